"""A process's own folder among the system's temporary files."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = ".lock"


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Makes a folder that is removed at the end of the block. Those of the same purpose are removed
    first whose process was killed, and so could not remove its own: their lock is free, which the
    kernel holds as long as a process lives, also one of another container."""
    begins = f"jaxtrain-{purpose}-"
    for path in Path(tempfile.gettempdir()).glob(f"{begins}*"):
        with suppress(OSError):  # in use, another user's, or without a lock
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
    with tempfile.TemporaryDirectory(prefix=begins) as folder:
        lock = os.open(Path(folder) / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(folder)
        finally:
            os.close(lock)
