"""What a process has said of itself is there after it was stopped or killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxtrain.cluster import sampler as sampling
from jaxtrain.cluster.phases import MOST_WRONG, PHASES, Phases
from jaxtrain.cluster.sampler import (
    HEAD,
    SLOTS,
    ProcessSample,
    SampleFile,
    Sampler,
    stacks_of_all,
)

ROOT = Path(__file__).parents[2]

EVERY_S = 0.3
"""Seconds between samples, for less waiting."""

CHILD = f"""
import sys, time
from pathlib import Path
from jaxtrain.cluster import sampler
from jaxtrain.cluster.phases import Phases
from jaxtrain.cluster.sampler import Sampler

sampler.EVERY_S = {EVERY_S}
phases = Phases()
sampler = Sampler(Path(sys.argv[1]), phases)

def waits_for_ever():
    print("ready", flush=True)
    time.sleep(1000)

phases.advance(41)
phases.enter("load")
phases.advance(42)
waits_for_ever()
"""


def read_sample(path: Path) -> ProcessSample:
    file = SampleFile(path)
    file.close_descriptor()
    try:
        return file.sample()
    finally:
        file.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_it_outlives_the_process(tmp_path: Path, number: int) -> None:
    file = tmp_path / "sample"
    command = [sys.executable, "-c", CHILD, str(file)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)})
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        began = time.monotonic()
        while "waits_for_ever" not in (before := read_sample(file)).stacks:
            assert time.monotonic() - began < 20
            time.sleep(0.02)
        os.kill(child.pid, number)
        at = time.monotonic()
        time.sleep(3 * EVERY_S)
        found = read_sample(file)
        assert (found.now.phase, found.now.step) == ("load", 42)
        assert before.sampled_at <= found.sampled_at < at, "its thread stood still too"
        assert found.now.since < began, "the clock is the machine's"
        assert "waits_for_ever" in found.stacks.partition("\nthread")[0], "the main thread first"
    finally:
        child.kill()
        child.communicate()


def test_while_it_lives_its_thread_writes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sampling, "EVERY_S", EVERY_S)
    sampler = Sampler(tmp_path / "sample", Phases())
    try:
        time.sleep(0.1)
        first = read_sample(tmp_path / "sample")
        time.sleep(3 * EVERY_S)
        assert read_sample(tmp_path / "sample").sampled_at >= first.sampled_at + EVERY_S
    finally:
        sampler.close()


def test_whose_numbers_are_wrong_is_said_by_a_process_that_ends_for_it(tmp_path: Path) -> None:
    phases = Phases()
    sampler = Sampler(tmp_path / "sample", phases)
    assert read_sample(tmp_path / "sample").now.wrong is None
    for processes in ((), (3, 7)):
        phases.accuse(processes)
        assert list(read_sample(tmp_path / "sample").now.wrong) == list(processes)
    phases.accuse(range(10**5))
    for phase in PHASES:
        phases.enter(phase)
    sampler.close()
    assert list(read_sample(tmp_path / "sample").now.wrong) == list(range(MOST_WRONG))


def test_nothing_was_said_yet(tmp_path: Path) -> None:
    assert SampleFile(tmp_path / "folder" / "new", create=True).sample() is None
    (tmp_path / "short").write_bytes(bytes(10))
    with pytest.raises(ValueError):
        SampleFile(tmp_path / "short")


def test_what_has_no_room_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sampling, "open", full, raising=False)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/new'"):
        SampleFile(tmp_path / "new", create=True)


def test_it_is_read_and_written_by_who_holds_it_whatever_became_of_its_name(tmp_path: Path) -> None:
    held = SampleFile(tmp_path / "sample", create=True)
    (tmp_path / "sample").unlink()
    sampler = Sampler(Path(f"/dev/fd/{held.descriptor}"), phases := Phases())
    phases.advance(3)
    sampler.close()
    assert held.sample().now.step == 3


def test_of_a_record_cut_off_in_the_writing_the_one_before_is_read(tmp_path: Path) -> None:
    file, phases = tmp_path / "sample", Phases()
    sampler = Sampler(file, phases)
    phases.advance(7)  # the second record of "now"
    sampler.close()
    assert read_sample(file).now.step == 7
    data = bytearray(file.read_bytes())
    for slot in (0, 1):
        if data[slot * SLOTS["now"]] == 2:
            data[slot * SLOTS["now"] + HEAD.size + 3] ^= 1
    file.write_bytes(data)
    assert read_sample(file).now.step == 0


def test_stacks_without_end_leave_their_outermost_frames() -> None:
    ready, done = threading.Event(), threading.Event()

    def one(n: int) -> None:
        other(n - 1) if n else innermost()

    def other(n: int) -> None:
        one(n)

    def innermost() -> None:
        ready.set()
        done.wait()

    thread = threading.Thread(target=one, args=(100,), name="deep")
    thread.start()
    ready.wait()
    try:
        whole, cut = stacks_of_all(10**6), stacks_of_all(4000)
    finally:
        done.set()
        thread.join()
    assert len(cut) <= 4000 < len(whole) and whole.count("other(n - 1)") == 101
    mine = cut.partition("thread deep:")[2]
    assert "done.wait()" in mine and "threading.py" in mine and 0 < mine.count("other(n - 1)") < 101


PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import os, time
from jaxtrain.cluster.sampler import end_with_parent
end_with_parent(int(os.environ["JAXTRAIN_SUPERVISOR"]))
print(os.getpid(), flush=True)
time.sleep(1000)
'''], stdout=subprocess.PIPE, env={**os.environ, "JAXTRAIN_SUPERVISOR": str(os.getpid())})
pid = int(child.stdout.readline())
if sys.argv[1] == "stopped":
    os.kill(pid, 19)
print(pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own doing")
@pytest.mark.parametrize("how", ["running", "stopped"])
def test_nobody_outlives_a_supervisor_that_is_killed(how: str) -> None:
    parent = subprocess.run(
        [sys.executable, "-c", PARENT, how],
        stdout=subprocess.PIPE, env={"PYTHONPATH": str(ROOT)}, check=False, timeout=300,
    )  # fmt: skip
    pid = int(parent.stdout)
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"process {pid} goes on")


@pytest.mark.parametrize("record", SLOTS)
def test_a_record_that_is_half_written_is_no_record(tmp_path: Path, record: str) -> None:
    """Memory is shared as it is written: data first, then the head byte by byte."""
    file = SampleFile(tmp_path / "sample", create=True)
    file.close_descriptor()
    memory, values = file._memory, [None, *([n, "a" * (n % 3)] for n in range(1, 260))]
    for number in (*range(1, 5), 255, 256, 257):
        file._numbers[record] = number - 1
        if number > 5:  # the one before it stands in the other slot
            file._numbers[record] = number - 2
            file.write(record, values[number - 1])
        start, before = file._start(record, number), bytes(memory)
        file.write(record, values[number])
        after = bytes(memory)
        for written in range(HEAD.size):
            memory[start : start + written] = after[start : start + written]
            memory[start + written : start + HEAD.size] = before[
                start + written : start + HEAD.size
            ]
            assert file.read(record) in (values[number - 1], values[number]), (number, written)
        memory[start : start + HEAD.size] = after[start : start + HEAD.size]
        assert file.read(record) == values[number]
    file.close()
