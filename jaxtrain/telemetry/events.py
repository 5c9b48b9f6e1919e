"""TensorBoard's events, in the protocol buffers of tensorboardX.

The library's own writer has a thread that an error of the disk ends, behind a queue that is then
full for ever: the process could not end. Here each record is written whole or not at all, and waits
for room on a full disk, as the lines of metrics.jsonl do.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxtrain.files.appended import AppendedFile


def has_tensorboard() -> bool:
    """True if tensorboardX is installed."""
    return importlib.util.find_spec("tensorboardX") is not None


def refuse_without_tensorboard() -> None:
    """Raises ValueError if tensorboardX is not installed."""
    if not has_tensorboard():
        raise ValueError(
            "TensorBoard events need tensorboardX, which is not installed; "
            "pip install tensorboardX, or use tensorboard=False"
        )


class Events:
    """A file of events, written by a thread that imports the library after the first write.

    path: folder of such files. start: first step of this run; readers discard what an abandoned
    continuation wrote from there on. Raises ValueError if the library is not installed.
    """

    def __init__(self, path: Path, start: int) -> None:
        refuse_without_tensorboard()
        self._path, self._start = path, start
        self._file: AppendedFile | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the finite numbers among `values`, soon. Raises what an earlier write met in its
        thread, such as OSError for a full disk; that is tried again with the next one."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="events")
        self._pending.append(self._thread.submit(self._add, step, values))
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def close(self) -> None:
        """Writes what waits, and closes the file. Raises OSError if that fails."""
        if self._thread is None:
            return
        self._thread.shutdown(wait=True)
        self._thread = None
        errors = [error for future in self._pending if (error := future.exception()) is not None]
        self._pending.clear()
        if self._file is not None:
            self._file.close()  # now all is written, whatever failed before
        elif errors:
            raise errors[0]

    def _add(self, step: int, values: Mapping[str, Any]) -> None:
        file = self._file = self._file or self._opened()
        summary_type = _messages("summary").Summary
        numbers = [
            summary_type.Value(tag=name, simple_value=float(value))
            for name, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        ]
        summary = summary_type(value=numbers)
        file.append(_event(step=step, summary=summary))

    def _opened(self) -> AppendedFile:
        """Returns the file, whose first records wait for the first event."""
        self._path.mkdir(parents=True, exist_ok=True)
        # The suffix keeps a run resumed within the same second off the file of the one before.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.from{self._start}"
        session_log = _messages("event").SessionLog
        begun = session_log(status=session_log.START)
        first = _event(file_version="brain.Event:2") + _event(step=self._start, session_log=begun)
        return AppendedFile(self._path / name, first)


def _messages(name: str) -> ModuleType:
    """Returns a module of message types, which it makes when it is imported."""
    return importlib.import_module(f"tensorboardX.proto.{name}_pb2")


def _event(**fields: Any) -> bytes:
    """Returns the record of an event of now."""
    event = _messages("event").Event(wall_time=time.time(), **fields)
    return _record(event.SerializeToString())


def _record(data: bytes) -> bytes:
    """Returns data in the framing of such a file: its length, a checksum of that, the data, and a
    checksum of it."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(data))
    checksums = (struct.pack("<I", masked_crc32c(part)) for part in (length, data))
    return length + next(checksums) + data + next(checksums)
