"""The command line: parses, calls, prints. Everything it does is a function elsewhere.

Exit codes: 0 done; 1 a check failed; 2 refused input; 75 stopped after saving (Ctrl-C, SIGTERM);
130 interrupted with nothing saved.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jaxtrain.cli import generate, schedule, verify
from jaxtrain.cli.bench import add_bench
from jaxtrain.cli.shared import (
    FAILED,
    INTERRUPTED,
    JSON,
    PREEMPTED,
    REFUSED,
    answer,
    experiment_of,
    mesh_of,
    set_simulation_flags,
    told,
)
from jaxtrain.files.stores import local_path

DEVICE_FILES = {"gpu": ("/dev/nvidiactl",), "tpu": ("/dev/accel0", "/dev/vfio/0")}
"""Where the driver of a platform's devices shows that there are any."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    options = _parser().parse_args(arguments)
    options.own_process = arguments is None
    options.interrupted = False
    code = _exit_code(options)
    if options.own_process and options.interrupted:
        # The interpreter's own way out crashes in XLA where a compilation was interrupted.
        with suppress(OSError, KeyboardInterrupt):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    return code


def _exit_code(options: Any) -> int:
    try:
        return options.run(options)
    except ValueError as error:
        print(f"jaxtrain: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"jaxtrain: {error.strerror or error}: {error.filename or ''}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        options.interrupted = True
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxtrain", description="A sharded training stack")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Any], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    train = command("train", _train, "train; goes on with what is in the run directory")
    train.add_argument("experiment", help="a Python file with a function experiment()")
    train.add_argument("--mesh", default="meshes/cpu_1.toml", help="a mesh file")
    train.add_argument("--run-dir", help="where the run is kept; default runs/EXPERIMENT")
    train.add_argument("--steps", type=int, help="stop after so many steps in all")
    train.add_argument("--simulate", action="store_true", help="run the mesh on fake CPU devices")

    check = command("check", _check, "every violation at once, and where each leaf lives")
    check.add_argument("experiment")
    check.add_argument("--mesh", required=True)
    text = "the data is on another machine: do not look for its files"
    check.add_argument("--data-elsewhere", action="store_true", help=text)
    check.add_argument("--json", action="store_true", help=JSON)

    certify = command("certify", _certify, "the same run on every mesh, compared with one device")
    certify.add_argument("experiment")
    certify.add_argument("--devices", type=int, default=8)
    certify.add_argument("--layouts", choices=("quick", "all"), default="quick")
    certify.add_argument("--full", action="store_true", help="the model as it is, not shrunk")
    certify.add_argument("--json", action="store_true", help=JSON)

    compiled = command("compile", _compile, "what a step takes and sends, on a mesh here or not")
    compiled.add_argument("experiment")
    compiled.add_argument("--mesh", required=True)
    compiled.add_argument("--simulate", action="store_true", help="for fake CPU devices instead")
    compiled.add_argument("--json", action="store_true", help=JSON)
    for sub in (train, check, compiled):
        text = "another number or word in a field of the experiment, such as optimizer.b1=0.95"
        sub.add_argument(
            "--set", action="append", default=[], metavar="PATH=VALUE", dest="settings", help=text
        )

    add_bench(commands)

    text = "a pipeline schedule: its grid, cost and memory"
    schedule.add_options(command("schedule", schedule.draw, text))

    text = "continue a text with the model of a run, or of a folder of published weights"
    generate.add_options(command("generate", generate.generated, text))

    text = "a run's weights as a folder that transformers loads"
    generate.add_export_options(command("export", generate.exported, text))

    text = "read every checkpointed byte of a run, and name what is damaged"
    verify.add_options(command("verify", verify.verified, text))

    tokenize = command("tokenize", _tokenize, "the corpus as memory-mapped token files")
    tokenize.add_argument("experiment")
    tokenize.add_argument("--out", required=True, help="directory of the token files")
    tokenize.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return parser


def _train(options: Any) -> int:
    spec = mesh_of(options)
    if spec.simulated:
        set_simulation_flags(options, spec)
    from jaxtrain.checkpoint import committed_steps
    from jaxtrain.train.loop import train

    run_dir = Path(options.run_dir or Path("runs") / Path(options.experiment).stem)
    asked: list[int] = []

    def stop(number: int, frame: Any) -> None:
        if asked:  # asked twice: at once
            raise KeyboardInterrupt
        asked.append(number)
        print("\nstopping after this step; once more to stop at once", file=sys.stderr)

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        result = train(
            options.experiment,
            spec,
            run_dir=run_dir,
            steps=options.steps,
            settings=options.settings,
            should_stop=lambda: bool(asked),
        )
    except KeyboardInterrupt:
        options.interrupted = True
        return PREEMPTED if committed_steps(run_dir / "checkpoints") else INTERRUPTED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if result.stopped and result.saved is None:
        print(
            f"stopped at step {result.steps}; nothing is saved: the experiment has no checkpoints"
        )
        return INTERRUPTED
    if result.stopped:
        print(f"stopped; step {result.steps} is saved in {run_dir}; the same command goes on")
        return PREEMPTED
    print(f"done: {result.steps} steps, loss {result.loss:.4f}, run directory {run_dir}")
    return 0


def _check(options: Any) -> int:
    from jaxtrain.train.check import check

    here = not options.data_elsewhere
    report = check(experiment_of(options), options.mesh, data_here=here)
    return answer(options, report, report.table(), report.summary())


def _certify(options: Any) -> int:
    from jaxtrain.mesh.mesh import mesh_from_axes

    # A count below 1 makes no mesh; `certify` refuses it.
    set_simulation_flags(options, mesh_from_axes(data=max(options.devices, 1)))
    from jaxtrain.train.certify import certify

    certificate = None
    for difference, found in certify(
        options.experiment, devices=options.devices, which=options.layouts, full=options.full
    ):
        certificate = found
        done = f"{len(found.differences):>3}/{found.closed_count}"
        print(done, difference, flush=True, file=told(options))
    assert certificate is not None
    answer(options, certificate, certificate.summary())
    return FAILED if certificate.failed else 0


def _compile(options: Any) -> int:
    spec = mesh_of(options)
    if spec.simulated or spec.chip.platform == "cpu":
        set_simulation_flags(options, spec)
    elif not any(Path(device).exists() for device in DEVICE_FILES[spec.chip.platform]):
        from jaxtrain.mesh.absent import ENVIRONMENT

        os.environ.update({k: v for k, v in ENVIRONMENT.items() if k not in os.environ})
    from jaxtrain.planner.compile import compile_experiment

    report = compile_experiment(experiment_of(options), spec, compiler_log=_compiler_log)
    answer(options, report, report.table(), report.summary())
    return FAILED if report.violations or report.fits is False else 0


@contextmanager
def _compiler_log() -> Iterator[Callable[[], str]]:
    """What is written to the standard error meanwhile, by libraries too; passed on at the end."""
    sys.stderr.flush()
    kept, text = os.dup(2), ""
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: text
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            text = file.read().decode(errors="replace")
            sys.stderr.write(text)


def _tokenize(options: Any) -> int:
    from jaxtrain.data import Mixture, TextData, TokenFiles, progress_bar, tokenize
    from jaxtrain.experiment import load_experiment
    from jaxtrain.train.session import CACHE_DIR

    out = local_path("--out", options.out)
    data = load_experiment(options.experiment).data
    if not isinstance(data, TextData) or isinstance(data.source, (Mixture, TokenFiles)):
        found = type(getattr(data, "source", data)).__name__
        raise ValueError(
            f"tokenize reads the text of one source; {options.experiment} has {found}: write an "
            f"experiment whose data is TextData of that source alone"
        )
    vocabulary = data.vocabulary(CACHE_DIR.expanduser())
    for split in ("train", "held_out"):
        with progress_bar() as progress:
            written = tokenize(
                data.source,
                vocabulary,
                out / f"{split}.tokens",
                split=split,
                processes=options.processes,
                progress=progress,
            )
        print(f"{written.path}: {len(written.tokens):,} tokens")
    paths = f'"{out / "train.tokens"}", held_out_paths="{out / "held_out.tokens"}"'
    print(f"train on them: TextData(TokenFiles({paths}), {vocabulary.save(out)}, seq={data.seq})")
    return 0
