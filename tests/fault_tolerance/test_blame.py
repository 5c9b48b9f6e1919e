"""Which process of a start that failed is blamed: by what processes said as they ended."""

from __future__ import annotations

import io
import itertools
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxtrain.cluster.exit_codes import FAILED
from jaxtrain.cluster.phases import Now
from jaxtrain.cluster.sampler import ProcessSample
from jaxtrain.fault_tolerance import culprit
from jaxtrain.fault_tolerance.restarts import Failure
from jaxtrain.fault_tolerance.supervisor import Supervisor
from jaxtrain.machines.agents import GONE_S
from jaxtrain.machines.layouts import MachineLayout
from jaxtrain.machines.machine import LocalMachines, slots_of
from jaxtrain.machines.roster import Roster
from jaxtrain.machines.workers import Worker, ending, kind_of

ABORTED = -6


def ended(at: float, code: int, *, aborted: bool = False, lost: bool = False) -> dict[str, Any]:
    """aborted: by JAX, for the loss of another; lost: with its machine."""
    kind = "lost" if lost else kind_of(code)
    return dict(
        ended_at=at, code=code, lost_another=aborted, kind=kind, ending=ending(code), last_line=""
    )


def blamed(tmp_path: Path, *workers: dict[str, Any]) -> Failure:
    roster = Roster(LocalMachines(slots_of(1, tmp_path, [], {})), {1: MachineLayout(1)}, 0, print)
    roster.hosts = [SimpleNamespace(where="") for _ in workers]  # type: ignore[misc]
    made = Supervisor([], roster, tell=print, run_dir=tmp_path, folder=tmp_path)
    sample = ProcessSample(Now("step", 5, 100.0, 0.1, 0), 100.0)
    made.workers = []
    for number, how in enumerate(workers):
        worker: Any = SimpleNamespace(process=number, sample=lambda: sample, **how)
        worker.kill = lambda: None
        # What it says last is read by then.
        worker.join = partial(setattr, worker, "lost_another", how["lost_another"])
        worker.lost_another = False
        made.workers.append(worker)
    failure = made._ended(first=False)
    assert isinstance(failure, Failure)
    return failure


ENDS = {
    "a crash that is seen after the abort for it": [
        ended(2.0, FAILED), ended(1.0, ABORTED, aborted=True), ended(1.5, ABORTED, aborted=True),
    ],
    "a kill": [ended(3.0, -9), ended(2.0, ABORTED, aborted=True)],
    "an abort of its own": [ended(2.0, ABORTED), ended(1.0, ABORTED, aborted=True)],
    "a lost machine": [ended(3.0, FAILED, lost=True), ended(1.0, ABORTED, aborted=True)],
    "a lost machine, and errors where it is missing": [
        ended(3.0, FAILED, lost=True), ended(1.0, FAILED), ended(2.0, ABORTED, aborted=True),
    ],
    "the first of two crashes": [ended(1.0, FAILED), ended(2.0, FAILED)],
    "the first abort, where there is nothing else": [
        ended(1.0, ABORTED, aborted=True), ended(2.0, ABORTED, aborted=True),
    ],
}  # fmt: skip
"""The first process is to blame."""


@pytest.mark.parametrize("name", ENDS)
def test_one_that_was_aborted_for_anothers_loss_is_not_blamed(name: str, tmp_path: Path) -> None:
    """Whatever their numbers are, and whoever was seen first."""
    for order in itertools.permutations(range(len(ENDS[name]))):
        failure = blamed(tmp_path, *(ENDS[name][at] for at in order))
        assert failure.process == order.index(0)


SAID = {
    "Terminating process because the JAX distributed service detected fatal errors: peer 1": True,
    "jax.errors.JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: [a/pair.cc:538] Read error "
    "[127.0.0.1]:31660: Connection reset by peer": True,
    "XlaRuntimeError: UNKNOWN: Gloo AllGather failed: [a/pair.cc:553] Connection closed by peer "
    "[127.0.0.1]:4": True,
    "Gloo all-reduce failed: [a/pair.cc:446] writev [127.0.0.1]:4: Broken pipe": True,
    "Gloo collective permute failed: [a/pair.cc:538] Read error [::1]:4: Connection reset by "
    "peer": True,
    "Gloo context initialization failed: [a/pair.cc:538] Socket closed": True,
    "INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited or there was a network "
    "error. Last NCCL warning": True,
    "F0000 Terminating": False,
    "ConnectionResetError: [Errno 104] Connection reset by peer": False,
    "Gloo all-reduce failed: sizes differ": False,
}
"""A line that a process prints -> whether it tells of the loss of another."""


def heard(output: bytes) -> tuple[Worker, list[str]]:
    """A worker that has printed `output`, and the lines that it passed on."""
    worker, lines = object.__new__(Worker), list[str]()
    worker.process, worker.last_line, worker.lost_another = 0, "", False
    worker._popen = SimpleNamespace(stdout=io.BytesIO(output))  # type: ignore[assignment]
    worker.read(lines.append)
    assert worker._reader is not None
    worker._reader.join(60)
    return worker, lines


@pytest.mark.parametrize("after", [b"", b"*** Check failure stack trace: ***\n@ 0x7f\n"])
@pytest.mark.parametrize("said", SAID)
def test_a_worker_knows_that_it_was_aborted_whatever_it_printed_after(
    said: str, after: bytes
) -> None:
    """And of lines of another kind alone it does not."""
    worker, lines = heard(b"step 3\nE0000 " + said.encode() + b"\n" + after)
    assert worker.lost_another is SAID[said]
    assert len(lines) == 2 + len(after.splitlines())


def test_what_collectives_of_a_cpu_print_is_not_passed_on() -> None:
    """Nor the end of a line of theirs, which another one was written into; empty lines and
    numbers of the process are."""
    rank = b"[Gloo] Rank 0 is connected to 1 peer ranks. "
    rank += b"Expected number of connected peer ranks is : 1"
    output = rank + b"\n" + rank + rank + b"\n\n\nfirst\n" + rank + b"\n\nthird\n"
    output += rank + rank + b"\nfourth\n\n"
    # Written into before its last number, in the midst, and two of them.
    output += rank[:-1] + rank + b"\n1\n1\n" + rank[:40] + rank + b"\n" + rank[40:] + b"\n2\n"
    output += rank[:-1] + rank[:-1] + rank + b"\n1\n1\n3\n" + rank + b"\n4\n"
    output += rank[:40] + rank[:-1] + rank + b"\n" + rank[40:] + b"\n1\n5\n"
    lines = heard(output)[1]
    assert lines == ["", "first", "", "third", "fourth", "", "1", "2", "3", "4", "5"]


class Ends:
    """A process whose end is noticed at the `looks`th look."""

    def __init__(self, looks: float, code: int, *, aborted: bool = False) -> None:
        self.looks, self.ends, self.says, self.lost_another = looks, code, aborted, False
        self.children = True

    @property
    def code(self) -> int | None:
        self.looks -= 1
        return self.ends if self.looks < 0 else None

    def kill(self) -> None:
        """Of what it started."""
        self.children = False

    def join(self) -> None:
        """Its last lines are read now; they have no end where a child holds them open."""
        assert not self.children
        self.lost_another = self.says


def is_known(monkeypatch: pytest.MonkeyPatch, *workers: Ends, after: float = 0.0) -> bool:
    """after: seconds since a bad end was seen first."""
    clock = SimpleNamespace(now=100.0)
    module = SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda seconds: None)
    monkeypatch.setattr(culprit, "time", module)
    asked = culprit.Culprit()
    none: Any = SimpleNamespace(moved=lambda at: at, resume=lambda: None)
    known = asked.is_known(workers, none)
    clock.now += after
    return asked.is_known(workers, none) if after else known


def test_the_end_of_one_whose_loss_others_tell_of_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not of one that failed by itself, nor for ever, nor where nobody is left."""
    aborted, crashed = partial(Ends, 0, FAILED, aborted=True), partial(Ends, 0, FAILED)
    runs = partial(Ends, math.inf, -9)
    assert not is_known(monkeypatch, runs(), runs())
    assert not is_known(monkeypatch, aborted(), runs())
    assert not is_known(monkeypatch, aborted(), runs(), after=GONE_S + 1)
    assert is_known(monkeypatch, aborted(), runs(), after=culprit.LONGEST_S + 1)
    assert is_known(monkeypatch, aborted(), crashed(), runs())
    assert is_known(monkeypatch, aborted(), aborted())


def test_all_that_ended_by_the_same_signal_are_named(tmp_path: Path) -> None:
    """One of them is blamed; what was aborted for them, or ended otherwise, is not among them."""
    killed, aborted, crashed = ended(1.0, -9), ended(0.5, -6, aborted=True), ended(2.0, 1)
    failure = blamed(tmp_path, aborted, killed, ended(2.0, -9), crashed, ended(3.0, -9))
    assert failure.process == 1
    assert failure.what.endswith(
        "by SIGKILL after step 5, in phase step; so did process 2, process 4"
    )
    assert "so did" not in blamed(tmp_path, ended(1.0, 1), ended(2.0, 1)).what
    assert "so did" not in blamed(tmp_path, killed, ended(2.0, -11), aborted).what
