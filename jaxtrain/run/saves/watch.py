"""Whether a loss is a spike: a function of the losses so far, the same in every start."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from jaxtrain.experiment import LossSpikes

NORMAL = 1.4826
"""Standard deviations of normal numbers in their median absolute deviation."""


class LossWatch:
    """Sees the losses of a run one by one, by the rule of `LossSpikes`. What it knows is in every
    save (`saved`), so that a run that goes on from there sees what one without a stop would.

    since: the first step of the high losses that came last, None where the last was not high.
    seen: the step whose loss made them a spike; what comes after is not looked at, until the run
    has gone back, or `begin_again`. acted: spikes that were acted on. taken_twice: the step up to
    which steps are, or were, taken once more before any is skipped.
    """

    def __init__(self, policy: LossSpikes, saved: Mapping[str, Any] | None = None) -> None:
        self.policy, known = policy, saved or {}
        self.losses = deque[float](known.get("losses", ()), maxlen=policy.window)
        self.since: int | None = known.get("since")
        self.seen: int | None = known.get("seen")
        self.high: int = known.get("high", 0)
        self.acted: int = known.get("acted", 0)
        self.taken_twice: int = known.get("taken_twice", 0)

    @property
    def bound(self) -> float:
        """Above it the next loss is high."""
        if len(self.losses) < self.policy.window:
            return math.inf
        middle = statistics.median(self.losses)
        scale = NORMAL * statistics.median(abs(loss - middle) for loss in self.losses)
        return middle + max(self.policy.above * scale, self.policy.least)

    def add(self, step: int, loss: float) -> None:
        """The loss of the step that comes next."""
        if self.seen is not None or not math.isfinite(loss):
            return
        if loss <= self.bound:
            self.losses.append(loss)
            self.since, self.high = None, 0
            return
        self.since, self.high = self.since or step, self.high + 1
        if self.high >= self.policy.patience:  # it may be lower than in the start before
            self.seen = step

    def begin_again(self) -> None:
        """A spike was left as it is: what comes now is judged by what comes now."""
        self.losses.clear()
        self.since, self.seen, self.high = None, None, 0

    def saved(self) -> dict[str, Any]:
        """As JSON, for the metadata of a save."""
        known = {"since": self.since, "seen": self.seen, "high": self.high, "acted": self.acted}
        return {"losses": list(self.losses), "taken_twice": self.taken_twice, **known}
