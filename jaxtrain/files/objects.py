"""Files of an object store, by fsspec: whole, or a range of bytes. Errors of a store's package are
raised as OSError; a file is missing only where the store says so."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, BinaryIO, Concatenate, ParamSpec, TypeVar

from etils import epath

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


@_raises_os_errors
def names_in(directory: epath.Path) -> list[str]:
    """Returns the names of the files and prefixes right below a prefix; [] where there are none."""
    fs, name = _fsspec(directory)
    try:
        paths = fs.ls(name, detail=False)
    except FileNotFoundError:
        return []
    below = (path.rstrip("/").rpartition("/")[::2] for path in paths)
    return [entry for parent, entry in below if parent == name.rstrip("/")]


@_raises_os_errors
def read_range(path: epath.Path, start: int, end: int) -> bytes:
    """Returns the bytes of a file from `start` to `end`, in one request; fewer where it ends."""
    if start == end:  # an empty range is refused by some stores
        return b""
    fs, name = _fsspec(path)
    return fs.cat_file(name, start=start, end=end)


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


@_raises_os_errors
def files_below(directory: epath.Path) -> list[str]:
    """Returns the paths of all files below a prefix, relative to it."""
    fs, name = _fsspec(directory)
    start = name.rstrip("/") + "/"
    return [path.removeprefix(start) for path in fs.find(name) if path.startswith(start)]


def _fsspec(path: os.PathLike[str]) -> tuple[Any, str]:
    """Returns the file system of a store, and the name of a path in it."""
    import fsspec

    return fsspec.core.url_to_fs(os.fspath(path))
