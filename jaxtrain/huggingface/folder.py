"""The tensors of a folder: one model.safetensors, or the files of an index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxtrain.files.folder import file_of
from jaxtrain.files.json_text import parse_json
from jaxtrain.files.regular import open_regular, read_text

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes read, by the names of the format."""

Box = tuple[tuple[int, int], ...]
"""(start, stop) along each dim."""


class TensorInfo(NamedTuple):
    """Location, shape and dtype of a tensor, from the header: `name` in `file`."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: str


class Folder:
    """Headers and open files of a folder; `read` fetches a part of a tensor.

    single: the file that has all tensors, if it is there. index: the one that names several files,
    None if there can be only one. tensors: all tensors, by the name that `read` takes. problems:
    tensors that are in two files, or not where the index says. Both are filled within `with`.

    Raises ValueError where there are no safetensors, or a file cannot be opened: with the name of
    each. An index can only name files of the folder, and links lead nowhere else (`files.folder`).
    """

    def __init__(self, path: Path, single: str = SINGLE, index: str | None = INDEX) -> None:
        self.path, self._single, self._index_name = path, single, index
        self.tensors: dict[str, TensorInfo] = {}
        self.problems: list[str] = []
        self._files: dict[str, Any] = {}
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

    def read(self, name: str, box: Box) -> np.ndarray:
        """Returns a copy of part `box` of a tensor in the file's dtype, and reads no other
        bytes."""
        info = self.tensors[name]
        part = self._files[info.file].get_slice(info.name)
        return part[tuple(slice(*dim) for dim in box)]

    def digest(self) -> str:
        """Returns a digest of the names, shapes and dtypes of all tensors, and of three rows of
        each that is of floats: the first, the middle and the last one."""
        total = sha256()
        for name, info in sorted(self.tensors.items()):
            total.update(repr((name, info.shape, info.dtype)).encode())
            if info.dtype not in FLOATS or not info.shape or 0 in info.shape:
                continue
            *outer, last = info.shape
            for share in (0.0, 0.5, 1.0):
                starts = [int(share * (size - 1)) for size in outer]
                row = self.read(name, (*((start, start + 1) for start in starts), (0, last)))
                total.update(row.tobytes())
        return total.hexdigest()

    def rename(self, names: Mapping[str, str]) -> None:
        """Changes the names that `read` takes: old -> new."""
        self.tensors = {names.get(name, name): info for name, info in self.tensors.items()}

    def leave_out(self, names: Iterable[str]) -> None:
        """Removes some tensors from `tensors`."""
        self.tensors = {k: info for k, info in self.tensors.items() if k not in set(names)}

    def _index(self) -> dict[str, str] | None:
        """Returns tensor -> file; None for a single file, which is preferred if both exist."""
        if (self.path / self._single).is_file():
            return None
        if self._index_name is None or not (self.path / self._index_name).is_file():
            pickled = sorted(p.name for p in self.path.glob("*.bin"))
            hint = f"; {', '.join(pickled)} is pickled: save it as safetensors" if pickled else ""
            lacks = f"no {self._single}"
            if self._index_name is not None:
                lacks = f"neither {self._single} nor {self._index_name}"
            raise ValueError(f"{self.path} has {lacks}{hint}")
        path = self.path / self._index_name
        try:
            weight_map = parse_json(read_text(file_of(self.path, path.name)))["weight_map"]
            return {str(name): str(file) for name, file in weight_map.items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} has no weight_map of tensors to files: {error!r}") from error

    def _open(self, names: list[str]) -> None:
        broken = []
        for name in names:
            try:
                path = file_of(self.path, name)
                open_regular(path, "rb").close()  # the library would wait for a pipe
                file = self._stack.enter_context(safe_open(path, framework="np"))
            except (OSError, SafetensorError, ValueError) as error:
                broken.append(f"{self.path / name} cannot be opened: {error}")
                continue
            self._files[name] = file
            for tensor in file.keys():  # noqa: SIM118 (no mapping)
                part = file.get_slice(tensor)
                shape = tuple(part.get_shape())
                if tensor in self.tensors:
                    both = f"{self.tensors[tensor].file} and {name}"
                    self.problems.append(f"{tensor}: stands in {both}; keep one")
                self.tensors[tensor] = TensorInfo(name, tensor, shape, str(part.get_dtype()))
        if broken:
            raise ValueError("\n".join(broken))
