"""A directory that is a copy of what is at an address of a store: its file store.json names it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from jaxtrain.files.cache import CACHE
from jaxtrain.files.folder import plain_name
from jaxtrain.files.json_text import parse_json
from jaxtrain.files.regular import replacing
from jaxtrain.files.store import AnyPath, any_path, read_named
from jaxtrain.files.stores import address_violations, is_address

CHECKPOINTS = "checkpoints"
POINTER = "store.json"
MARK = "copied.json"
OF_MACHINE = ("ledger.jsonl", "ledger_open.json")
"""Files that stay on a machine: the times of its starts."""
UNFINISHED = ""
"""Mark of a directory into which files are being brought."""


class Pointer(NamedTuple):
    """Content of POINTER. mark: None before the first copy. pending: that of a copy that is being
    made, or failed: the store may have it."""

    address: str
    mark: str | None
    pending: str | None = None

    @property
    def marks(self) -> set[str | None]:
        """The marks that a store may have if it has no file newer than this directory's."""
        return {self.mark} if self.pending is None else {self.mark, self.pending}


class StoreFailed(ValueError):
    """A store could not be read or written, at the start of a run. Another start may succeed,
    unless it is for want of permission or of a bucket."""

    def __init__(self, text: str, error: OSError, otherwise: str) -> None:
        self.refusal = isinstance(error, PermissionError | FileNotFoundError)
        super().__init__(f"{text}: {error}; try again, or {otherwise}")

    def __reduce__(self) -> Any:
        """Another process that reads for this one raises it too."""
        return _store_failed, (str(self), self.refusal)


def _store_failed(text: str, refusal: bool) -> StoreFailed:
    error = StoreFailed.__new__(StoreFailed, text)
    error.refusal = refusal
    return error


def unreadable(place: str | AnyPath, error: OSError) -> StoreFailed:
    """Returns the error of what could not be read at an address, or not be kept in the cache."""
    remedy = "use a local copy"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) or _is_of_disk(error.filename):
        remedy = f"name another directory for what is fetched, by {CACHE}"
    return StoreFailed(f"{os.fspath(place)} cannot be read", error, remedy)


def _is_of_disk(name: object) -> bool:
    return isinstance(name, str | os.PathLike) and not is_address(name)


def checkpoints_in(run: AnyPath) -> AnyPath:
    """Returns the directory of a run's steps, which are in a store if RUN/store.json names one.
    Raises ValueError where that cannot be read."""
    pointer = pointer_of(run) if isinstance(run, Path) else None
    return (run if pointer is None else given_address(POINTER, pointer.address)) / CHECKPOINTS


def place_of(run: Path) -> str:
    """Returns the address of a run in a store, or the whole path of another: its name on any
    machine. Raises ValueError as `checkpoints_in`."""
    pointer = pointer_of(run)
    return str(run.resolve()) if pointer is None else pointer.address


def shown(run: Path) -> str:
    """Returns the name of a run in messages: for one in a store its address, and its directory."""
    pointer = pointer_of(run)
    return str(run) if pointer is None else f"{pointer.address} (here {run})"


def given_place(name: str, path: str | AnyPath) -> AnyPath:
    """Returns the path of the argument `name` as it is given, or its address. Raises ValueError as
    `any_path`."""
    return given_address(name, path) if is_address(path) else given_path(name, path)


def given_path(name: str, run: str | AnyPath) -> Path:
    """Returns the path of the argument `name`. Raises ValueError for an address that is not
    read."""
    if violations := address_violations(name, run):
        raise ValueError(violations[0])
    return Path(run)


def given_address(name: str, run: str | AnyPath) -> epath.Path:
    """Returns the address of the argument `name`. Raises ValueError as `any_path`."""
    address = any_path(name, run)
    assert not isinstance(address, Path), "only addresses are given here"
    return address


def is_copied(name: str) -> bool:
    """True for a file of a run, by its path in the directory, that a copy has: not for the steps,
    for hidden and temporary files, and for names that lead elsewhere."""
    first, *_ = parts = name.split("/")
    if first in (CHECKPOINTS, POINTER, MARK, *OF_MACHINE) or first.startswith("launch-"):
        return False
    if first.endswith(".tmp"):
        return False
    return all(plain_name(part) and not part.startswith(".") for part in parts)


def mark_of(address: epath.Path) -> str | None:
    """Returns the mark of the last copy in a store; None where there is none. Raises OSError, and
    ValueError for what is no mark."""
    try:
        text = read_named(address, MARK)
    except FileNotFoundError:
        return None
    mark = json_object(text, address / MARK).get("mark")
    if not isinstance(mark, str) or mark == UNFINISHED:
        raise ValueError(
            f"{address / MARK} has no mark of a copy; remove it, if no run goes on there"
        )
    return mark


def pointer_of(directory: Path) -> Pointer | None:
    """Returns what RUN/store.json has; None where there is none. Raises ValueError where it cannot
    be read."""
    if not (directory / POINTER).is_file():
        return None
    stored = json_object(read_named(directory, POINTER), directory / POINTER)
    address, *marks = (stored.get(name) for name in Pointer._fields)
    is_text = all(isinstance(mark, str | None) for mark in marks)
    if not isinstance(address, str) or not is_address(address) or not is_text:
        raise ValueError(f"{directory / POINTER} names no store; write the run's address into it")
    return Pointer(address, *marks)


def write_pointer(directory: Path, pointer: Pointer) -> None:
    """Writes RUN/store.json, whole or not at all."""
    with replacing(directory / POINTER) as file:
        file.write(json.dumps(pointer._asdict()).encode())


def json_object(text: str, source: AnyPath) -> dict[str, Any]:
    """Returns the object in a JSON text. Raises ValueError, with its source."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{source} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{source} holds a {type(value).__name__}, not an object")
    return value
