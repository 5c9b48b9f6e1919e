"""Which process failed first, when processes of a start have ended."""

from __future__ import annotations

import time
from collections.abc import Sequence

from jaxtrain.cluster.exit_codes import DONE, INTERRUPTED, PREEMPTED
from jaxtrain.machines.agents import GONE_S
from jaxtrain.machines.machine import RunningProcess
from jaxtrain.machines.pauses import Pauses

GRACE_S = 0.3
"""Wait after the first exit: an earlier one may be noticed only now."""

LONGEST_S = GONE_S + 5.0
"""Longest wait for the end of a process whose loss others tell of: longer than a silent machine is
waited for. The kernel closes a killed process's connections first, and says that it has ended when
its last thread has."""


def ended_badly(worker: RunningProcess) -> bool:
    """True for a bad exit code, or a good one before the run was done."""
    if worker.code == DONE:
        return worker.sample().now.phase != "exit"
    return worker.code not in (None, PREEMPTED)


class Culprit:
    """Decides when the process that failed first is known. Ask it in every look at the processes of
    a start, since a wait for a process that hangs is the deadlines' to end."""

    def __init__(self) -> None:
        self._since = 0.0
        """Monotonic time at which a bad end was seen; 0 before."""

    def is_known(self, workers: Sequence[RunningProcess], pauses: Pauses) -> bool:
        """Returns False before a bad end, and while all that ended badly say that another process
        was lost, and one has not ended. pauses: of this process, in which it notices nothing."""
        if not any(map(ended_badly, workers)):
            return False
        if not self._since:
            self._since = time.monotonic()
            if any(worker.code is None for worker in workers):
                time.sleep(GRACE_S)
        bad = last_words(workers)
        pauses.resume()
        runs = any(worker.code is None for worker in workers)
        waited = time.monotonic() - pauses.moved(self._since)
        return not (runs and all(worker.lost_another for worker in bad)) or waited > LONGEST_S


def last_words(workers: Sequence[RunningProcess]) -> list[RunningProcess]:
    """Returns those that ended badly, whose last lines are read, and whose children are ended: they
    would hold the output open."""
    bad = [worker for worker in workers if ended_badly(worker)]
    for worker in bad:
        worker.kill()
        worker.join()
    return bad


def first_to_fail(bad: Sequence[RunningProcess]) -> RunningProcess:
    """Returns the one to blame of those that ended badly: the first, but for those that ended
    because another was lost. A lost machine comes before errors of processes that miss it."""
    return min(bad, key=lambda w: (w.lost_another, w.kind != "lost", w.ended_at))


def common_code(codes: Sequence[int | None]) -> int | None:
    """Returns the common exit code of all processes; None for a failure."""
    distinct = set(codes)
    if distinct <= {DONE}:
        return DONE
    if distinct <= {DONE, PREEMPTED}:
        return PREEMPTED
    return INTERRUPTED if distinct == {INTERRUPTED} else None
