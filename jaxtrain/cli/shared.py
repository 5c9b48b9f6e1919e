"""What commands share: the mesh and experiment they were given, and how they answer."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

UNREAD = 141
"""As a shell says of a program that SIGPIPE ended: `jaxtrain ... | head -1`."""
JSON = "JSON alone on the standard output; what people read goes to standard error"
MESH = "a mesh file, or the name of one that comes with jaxtrain, such as h100_8"
SETTING = (
    "another value in a field of the experiment: optimizer.b1=0.95, precision=bf16, "
    "'optimizer=SGD(0.1)'; may be repeated"
)
STARTED_AGAIN = "JAXTRAIN_STARTED_AGAIN"


def mesh_of(options: argparse.Namespace) -> Any:
    from jaxtrain.mesh.mesh import load_mesh

    spec = load_mesh(options.mesh)
    return spec.simulate() if options.simulate else spec


def run_dir_of(options: argparse.Namespace) -> Path:
    """Where `train` keeps its run."""
    return Path(options.run_dir or Path("runs") / Path(options.experiment).stem)


def add_settings(sub: argparse.ArgumentParser) -> None:
    """--set, for commands that take an experiment."""
    sub.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", dest="settings", help=SETTING
    )


def experiment_of(options: argparse.Namespace) -> Any:
    from jaxtrain.experiment import load_experiment, with_fields

    return with_fields(load_experiment(options.experiment), options.settings)


def set_simulation_flags(options: argparse.Namespace, spec: Any, processes: int = 1) -> None:
    """Tells JAX of fake devices before it starts: this process's share of them. The C library reads
    its variable only when a process starts: the command starts again, once, as the same process."""
    from jaxtrain.mesh.simulation import simulation_flags

    before = os.environ.get("GLIBC_TUNABLES")
    os.environ.update(simulation_flags(spec, os.environ, processes))
    late = before != os.environ["GLIBC_TUNABLES"] and sys.platform == "linux"
    if options.own_process and late and not os.environ.get(STARTED_AGAIN):
        os.environ[STARTED_AGAIN] = "1"  # a system that drops GLIBC_TUNABLES must not loop
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class RunFailed(Exception):
    """What a run fails of once it takes steps, whatever its type, as the cause of this: no refusal
    of what was given. Before that too where code of the user's own would leave by SystemExit."""


@contextmanager
def signals_to(act: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C, a scheduler's SIGTERM and a terminal that closes call `act` within the block, but for
    those that are ignored, as nohup has it."""
    before = {
        number: signal.signal(number, lambda *_: act())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    """A line on the standard output, if that still is there: a terminal may have been closed."""
    with suppress(OSError):
        print(text, flush=True)


def settle_streams() -> None:
    """Write out what is held, at the end of a process. What cannot be written is let go: the exit
    code is the command's, not one of the interpreter's that failed to write."""
    for stream in (sys.stdout, sys.stderr):
        try:
            with suppress(KeyboardInterrupt):
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def text_stream(options: argparse.Namespace) -> TextIO:
    """Where people are told: with --json the standard output is for a program."""
    return sys.stderr if options.json else sys.stdout


def progress(options: argparse.Namespace) -> Callable[[str], None]:
    """Tells people a line at once."""
    return lambda text: print(text, flush=True, file=text_stream(options))


def answer(options: argparse.Namespace, report: Any, *texts: str, **more: Any) -> int:
    """What a command has found: `texts` for people, with --json the report for a program, and
    `more` beside it."""
    print(*texts, sep="\n", file=text_stream(options))
    if options.json:
        print(json.dumps(report.as_json() | more))
    return 0
