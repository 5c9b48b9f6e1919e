"""A run in an object store: its directory on the machine that runs it has a copy there.

    RUN/store.json             the address, and the mark of the last copy that RUN is equal to
    ADDRESS/checkpoints/...    the steps; they are saved there, and are not in RUN
    ADDRESS/copied.json        the mark of the last copy
    ADDRESS/...                copies of all other files of RUN but OF_MACHINE

Each copy has a new mark, so that a machine sees when another one has made a copy since.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from jaxtrain.files import objects
from jaxtrain.files.cache import cache_directory
from jaxtrain.files.folder import plain_name
from jaxtrain.files.json_text import parse_json
from jaxtrain.files.regular import replacing
from jaxtrain.files.store import (
    AnyPath,
    any_path,
    names_in,
    put,
    read_named,
    required_size,
    writing,
)
from jaxtrain.files.stores import is_address, run_violations

CHECKPOINTS = "checkpoints"
POINTER = "store.json"
MARK = "copied.json"
CONFIG = "config.json"
OF_MACHINE = ("ledger.jsonl", "ledger_open.json")
"""Files that stay on a machine: the times of its starts."""
UNFINISHED = ""
"""Mark of a directory into which files are being brought."""
PIECE = 2**24
"""Bytes that are sent or fetched at once."""


class Pointer(NamedTuple):
    """Content of POINTER. mark: None before the first copy. pending: that of a copy that is being
    made, or failed: the store may have it."""

    address: str
    mark: str | None
    pending: str | None = None

    @property
    def marks(self) -> set[str | None]:
        """Marks of a store that has nothing newer than RUN."""
        return {self.mark} if self.pending is None else {self.mark, self.pending}


class StoreFailed(ValueError):
    """A store could not be read or written, at the start of a run. Another start may succeed,
    unless it is for want of permission or of a bucket."""

    def __init__(self, text: str, error: OSError) -> None:
        self.refusal = isinstance(error, PermissionError | FileNotFoundError)
        super().__init__(f"{text}: {error}; try again, or give another --run-dir")


def checkpoints_in(run: AnyPath) -> AnyPath:
    """Returns the directory of a run's steps, which are in a store if RUN/store.json names one.
    Raises ValueError where that cannot be read."""
    pointer = _pointer(run) if isinstance(run, Path) else None
    return (run if pointer is None else _address(POINTER, pointer.address)) / CHECKPOINTS


def place_of(run: Path) -> str:
    """Returns the address of a run in a store, or the whole path of another: its name on any
    machine. Raises ValueError as `checkpoints_in`."""
    pointer = _pointer(run)
    return str(run.resolve()) if pointer is None else pointer.address


def shown(run: Path) -> str:
    """Returns the name of a run in messages: for one in a store its address, and its directory."""
    pointer = _pointer(run)
    return str(run) if pointer is None else f"{pointer.address} (here {run})"


def directory_here(run: str | Path) -> Path:
    """Returns the directory on this machine in which a run is trained: for an address
    `runs/NAME`, where NAME is the address's last part, and a longer name where another run has that
    directory. Raises ValueError for an address without a name, and for those that are not read."""
    if not is_address(run):
        return _path("run_dir", run)
    address = _address("run_dir", run)
    if "/" not in os.fspath(address).partition("://")[2]:
        raise ValueError(f"run_dir={str(run)!r} is a bucket; give a name in it: {address}/NAME")
    directory = Path("runs") / address.name
    pointer = _pointer(directory)
    if pointer is None and not {CONFIG, CHECKPOINTS} & {*names_in(directory)}:
        return directory
    is_ours = pointer is not None and pointer.address == os.fspath(address)
    return directory if is_ours else directory.with_name(_unique_name(address)[:-16])


def _path(name: str, run: str | Path) -> Path:
    if violations := run_violations(name, run):
        raise ValueError(violations[0])
    return Path(run)


def _unique_name(address: epath.Path) -> str:
    return f"{address.name}-{sha256(os.fspath(address).encode()).hexdigest()[:24]}"


def _address(name: str, run: str | Path) -> epath.Path:
    address = any_path(name, run)
    assert not isinstance(address, Path), "only addresses are given here"
    return address


@contextmanager
def opened_for_training(run: str | Path) -> Iterator[Path]:
    """Yields a run's directory on this machine, with the files that another machine has copied to
    the store since. If the start fails before the run has begun, the files that were brought into
    a new directory are removed with it.

    Raises ValueError as `directory_here`, and StoreFailed.
    """
    directory = directory_here(run)
    pointer = _pointer(directory)
    if pointer is None and not is_address(run):
        yield directory
        return
    new_folders = [path for path in (directory, *directory.parents) if not path.exists()]
    place = run if pointer is None else pointer.address
    brought: dict[Path, os.stat_result] = {}
    try:
        _bring(directory, _address("run_dir", place), brought, reads=False)
        yield directory
    except BaseException:
        if new_folders:
            _remove_again(brought, new_folders)
        raise


def opened_for_reading(name: str, run: str | Path) -> Path:
    """Returns the directory of the argument `name`: for an address a copy of the run's files but
    for its steps, in the cache. Raises ValueError as `directory_here` and where no run is,
    and StoreFailed."""
    if not is_address(run):
        return _path(name, run)
    address = _address(name, run)
    directory = cache_directory() / "runs" / _unique_name(address)
    _bring(directory, address, {}, reads=True)
    if not (directory / CONFIG).exists():
        shutil.rmtree(directory, ignore_errors=True)
        raise ValueError(f"{address} has no {CONFIG}, so it is no run; give the address of one")
    return directory


class RunCopy:
    """Copies the files of a run's directory into its store, those that changed since the last
    copy."""

    def __init__(self, directory: Path, pointer: Pointer) -> None:
        self.address = _address(POINTER, pointer.address)
        self._directory, self._pointer = directory, pointer
        self._copied: dict[str, tuple[int, int]] = {}
        self._pool = ThreadPoolExecutor(1)
        self._marks = pointer.marks
        """That the store may have if no other machine has made a copy: a write that failed may have
        taken effect."""
        self._last: Future[None] | None = None
        self._is_due = False

    @classmethod
    def of(cls, directory: Path) -> RunCopy | None:
        """Returns the copy of a directory; None for one that is not copied."""
        pointer = _pointer(directory)
        return None if pointer is None else cls(directory, pointer)

    def taken(self) -> str:
        """Returns why this run cannot go on, if another machine has made a copy since: it runs the
        same run; "" if not. Raises OSError, and ValueError for a mark that cannot be read."""
        mark = _mark(self.address)
        if mark is None or mark in self._marks:
            return ""
        return (
            f"another start of the run has written to {self.address} since this one began, and "
            "goes on alone"
        )

    def begin(self) -> None:
        """Copies in another thread, after the copy that is being made."""
        self._is_due = True
        if self._last is None or self._last.done():
            self._last = self._pool.submit(self._copy_due)

    def _copy_due(self) -> None:
        while self._is_due:
            self._is_due = False
            self.make()

    def failure(self) -> str | None:
        """Returns why the last copy that was begun failed; None if it did not, or is not done."""
        error = self._last.exception() if self._last is not None and self._last.done() else None
        return None if error is None else str(error)

    def close(self) -> None:
        """Copies once more, and ends the thread. Raises as `make`."""
        self._pool.shutdown()
        self.make()

    def point(self) -> None:
        """Writes RUN/store.json."""
        _write_pointer(self._directory, self._pointer)

    def make(self) -> None:
        """Copies now. Raises OSError, and ValueError if the run is `taken`."""
        if problem := self.taken():
            raise ValueError(problem)
        for name in _names(self._directory):
            status = (self._directory / name).stat()
            version = status.st_size, status.st_mtime_ns
            if self._copied.get(name) != version:
                _send(self._directory / name, self.address / name)
                self._copied[name] = version
        mark = secrets.token_hex(8)
        self._marks.add(mark)
        self._pointer = self._pointer._replace(pending=mark)
        self.point()
        put(self.address / MARK, json.dumps({"mark": mark}).encode())
        self._pointer = self._pointer._replace(mark=mark, pending=None)
        self.point()


def _bring(
    directory: Path, address: epath.Path, brought: dict[Path, os.stat_result], *, reads: bool
) -> None:
    """Makes the directory, with the files of the store unless it has them, or newer ones. brought:
    is given those that are written. reads: nothing else writes the directory, so that it has none
    newer.

    A store into which another tool has put a run has no mark: a directory that is trained in is
    newer than that, and one that is read may be older. Raises StoreFailed, and ValueError for a
    mark that cannot be read.
    """
    pointer = _pointer(directory)
    try:
        mark = _mark(address)
        if pointer is not None and mark in pointer.marks and not (reads and mark is None):
            return
        directory.mkdir(parents=True, exist_ok=True)
        # Before its files: a start after a kill, or another process of this machine, brings them.
        _write_pointer(directory, Pointer(os.fspath(address), UNFINISHED))
        brought[directory / POINTER] = (directory / POINTER).stat()
        for name in filter(_is_copied, objects.files_below(address)):
            _fetch(address / name, directory / name)
            brought[directory / name] = (directory / name).stat()
        _write_pointer(directory, Pointer(os.fspath(address), mark))
        brought[directory / POINTER] = (directory / POINTER).stat()
    except OSError as error:
        raise StoreFailed(f"{address} cannot be read into {directory}", error) from error


def _remove_again(brought: dict[Path, os.stat_result], new_folders: list[Path]) -> None:
    """Removes the files and the directories that are empty then. Nothing once the run has begun: it
    writes POINTER anew, by which the directory counts as equal to the store."""
    pointer = new_folders[0] / POINTER
    if pointer in brought and not _is_unchanged(pointer, brought[pointer]):
        return
    for path, status in brought.items():
        if _is_unchanged(path, status):
            path.unlink()
    parents = {parent for path in brought for parent in path.parents}
    folders = [folder for folder in parents if new_folders[0] in folder.parents]
    for folder in (*sorted(folders, reverse=True), *new_folders):
        with suppress(OSError):  # others are in it
            folder.rmdir()


def _is_unchanged(path: Path, status: os.stat_result) -> bool:
    with suppress(OSError):
        now = path.stat()
        return (now.st_ino, now.st_mtime_ns) == (status.st_ino, status.st_mtime_ns)
    return False


def _is_copied(name: str) -> bool:
    """True for a file of a run, by its path in the directory, that a copy has: not for the steps,
    for hidden and temporary files, and for names that lead elsewhere."""
    first, *_ = parts = name.split("/")
    if first in (CHECKPOINTS, POINTER, MARK, *OF_MACHINE) or first.startswith("launch-"):
        return False
    if first.endswith(".tmp"):
        return False
    return all(plain_name(part) and not part.startswith(".") for part in parts)


def _names(directory: Path) -> Iterator[str]:
    """Yields the paths in a directory of the files that a copy has."""
    for folder, folders, files in os.walk(directory):
        place = Path(folder).relative_to(directory)
        folders[:] = [name for name in folders if _is_copied((place / name).as_posix())]
        for name in map(lambda file: (place / file).as_posix(), files):
            path = directory / name
            if _is_copied(name) and path.is_file() and not path.is_symlink():
                yield name


def _send(path: Path, target: AnyPath) -> None:
    with path.open("rb") as file, writing(target) as writer:
        while piece := file.read(PIECE):
            writer.write(piece)


def _fetch(source: epath.Path, path: Path) -> None:
    """Writes a file of the store to a path, whole or not at all."""
    size = required_size(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        for start in range(0, size, PIECE):
            file.write(objects.read_range(source, start, min(size, start + PIECE)))
        if file.tell() != size:
            raise OSError(errno.EIO, "the answer is cut short", os.fspath(source))


def _mark(address: epath.Path) -> str | None:
    """Returns the mark of the last copy in a store; None where there is none. Raises OSError, and
    ValueError for what is no mark."""
    try:
        text = read_named(address, MARK)
    except FileNotFoundError:
        return None
    mark = _object(text, f"{address / MARK}").get("mark")
    if not isinstance(mark, str) or mark == UNFINISHED:
        raise ValueError(
            f"{address / MARK} has no mark of a copy; remove it, if no run goes on there"
        )
    return mark


def _pointer(directory: Path) -> Pointer | None:
    """Returns what RUN/store.json has; None where there is none. Raises ValueError where it cannot
    be read."""
    if not (directory / POINTER).is_file():
        return None
    stored = _object(read_named(directory, POINTER), f"{directory / POINTER}")
    address, *marks = (stored.get(name) for name in Pointer._fields)
    is_text = all(isinstance(mark, str | None) for mark in marks)
    if not isinstance(address, str) or not is_address(address) or not is_text:
        raise ValueError(f"{directory / POINTER} names no store; write the run's address into it")
    return Pointer(address, *marks)


def _object(text: str, source: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{source} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{source} holds a {type(value).__name__}, not an object")
    return value


def _write_pointer(directory: Path, pointer: Pointer) -> None:
    with replacing(directory / POINTER) as file:
        file.write(json.dumps(pointer._asdict()).encode())
