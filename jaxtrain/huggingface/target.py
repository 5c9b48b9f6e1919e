"""Atomic writing of a folder: files go into a temporary folder, which is renamed when complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxtrain.checkpoint.storage import describe
from jaxtrain.files.regular import sync_path, write_text


class Target:
    """The folder to write, on process 0; does nothing on others.

    A failure among several processes is stored, because the others would wait for this one in the
    next collective: later attempts do nothing, and `agree` raises on all. Without `commit` nothing
    remains, except after a kill: then a folder whose name begins with a dot.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.partial = self.folder.with_name(f".{self.folder.name}.partial-{os.getpid()}")
        self.failure: ValueError | None = None

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *exc: object) -> None:
        if jax.process_index() == 0:
            shutil.rmtree(self.partial, ignore_errors=True)

    def attempt(self, action: Callable[[], None]) -> None:
        """Runs `action` on process 0 if nothing failed before. Raises ValueError at once if there
        is only one process."""
        if jax.process_index() != 0 or self.failure is not None:
            return
        try:
            action()
        except ValueError as error:
            self.failure = error
        except (OSError, SafetensorError) as error:
            message = f"{self.folder} could not be written, and nothing of it is left"
            self.failure = ValueError(f"{message}: {describe(error)}")
            self.failure.__cause__ = error
        if self.failure is not None and jax.process_count() == 1:
            raise self.failure

    def agree(self) -> None:
        """Raises ValueError on every process where process 0 has failed."""
        if jax.process_count() == 1:
            return
        from jax.experimental import multihost_utils

        failed = multihost_utils.broadcast_one_to_all(np.int32(self.failure is not None))
        if self.failure is not None:
            raise self.failure
        if failed:
            raise ValueError(f"process 0 could not write {self.folder}; its own error says why")

    def begin(self, size: int) -> None:
        """Makes the temporary folder. Raises ValueError for a folder that is not empty, or a disk
        with less than `size` bytes free."""
        if problems := in_the_way(self.folder):
            raise ValueError("\n".join(problems))
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder.parent).free
        if free < size:
            raise ValueError(
                f"{self.folder} needs {size:,} bytes and {free:,} are free there; free "
                f"{size - free:,} bytes, give another folder, or dtype='bfloat16'"
            )
        self.partial.mkdir()

    def save(self, file: str, arrays: Mapping[str, np.ndarray]) -> None:
        path = self.partial / file
        # Without this metadata `transformers` 4 refuses a file.
        save_file(dict(arrays), path, metadata={"format": "pt"})
        path.chmod(0o644)  # the library's own is for the owner alone
        sync_path(path)

    def commit(self, texts: Mapping[str, str]) -> None:
        """Writes the small files, and renames the temporary folder."""
        for name, text in texts.items():
            write_text(self.partial / name, text)
            sync_path(self.partial / name)
        sync_path(self.partial)
        self.partial.rename(self.folder)
        sync_path(self.folder.parent)


def in_the_way(folder: Path) -> list[str]:
    """Returns why a folder cannot be written: it exists and is not empty."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return []
    return [f"{folder.absolute()} is there already; remove it or give a new folder"]
