"""What a process is at, in a file that outlives it, written through memory for a supervisor.

The phase is written as it changes, and every two seconds by a thread of its own the stacks of all
Python threads. A process that was stopped or killed has said what it was at; one whose thread still
writes and whose phase does not change hangs.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import threading
import time
import traceback
import zlib
from pathlib import Path
from struct import Struct
from typing import NamedTuple

from jaxtrain.cluster.phases import Now, Phases

SAMPLE_FILE = "JAXTRAIN_SAMPLE_FILE"
"""The environment variable by which a supervisor tells where it reads: a path."""

SUPERVISOR = "JAXTRAIN_SUPERVISOR"
"""The one by which it tells its process id."""

EVERY_S = 2.0
HEAD = Struct("<QII")
"""Number of the record, its bytes, their CRC-32."""

SLOTS = {"now": 1024, "sample": 2**18}
"""Record -> bytes of each of its two slots: one is whole while the other is written."""

SIZE = 2 * sum(SLOTS.values())

STACKS = 2**15
"""Characters of a sample at most; JSON makes six bytes of one at worst."""


class Sample(NamedTuple):
    """The last that a process has said. now: what it is at. at: when its sampler last ran, by the
    machine's monotonic clock, 0 before it did; stacks: of its Python threads then, the main one
    first."""

    now: Now
    at: float = 0.0
    stacks: str = ""


class SampleFile:
    """What a process says of itself, in memory that it shares with who watches it: a file that was
    removed meanwhile is as good.

    create: anew, in folders that are made where they are missing. Raises OSError, with the path,
    and ValueError for a file that is none.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.descriptor = _made(path) if create else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        """For a process that is to write what this one reads."""
        self._memory = mmap.mmap(self.descriptor, SIZE)
        self._numbers = dict.fromkeys(SLOTS, 0)

    def close_descriptor(self) -> None:
        """The memory is read and written as before."""
        os.close(self.descriptor)

    def write(self, record: str, value: object) -> None:
        number, data = self._numbers[record] + 1, json.dumps(value).encode()
        assert HEAD.size + len(data) <= SLOTS[record], f"{record} of {len(data)} bytes"
        start = self._start(record, number)
        self._memory[start + HEAD.size : start + HEAD.size + len(data)] = data
        HEAD.pack_into(self._memory, start, number, len(data), zlib.crc32(data))
        self._numbers[record] = number

    def read(self, record: str) -> list | None:
        """The newest that is whole."""
        found = []
        for slot in (0, 1):
            start = self._start(record, slot)
            number, size, crc = HEAD.unpack_from(self._memory, start)
            data = self._memory[start + HEAD.size : start + HEAD.size + size]
            if number and size <= SLOTS[record] and zlib.crc32(data) == crc:
                found.append((number, data))
        return json.loads(max(found)[1]) if found else None

    def sample(self) -> Sample | None:
        """The last that the process said; None before it has said anything."""
        now, sample = self.read("now"), self.read("sample")
        if now is None:
            return None
        at, stacks = sample or (0.0, "")
        return Sample(Now(*now), at, stacks)

    def close(self) -> None:
        self._memory.close()

    def _start(self, record: str, number: int) -> int:
        before = sum(2 * size for name, size in SLOTS.items() if name < record)
        return before + SLOTS[record] * (number % 2)


def _made(path: Path) -> int:
    """A descriptor of a new file, with all its bytes: the kernel ends a process that writes,
    through memory, what has no room on the disk. Folders that it makes are this user's alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(bytes(SIZE))
    except OSError as error:
        os.close(descriptor)
        raise OSError(error.errno, error.strerror, str(path)) from error
    return descriptor


class Sampler:
    """Writes what `phases` are at into `path`, made where it is not there, until it is closed or
    the process ends."""

    def __init__(self, path: Path, phases: Phases) -> None:
        self._file, self._lock = SampleFile(path, create=not path.exists()), threading.Lock()
        self._file.close_descriptor()
        phases.listen(self._write_now)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _write_now(self, now: Now) -> None:
        with self._lock:
            self._file.write("now", now)

    def _sample(self) -> None:
        while True:
            stacks = stacks_of_all(STACKS)
            self._file.write("sample", (time.monotonic(), stacks))
            if self._closed.wait(EVERY_S):
                return


def stacks_of_all(most: int) -> str:
    """The stacks of all Python threads but this one, the main one first, innermost frame last; the
    outermost are left out where they are more than `most` characters."""
    own, names = threading.get_ident(), {t.ident: t.name for t in threading.enumerate()}
    main, texts = threading.main_thread().ident, []
    frames = sorted(sys._current_frames().items(), key=lambda each: each[0] != main)
    share = most // max(1, len(frames) - 1)
    for number, frame in frames:
        if number != own:
            text = "".join(traceback.format_stack(frame))
            texts.append(f"thread {names.get(number, number)}:\n{text[-share:]}")
    return "\n".join(texts)[:most]


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the one that started it ends, however that ends: no
    worker goes on without its supervisor, not a stopped one either. Linux alone has it."""
    if sys.platform != "linux":
        return
    import ctypes

    set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        print(f"jaxtrain: process {parent}, which started this one, is gone", file=sys.stderr)
        os._exit(1)
