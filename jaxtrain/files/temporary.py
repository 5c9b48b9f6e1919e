"""A process's own folder among the system's temporary files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Makes a folder that is removed at the end of the block. Those of the same purpose are removed
    first whose process was killed, and so could not remove its own."""
    begins = f"jaxtrain-{purpose}-"
    for path in Path(tempfile.gettempdir()).glob(f"{begins}*"):
        process = path.name.removeprefix(begins).partition("-")[0]
        if process.isdecimal() and not _runs(int(process)):
            shutil.rmtree(path, ignore_errors=True)  # another user's stays
    with tempfile.TemporaryDirectory(prefix=f"{begins}{os.getpid()}-") as folder:
        yield Path(folder)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
