"""Parts that commands share: reading the mesh and the experiment, and printing the answer."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, TextIO

UNREAD = 141
"""A shell's exit code for a program ended by SIGPIPE: `jaxtrain ... | head -1`."""
JSON = "JSON alone on the standard output; what people read goes to standard error"
MESH = "a mesh file, or the name of one that comes with jaxtrain, such as h100_8"
SETTING = (
    "another value in a field of the experiment: optimizer.b1=0.95, precision=bf16, "
    "'optimizer=SGD(0.1)'; may be repeated"
)
AGAIN_S = 0.5
"""Seconds until a Ctrl-C that was dropped is sent again. Longer than `train.TOGETHER_S`, within
which two count as one."""
STARTED_AGAIN = "JAXTRAIN_STARTED_AGAIN"


def mesh_of(options: argparse.Namespace) -> Any:
    from jaxtrain.mesh.mesh import load_mesh

    spec = load_mesh(options.mesh)
    return spec.simulate() if options.simulate else spec


def run_dir_of(options: argparse.Namespace) -> Path:
    """Returns the directory on this machine in which `train` keeps its run. Raises ValueError if it
    is given twice, or for a name that is a path."""
    from jaxtrain.files.stored_run import directory_here

    name = options.name
    if name is None:
        return directory_here(options.run_dir or Path("runs") / Path(options.experiment).stem)
    if options.run_dir:
        raise ValueError(
            f"--name {name} is the directory runs/{name}, and --run-dir is {options.run_dir}; give "
            "one of them"
        )
    if not name or Path(name).name != name or name == "..":
        raise ValueError(f"--name {name!r} names a directory in runs/; give a path as --run-dir")
    return Path("runs") / name


@contextmanager
def numbered_directory(base: Path) -> Iterator[Path]:
    """Creates and yields the first of the directories base-1, base-2, ... that does not exist; no
    other process can get the same one. On exit the directory is removed if it is empty, as after a
    refused run. Raises ValueError for a path without a name."""
    if base.name in ("", ".."):
        raise ValueError(
            f"--numbered has no name to number in --run-dir {base}; give one with a name"
        )
    for number in count(1):
        path = base.with_name(f"{base.name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        break
    try:
        yield path
    finally:
        with suppress(OSError):  # it has a run
            path.rmdir()


def add_mesh(sub: argparse.ArgumentParser) -> None:
    """Adds --mesh, for commands that take one CPU device where none is given."""
    sub.add_argument("--mesh", default="cpu_1", help=f"{MESH}; default cpu_1")


def add_branch(sub: argparse.ArgumentParser, text: str) -> None:
    """Adds --from, for commands that take a run of which another is to be a branch. text: help."""
    sub.add_argument("--from", dest="from_run", metavar="RUN[@STEP]", help=text)


def add_settings(sub: argparse.ArgumentParser) -> None:
    """Adds --set, for commands that take an experiment."""
    sub.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", dest="settings", help=SETTING
    )


def experiment_of(options: argparse.Namespace) -> Any:
    from jaxtrain.experiment import load_experiment, with_fields

    return with_fields(load_experiment(options.experiment), options.settings)


def set_simulation_flags(options: argparse.Namespace, spec: Any, processes: int = 1) -> None:
    """Sets JAX's flags for this process's fake devices before JAX starts. The C library reads its
    variable only when a process starts, so the command starts again, once, as the same process."""
    from jaxtrain.mesh.simulation import simulation_flags

    previous = os.environ.get("GLIBC_TUNABLES")
    os.environ.update(simulation_flags(spec, os.environ, processes))
    too_late = previous != os.environ["GLIBC_TUNABLES"] and sys.platform == "linux"
    if options.own_process and too_late and not os.environ.get(STARTED_AGAIN):
        os.environ[STARTED_AGAIN] = "1"  # a system that drops GLIBC_TUNABLES must not loop
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def print_failure(error: BaseException) -> None:
    """Prints why a run failed: errors of checkpoints as a line, of a failed save with what to do;
    others with their traceback."""
    storage = sys.modules.get("jaxtrain.checkpoint.storage")  # it imports JAX
    if storage is None or not isinstance(error, storage.CheckpointError):
        return traceback.print_exception(error)
    text, steps, begins = str(error), list[int](), "the newest save"
    with suppress(OSError):  # the same trouble again
        steps = storage.committed_steps(error.directory)
        begins = f"step {steps[-1]}" if steps else "the beginning"
    if isinstance(error, storage.FailedSave) and error.step in steps:
        place = f"checkpoint step {error.step} in {error.directory}"
        text = f"{place}: {error.problem}; a second try saved it: start the run again"
    elif isinstance(error, storage.FailedSave):
        text += f", and start the run again: it goes on from {begins}"
    for line in (f"jaxtrain: {text}", *getattr(error, "__notes__", [])):
        print(line, file=sys.stderr)
    return None


def print_refusal(error: BaseException) -> None:
    """Prints why input was refused, as a line."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    print(f"jaxtrain: {text}", file=sys.stderr)


class RunFailed(Exception):
    """A failure of a run, or a SystemExit of the user's code. `__cause__` is the error, of any
    type. It is not a refusal of the input."""


@contextmanager
def signals_to(act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` for Ctrl-C, a scheduler's SIGTERM and a terminal that closes, within the block.
    Signals that are ignored, as under nohup, stay ignored."""
    previous = {
        number: signal.signal(number, lambda *_: act())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Interrupted(KeyboardInterrupt):
    """A Ctrl-C that is sent again if it was dropped: when a command has seen it, its process ends
    at once. What is raised in a finalizer or a callback of the garbage collector is dropped, and
    under a bare `except`; JAX has all three."""

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        main = threading.main_thread().ident
        assert main is not None
        again = threading.Timer(AGAIN_S, signal.pthread_kill, (main, signal.SIGINT))
        again.daemon = True
        again.start()


def tell_dropped(dropped: Any) -> None:
    """Prints an exception that Python dropped (for `sys.unraisablehook`), unless it is a Ctrl-C,
    which is sent again."""
    if not isinstance(dropped.exc_value, Interrupted):
        sys.__unraisablehook__(dropped)


def interrupt(number: int, frame: Any) -> NoReturn:
    """Raises `Interrupted`: the handler of Ctrl-C of a command that has no other."""
    raise Interrupted


def say(text: str) -> None:
    """Prints a line of a run on the standard output, behind the time of day; ignores a terminal
    that has been closed."""
    from jaxtrain.telemetry.progress import Lines

    Lines(sys.stdout).write(text)


def settle_streams() -> None:
    """Flushes the standard streams at the end of a process. Output that cannot be written is
    dropped, so that the exit code is the command's, not the interpreter's for a failed write."""
    for stream in (sys.stdout, sys.stderr):
        try:
            with suppress(KeyboardInterrupt):
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def text_stream(options: argparse.Namespace) -> TextIO:
    """Returns the stream for text that people read: stderr with --json, where stdout has only the
    JSON for a program; else stdout."""
    return sys.stderr if options.json else sys.stdout


def progress(options: argparse.Namespace) -> Callable[[str], None]:
    """Returns a function that prints a line for people at once."""
    return lambda text: print(text, flush=True, file=text_stream(options))


def experiment_arguments(train: argparse.Namespace) -> list[str]:
    """Returns the arguments by which another command gets the experiment, the mesh and the settings
    of a `train`."""
    mesh = ["--mesh", train.mesh] if train.mesh else []
    settings = (part for setting in train.settings for part in ("--set", setting))
    return [train.experiment, *mesh, *settings]


def seconds_violations(flag: str, seconds: float) -> list[str]:
    """Returns a message for what is no time to wait; `inf` waits for ever."""
    return [] if seconds >= 0 else [f"{flag}={seconds:g}; use a number of seconds, such as 10"]


def answer(options: argparse.Namespace, report: Any, *texts: str, **more: Any) -> int:
    """Prints a command's result: `texts` for people, and with --json the report and `more` for a
    program."""
    print(*texts, sep="\n", file=text_stream(options))
    if options.json:
        print(json.dumps(report.as_json() | more))
    return 0
