"""The tensors of a folder: one model.safetensors, or the files of an index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxtrain.files.fetched import StoredFile, require_unchanged
from jaxtrain.files.folder import file_of
from jaxtrain.files.json_text import parse_json
from jaxtrain.files.opened import OpenedFolder
from jaxtrain.files.pointer import StoreFailed, unreadable
from jaxtrain.files.regular import open_regular, read_text
from jaxtrain.huggingface.header import WIDTHS, HeaderEntry, header_of, read_bytes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes read, by the names of the format."""

READERS = 32
"""Requests for headers and rows that are under way together."""

TensorBox = tuple[tuple[int, int], ...]
"""(start, stop) along each dim."""


class TensorInfo(NamedTuple):
    """Location, shape and dtype of a tensor, from the header: `name` in `file`."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: str


class Folder:
    """Headers and open files of a folder; `read` reads a part of a tensor.

    single: the file that has all tensors, if it is there. index: the one that names several files,
    None if there can be only one. place: the folder, or its address. tensors: all tensors, by the
    name that `read` takes. problems: tensors that are in two files, or not where the index says.
    Both are filled within `with`.

    Of a folder in a store names and shapes are read, and a file of tensors is fetched once one of
    them is.

    Raises ValueError where there are no safetensors, or a file cannot be opened: with the name of
    each; StoreFailed. An index can only name files of the folder, and links lead nowhere else
    (`files.folder`).
    """

    def __init__(
        self, folder: OpenedFolder, single: str = SINGLE, index: str | None = INDEX
    ) -> None:
        self.place, self._folder = folder.place, folder
        self._single, self._index_name = single, index
        self.tensors: dict[str, TensorInfo] = {}
        self.problems: list[str] = []
        self._files: dict[str, Any] = {}
        self._remote: dict[str, StoredFile] = {}
        """Files that were in the store alone when the folder was opened."""
        self._headers: dict[str, dict[str, HeaderEntry]] = {}
        """Of these."""
        self._stack = ExitStack()

    def __enter__(self) -> Folder:
        index = self._index()
        names = sorted(set(index.values())) if index is not None else [self._single]
        try:
            self._open(names)
        except ValueError:
            self._stack.close()
            raise
        for name, file in (index or {}).items():
            if name not in self.tensors or self.tensors[name].file != file:
                self.problems.append(f"{name}: {INDEX} says it is in {file}, where it is not")
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def read(self, name: str, box: TensorBox) -> np.ndarray:
        """Returns a copy of part `box` of a tensor in the file's dtype, and reads no other bytes of
        a file that is here. Raises StoreFailed."""
        info = self.tensors[name]
        if info.file not in self._files:
            self._files[info.file] = self._opened(self._folder.whole(info.file))
        part = self._files[info.file].get_slice(info.name)
        return part[tuple(slice(*dim) for dim in box)]

    def digest(self, *, fetch: bool = False) -> str:
        """Returns a digest of the names, shapes and dtypes of all tensors, and of three rows of
        each that is of floats: the first, the middle and the last one. fetch: whole files of a
        store, which is faster if they will be read. Raises StoreFailed."""
        total, rows = sha256(), iter(self._rows(fetch))
        for name, info in sorted(self.tensors.items()):
            total.update(repr((name, info.shape, info.dtype)).encode())
            for _ in _row_boxes(info):
                total.update(next(rows))
        return total.hexdigest()

    def _rows(self, fetch: bool) -> list[bytes]:
        """Returns the bytes of the rows of `digest`."""
        boxes = [(name, b) for name, info in sorted(self.tensors.items()) for b in _row_boxes(info)]
        if fetch or not self._remote:
            return [self.read(name, box).tobytes() for name, box in boxes]
        try:
            with ThreadPoolExecutor(READERS) as pool:
                rows = list(pool.map(lambda row: self._row(*row), boxes))
            require_unchanged(self._remote.values())
        except OSError as error:
            raise unreadable(self.place, error) from error
        return rows

    def _row(self, name: str, box: TensorBox) -> bytes:
        info = self.tensors[name]
        if info.file not in self._remote:
            return self.read(name, box).tobytes()
        entry = self._headers[info.file][info.name]
        width = WIDTHS[info.dtype]
        first = int(np.ravel_multi_index([start for start, _ in box], info.shape))
        address = self._remote[info.file].address
        return read_bytes(address, entry.start + first * width, info.shape[-1] * width)

    def rename(self, names: Mapping[str, str]) -> None:
        """Changes the names that `read` takes: old -> new."""
        self.tensors = {names.get(name, name): info for name, info in self.tensors.items()}

    def leave_out(self, names: Iterable[str]) -> None:
        """Removes some tensors from `tensors`."""
        self.tensors = {k: info for k, info in self.tensors.items() if k not in set(names)}

    def _index(self) -> dict[str, str] | None:
        """Returns tensor -> file; None for a single file, which is preferred if both exist."""
        names = self._folder.names()
        if self._single in names:
            return None
        if self._index_name is None or self._index_name not in names:
            pickled = sorted(name for name in names if name.endswith(".bin"))
            hint = f"; {', '.join(pickled)} is pickled: save it as safetensors" if pickled else ""
            lacks = f"no {self._single}"
            if self._index_name is not None:
                lacks = f"neither {self._single} nor {self._index_name}"
            raise ValueError(f"{self.place} has {lacks}{hint}")
        path = self.place / self._index_name
        try:
            text = read_text(file_of(self._folder.here, self._index_name))
            return {str(k): str(v) for k, v in parse_json(text)["weight_map"].items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} has no weight_map of tensors to files: {error!r}") from error

    def _open(self, names: list[str]) -> None:
        broken = []
        with ThreadPoolExecutor(READERS) as pool:
            headers = {name: pool.submit(self._header, name) for name in names}
        for name, header in headers.items():
            try:
                tensors = header.result()
            except StoreFailed:
                raise
            except (OSError, SafetensorError, ValueError) as error:
                broken.append(f"{self.place / name} cannot be opened: {error}")
                continue
            for tensor, (dtype, shape) in tensors.items():
                if tensor in self.tensors:
                    both = f"{self.tensors[tensor].file} and {name}"
                    self.problems.append(f"{tensor}: stands in {both}; keep one")
                self.tensors[tensor] = TensorInfo(name, tensor, shape, dtype)
        if broken:
            raise ValueError("\n".join(broken))

    def _header(self, name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns the dtype and the shape of each tensor of a file. One that is here stays open."""
        if (stored := self._folder.remote(name)) is not None:
            try:
                entries = header_of(stored)
            except OSError as error:
                raise unreadable(stored.address, error) from error
            self._remote[name], self._headers[name] = stored, entries
            return {k: (entry.dtype, entry.shape) for k, entry in entries.items()}
        file = self._files[name] = self._opened(self._folder.whole(name))
        parts = {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118
        return {k: (str(part.get_dtype()), tuple(part.get_shape())) for k, part in parts.items()}

    def _opened(self, path: Path) -> Any:
        open_regular(path, "rb").close()  # the library would wait for a pipe
        return self._stack.enter_context(safe_open(path, framework="np"))


def _row_boxes(info: TensorInfo) -> list[TensorBox]:
    """Returns the first, the middle and the last row of a tensor of floats; [] of another."""
    if info.dtype not in FLOATS or not info.shape or 0 in info.shape:
        return []
    *outer, last = info.shape
    starts = [[int(share * (size - 1)) for size in outer] for share in (0.0, 0.5, 1.0)]
    return [(*((start, start + 1) for start in row), (0, last)) for row in starts]
