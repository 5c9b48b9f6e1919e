"""Files of an object store, by fsspec: whole, or a range of bytes. Errors of a store's package are
raised as OSError; a file is missing only where the store says so."""

from __future__ import annotations

import errno
import io
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, BinaryIO, Concatenate, NamedTuple, ParamSpec, TypeVar

from etils import epath

VERSION = ("ETag", "generation", "etag")
"""Fields of a file of which a store has one: it changes whenever the file is written."""
PIECE, FETCHERS = 2**24, 8
"""Bytes of one request of `read_into`, and requests that are under way together."""

P = ParamSpec("P")
R = TypeVar("R")


def list_anew(scheme: str) -> None:
    """Makes fsspec ask the store at every listing. It remembers lists else, and another process's
    files would not be seen."""
    import fsspec

    fsspec.config.conf.setdefault(scheme, {})["use_listings_cache"] = False


def is_registered(scheme: str) -> bool:
    """True if fsspec has been given a file system for the scheme by a program."""
    import fsspec

    return scheme in fsspec.registry


@contextmanager
def os_errors(path: epath.Path) -> Iterator[None]:
    """Raises errors of a store's package as OSError: no credentials, no connection."""
    try:
        yield
    except (OSError, AssertionError, MemoryError):
        raise
    except Exception as error:  # also a ValueError, which would be damage here
        text = f"{type(error).__name__}: {error}"
        raise OSError(errno.EIO, text, os.fspath(path)) from error


def _raises_os_errors(
    act: Callable[Concatenate[epath.Path, P], R],
) -> Callable[Concatenate[epath.Path, P], R]:
    @wraps(act)
    def wrapped(path: epath.Path, *args: P.args, **kwargs: P.kwargs) -> R:
        with os_errors(path):
            return act(path, *args, **kwargs)

    return wrapped


@_raises_os_errors
def size_of(path: epath.Path) -> int | None:
    """Returns the bytes of a file; None where there is none."""
    fs, name = _fsspec(path)
    try:
        info = fs.info(name)  # not `exists`, which is False for errors of any kind
    except FileNotFoundError:
        return None
    return int(info["size"]) if info["type"] == "file" else None


class StoreEntry(NamedTuple):
    """size: bytes of a file, None of a prefix. version: a text that is another one once the file
    has been written again; "" in a store that has none, where only another size is seen."""

    size: int | None
    version: str


@_raises_os_errors
def entries_in(directory: epath.Path) -> dict[str, StoreEntry]:
    """Returns the files and prefixes right below a prefix, by name; {} where there are none."""
    fs, name = _fsspec(directory)
    try:
        listed = fs.ls(name, detail=True)
    except FileNotFoundError:
        return {}
    below = ((info["name"].rstrip("/").rpartition("/")[::2], info) for info in listed)
    return {own: _entry(info) for (parent, own), info in below if parent == name.rstrip("/")}


def names_in(directory: epath.Path) -> list[str]:
    """Returns the names of the files and prefixes right below a prefix; [] where there are none."""
    return list(entries_in(directory))


@_raises_os_errors
def entry_of(path: epath.Path) -> StoreEntry:
    """Returns what a store says of a file. Raises FileNotFoundError."""
    fs, name = _fsspec(path)
    return _entry(fs.info(name))


@_raises_os_errors
def files_at(path: epath.Path) -> dict[str, StoreEntry]:
    """Returns the file at an address, or those below it, by address."""
    fs, name = _fsspec(path)
    scheme = os.fspath(path).partition("://")[0]
    listed = fs.find(name, detail=True)
    # Consoles of stores mark an empty folder by a file whose name ends with a slash.
    names = [name for name in listed if not name.endswith("/")]
    if broken := [name for name in names if "//" in name]:
        raise OSError(errno.EINVAL, "a name with two slashes is not read; rename it", broken[0])
    entries = {f"{scheme}://{name}": _entry(listed[name]) for name in names}
    return {address: entry for address, entry in entries.items() if entry.size is not None}


def _entry(info: dict[str, Any]) -> StoreEntry:
    # No times: a list and a question for one file do not write them equally in all stores.
    version = next((str(info[field]) for field in VERSION if info.get(field)), "")
    return StoreEntry(int(info["size"]) if info["type"] == "file" else None, version)


@_raises_os_errors
def read_range(path: epath.Path, start: int, end: int) -> bytes:
    """Returns the bytes of a file from `start` to `end`, in one request; fewer where it ends."""
    if start == end:  # an empty range is refused by some stores
        return b""
    fs, name = _fsspec(path)
    return fs.cat_file(name, start=start, end=end)


def read_into(path: epath.Path, size: int, file: BinaryIO, start: int = 0) -> None:
    """Writes the bytes of a file of `size` bytes, from `start`, to an open one. Raises OSError."""
    pending: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(FETCHERS) as pool:
        for at in range(start, size, PIECE):
            pending.append(pool.submit(_whole_range, path, at, min(size, at + PIECE)))
            if len(pending) == FETCHERS:
                file.write(pending.popleft().result())
        for piece in pending:
            file.write(piece.result())


def _whole_range(path: epath.Path, start: int, end: int) -> bytes:
    data = read_range(path, start, end)
    if len(data) != end - start:
        raise OSError(errno.EIO, "the answer is cut short", os.fspath(path))
    return data


class RangeReader(io.RawIOBase):
    """Reads a file of `size` bytes by ranges."""

    def __init__(self, path: epath.Path, size: int) -> None:
        self._path, self._size, self._at = path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readall(self) -> bytes:
        rest = io.BytesIO()
        read_into(self._path, self._size, rest, self._at)
        self._at = self._size
        return rest.getvalue()

    def readinto(self, buffer: Any) -> int:
        stop = max(self._at, min(self._size, self._at + len(buffer)))
        data = _whole_range(self._path, self._at, stop)
        buffer[: len(data)] = data
        self._at = stop
        return len(data)


@contextmanager
def writing(path: epath.Path) -> Iterator[BinaryIO]:
    """Opens a file to write it from its first byte on; it is there when the block ends, and is not
    changed if the block raises."""
    with os_errors(path):
        fs, name = _fsspec(path)
        file = fs.open(name, "wb")
    try:
        yield file
        with os_errors(path):
            file.close()
    except BaseException:
        with suppress(Exception):  # the first error counts
            file.discard()
        file.closed = True  # else it is sent when it is collected
        raise


@_raises_os_errors
def copy_file(source: epath.Path, target: os.PathLike[str]) -> None:
    """Makes the store copy a file: none of its bytes is sent here."""
    fs, name = _fsspec(source)
    fs.cp_file(name, _fsspec(target)[1])


@_raises_os_errors
def remove_file(path: epath.Path) -> None:
    """Removes a file, if it is there."""
    fs, name = _fsspec(path)
    with suppress(FileNotFoundError):
        fs.rm_file(name)


def files_below(directory: epath.Path) -> dict[str, StoreEntry]:
    """Returns the files below a prefix, by their paths relative to it. Raises OSError."""
    start = os.fspath(directory) + "/"
    below = files_at(directory).items()
    return {k.removeprefix(start): entry for k, entry in below if k.startswith(start)}


def _fsspec(path: os.PathLike[str]) -> tuple[Any, str]:
    """Returns the file system of a store, and the name of a path in it."""
    import fsspec

    return fsspec.core.url_to_fs(os.fspath(path))
