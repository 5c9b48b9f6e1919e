"""Files on the local disk or in an object store: what checkpoints read and write goes through here.

A path is a `pathlib.Path`, or for the address of a store (gs://bucket/run, s3://bucket/run) an
`epath.Path` of the package etils, over fsspec. Both have `/`, `name` and `parent`; all else that is
done with either is a function of this module, since it fails or is committed in other ways.

A store has no rename that is atomic, no links and no directories: those are prefixes of names. It
has files that appear whole or not at all. So what is to appear at once is committed by one more
file: see `is_committed`.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import Any

from etils import epath

from jaxtrain.files import objects
from jaxtrain.files.folder import file_of
from jaxtrain.files.regular import LARGEST_TEXT, open_regular, read_text, sync_path, write_all
from jaxtrain.files.stores import PACKAGES, address_violations, scheme_of

AnyPath = Path | epath.Path

COMMITTED = "commit_success.txt"
"""Orbax writes this file last into a directory of a store."""


def any_path(name: str, path: str | AnyPath) -> AnyPath:
    """Returns the absolute path of the argument `name`, or the address of a store. Raises
    ValueError for a scheme that none of PACKAGES reaches, and where its package is missing."""
    text = os.fspath(path)
    scheme = scheme_of(text)
    if scheme not in PACKAGES:
        if violations := address_violations(name, text):
            raise ValueError(violations[0])
        return Path(text).absolute()
    address = address_of(name, text)
    _refuse_missing(name, text, scheme)
    objects.list_anew(scheme)
    return epath.Path(address)


def address_of(name: str, text: str) -> str:
    """Returns an address as `any_path` writes it, also where its package is missing. Raises
    ValueError for one that names no bucket."""
    scheme = scheme_of(text)
    # `Path` keeps one of an address's two slashes.
    place = text.partition(":")[2].removeprefix("/").removeprefix("/")
    bucket, *names = place.rstrip("/").split("/")
    if {"", ".", ".."} & {bucket, *names}:
        raise ValueError(f"{name}={text!r} is no address; give one such as {scheme}://BUCKET/NAME")
    return "/".join([f"{scheme}://{bucket}", *names])


def _refuse_missing(name: str, path: str, scheme: str) -> None:
    """Raises ValueError where the package is missing that reaches addresses of the scheme."""
    package = PACKAGES[scheme]
    if find_spec(package) is None and not objects.is_registered(scheme):
        raise ValueError(
            f"{name}={path!r} is reached by the package {package}, which is not installed: "
            f"pip install {package}"
        )


def is_local(path: AnyPath) -> bool:
    """True if the path is on this machine's file systems."""
    return isinstance(path, Path)


def from_orbax(directory: os.PathLike[str]) -> AnyPath:
    """Returns the path of a directory as Orbax names it."""
    text = os.fspath(directory)
    return epath.Path(text) if "://" in text else Path(text)


def names_in(directory: AnyPath) -> list[str]:
    """Returns the names in a directory; [] where there is none. Raises OSError."""
    if not isinstance(directory, Path):
        return objects.names_in(directory)
    return os.listdir(directory) if directory.is_dir() else []


def size_of(path: AnyPath) -> int | None:
    """Returns the bytes of a regular file; None where there is none, and for a link. Raises
    OSError."""
    if not isinstance(path, Path):
        return objects.size_of(path)
    with suppress(FileNotFoundError, NotADirectoryError):
        status = path.lstat()
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


def required_size(path: AnyPath) -> int:
    """Returns the bytes of a regular file. Raises OSError: FileNotFoundError where none is."""
    if (size := size_of(path)) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
    return size


def exists(path: AnyPath) -> bool:
    """True if a file or directory is there. Raises OSError."""
    if isinstance(path, Path):
        return path.exists()
    return objects.size_of(path) is not None or bool(objects.names_in(path))


def identity_of(directory: AnyPath) -> int | str:
    """Returns what tells a directory from a copy of it: its inode, or its address in a store.
    Raises OSError."""
    return directory.stat().st_ino if isinstance(directory, Path) else os.fspath(directory)


def read_named(directory: AnyPath, name: str) -> str:
    """Returns the UTF-8 text of the file `name` in a directory from an untrusted source. Raises as
    `file_of` and `read_text`."""
    if isinstance(directory, Path):
        return read_text(file_of(directory, name))
    path = directory / name
    if (size := required_size(path)) > LARGEST_TEXT:
        raise ValueError(f"{path} has {size:,} bytes; a text has at most {LARGEST_TEXT:,}")
    return objects.read_range(path, 0, size).decode("utf-8")


@contextmanager
def reading(path: AnyPath, offset: int, size: int) -> Iterator[FileIO | io.BytesIO | None]:
    """Opens a file to read `size` bytes from `offset`; yields None where it ends before them.

    Bytes of a store are one request. Raises OSError, such as FileNotFoundError; ValueError for what
    is not a regular file.
    """
    if isinstance(path, Path):
        with open_regular(path, "rb") as file:
            file.seek(offset)
            yield file if os.fstat(file.fileno()).st_size >= offset + size else None
        return
    try:
        data = objects.read_range(path, offset, offset + size)
    except OSError:  # some stores refuse a range behind the end
        if required_size(path) >= offset + size:
            raise
        data = b""
    if len(data) < size and required_size(path) >= offset + size:
        raise OSError(errno.EIO, "the answer is cut short", os.fspath(path))
    yield io.BytesIO(data) if len(data) == size else None


@contextmanager
def local_copy(path: AnyPath) -> Iterator[Path]:
    """Yields a local path of a file: its own, or one of a copy that is removed after the block.
    Raises OSError."""
    if isinstance(path, Path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="jaxtrain-") as folder:
        copy = Path(folder) / path.name
        copy.write_bytes(objects.read_range(path, 0, required_size(path)))
        yield copy


class Writer:
    """Writes a new file from its first byte to its last."""

    def __init__(self, file: Any, path: AnyPath) -> None:
        self._file, self._path = file, path

    def write(self, data: bytes | memoryview) -> None:
        """Writes all of `data` after what was written. Raises OSError."""
        if isinstance(self._path, Path):
            write_all(self._file, data)
            return
        with objects.os_errors(self._path):
            self._file.write(data)


@contextmanager
def writing(path: AnyPath) -> Iterator[Writer]:
    """Opens a file to write. It is durable at the end of the block; the name of a local one once
    its directory is synchronised. Raises OSError; ValueError for a link."""
    if isinstance(path, Path):
        with open_regular(path, "wb") as file:
            yield Writer(file, path)
            os.fsync(file.fileno())
        return
    with objects.writing(path) as stored:
        yield Writer(stored, path)


def put(path: AnyPath, data: bytes) -> None:
    """Writes a whole file, and returns when data and name are durable. Raises as `writing`."""
    with writing(path) as writer:
        writer.write(data)
    if isinstance(path, Path):
        sync_path(path.parent)


def send(path: Path, target: AnyPath) -> None:
    """Copies a local file. Raises as `writing`."""
    with path.open("rb") as file, writing(target) as writer:
        while piece := file.read(objects.PIECE):
            writer.write(piece)


def share_file(source: AnyPath, target: AnyPath) -> None:
    """Makes a file under another name without sending its bytes through this machine: by a hard
    link, or by a copy that the store makes. Raises OSError."""
    if isinstance(source, Path):
        os.link(source, target)
        return
    objects.copy_file(source, target)


def remove_file(path: AnyPath) -> None:
    """Removes a file, if it is there. Raises OSError."""
    if isinstance(path, Path):
        path.unlink(missing_ok=True)
    else:
        objects.remove_file(path)


def is_committed(directory: AnyPath) -> bool:
    """True if all of a directory that was written at once is there. A local one is renamed when it
    is, so that its name says so. Raises OSError."""
    return isinstance(directory, Path) or objects.size_of(directory / COMMITTED) is not None


def move(directory: AnyPath, target: AnyPath) -> None:
    """Renames a directory. In a store its files are copied, and then removed. Raises OSError."""
    if isinstance(directory, Path):
        directory.rename(target)
        return
    for name in sorted(objects.files_below(directory), key=lambda name: name == COMMITTED):
        objects.copy_file(directory / name, target / name)
    remove(directory)


def remove(directory: AnyPath, early: str = COMMITTED) -> None:
    """Removes a directory and all in it; one that is committed in a store is not after the first
    file. early: the file that is removed next. Raises OSError."""
    if isinstance(directory, Path):
        shutil.rmtree(directory)
        return
    for name in (COMMITTED, early, *objects.files_below(directory)):
        objects.remove_file(directory / name)


def remove_what_can_be(directory: AnyPath) -> None:
    """Does `remove` and raises nothing; on a disk what cannot be removed keeps only itself."""
    if isinstance(directory, Path):
        shutil.rmtree(directory, ignore_errors=True)
        return
    with suppress(OSError):
        remove(directory)
