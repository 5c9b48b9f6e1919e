"""Decides whether a run restarts after a failure, and when."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from jaxtrain.violations import at_least, count, positive, raise_violations


class Failure(NamedTuple):
    """Why the processes of one start ended. process: the one to blame. kind: "crashed" (it exited,
    or a fault of its own ended it), "refused" (it refused input that an earlier start accepted),
    "left" (it exited with success before the run was done), "killed" (by SIGKILL), "lost" (with its
    machine), "hangs", "silent", or "wrong" (wrong numbers). what: description. step: done so far.
    at: seconds. first: steps done before that start, -1 if unknown. cause: how it ended, with its
    last output. still: since when it was stuck, by the clock of `at`, if it hangs or is silent.
    wrong: processes that certainly have wrong numbers; () if one of several has."""

    process: int
    kind: str
    what: str
    phase: str
    step: int
    at: float
    first: int = -1
    cause: str = ""
    still: float | None = None
    wrong: tuple[int, ...] = ()


@dataclass(frozen=True)
class Restarts:
    """Limits of restarts: `most` within `within_s` seconds, each after a wait that doubles from
    `first_wait_s` to `longest_wait_s` while no step is gained. Raises ValueError with every
    violation."""

    most: int = 10
    within_s: float = 3600
    first_wait_s: float = 1
    longest_wait_s: float = 60

    def __post_init__(self) -> None:
        raise_violations(
            count("most", self.most, 0)
            + positive("within_s", self.within_s)
            + at_least("first_wait_s", self.first_wait_s, 0)
            + at_least("longest_wait_s", self.longest_wait_s, 0)
        )


class Exhausted(NamedTuple):
    """No more restarts. deterministic: the same failure at the same step, twice, or in the
    first step of start after start."""

    deterministic: bool
    why: str


class RestartHistory:
    """The failures of a run so far; decides whether, and when, the run restarts after the next."""

    def __init__(self, restarts: Restarts) -> None:
        self._restarts, self._waits = restarts, 0
        self._times: deque[float] = deque()
        self._latest: Failure | None = None
        self._step_by_step = 0
        """Starts in a row that gained one step each and failed as the one before."""

    def decide(self, failure: Failure) -> float | Exhausted:
        """Returns seconds to wait before all are restarted, or why they are not."""
        rule, previous = self._restarts, self._latest
        self._latest = failure
        if previous is not None and _same(previous, failure):
            return Exhausted(
                True,
                f"the same failure twice, after step {failure.step} in phase {failure.phase}: "
                f"another start would meet it again; {failure.what}",
            )
        again = previous is not None and _in_each_step(previous, failure)
        self._step_by_step = self._step_by_step + 1 if again else 0
        if self._step_by_step == 2:
            return Exhausted(
                True,
                f"the same failure in three starts, the last two of which gained one step each: "
                f"another start would end in its first step; {failure.what}",
            )
        while self._times and failure.at - self._times[0] > rule.within_s:
            self._times.popleft()
        if len(self._times) >= rule.most:
            return Exhausted(
                False,
                f"{len(self._times)} restarts within {rule.within_s:g} s are used up "
                f"(--restarts {rule.most}); {failure.what}",
            )
        self._times.append(failure.at)
        won = previous is None or failure.step > previous.step
        self._waits = 0 if won else self._waits + 1
        return min(rule.longest_wait_s, rule.first_wait_s * 2**self._waits)


TRANSIENT = re.compile(
    r"Connection|BrokenPipe|Timeout|timed out|temporarily|Stale file|Input/output error|No route|"
    r"UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|MissingProcesses|Too many open files|Network|"
    r"is in use by|cannot start a process|No such file|Transport endpoint|No space left|"
    r"Read-only file system|quota exceeded"
)
"""Messages about a network or a file system, whose problem may pass."""


def _same(a: Failure, b: Failure) -> bool:
    """True if two failures come from the program, not from a machine: it crashed by itself, or its
    numbers were wrong in the same way, at the same step. If a start gained no step, the cause must
    also be the same, and not one that may pass. A crash while joining the others is the network's,
    unless it is a refusal."""
    alike = (a.kind, a.phase, a.step, a.wrong) == (b.kind, b.phase, b.step, b.wrong)
    if not alike or a.kind not in ("crashed", "refused", "left", "wrong"):
        return False
    if a.phase == "join" and a.kind == "crashed":
        return False
    if all(failure.step > failure.first >= 0 for failure in (a, b)):
        return True
    return _same_cause(a, b)


def _in_each_step(a: Failure, b: Failure) -> bool:
    """True if the start that ended with `b` went on where `a` had ended, gained one step and failed
    in the same way, for a cause that does not pass: a callback that always raises lets a run save
    what it has."""
    gained_one = b.first >= 0 and b.step == b.first + 1 == a.step + 1
    alike = b.kind == "crashed" and (a.kind, a.phase) == (b.kind, b.phase)
    return gained_one and alike and _same_cause(a, b)


def _same_cause(a: Failure, b: Failure) -> bool:
    """True if the causes are one text without addresses and numbers, which differ between
    processes, and not one that may pass."""
    a_text, b_text = (re.sub(r"0x[0-9a-fA-F]+|\d+", "#", cause) for cause in (a.cause, b.cause))
    return a_text == b_text and not TRANSIENT.search(a.cause)
