"""Reports of a process on itself, in a memory-mapped file that outlives it, for a supervisor.

The phase is written as it changes; a thread of its own writes the stacks of all Python threads
every two seconds. So a stopped or killed process has left its last phase. A process whose thread
still writes, but whose phase does not change, hangs.
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
"""Environment variable with the path that a supervisor reads."""

SUPERVISOR = "JAXTRAIN_SUPERVISOR"
"""Environment variable with the supervisor's process id."""

STARTED_BY = "JAXTRAIN_STARTED_BY"
"""Environment variable: number of the process, a launch or an agent, that starts a run's process
again when it has ended."""

EVERY_S = 2.0
HEAD = Struct("<QII")
"""Number of the record, its bytes, the CRC-32 of both."""

SLOTS = {"now": 1024, "sample": 2**18}
"""Record -> bytes of each of its two slots: one is valid while the other is written."""

SIZE = 2 * sum(SLOTS.values())

STACKS = 2**15
"""Most characters of a sample; JSON uses at most six bytes for one."""


class ProcessSample(NamedTuple):
    """The latest report of a process. now: its state. sampled_at: when its sampler last ran, by the
    machine's monotonic clock, 0 before that; stacks: of its Python threads then, the main one
    first."""

    now: Now
    sampled_at: float = 0.0
    stacks: str = ""


class SampleFile:
    """The reports of a process, in memory that it shares with its supervisor; removing the file
    does no harm.

    create: a new file, with its folders. Raises OSError with the path, and ValueError for a file of
    another kind.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        self.descriptor = _create(path) if create else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        """For the process that writes what this one reads."""
        self._memory = mmap.mmap(self.descriptor, SIZE)
        self._numbers = dict.fromkeys(SLOTS, 0)

    def close_descriptor(self) -> None:
        """Closes the file; the memory stays readable and writable."""
        os.close(self.descriptor)

    def write(self, record: str, value: object) -> None:
        number, data = self._numbers[record] + 1, json.dumps(value).encode()
        assert HEAD.size + len(data) <= SLOTS[record], f"{record} of {len(data)} bytes"
        start = self._start(record, number)
        self._memory[start + HEAD.size : start + HEAD.size + len(data)] = data
        HEAD.pack_into(self._memory, start, number, len(data), _checksum(number, data))
        self._numbers[record] = number

    def read(self, record: str) -> list | None:
        """The newest valid record, or None."""
        records = []
        for slot in (0, 1):
            start = self._start(record, slot)
            number, size, crc = HEAD.unpack_from(self._memory, start)
            data = self._memory[start + HEAD.size : start + HEAD.size + size]
            if number and size <= SLOTS[record] and _checksum(number, data) == crc:
                records.append((number, data))
        return json.loads(max(records)[1]) if records else None

    def sample(self) -> ProcessSample | None:
        """The latest report of the process; None before the first."""
        now, sample = self.read("now"), self.read("sample")
        if now is None:
            return None
        sampled_at, stacks = sample or (0.0, "")
        return ProcessSample(Now(*now), sampled_at, stacks)

    def close(self) -> None:
        self._memory.close()

    def _start(self, record: str, number: int) -> int:
        offset = sum(2 * size for name, size in SLOTS.items() if name < record)
        return offset + SLOTS[record] * (number % 2)


def _checksum(number: int, data: bytes) -> int:
    """Returns the CRC-32 of a record. A head is written byte by byte: without the number, one of
    which only the number is there would be that of an empty record."""
    return zlib.crc32(data, zlib.crc32(number.to_bytes(8, "little")))


def _create(path: Path) -> int:
    """Returns the descriptor of a new file at its full size: writing through memory without disk
    space would kill the process. New folders are private to the user."""
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
    """Writes the state of `phases` into `path`, created if missing, until it is closed or the
    process ends."""

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
    """Stacks of all Python threads but this one, the main one first, innermost frame last.
    Outermost frames are cut beyond `most` characters in all."""
    own, names = threading.get_ident(), {t.ident: t.name for t in threading.enumerate()}
    main, texts = threading.main_thread().ident, []
    frames = sorted(sys._current_frames().items(), key=lambda frame: frame[0] != main)
    share = most // max(1, len(frames) - 1)
    for number, frame in frames:
        if number != own:
            text = "".join(traceback.format_stack(frame))
            texts.append(f"thread {names.get(number, number)}:\n{text[-share:]}")
    return "\n".join(texts)[:most]


def end_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends: no worker outlives its supervisor,
    even if it is stopped. Linux only."""
    if sys.platform != "linux":
        return
    import ctypes

    set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None, use_errno=True).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        print(f"jaxtrain: process {parent}, which started this one, is gone", file=sys.stderr)
        os._exit(1)
