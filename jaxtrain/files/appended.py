"""A file of records that a run appends to, also while its disk is full."""

from __future__ import annotations

from pathlib import Path

from jaxtrain.files.regular import append_whole, open_regular

LARGEST_BACKLOG = 4 * 2**20
"""Bytes that wait for room at most."""


class AppendedFile:
    """Appends records to a regular file, each whole or not at all. What a disk has no room for
    waits, up to LARGEST_BACKLOG, and is written with the next record that fits; records that come
    when more waits are lost. first: waits for the first record. Raises ValueError as
    `open_regular`; OSError."""

    def __init__(self, path: Path, first: bytes = b"") -> None:
        self.path, self._file, self._unwritten = path, open_regular(path, "ab"), first

    def append(self, record: bytes) -> None:
        """Writes what waits and `record`. Raises OSError that names the file."""
        try:
            append_whole(self._file, self._unwritten + record)
            self._unwritten = b""
        except OSError as error:
            if len(self._unwritten) + len(record) <= LARGEST_BACKLOG:
                self._unwritten += record
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def close(self) -> None:
        """Writes what is buffered and closes the file, even if the write raises OSError."""
        with self._file:
            if self._unwritten:
                self.append(b"")
