"""Policy of saves: after which steps a run saves, and which saves it keeps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from jaxtrain.files.stores import store_violations
from jaxtrain.reprs import short_repr

FARTHEST = 16
EVALUATED_BATCHES = "eval_batches"
"""Metric of a save with the number of evaluated batches, 0 for all."""
UNMEASURED_S = 600.0
"""Seconds between saves while the time of a save or the failure rate is unknown."""


@dataclass(frozen=True)
class Minutes:
    """Save `minutes` after the previous save. None: at the interval that loses the least time, by
    the measured save time and the mesh file's mtbf_hours (Daly 2006); ten minutes where the mesh
    file has none, and before the first save."""

    minutes: float | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        minutes = self.minutes
        if minutes is not None and not (_is_number(minutes) and 0 < minutes < math.inf):
            raise ValueError(f"minutes={minutes!r} between saves; use for example Minutes(10)")


@dataclass(frozen=True)
class Best:
    """The `n` saves with the least `metric` (the greatest if `greatest`), of those that have it:
    eval_loss or bits_per_byte (of a set of `Evaluation.sets`: eval_loss/code; of a task:
    acc/hellaswag), of steps that are both evaluated and saved. After the last step only where that
    evaluation is over as many batches (`Evaluation.final_batches`) as the others. Where a resumed
    run evaluates over another number of batches, the best of each number are kept."""

    metric: str
    n: int = 1
    greatest: bool = False

    def __post_init__(self) -> None:
        if not _counts(self.n):
            raise ValueError(f"Best keeps n={self.n!r} saves; use n=1 or more")


@dataclass(frozen=True)
class Keep:
    """The newest `latest` saves, also those of steps that are multiples of `every`, and `best`. An
    older one is removed when a newer is committed. With `best`, every evaluated step is saved."""

    latest: int = 3
    every: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        counts = {"latest": self.latest, "every": self.every}
        violations = [f"{k}={v!r}" for k, v in counts.items() if v is not None and not _counts(v)]
        violations = [f"{field} counts from 1" for field in violations]
        if self.best is not None and not isinstance(self.best, Best):
            violations.append(f"best={self.best!r} is no Best")
        if violations:
            raise ValueError(
                f"Keep: {'; '.join(violations)}; use for example "
                'Keep(latest=3, every=1000, best=Best("eval_loss"))'
            )

    def select(self, steps: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Returns the saved steps to keep. steps: metrics of each saved step."""
        order = sorted(steps)
        chosen = set(order[-self.latest :])
        if self.every is not None:
            chosen |= {step for step in order if step % self.every == 0}
        if self.best is not None:
            name, sign = self.best.metric, -1 if self.best.greatest else 1
            rated = [s for s in order if math.isfinite(steps[s].get(name, math.nan))]
            for batches in {steps[s].get(EVALUATED_BATCHES) for s in rated}:
                comparable = [s for s in rated if steps[s].get(EVALUATED_BATCHES) == batches]
                comparable.sort(key=lambda s: (sign * steps[s][name], -s))
                chosen |= set(comparable[: self.best.n])
        return chosen


@dataclass(frozen=True)
class LocalTier:
    """A fast tier in addition, for frequent saves: each process saves its own part, and a copy of
    it to another machine's process, so that one machine may be lost with all its data.

    every: steps between, or `Minutes`. directory: of this machine alone, a disk or memory; it takes
    three steps' parts, twice where there are several processes. `{process}` in it is replaced by
    the process's number. Files of a deleted run stay there until you remove them.
    """

    every: int | Minutes = 50
    directory: str = "/dev/shm/jaxtrain"

    def __post_init__(self) -> None:
        violations = []
        if not isinstance(self.every, Minutes) and not _counts(self.every):
            violations.append(f"every={self.every!r} counts in whole steps from 1; use every=50")
        if not isinstance(self.directory, str) or not _names_a_place(self.directory):
            violations.append(
                f"directory={self.directory!r} is a path in which {{process}} may stand; use for "
                "example '/dev/shm/jaxtrain'"
            )
        violations += store_violations("directory", self.directory)
        if violations:
            raise ValueError("; ".join(violations))


@dataclass(frozen=True)
class SavePolicy:
    """every: steps between saves, or `Minutes`. keep: number of the newest saves, or `Keep`. local:
    a fast tier in addition.

    A run also saves at its end, when it is stopped, and when a step fails.
    """

    every: int | Minutes = Minutes()
    keep: int | Keep = 3
    local: LocalTier | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        violations = []
        if self.local is not None and not isinstance(self.local, LocalTier):
            violations.append(
                f"local={self.local!r} is no LocalTier; use local=LocalTier(every=50)"
            )
        if not isinstance(self.every, Minutes) and not _counts(self.every):
            violations.append(
                f"every={self.every!r} is no number of steps from 1; use every=500, or Minutes(10)"
            )
        if not isinstance(self.keep, Keep) and not _counts(self.keep):
            violations.append(
                f"keep={self.keep!r} is no number of saves from 1; use keep=3, "
                'Keep(latest=3, best=Best("eval_loss")), or Keep(3, every=1) to keep all'
            )
        if violations:
            raise ValueError("a save policy: " + "; ".join(violations))

    @property
    def keeping(self) -> Keep:
        return self.keep if isinstance(self.keep, Keep) else Keep(self.keep)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """Returns the seconds from the end of one save to the start of the next that minimise the lost
    time of saves and failures: Daly, "A higher order estimate of the optimum checkpoint interval
    for restart dumps" (2006), equation 37; Young's sqrt(2 save mtbf) to first order."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


class SaveClock:
    """Decides after which steps to save: the same on every process, though their clocks differ.

    Several processes use the clock of process 0, which they ask seldom: after half of the remaining
    time, then after half of what remains, and at least every FARTHEST steps.
    """

    def __init__(
        self,
        every: int | Minutes,
        mtbf_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.every, self.mtbf_s, self.clock = every, mtbf_s, clock
        self.save_s: float | None = None
        """Seconds of the last save, from its call to its commit."""
        self.saved_at = clock()
        self.next_look = 0
        self.last_look: tuple[int, float] | None = None

    def interval_s(self) -> float:
        """Returns the seconds between saves, as known now; at least the time of a save."""
        if isinstance(self.every, Minutes) and self.every.minutes is not None:
            return 60 * self.every.minutes
        if self.save_s is None or self.mtbf_s is None:
            return UNMEASURED_S
        return max(self.save_s, daly_interval(self.save_s, self.mtbf_s))

    def due(self, step: int) -> bool:
        """True if a save is due after `step` steps. Called after every step."""
        if isinstance(self.every, int):
            return step > 0 and step % self.every == 0
        if step < self.next_look:
            return False
        now, remaining = _of_process_0(
            self.clock(), self.interval_s() - self.clock() + self.saved_at
        )
        if remaining <= 0:
            return True
        steps = 1
        if self.last_look is not None and jax.process_count() > 1:
            last_step, last_time = self.last_look
            step_s = max((now - last_time) / (step - last_step), 1e-6)
            steps = min(max(1, int(remaining / step_s / 2)), FARTHEST)
        self.next_look, self.last_look = step + steps, (step, now)
        return False

    def agrees(self, step: int) -> bool:
        """True if `due(step)` runs a collective: nothing else may run on the devices then."""
        timed = isinstance(self.every, Minutes) and step >= self.next_look
        return timed and jax.process_count() > 1

    def saved(self, step: int) -> None:
        """Notes that a save after `step` began, or was tried."""
        self.saved_at, self.last_look, self.next_look = self.clock(), None, step + 1


def _of_process_0(*values: float) -> tuple[float, ...]:
    if jax.process_count() == 1:
        return values
    from jax.experimental import multihost_utils

    return tuple(map(float, multihost_utils.broadcast_one_to_all(np.asarray(values))))


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _names_a_place(directory: str) -> bool:
    try:
        return bool(directory.format(process=0))
    except (KeyError, IndexError, ValueError):
        return False
