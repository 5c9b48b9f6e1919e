"""The command line: parses, calls, prints. Everything it does is a function elsewhere.

Exit codes: 0 done; 1 a check failed; 2 refused input; 75 stopped after saving (Ctrl-C, SIGTERM);
130 interrupted with nothing saved.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

FAILED, REFUSED, PREEMPTED, INTERRUPTED = 1, 2, 75, 130
JSON = "JSON alone on the standard output; what people read goes to standard error"
STARTED_AGAIN = "JAXTRAIN_STARTED_AGAIN"
DEVICE_FILES = {"gpu": ("/dev/nvidiactl",), "tpu": ("/dev/accel0", "/dev/vfio/0")}
"""Where the driver of a platform's devices shows that there are any."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    options = _parser().parse_args(arguments)
    options.own_process = arguments is None
    try:
        return options.run(options)
    except ValueError as error:
        print(f"jaxtrain: {error}", file=sys.stderr)
        return REFUSED
    except OSError as error:
        print(f"jaxtrain: {error.strerror or error}: {error.filename or ''}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
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

    _bench_commands(commands)

    _schedule_options(
        command("schedule", _schedule, "a pipeline schedule: its grid, cost and memory")
    )

    tokenize = command("tokenize", _tokenize, "the corpus as memory-mapped token files")
    tokenize.add_argument("experiment")
    tokenize.add_argument("--out", required=True, help="directory of the token files")
    tokenize.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    return parser


def _schedule_options(schedule: argparse.ArgumentParser) -> None:
    source = schedule.add_mutually_exclusive_group(required=True)
    source.add_argument("--kind", help="gpipe, one_f_one_b, interleaved or zero_bubble")
    source.add_argument("--table", metavar="FILE", help="a table of your own, as --save writes it")
    schedule.add_argument("--stages", type=int, help="pipeline stages, with --kind")
    schedule.add_argument("--microbatches", type=int, help="microbatches of a step, with --kind")
    schedule.add_argument("--chunks", type=int, help="of blocks on each stage; default 1")
    for name, text in (("forward", "F"), ("backward", "B"), ("weight", "W"), ("head", "the head")):
        help_ = (
            f"cost of {text} on one microbatch, in any unit; default {0 if name == 'head' else 1}"
        )
        schedule.add_argument(f"--{name}", type=float, metavar="TIME", help=help_)
    schedule.add_argument("--svg", metavar="FILE", help="write a Gantt chart there")
    schedule.add_argument("--save", metavar="FILE", help="write the table there")
    schedule.add_argument("--json", action="store_true", help=JSON)


def _bench_commands(commands: Any) -> None:
    text = "measure against the plain form, in turn in one run"
    bench = commands.add_parser("bench", help=text, description=text)
    kinds = bench.add_subparsers(required=True, metavar="WHAT")

    text = "the step of an experiment beside a plain jax and optax loop of the same model"
    step = kinds.add_parser("step", help=text, description=text)
    step.set_defaults(run=_bench_step)
    step.add_argument("experiment")
    step.add_argument("--mesh", default="meshes/cpu_1.toml")
    step.add_argument("--steps", type=int, default=10)

    text = "every collective by every algorithm beside lax's own"
    collectives = kinds.add_parser("collectives", help=text, description=text)
    collectives.set_defaults(run=_bench_collectives)
    collectives.add_argument("--mesh", required=True)
    for name, text in (
        ("collectives", "a,b or all; default all, across processes those of a training step"),
        ("algorithms", "a,b or all; default all, fewer across processes and beyond 16MiB"),
        ("sizes", "of the whole buffer on one device; default 4KiB,64KiB,1MiB,16MiB,64MiB"),
        ("processes", "how many share simulated devices; default 1,2,4, on accelerators 1"),
    ):
        collectives.add_argument(f"--{name}", metavar="A,B", help=text)
    for sub in (step, collectives):
        sub.add_argument("--simulate", action="store_true", help="run the mesh on fake CPU devices")

    text = "a step of every pipeline schedule beside what its table predicts, on fake CPU devices"
    pipeline = kinds.add_parser("pipeline", help=text, description=text)
    pipeline.set_defaults(run=_bench_pipeline)
    pipeline.add_argument("--stages", type=int, default=2, choices=range(2, 17), metavar="N")
    for sub in (step, collectives, pipeline):
        sub.add_argument("--json", action="store_true", help=JSON)


def _mesh(options: Any) -> Any:
    from jaxtrain.mesh.mesh import load_mesh

    spec = load_mesh(options.mesh)
    return spec.simulate() if options.simulate else spec


def _experiment(options: Any) -> Any:
    from jaxtrain.experiment import load_experiment, with_fields

    return with_fields(load_experiment(options.experiment), options.settings)


def _set_simulation_flags(options: Any, spec: Any) -> None:
    """Tells JAX of fake devices before it starts. The C library reads its variable only when a
    process starts: the command starts again, once, as the same process."""
    from jaxtrain.mesh.simulation import simulation_flags

    before = os.environ.get("GLIBC_TUNABLES")
    os.environ.update(simulation_flags(spec, os.environ))
    late = before != os.environ["GLIBC_TUNABLES"] and sys.platform == "linux"
    if options.own_process and late and not os.environ.get(STARTED_AGAIN):
        os.environ[STARTED_AGAIN] = "1"  # a system that drops GLIBC_TUNABLES must not loop
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _train(options: Any) -> int:
    spec = _mesh(options)
    if spec.simulated:
        _set_simulation_flags(options, spec)
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


def _told(options: Any) -> TextIO:
    """Where people are told: with --json the standard output is for a program."""
    return sys.stderr if options.json else sys.stdout


def _progress(options: Any) -> Callable[[str], None]:
    """Tells people a line at once."""
    return lambda text: print(text, flush=True, file=_told(options))


def _answer(options: Any, report: Any, *texts: str) -> int:
    """What a command has found: `texts` for people, with --json the report for a program."""
    print(*texts, sep="\n", file=_told(options))
    if options.json:
        print(json.dumps(report.as_json()))
    return 0


def _check(options: Any) -> int:
    from jaxtrain.train.check import check

    report = check(_experiment(options), options.mesh)
    return _answer(options, report, report.table(), report.summary())


def _certify(options: Any) -> int:
    from jaxtrain.mesh.mesh import mesh_from_axes

    _set_simulation_flags(options, mesh_from_axes(data=options.devices))
    from jaxtrain.train.certify import certify

    certificate = None
    for difference, found in certify(
        options.experiment, devices=options.devices, which=options.layouts, full=options.full
    ):
        certificate = found
        print(difference, flush=True, file=_told(options))
    assert certificate is not None
    _answer(options, certificate, certificate.summary())
    return FAILED if certificate.failed else 0


def _compile(options: Any) -> int:
    spec = _mesh(options)
    if spec.simulated or spec.chip.platform == "cpu":
        _set_simulation_flags(options, spec)
    elif not any(Path(device).exists() for device in DEVICE_FILES[spec.chip.platform]):
        from jaxtrain.mesh.absent import ENVIRONMENT

        os.environ.update({k: v for k, v in ENVIRONMENT.items() if k not in os.environ})
    from jaxtrain.planner.compile import compile_experiment

    report = compile_experiment(_experiment(options), spec, compiler_log=_compiler_log)
    _answer(options, report, report.table(), report.summary())
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


def _bench_step(options: Any) -> int:
    from jaxtrain.train.bench import bench_step

    found = bench_step(options.experiment, _mesh(options), steps=options.steps)
    return _answer(options, found, found.table())


def _bench_collectives(options: Any) -> int:
    from jaxtrain.train import bench_collectives as bench

    readers: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
        "collectives": (str.strip, bench.MEASURED),
        "algorithms": (str.strip, bench.OURS),
        "sizes": (bench.read_size, ()),
        "processes": (bench.read_count, ()),
    }
    chosen: dict[str, Any] = {}
    for name, (read, everything) in readers.items():
        text = getattr(options, name)
        if text is not None:
            whole = text == "all" and everything
            chosen[name] = everything if whole else [read(word) for word in text.split(",")]
    try:
        found = bench.bench_collectives(_mesh(options), **chosen, progress=_progress(options))
    except RuntimeError as error:  # a process's last words say more than where we waited for it
        print(f"jaxtrain: {error}", file=sys.stderr)
        return FAILED
    return _answer(options, found, found.summary())


def _bench_pipeline(options: Any) -> int:
    from jaxtrain.mesh.mesh import mesh_from_axes

    _set_simulation_flags(options, mesh_from_axes(stage=options.stages))
    from jaxtrain.train.bench_pipeline import bench_pipeline

    found = bench_pipeline(options.stages, progress=_progress(options))
    return _answer(options, found, found.table())


def _schedule(options: Any) -> int:
    from rich.console import Console

    from jaxtrain.pipeline.picture import as_json, figures, grid, svg
    from jaxtrain.pipeline.schedule import Costs, make_schedule
    from jaxtrain.pipeline.table_file import read_schedule, written

    sizes = {name: getattr(options, name) for name in ("stages", "microbatches", "chunks")}
    given = {name: size for name, size in sizes.items() if size is not None}
    if options.table:
        if given:
            raise ValueError(f"--table has its own sizes; leave out --{', --'.join(given)}")
        schedule = read_schedule(options.table)
    else:
        if missing := sorted({"stages", "microbatches"} - set(given)):
            raise ValueError(f"--kind needs --{' and --'.join(missing)}")
        schedule = make_schedule(options.kind, **given)
    times = {name: getattr(options, name) for name in ("forward", "backward", "weight", "head")}
    costs = Costs(**{name: time for name, time in times.items() if time is not None})
    told = _told(options)
    console = Console(file=told)
    for part in grid(schedule, console.width):
        console.print(part)
    print(figures(schedule, costs), file=told)
    if options.svg:
        Path(options.svg).write_text(svg(schedule, costs), encoding="utf-8")
    if options.save:
        Path(options.save).write_text(written(schedule), encoding="utf-8")
    if options.json:
        print(json.dumps(as_json(schedule, costs)))
    return 0


def _tokenize(options: Any) -> int:
    from jaxtrain.data import Mixture, TextData, TokenFiles, progress_bar, tokenize
    from jaxtrain.experiment import load_experiment
    from jaxtrain.train.session import CACHE_DIR

    data = load_experiment(options.experiment).data
    if not isinstance(data, TextData) or isinstance(data.source, (Mixture, TokenFiles)):
        found = type(getattr(data, "source", data)).__name__
        raise ValueError(
            f"tokenize reads the text of one source; {options.experiment} has {found}: write an "
            f"experiment whose data is TextData of that source alone"
        )
    vocabulary, out = data.vocabulary(CACHE_DIR.expanduser()), Path(options.out)
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


if __name__ == "__main__":
    raise SystemExit(main())
