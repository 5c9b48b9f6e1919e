"""Whether to begin again after a failure, and when."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from jaxtrain.violations import at_least, count, positive, raise_violations


class Failure(NamedTuple):
    """Why the processes of one start ended. process: the one to blame. kind: "crashed" (it exited,
    or a fault of its own ended it), "killed" (by SIGKILL), "hangs" or "silent". what: in words.
    step: it had done. at: seconds."""

    process: int
    kind: str
    what: str
    phase: str
    step: int
    at: float


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


def _same(a: Failure, b: Failure) -> bool:
    """Whether two failures are of the program rather than of a machine: it crashed of itself, at
    the same step. Meeting the others fails for reasons of the network."""
    alike = (a.kind, a.phase, a.step) == (b.kind, b.phase, b.step)
    return alike and a.kind == "crashed" and a.phase not in ("start", "join")
