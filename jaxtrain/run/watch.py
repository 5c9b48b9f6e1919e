"""Detection of loss spikes: a function of the losses so far, equal in every start."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from jaxtrain.experiment import LossSpikes

NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


class LossWatch:
    """Takes the losses of a run one by one, by the rule of `LossSpikes`. Every save contains its
    state (`saved`), so that a resumed run detects the same spikes as an uninterrupted one.

    since: first step of the current high losses, None if the last loss was not high. seen: the step
    whose loss made them a spike; later losses are ignored until the run went back, or
    `begin_again`. acted: spikes that were acted on. taken_twice: up to this step, steps are or were
    repeated before any batch is skipped.
    """

    def __init__(self, policy: LossSpikes, saved: Mapping[str, Any] | None = None) -> None:
        self.policy, state = policy, saved or {}
        self.losses = deque[float](state.get("losses", ()), maxlen=policy.window)
        self.since: int | None = state.get("since")
        self.seen: int | None = state.get("seen")
        self.high: int = state.get("high", 0)
        self.acted: int = state.get("acted", 0)
        self.taken_twice: int = state.get("taken_twice", 0)

    @property
    def bound(self) -> float:
        """Above this bound the next loss is high."""
        if len(self.losses) < self.policy.window:
            return math.inf
        middle = statistics.median(self.losses)
        scale = NORMAL * statistics.median(abs(loss - middle) for loss in self.losses)
        return middle + max(self.policy.above * scale, self.policy.least)

    def add(self, step: int, loss: float) -> None:
        """Takes the loss of the next step."""
        if self.seen is not None or not math.isfinite(loss):
            return
        if loss <= self.bound:
            self.losses.append(loss)
            self.since, self.high = None, 0
            return
        self.since, self.high = self.since or step, self.high + 1
        if self.high >= self.policy.patience:  # it may be lower than in the previous start
            self.seen = step

    def begin_again(self) -> None:
        """Ignores the last spike: later losses are compared with later losses only."""
        self.losses.clear()
        self.since, self.seen, self.high = None, None, 0

    def saved(self) -> dict[str, Any]:
        """The state as JSON, for the metadata of a save."""
        state = {"since": self.since, "seen": self.seen, "high": self.high, "acted": self.acted}
        return {"losses": list(self.losses), "taken_twice": self.taken_twice, **state}
