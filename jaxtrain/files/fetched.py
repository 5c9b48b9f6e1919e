"""Files of object stores in the cache, each as it was when a list told of it.

    CACHE/DIGEST.stored        a file; DIGEST is that of its address and version
    CACHE/store-DIGEST/...     texts of one folder; of its address and of their versions
    CACHE/run-DIGEST/...       small files of a run, in the same way

An entry never changes: what has been written again in the store is another one. It appears whole.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import glob
import io
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from etils import epath

from jaxtrain.files import objects
from jaxtrain.files.cache import cache_directory, mark_used
from jaxtrain.files.cache_entries import keep_within_limit
from jaxtrain.files.regular import replacing
from jaxtrain.notices import notice, size

LOCK = ".fetching"
BUFFER = 2**22
"""Bytes of one request for a file that is read in place."""
LARGE = 2**28
"""Bytes of a file whose fetch is told."""


class StoredFile(NamedTuple):
    """A file of a store as a list has it. size: bytes. version: as of `objects.StoreEntry`."""

    address: epath.Path
    size: int
    version: str


def stored_files(address: epath.Path) -> tuple[dict[str, StoredFile], list[str]]:
    """Returns the files right below an address, by name, and the names of its folders, in one
    request. Raises OSError."""
    entries = objects.entries_in(address)
    files = {
        name: StoredFile(address / name, entry.size, entry.version)
        for name, entry in entries.items()
        if entry.size is not None
    }
    return files, [name for name in entries if name not in files]


def stored_below(address: epath.Path) -> list[StoredFile]:
    """Returns the file at an address, or the files below it, but for hidden ones. Raises
    OSError."""
    return _matching(address, ["**"])


def stored_matches(pattern: epath.Path) -> list[StoredFile]:
    """Returns the files that match a pattern as of `glob`. Raises OSError.

    All below the parts without wildcards are listed: fsspec's own `glob` leaves out folders that
    cannot be listed, without a word.
    """
    parts = os.fspath(pattern).split("/")
    first = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return _matching(epath.Path("/".join(parts[:first])), parts[first:])


def _matching(address: epath.Path, parts: list[str]) -> list[StoredFile]:
    start = os.fspath(address)
    return [
        StoredFile(epath.Path(name), entry.size or 0, entry.version)
        for name, entry in objects.files_at(address).items()
        if name == start or _matches(name.removeprefix(f"{start}/").split("/"), parts)
    ]


def _matches(names: list[str], parts: list[str]) -> bool:
    """True if the parts of a path match those of a pattern: `**` any number of folders."""
    if not parts or not names:
        return not parts and not names
    name, part = names[0], parts[0]
    if name[0] == "." != part[0]:  # hidden
        return False
    if part != "**":
        return fnmatch.fnmatchcase(name, part) and _matches(names[1:], parts[1:])
    if len(names) == 1 == len(parts):
        return True
    return _matches(names[1:], parts) or _matches(names, parts[1:])


@contextmanager
def opened_in_place(
    address: epath.Path, version: str, *, buffer: int | None = None
) -> Iterator[BinaryIO]:
    """Opens a file of a store to read it where it is. buffer: bytes of a request at least; 0 for
    what is asked for alone. Raises OSError where the file has not this version, now or at the end
    of the block."""
    size, now = objects.entry_of(address)
    file = StoredFile(address, size or 0, version)
    if now != version:
        require_unchanged([file])
    reader: Any = objects.RangeReader(address, file.size)
    try:
        with reader if buffer == 0 else io.BufferedReader(reader, buffer or BUFFER) as opened:
            yield opened
    except (ValueError, OSError):  # what was read may be of two versions
        require_unchanged([file])
        raise
    require_unchanged([file])


def cached_place(file: StoredFile) -> Path:
    """Returns the path in the cache where a file of a store is once it has been fetched."""
    name = digest_of(os.fspath(file.address), str(file.size), file.version)
    return cache_directory() / f"{name}.stored"


def fetched(file: StoredFile) -> Path:
    """Returns a copy of a file, which is fetched unless it is here. Raises OSError, also where the
    file has been written again since it was listed."""
    path = cached_place(file)
    if not path.is_file():
        with _alone(path.parent):
            if not path.is_file():  # no other process has fetched it meanwhile
                if file.size >= LARGE:
                    notice(f"fetching {os.fspath(file.address)}, {size(file.size)}")
                _fetch(file, path)
        keep_within_limit(path.parent)
    mark_used(path, os.fspath(file.address))
    return path


def fetched_folder(
    name: str, address: epath.Path, files: Mapping[str, StoredFile], texts: Mapping[str, str]
) -> Path:
    """Returns the directory of the cache with that name, which is made unless it is here. files:
    those that it has, by their paths in it. texts: others that are written into it. Raises OSError
    as `fetched`."""
    directory = cache_directory() / name
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        unfinished = directory.with_name(f".{name}-{uuid.uuid4().hex[:8]}")
        unfinished.mkdir()
        try:
            for path in {(unfinished / file).parent for file in files}:
                path.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(objects.FETCHERS) as pool:
                list(pool.map(lambda file: _fetch(files[file], unfinished / file), files))
            for text, content in texts.items():
                (unfinished / text).write_text(content, encoding="utf-8")
            unfinished.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process was faster
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        keep_within_limit(directory.parent)
    mark_used(directory, os.fspath(address))
    return directory


def digest_of(*texts: str) -> str:
    """Returns the part of an entry's name that tells what it is."""
    return sha256("\n".join(texts).encode()).hexdigest()[:24]


def require_unchanged(files: Iterable[StoredFile]) -> None:
    """Raises OSError where a file has been written again since it was listed."""
    for file in files:
        if objects.entry_of(file.address) != (file.size, file.version):
            text = "it has been written again while it was read"
            raise OSError(errno.ESTALE, text, os.fspath(file.address))


def _fetch(file: StoredFile, path: Path) -> None:
    with replacing(path) as target:
        try:
            objects.read_into(file.address, file.size, target)
        finally:  # also if it has become shorter
            require_unchanged([file])


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Makes the cache, and keeps other threads and processes of the machine out of such blocks: one
    fetch takes all of the network. Raises OSError."""
    cache.mkdir(parents=True, exist_ok=True)
    try:
        # Of another user it can be opened to read, which is enough.
        lock = os.open(cache / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        lock = os.open(cache / LOCK, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with suppress(OSError):  # a file system without locks: a file may be fetched twice
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                notice(f"waiting until another process has fetched into {cache}")
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
