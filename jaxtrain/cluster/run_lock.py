"""One run at a time in a run directory: two would destroy each other's saves."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from jaxtrain.cluster.sampler import STARTED_BY
from jaxtrain.files.regular import open_regular, refuse_links

NAME = ".lock"
PROBE_S = 0.05
"""Seconds that a process waits for one that only looks whether the directory is in use."""


@contextmanager
def sole_run(run_dir: Path, last: str | None = None) -> Iterator[Callable[[], bool]]:
    """Locks the run directory, made if needed, until the block or the process ends; the kernel
    releases the lock in every case. Yields a function that is True while the lock is held: False
    once the directory or the lock file was removed. Raises ValueError while another run holds it,
    for a lock that is a link or no file, and if another run has held it since `refuse_held` gave
    `last`: what this one has read is not the newest."""
    with _writable(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        opened = open_regular(run_dir / NAME, "a+b")
    with opened as file:
        _take(file, run_dir)
        if last is not None and _last(file) != last:
            raise ValueError(
                f"run directory {run_dir} was used by another run while this one compiled; the "
                "same command goes on from what that run left"
            )
        file.truncate(0)
        # Taken out of the environment: a process that this one starts is nobody's to start again.
        file.write(f"{os.getpid()} {os.environ.pop(STARTED_BY, '')}".encode())
        status = os.fstat(file.fileno())
        yield lambda: _is_at(run_dir / NAME, status)


def _is_at(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.lstat(), status)
    except OSError:
        return False


def refuse_held(run_dir: Path) -> str:
    """Raises ValueError while a run holds the directory, where it has links that would be written
    through, or where its lock cannot be written; writes nothing. Returns which run held it last,
    for `sole_run`."""
    refuse_links(run_dir)
    path = run_dir / NAME
    if path.exists():
        with _writable(run_dir):
            opened = open_regular(path, "r+b")
        with opened as file:
            _take(file, run_dir)
            return _last(file)
    return ""


def is_held(run_dir: Path) -> bool:
    """True while a run holds the directory."""
    try:
        with open_regular(run_dir / NAME, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except (OSError, ValueError):  # no lock, or none that can be opened
        return False


def _last(file: FileIO) -> str:
    """Returns text that differs between any two runs that held the lock; "" if none has."""
    file.seek(0)
    holder = file.read(40).decode(errors="replace")
    return holder and f"{holder} {os.fstat(file.fileno()).st_mtime_ns}"


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
    if not _locked(file):
        time.sleep(PROBE_S)  # another may only have looked whether it is held
        if not _locked(file):
            raise ValueError(
                f"run directory {run_dir} is in use by {_holder(file)}, or give another run "
                "directory"
            )


def _locked(file: FileIO) -> bool:
    """True if this process has the lock now; returns at once."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(file: FileIO) -> str:
    """Returns which process holds the lock, and what to do."""
    file.seek(0)
    holder, _, starter = file.read(40).decode(errors="replace").partition(" ")
    if starter:
        again = f"process {holder}, which process {starter} (of a launch or an agent) starts again"
        return f"{again}; wait for it, stop the launch"
    return f"process {holder or '?'}; wait for it, stop it"
