"""Atomic writing of a folder: on a disk files go into a temporary folder, which is renamed when
complete; in a store the file by which a folder is one is written last."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxtrain.checkpoint.storage import describe
from jaxtrain.files.regular import sync_path, write_text
from jaxtrain.files.store import AnyPath, names_in, put, remove_file, send, size_of


class Target:
    """The folder to write, on process 0; does nothing on others.

    A failure among several processes is stored, because the others would wait for this one in the
    next collective: later attempts do nothing, and `agree` raises on all. Without `commit` nothing
    remains, except after a kill: then a folder whose name begins with a dot, or files of tensors in
    a store.
    """

    def __init__(self, folder: AnyPath) -> None:
        self.folder = folder.absolute() if isinstance(folder, Path) else folder
        self.partial: Path | None = None
        self.failure: ValueError | None = None
        self._sent: list[AnyPath] = []

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.partial is not None:
            shutil.rmtree(self.partial, ignore_errors=True)
        for path in reversed(self._sent):  # first that by which the folder is one
            with suppress(OSError):
                remove_file(path)

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
            rest = "nothing of it is left"
            if not isinstance(self.folder, Path):
                rest = "what was written of it is removed, if the store answers"
            message = f"{self.folder} could not be written, and {rest}"
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

    def begin(self, sizes: Sequence[int]) -> None:
        """Makes the temporary folder. sizes: bytes of the files of tensors. Raises ValueError for a
        folder that is not empty, or a disk without room for them; for a store, on which one after
        the other lies, for the largest."""
        if problems := in_the_way(self.folder):
            raise ValueError("\n".join(problems))
        if not isinstance(self.folder, Path):
            self.partial = Path(tempfile.mkdtemp(prefix="jaxtrain-"))
            _require_room(self.folder, self.partial, max(sizes), "set TMPDIR to another disk")
            return
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        _require_room(self.folder, self.folder.parent, sum(sizes), "give another folder")
        self.partial = self.folder.with_name(f".{self.folder.name}.partial-{os.getpid()}")
        self.partial.mkdir()

    def save(self, file: str, arrays: Mapping[str, np.ndarray]) -> None:
        assert self.partial is not None
        path = self.partial / file
        # Without this metadata `transformers` 4 refuses a file.
        save_file(dict(arrays), path, metadata={"format": "pt"})
        if not isinstance(self.folder, Path):
            self._sent.append(self.folder / file)
            send(path, self.folder / file)
            path.unlink()
            return
        path.chmod(0o644)  # the library's own is for the owner alone
        sync_path(path)

    def commit(self, texts: Mapping[str, str]) -> None:
        """Writes the small files, in order, and renames the temporary folder."""
        assert self.partial is not None
        if not isinstance(self.folder, Path):
            if {*names_in(self.folder)} != {path.name for path in self._sent}:
                self._sent.clear()
                raise ValueError(
                    f"{self.folder} is being written by another process too; remove it, and give "
                    "each a folder of its own"
                )
            for name, text in texts.items():
                self._sent.append(self.folder / name)
                put(self.folder / name, text.encode("utf-8"))
            self._sent.clear()
            return
        for name, text in texts.items():
            write_text(self.partial / name, text)
            sync_path(self.partial / name)
        sync_path(self.partial)
        self.partial.rename(self.folder)
        sync_path(self.folder.parent)


def _require_room(folder: AnyPath, disk: Path, size: int, remedy: str) -> None:
    free = shutil.disk_usage(disk).free
    if free < size:
        raise ValueError(
            f"{folder} needs {size:,} bytes and {free:,} are free in {disk}; free "
            f"{size - free:,} bytes, {remedy}, or dtype='bfloat16'"
        )


def in_the_way(folder: AnyPath) -> list[str]:
    """Returns why a folder cannot be written: it exists and is not empty. Raises OSError for a
    store that does not answer."""
    if isinstance(folder, Path):
        is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
        place = folder.absolute()
    else:
        is_free, place = not names_in(folder) and size_of(folder) is None, folder
    return [] if is_free else [f"{place} is there already; remove it or give a new folder"]
