"""One run at a time in a run directory: two would destroy each other's saves."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

NAME = ".lock"


@contextmanager
def sole_run(run_dir: Path) -> Iterator[None]:
    """Holds the run directory, made if need be, until the block or the process ends, however it
    ends: the lock is the kernel's. Raises ValueError while another run holds it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        opened = (run_dir / NAME).open("a+", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{run_dir} cannot be written: {error.strerror}; give another --run-dir, or make room "
            "and permission there"
        ) from error
    with opened as file:
        _take(file, run_dir)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def refuse_held(run_dir: Path) -> None:
    """Raises ValueError while a run holds the directory; writes nothing."""
    path = run_dir / NAME
    if path.exists():
        with path.open("r+", encoding="utf-8") as file:
            _take(file, run_dir)


def _take(file: IO[str], run_dir: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(
            f"run directory {run_dir} is in use by process {file.read() or '?'}; wait for it, stop "
            f"it, or give another run directory"
        ) from None
