"""One run at a time in a run directory: two would destroy each other's saves."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from jaxtrain.cluster.sampler import STARTED_BY
from jaxtrain.files.regular import open_regular, refuse_links

NAME = ".lock"


@contextmanager
def sole_run(run_dir: Path) -> Iterator[Callable[[], bool]]:
    """Locks the run directory, made if needed, until the block or the process ends; the kernel
    releases the lock in every case. Yields a function that is True while the lock is held: False
    once the directory or the lock file was removed. Raises ValueError while another run holds it,
    and for a lock that is a link or no file."""
    with _writable(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        opened = open_regular(run_dir / NAME, "a+b")
    with opened as file:
        _take(file, run_dir)
        file.truncate(0)
        file.write(f"{os.getpid()} {os.environ.get(STARTED_BY, '')}".encode())
        status = os.fstat(file.fileno())
        yield lambda: _is_at(run_dir / NAME, status)


def _is_at(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.lstat(), status)
    except OSError:
        return False


def refuse_held(run_dir: Path) -> None:
    """Raises ValueError while a run holds the directory, where it has links that would be written
    through, or where its lock cannot be written; writes nothing."""
    refuse_links(run_dir)
    path = run_dir / NAME
    if path.exists():
        with _writable(run_dir):
            opened = open_regular(path, "r+b")
        with opened as file:
            _take(file, run_dir)


@contextmanager
def _writable(run_dir: Path) -> Iterator[None]:
    """Raises ValueError if the block raises OSError."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{run_dir} cannot be written: {error.strerror}; give another --run-dir, or make room "
            "and permission there"
        ) from error


def _take(file: FileIO, run_dir: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"run directory {run_dir} is in use by {_holder(file)}, or give another run directory"
        ) from None


def _holder(file: FileIO) -> str:
    """Returns which process holds the lock, and what to do."""
    file.seek(0)
    holder, _, starter = file.read(40).decode(errors="replace").partition(" ")
    if starter:
        again = f"process {holder}, which process {starter} starts again"
        return f"{again}; wait for it, stop {starter}"
    return f"process {holder or '?'}; wait for it, stop it"
