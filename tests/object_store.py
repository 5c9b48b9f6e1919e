"""An object store in this process's memory, at s3://, by fsspec: what a bucket does, without one.

It has no directories, no rename and no links; a file is there whole once its writer is closed, or
not at all.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, unquote

import fsspec
from fsspec.registry import _registry
from fsspec.spec import AbstractBufferedFile

from jaxtrain.files.cache import cache_directory
from jaxtrain.files.regular import replacing
from jaxtrain.files.store import AnyPath

Files = MutableMapping[str, bytes]
"""By name, which begins with the bucket's."""


class FolderFiles(Files):
    """Files that several processes have, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, name: str) -> Path:
        return self.folder / quote(name, safe="")

    def __getitem__(self, name: str) -> bytes:
        try:
            return self._path(name).read_bytes()
        except FileNotFoundError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, data: bytes) -> None:
        with replacing(self._path(name)) as file:
            file.write(data)

    def __delitem__(self, name: str) -> None:
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter([unquote(name) for name in os.listdir(self.folder) if name[0] != "."])

    def __len__(self) -> int:
        return len(list(iter(self)))


class ObjectStore(fsspec.AbstractFileSystem):
    """All instances have the same files.

    changes: the name and the bytes of each file that was written, None where it was removed, in
    order. copied: the names of those that the store copied. reads: name, first and last byte of
    each range that was read. request: is called with each request's kind and name, and may raise
    what a store would.
    """

    protocol = ("s3",)
    files: ClassVar[Any] = {}
    changes: ClassVar[list[tuple[str, bytes | None]]] = []
    copied: ClassVar[list[str]] = []
    reads: ClassVar[list[tuple[str, int | None, int | None]]] = []
    request: ClassVar[Callable[[str, str], None]] = staticmethod(lambda kind, name: None)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        ObjectStore.request("info", name)
        return self._entry(name)

    def _entry(self, name: str) -> dict[str, Any]:
        if name in self.files:
            data = self.files[name]
            tag = sha256(data).hexdigest()
            return {"name": name, "size": len(data), "type": "file", "created": 0, "ETag": tag}
        if any(other.startswith(f"{name}/") for other in self.files):
            return {"name": name, "size": 0, "type": "directory", "created": 0}
        raise FileNotFoundError(name)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        name = self._strip_protocol(path)
        if name in self.dircache:  # as a store's package remembers lists, unless it is told not to
            return (
                self.dircache[name] if detail else [entry["name"] for entry in self.dircache[name]]
            )
        ObjectStore.request("ls", name)
        if name in self.files:
            below = {name}
        else:
            start = len(name) + 1
            inside = [other[start:] for other in list(self.files) if other.startswith(f"{name}/")]
            below = {f"{name}/{other.partition('/')[0]}" for other in inside}
        if not below:
            raise FileNotFoundError(name)
        entries = [self._entry(entry) for entry in sorted(below)]
        self.dircache[name] = entries
        return entries if detail else sorted(below)

    def find(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
        """As a store's package has it: by lists without folders, whose errors are raised."""
        name = self._strip_protocol(path)
        ObjectStore.request("ls", name)
        below = {k for k in list(self.files) if k.startswith(f"{name}/") or k == name}
        if kwargs.get("withdirs"):
            parts = [k.split("/") for k in below]
            folders = {"/".join(part[:n]) for part in parts for n in range(1, len(part))}
            below |= {folder for folder in folders if folder.startswith(f"{name}/")}
        return {k: self._entry(k) for k in sorted(below)} if detail else sorted(below)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        name = self._strip_protocol(path)
        ObjectStore.request("read", name)
        if name not in self.files:
            raise FileNotFoundError(name)
        self.reads.append((name, start, end))
        data = self.files[name]
        if start is not None and (start == end or start >= len(data)):
            raise OSError("a range without bytes")  # as S3 answers it
        return data[start:end]

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        name = self._strip_protocol(path)
        return io.BytesIO(self.cat_file(name)) if mode == "rb" else _Upload(self, name, mode)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        ObjectStore.request("copy", source)
        if source not in self.files:
            raise FileNotFoundError(source)
        self.copied.append(target)
        put_object(target, self.files[source])

    def rm_file(self, path: str) -> None:
        name = self._strip_protocol(path)
        ObjectStore.request("remove", name)
        if self.files.pop(name, None) is None:
            raise FileNotFoundError(name)  # as Google's store answers it
        self.changes.append((name, None))

    def _rm(self, path: str) -> None:
        self.rm_file(path)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """A prefix is there as soon as a name begins with it."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """As `mkdir`."""


class _Upload(AbstractBufferedFile):
    """A file that is written. It is there once it is closed."""

    def _initiate_upload(self) -> None:
        self.data = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.data += self.buffer.getvalue()
        if final:
            ObjectStore.request("write", self.path)
            put_object(self.path, self.data)
        return True


def put_object(name: str, data: bytes | None) -> None:
    """Writes a file of the store, or removes it."""
    if data is None:
        ObjectStore.files.pop(name, None)
    else:
        ObjectStore.files[name] = data
    ObjectStore.changes.append((name, data))


@contextmanager
def object_store(folder: Path | None = None) -> Iterator[type[ObjectStore]]:
    """Registers an empty store for the block. folder: has its files, for several processes."""
    fsspec.register_implementation("s3", ObjectStore, clobber=True)
    ObjectStore.files = {} if folder is None else FolderFiles(folder)
    _empty()
    try:
        yield ObjectStore
    finally:
        _empty()
        ObjectStore.files = {}
        _registry.pop("s3", None)


def _empty() -> None:
    ObjectStore.changes.clear()
    ObjectStore.copied.clear()
    ObjectStore.reads.clear()
    ObjectStore.request = staticmethod(lambda kind, name: None)


def empty_cache() -> None:
    """Removes all that was fetched."""
    shutil.rmtree(cache_directory())


def copy_tree(source: AnyPath, target: AnyPath) -> AnyPath:
    """Copies all files below a directory of either kind; returns `target`."""
    for path in files_below(source):
        put_below(target / str(path.relative_to(source)), path.read_bytes())
    return target


def files_below(directory: AnyPath) -> list[AnyPath]:
    """Returns the files of a directory and its folders."""
    entries = sorted(directory.iterdir())
    return [file for path in entries for file in (files_below(path) if path.is_dir() else [path])]


def put_below(path: AnyPath, data: bytes = b"") -> None:
    """Writes a file, and makes its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
