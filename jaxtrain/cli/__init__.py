"""The command line: parses, calls, prints. All other work is done by functions of other packages.

Exit codes: 0 done; 1 a check failed, or a run failed; 2 refused input; 69 and 124 processes crashed
or hung and no restarts are left; 70 a failure that occurs again; 75 stopped after saving (Ctrl-C,
SIGTERM, SIGHUP); 130 interrupted with nothing saved; 141 the reader of the output has gone.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxtrain.cli import (
    agent,
    cache,
    drill,
    elastic,
    evaluate,
    generate,
    launch,
    new,
    runs,
    schedule,
    train,
    verify,
)
from jaxtrain.cli.bench import add_bench
from jaxtrain.cli.shared import (
    JSON,
    UNREAD,
    RunFailed,
    add_branch,
    add_mesh,
    add_settings,
    answer,
    experiment_of,
    interrupt,
    mesh_of,
    print_failure,
    print_refusal,
    progress,
    set_simulation_flags,
    settle_streams,
    tell_dropped,
    text_stream,
)
from jaxtrain.cluster.exit_codes import FAILED, INTERRUPTED, REFUSED
from jaxtrain.files.stores import local_path
from jaxtrain.state_format.hashing import LacksPackage
from jaxtrain.violations import refuses

DEVICE_FILES = {"gpu": ("/dev/nvidiactl",), "tpu": ("/dev/accel0", "/dev/vfio/0")}
"""Files by which a platform's driver shows that it has devices."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    options = _parser().parse_args(arguments)
    options.own_process = arguments is None
    options.interrupted = False
    if options.own_process and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
        sys.unraisablehook = tell_dropped
    code = _exit_code(options)
    if options.own_process:
        settle_streams()
    if options.own_process and options.interrupted:
        os._exit(code)  # the interpreter's own way out crashes in XLA after a compilation
    return code


class _Version(argparse.Action):
    """Prints the versions that a bug report needs. They are looked up only here, to keep starts
    fast."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import platform
        from importlib.metadata import version

        parts = [f"{name} {version(name)}" for name in ("jaxtrain", "jax", "jaxlib")]
        print(", ".join([*parts, f"Python {platform.python_version()}"]))
        parser.exit()


def _exit_code(options: argparse.Namespace) -> int:
    try:
        return options.run(options)
    except RunFailed as error:
        assert error.__cause__ is not None
        print_failure(error.__cause__)
        return FAILED
    except BrokenPipeError:
        return UNREAD
    except SystemExit as error:  # rich exits like this if the reader has gone
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return UNREAD
    except (ValueError, LacksPackage, OSError) as error:
        print_refusal(error)
        return REFUSED if refuses(error) else FAILED
    except KeyboardInterrupt:
        options.interrupted = True
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxtrain", description="A sharded training stack")
    parser.add_argument("--version", action=_Version, nargs=0, help="versions, for reports")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Any], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    text = "write an experiment file and a mesh file to begin with"
    new.add_options(command("new", new.new_command, text))

    text = "train; goes on with what is in the run directory, or anew with --fresh"
    trained = command("train", train.train_command, text)
    train.add_options(trained)

    text = "several processes of one run on this machine, started again when one fails"
    launch.add_options(command("launch", _launch, text))

    text = "every fault on purpose, on the experiment made small, and what became of the run"
    drill.add_options(command("drill", drill.drill_command, text))

    text = "the process of this machine, for a launch --machines elsewhere"
    agent.add_options(command("agent", agent.agent_command, text))

    text = "how a run stands on fewer machines than its mesh has"
    fewer = command("elastic", elastic.elastic_command, text)
    elastic.add_options(fewer)

    check = command("check", _check, "every violation at once, and where each leaf lives")
    check.add_argument("experiment")
    add_mesh(check)
    text = "the data is on another machine: do not look for its files"
    check.add_argument("--data-elsewhere", action="store_true", help=text)
    add_branch(check, "check it as a branch of another run, as train --from begins one")
    check.add_argument("--json", action="store_true", help=JSON)

    certify = command("certify", _certify, "the same run on every mesh, compared with one device")
    certify.add_argument("experiment")
    certify.add_argument("--devices", type=int, default=8)
    certify.add_argument("--layouts", choices=("quick", "all"), default="quick")
    certify.add_argument("--full", action="store_true", help="the model as it is, not shrunk")
    certify.add_argument("--json", action="store_true", help=JSON)

    compiled = command("compile", _compile, "what a step takes and sends, on a mesh here or not")
    compiled.add_argument("experiment")
    add_mesh(compiled)
    compiled.add_argument("--simulate", action="store_true", help="for fake CPU devices instead")
    compiled.add_argument("--json", action="store_true", help=JSON)
    for sub in (trained, fewer, check, compiled):
        add_settings(sub)
    add_bench(commands)

    _add_readers(command)
    return parser


AddCommand = Callable[[str, Callable[[Any], int], str], argparse.ArgumentParser]


def _add_readers(command: AddCommand) -> None:
    """Commands about schedules, weights, checkpoints and data."""
    text = "a pipeline schedule: its grid, cost and memory"
    schedule.add_options(command("schedule", schedule.draw, text))

    text = "continue a text with the model of a run, or of a folder of published weights"
    generate.add_options(command("generate", generate.generate_command, text))

    text = "the loss of a run on its held-out rows, or on other texts"
    evaluate.add_options(command("evaluate", evaluate.evaluate_command, text))

    text = "a run's weights as a folder that transformers loads"
    generate.add_export_options(command("export", generate.export_command, text))

    text = "the runs of a folder: how far each is, and what differs from the one before"
    runs.add_options(command("runs", runs.runs_command, text))

    text = "what tokenised data takes on this machine, and less of it"
    cache.add_options(command("cache", cache.cache_command, text))

    text = "read every checkpointed byte of a run, and name what is damaged"
    verify.add_options(command("verify", verify.verify_command, text))

    tokenize = command("tokenize", _tokenize, "the corpus as memory-mapped token files")
    tokenize.add_argument("experiment")
    tokenize.add_argument("--out", required=True, help="directory of the token files")
    tokenize.add_argument("--processes", type=int, default=os.cpu_count() or 1)


def _launch(options: argparse.Namespace) -> int:
    return launch.launch_command(options, _parser().parse_args)


def _check(options: argparse.Namespace) -> int:
    from jaxtrain.planner.overhead import overhead
    from jaxtrain.planner.seconds import step_seconds
    from jaxtrain.session.check import check

    data_here = not options.data_elsewhere
    begins: Any = dict(data_here=data_here, from_run=options.from_run)
    report = check(experiment_of(options), options.mesh, **begins)
    work, least = overhead(report.assembly), step_seconds(report.assembly)
    texts = [report.table(), report.summary()]
    more = {}
    if work is not None:
        texts.append(work.summary())
        more["pipeline_work"] = work.as_json()
    if least is not None:
        texts.append(least.summary())
        more["step_at_least"] = least.as_json()
    return answer(options, report, *texts, **more)


def _certify(options: argparse.Namespace) -> int:
    from jaxtrain.mesh.mesh import mesh_from_axes

    # A count below 1 makes no mesh; `certify` refuses it.
    set_simulation_flags(options, mesh_from_axes(data=max(options.devices, 1)))
    from jaxtrain.certificate.certify import certify

    certificate = None
    with _traced_quickly():
        for difference, latest in certify(
            options.experiment, devices=options.devices, which=options.layouts, full=options.full
        ):
            certificate = latest
            done = f"{len(latest.differences):>3}/{latest.closed_count}"
            print(done, difference, flush=True, file=text_stream(options))
    assert certificate is not None
    answer(options, certificate, certificate.summary())
    return FAILED if certificate.failed else 0


@contextmanager
def _traced_quickly() -> Iterator[None]:
    """Saves 6% of the time of work that is little but tracing and compiling: its many small
    objects live on, and are looked through seldom; operations carry no stack of callers
    (experiments/LOG.md, 2026-11-28)."""
    import jax

    before = gc.get_threshold(), jax.config.jax_traceback_in_locations_limit
    gc.set_threshold(50_000, 20, 100)
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        gc.set_threshold(*before[0])
        jax.config.update("jax_traceback_in_locations_limit", before[1])


def _compile(options: argparse.Namespace) -> int:
    spec = mesh_of(options)
    if spec.simulated or spec.chip.platform == "cpu":
        set_simulation_flags(options, spec)
    elif not any(Path(device).exists() for device in DEVICE_FILES[spec.chip.platform]):
        from jaxtrain.mesh.absent import ENVIRONMENT

        os.environ.update({k: v for k, v in ENVIRONMENT.items() if k not in os.environ})
    from jaxtrain.contract.compile import compile

    tell = progress(options)
    report = compile(experiment_of(options), spec, compiler_log=_compiler_log, progress=tell)
    answer(options, report, report.table(), report.summary())
    return FAILED if report.violations or report.fits is False else 0


@contextmanager
def _compiler_log() -> Iterator[Callable[[], str]]:
    """Captures standard error within the block, libraries' output too, and writes it out at the
    end."""
    sys.stderr.flush()
    stderr_copy, text = os.dup(2), ""
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: text
        finally:
            os.dup2(stderr_copy, 2)
            os.close(stderr_copy)
            file.seek(0)
            text = file.read().decode(errors="replace")
            sys.stderr.write(text)


def _tokenize(options: argparse.Namespace) -> int:
    from jaxtrain.data import Mixture, TextData, TokenFiles, tokenize
    from jaxtrain.experiment import load_experiment
    from jaxtrain.files.cache import cache_directory
    from jaxtrain.telemetry.progress import progress_bar

    out = local_path("--out", options.out)
    data = load_experiment(options.experiment).data
    if not isinstance(data, TextData) or isinstance(data.source, (Mixture, TokenFiles)):
        kind = type(getattr(data, "source", data)).__name__
        raise ValueError(
            f"tokenize reads the text of one source; {options.experiment} has {kind}: write an "
            f"experiment whose data is TextData of that source alone"
        )
    vocabulary = data.vocabulary(cache_directory())
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
