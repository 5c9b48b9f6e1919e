"""Opens regular files only, and no symbolic link for writing."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO

LARGEST_TEXT = 256 * 2**20
"""Bytes; the largest tokenizers published are a tenth of it."""

KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

FLAGS = {
    "rb": os.O_RDONLY,
    "wb": os.O_WRONLY | os.O_CREAT,
    "ab": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "r+b": os.O_RDWR,
    "a+b": os.O_RDWR | os.O_CREAT | os.O_APPEND,
}


def open_regular(path: Path, mode: str) -> FileIO:
    """Opens an unbuffered binary file. mode: one of FLAGS. A link is followed to read, and never to
    write; a file is truncated only after it is checked.

    Raises ValueError for a link in a writing mode and for anything but a regular file, without
    waiting for a pipe. OSError as `open`.
    """
    writes = mode != "rb"
    flags = FLAGS[mode] | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if writes else 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise ValueError(_linked(path)) from None
        if error.errno in (errno.ENXIO, errno.EISDIR):  # a pipe without a reader, a directory
            raise ValueError(not_regular(path, os.stat(path).st_mode)) from None
        raise
    try:
        file_mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(file_mode):
            raise ValueError(not_regular(path, file_mode))
        if mode == "wb":
            os.ftruncate(descriptor, 0)
        return FileIO(descriptor, mode)
    except BaseException:
        os.close(descriptor)
        raise


def read_text(path: Path) -> str:
    """Returns UTF-8 text. Raises ValueError as `open_regular`, for more than LARGEST_TEXT bytes and
    for bytes that are not UTF-8; OSError."""
    with open_regular(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST_TEXT:
            raise ValueError(f"{path} has {size:,} bytes; a text here has at most {LARGEST_TEXT:,}")
        return file.read().decode("utf-8")


def write_text(path: Path, text: str) -> None:
    """Writes text as UTF-8. Raises ValueError as `open_regular`; OSError."""
    with open_regular(path, "wb") as file:
        write_all(file, text.encode("utf-8"))


def sync_path(path: Path) -> None:
    """Returns when a file's bytes are durable, or the names of new and renamed files in a
    directory. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of `path` at the end of the block: after a crash the old
    one is there, or the new one. Both are durable. Raises OSError."""
    unfinished = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        with open(unfinished, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_path(path.parent)


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Writes all of `data`: one write to an unbuffered file may take less."""
    remaining = memoryview(data)
    while remaining:
        remaining = remaining[file.write(remaining) :]


def append_whole(file: FileIO, data: bytes) -> None:
    """Appends all of `data`, or nothing: half a line would damage the lines after it. Raises
    OSError."""
    size = os.fstat(file.fileno()).st_size
    try:
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        file.truncate(size)
        raise


def not_regular(path: Path, mode: int) -> str:
    kind = KINDS.get(stat.S_IFMT(mode), "no regular file")
    return f"{path} is {kind}, and a file is expected there; remove it"


def _linked(path: Path) -> str:
    return (
        f"{path} is a symbolic link to {os.readlink(path)}, which would be written through it; "
        "remove the link"
    )


def refuse_links(directory: Path) -> None:
    """Raises ValueError that names each entry of a directory that is a link out of it, or neither a
    file nor a directory. The directory itself may be a link."""
    if not directory.is_dir():
        return
    home, violations = directory.resolve(), []
    for path in sorted(directory.iterdir()):
        if path.is_symlink() and not path.resolve().is_relative_to(home):
            violations.append(f"{path} is a symbolic link to {os.readlink(path)}")
        elif path.exists() and not path.is_file() and not path.is_dir():
            violations.append(not_regular(path, path.stat().st_mode))
    if violations:
        raise ValueError(
            "\n".join(violations)
            + f"\nnothing outside of {directory} is read or written through it; "
            "remove the links, or make the directory itself one"
        )
