"""Whether to begin again after a failure, and when."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from jaxtrain.violations import at_least, count, positive, raise_violations


class Failure(NamedTuple):
    """Why the processes of one start ended. process: the one to blame. kind: "crashed" (it exited,
    or a fault of its own ended it), "refused" (it refused what an earlier start took), "left" (it
    exited well before the run was done), "killed" (by SIGKILL), "lost" (with its machine), "hangs",
    "silent", or "wrong" (numbers of the run are). what: in words. step: it had done. at: seconds.
    first: steps done before that start, -1 where it did not come to know. cause: how it ended, with
    the last that it said. still: since when it had not moved, of the clock of `at`, where it hangs
    or is silent. wrong: processes whose numbers are certain to be wrong; none where that is one of
    several and cannot be told.
    """

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
    """How often all processes may be started again: `most` times within `within_s` seconds, after a
    wait that doubles from `first_wait_s` to `longest_wait_s` while no step is won. Raises
    ValueError with every violation."""

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
    """No more restarts. deterministic: the same failure at the same step, twice."""

    deterministic: bool
    why: str


class RestartHistory:
    """The failures so far, and what follows from the next one."""

    def __init__(self, restarts: Restarts) -> None:
        self._restarts, self._waits = restarts, 0
        self._times: deque[float] = deque()
        self._latest: Failure | None = None

    def decide(self, failure: Failure) -> float | Exhausted:
        """Seconds to wait before all are started again, or why they are not."""
        rule, before = self._restarts, self._latest
        self._latest = failure
        if before is not None and _same(before, failure):
            return Exhausted(
                True,
                f"the same failure twice, after step {failure.step} in phase {failure.phase}: "
                f"another start would meet it again; {failure.what}",
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
        won = before is None or failure.step > before.step
        self._waits = 0 if won else self._waits + 1
        return min(rule.longest_wait_s, rule.first_wait_s * 2**self._waits)


TRANSIENT = re.compile(
    r"Connection|BrokenPipe|Timeout|timed out|temporarily|Stale file|Input/output error|No route|"
    r"UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|MissingProcesses|Too many open files|Network|"
    r"is in use by|cannot start a process|No such file|Transport endpoint|No space left"
)
"""In what a process says of a network or a file system, which may be well a moment later."""


def _same(a: Failure, b: Failure) -> bool:
    """Whether two failures are of the program rather than of a machine: it crashed of itself, or
    its numbers were wrong in the same way, at the same step. Where neither start had won a step
    that says nothing: there it must have been for the same reason, and none that passes. Meeting
    the others fails for reasons of the network, where it is no refusal."""
    alike = (a.kind, a.phase, a.step, a.wrong) == (b.kind, b.phase, b.step, b.wrong)
    if not alike or a.kind not in ("crashed", "refused", "left", "wrong"):
        return False
    if a.phase in ("start", "join") and a.kind == "crashed":
        return False
    if all(each.step > each.first >= 0 for each in (a, b)):
        return True
    return _plain(a.cause) == _plain(b.cause) and not TRANSIENT.search(a.cause)


def _plain(cause: str) -> str:
    """Without addresses and numbers, which are of one process."""
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", cause)
