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
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from etils import epath

from jaxtrain.files import objects
from jaxtrain.files.fetched import StoredFile, digest_of, fetched_folder
from jaxtrain.files.opened import open_folder
from jaxtrain.files.pointer import (
    CHECKPOINTS,
    MARK,
    POINTER,
    UNFINISHED,
    Pointer,
    StoreFailed,
    given_address,
    given_path,
    is_copied,
    json_object,
    mark_of,
    pointer_of,
    unreadable,
    write_pointer,
)
from jaxtrain.files.regular import replacing
from jaxtrain.files.store import names_in, put, read_named, required_size, send
from jaxtrain.files.stores import is_address

CONFIG = "config.json"
RUN = "experiment"
"""An entry of a run's config.json, which a model's has not."""
TRIES = 3
"""Of reading a run whose files are being copied into its store."""


def directory_here(run: str | Path) -> Path:
    """Returns the directory on this machine in which a run is trained: for an address
    `runs/NAME`, where NAME is the address's last part, and a longer name where another run has that
    directory. Raises ValueError for an address without a name, and for those that are not read."""
    if not is_address(run):
        return given_path("run_dir", run)
    address = given_address("run_dir", run)
    if "/" not in os.fspath(address).partition("://")[2]:
        raise ValueError(f"run_dir={str(run)!r} is a bucket; give a name in it: {address}/NAME")
    directory = Path("runs") / address.name
    pointer = pointer_of(directory)
    if pointer is None and not {CONFIG, CHECKPOINTS} & {*names_in(directory)}:
        return directory
    if pointer is not None and pointer.address == os.fspath(address):
        return directory
    return directory.with_name(f"{address.name}-{digest_of(os.fspath(address))[:8]}")


@contextmanager
def opened_for_training(run: str | Path) -> Iterator[Path]:
    """Yields a run's directory on this machine, with the files that another machine has copied to
    the store since. If the start fails before the run has begun, the files that were brought into
    a new directory are removed with it.

    Raises ValueError as `directory_here`, and StoreFailed.
    """
    directory = directory_here(run)
    pointer = pointer_of(directory)
    if pointer is None and not is_address(run):
        yield directory
        return
    new_folders = [path for path in (directory, *directory.parents) if not path.exists()]
    place = run if pointer is None else pointer.address
    brought: dict[Path, os.stat_result] = {}
    try:
        _bring(directory, given_address("run_dir", place), brought)
        yield directory
    except BaseException:
        if new_folders:
            _remove_again(brought, new_folders)
        raise


def opened_for_reading(name: str, path: str | Path) -> Path:
    """Returns the directory of the argument `name`, a run or a model's folder: for an address one
    in the cache, with its small files. Raises ValueError for an address that is not read, and where
    neither is; StoreFailed."""
    if not is_address(path):
        return given_path(name, path)
    address = given_address(name, path)
    run = _run_at(address)
    return open_folder(name, path).here if run is None else run


def opened_run(name: str, path: str | Path) -> Path:
    """Returns the directory of a run as `opened_for_reading`. Raises ValueError for an address
    where there is none too."""
    if not is_address(path):
        return given_path(name, path)
    address = given_address(name, path)
    if (run := _run_at(address)) is None:
        raise ValueError(
            f"{address} has no {CONFIG} of a run, so it is no run; give the address of one"
        )
    return run


def _run_at(address: epath.Path) -> Path | None:
    """Returns a directory with the files of a run; None where there is no run."""
    try:
        names = {*names_in(address)}
        is_run = MARK in names or (CONFIG in names and RUN in _config(address))
        return _fetched_run(address) if is_run else None
    except OSError as error:
        raise unreadable(address, error) from error


def _config(address: epath.Path) -> dict[str, Any]:
    try:
        return json_object(read_named(address, CONFIG), address / CONFIG)
    except UnicodeDecodeError as error:
        raise ValueError(f"{address / CONFIG} is not UTF-8: {error}") from error


def _fetched_run(address: epath.Path, tries: int = TRIES) -> Path:
    files = {
        name: StoredFile(address / name, entry.size or 0, entry.version)
        for name, entry in objects.files_below(address).items()
        if is_copied(name)
    }
    versions = [f"{name} {file.size} {file.version}" for name, file in sorted(files.items())]
    pointer = {POINTER: json.dumps(Pointer(os.fspath(address), None)._asdict())}
    name = f"run-{digest_of(os.fspath(address), *versions)}"
    try:
        return fetched_folder(name, address, files, pointer)
    except OSError as error:
        if error.errno != errno.ESTALE or tries == 1:
            raise
        return _fetched_run(address, tries - 1)  # the run is making a copy


class RunCopy:
    """Copies the files of a run's directory into its store, those that changed since the last
    copy."""

    def __init__(self, directory: Path, pointer: Pointer) -> None:
        self.address = given_address(POINTER, pointer.address)
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
        pointer = pointer_of(directory)
        return None if pointer is None else cls(directory, pointer)

    def taken(self) -> str:
        """Returns why this run cannot go on, if another machine has made a copy since: it runs the
        same run; "" if not. Raises OSError, and ValueError for a mark that cannot be read."""
        mark = mark_of(self.address)
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
        write_pointer(self._directory, self._pointer)

    def make(self) -> None:
        """Copies now. Raises OSError, and ValueError if the run is `taken`."""
        if problem := self.taken():
            raise ValueError(problem)
        for name in _names(self._directory):
            status = (self._directory / name).stat()
            version = status.st_size, status.st_mtime_ns
            if self._copied.get(name) != version:
                send(self._directory / name, self.address / name)
                self._copied[name] = version
        mark = secrets.token_hex(8)
        self._marks.add(mark)
        self._pointer = self._pointer._replace(pending=mark)
        self.point()
        put(self.address / MARK, json.dumps({"mark": mark}).encode())
        self._pointer = self._pointer._replace(mark=mark, pending=None)
        self.point()


def _bring(directory: Path, address: epath.Path, brought: dict[Path, os.stat_result]) -> None:
    """Makes the directory, with the files of the store unless it has them, or newer ones: a store
    into which another tool has put a run has no mark, and the directory is newer. brought: is given
    those that are written. Raises StoreFailed, and ValueError for a mark that cannot be read."""
    pointer = pointer_of(directory)
    try:
        mark = mark_of(address)
        if pointer is not None and mark in pointer.marks:
            return
        directory.mkdir(parents=True, exist_ok=True)
        # Before its files: a start after a kill, or another process of this machine, brings them.
        write_pointer(directory, Pointer(os.fspath(address), UNFINISHED))
        brought[directory / POINTER] = (directory / POINTER).stat()
        for name in filter(is_copied, objects.files_below(address)):
            _fetch(address / name, directory / name)
            brought[directory / name] = (directory / name).stat()
        write_pointer(directory, Pointer(os.fspath(address), mark))
        brought[directory / POINTER] = (directory / POINTER).stat()
    except OSError as error:
        problem = f"{address} cannot be read into {directory}"
        raise StoreFailed(problem, error, "give another --run-dir") from error


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


def _names(directory: Path) -> Iterator[str]:
    """Yields the paths in a directory of the files that a copy has."""
    for folder, folders, files in os.walk(directory):
        place = Path(folder).relative_to(directory)
        folders[:] = [name for name in folders if is_copied((place / name).as_posix())]
        for name in map(lambda file: (place / file).as_posix(), files):
            path = directory / name
            if is_copied(name) and path.is_file() and not path.is_symlink():
                yield name


def _fetch(source: epath.Path, path: Path) -> None:
    """Writes a file of the store to a path, whole or not at all."""
    size = required_size(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        objects.read_into(source, size, file)
