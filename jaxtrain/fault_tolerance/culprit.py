"""Which process failed first, when processes of a start have ended."""

from __future__ import annotations

import time
from collections.abc import Sequence

from jaxtrain.cluster.exit_codes import DONE, PREEMPTED
from jaxtrain.machines.machine import RunningProcess
from jaxtrain.machines.roster import POLL_S

GRACE_S = 0.3
"""Wait after the first exit: an earlier one may be noticed only now."""

LONGEST_S = 10.0
"""Longest wait for the end of a process whose loss others tell of. The kernel closes a killed
process's connections first, and says that it has ended when its last thread has."""


def ended_badly(worker: RunningProcess) -> bool:
    """True for a bad exit code, or a good one before the run was done."""
    if worker.code == DONE:
        return worker.sample().now.phase != "exit"
    return worker.code not in (None, PREEMPTED)


def await_culprit(workers: Sequence[RunningProcess]) -> None:
    """Waits a moment after a bad end, for earlier ones that are noticed later; and longer while all
    that ended badly say that another process was lost, and one has not ended."""
    began = time.monotonic()
    time.sleep(GRACE_S)
    while time.monotonic() - began < LONGEST_S and any(w.code is None for w in workers):
        bad = [worker for worker in workers if ended_badly(worker)]
        for worker in bad:
            worker.join()  # its last lines are read
        if not all(worker.lost_another for worker in bad):
            return
        time.sleep(POLL_S)


def first_to_fail(bad: Sequence[RunningProcess]) -> RunningProcess:
    """Returns the one to blame of those that ended badly: the first, but for those that ended
    because another was lost. A lost machine comes before errors of processes that miss it."""
    return min(bad, key=lambda w: (w.lost_another, w.kind != "lost", w.ended_at))
