"""When a run saves, and which saves it keeps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from jaxtrain.files.stores import store_violations

FARTHEST = 16
EVALUATED_BATCHES = "eval_batches"
"""Among the metrics of a save: over how many batches they are, 0 for all there are."""
UNMEASURED_S = 600.0
"""Seconds between saves while nobody knows what a save takes, or how often the machines fail."""


@dataclass(frozen=True)
class Minutes:
    """Save so many `minutes` after the save before. None: as often as loses the least time, by the
    measured save time and the mesh file's mtbf_hours (Daly 2006); ten minutes where the mesh file
    has none, and before the first save."""

    minutes: float | None = None

    def __post_init__(self) -> None:
        given = self.minutes
        if given is not None and not (_is_number(given) and 0 < given < math.inf):
            raise ValueError(f"minutes={given!r} between saves; use for example Minutes(10)")


@dataclass(frozen=True)
class Best:
    """The `n` saves with the least `metric` (the greatest if `greatest`), of those that have it:
    eval_loss or bits_per_byte, of steps that are both evaluated and saved. After the last step only
    where that evaluation is over as many batches (`Evaluation.final_batches`) as the others. Where
    a resumed run evaluates over another number of batches, the best of each number are kept."""

    metric: str
    n: int = 1
    greatest: bool = False

    def __post_init__(self) -> None:
        if not _counts(self.n):
            raise ValueError(f"Best keeps n={self.n!r} saves; use n=1 or more")


@dataclass(frozen=True)
class Keep:
    """The newest `latest` saves, besides those of steps that are multiples of `every`, and `best`.
    An older one goes when a newer is committed. With `best`, what is evaluated is saved."""

    latest: int = 3
    every: int | None = None
    best: Best | None = None

    def __post_init__(self) -> None:
        counts = {"latest": self.latest, "every": self.every}
        wrong = [f"{k}={v!r}" for k, v in counts.items() if v is not None and not _counts(v)]
        wrong = [f"{each} counts from 1" for each in wrong]
        if self.best is not None and not isinstance(self.best, Best):
            wrong.append(f"best={self.best!r} is no Best")
        if wrong:
            raise ValueError(
                f"Keep: {'; '.join(wrong)}; use for example "
                'Keep(latest=3, every=1000, best=Best("eval_loss"))'
            )

    def kept(self, steps: Mapping[int, Mapping[str, float]]) -> set[int]:
        """Which of the saved steps to keep; `steps` has the metrics of each."""
        order = sorted(steps)
        kept = set(order[-self.latest :])
        if self.every is not None:
            kept |= {step for step in order if step % self.every == 0}
        if self.best is not None:
            name, sign = self.best.metric, -1 if self.best.greatest else 1
            rated = [s for s in order if math.isfinite(steps[s].get(name, math.nan))]
            for batches in {steps[s].get(EVALUATED_BATCHES) for s in rated}:
                alike = [s for s in rated if steps[s].get(EVALUATED_BATCHES) == batches]
                alike.sort(key=lambda s: (sign * steps[s][name], -s))
                kept |= set(alike[: self.best.n])
        return kept


@dataclass(frozen=True)
class LocalTier:
    """Besides, save often where it is fast: each process its own part, and a copy of it to another
    machine's process, so that one machine may be lost with all it holds.

    every: steps between, or `Minutes`. directory: of this machine alone, a disk or memory; it takes
    three steps' parts, twice where there are several processes. `{process}` in it becomes the
    process's number. What a run leaves there when it is deleted is yours to remove.
    """

    every: int | Minutes = 50
    directory: str = "/dev/shm/jaxtrain"

    def __post_init__(self) -> None:
        wrong = []
        if not isinstance(self.every, Minutes) and not _counts(self.every):
            wrong.append(f"every={self.every!r} counts in whole steps from 1; use every=50")
        if not isinstance(self.directory, str) or not _names_a_place(self.directory):
            wrong.append(
                f"directory={self.directory!r} is a path in which {{process}} may stand; use for "
                "example '/dev/shm/jaxtrain'"
            )
        wrong += store_violations("directory", self.directory)
        if wrong:
            raise ValueError("; ".join(wrong))


@dataclass(frozen=True)
class SavePolicy:
    """every: steps between saves, or `Minutes`. keep: how many of the newest, or `Keep`. local: a
    fast tier besides.

    A run saves besides at its end, when it is stopped, and when a step fails.
    """

    every: int | Minutes = Minutes()
    keep: int | Keep = 3
    local: LocalTier | None = None

    def __post_init__(self) -> None:
        wrong = []
        if self.local is not None and not isinstance(self.local, LocalTier):
            wrong.append(f"local={self.local!r} is no LocalTier; use local=LocalTier(every=50)")
        if not isinstance(self.every, Minutes) and not _counts(self.every):
            wrong.append(
                f"every={self.every!r} is no number of steps from 1; use every=500, or Minutes(10)"
            )
        if not isinstance(self.keep, Keep) and not _counts(self.keep):
            wrong.append(
                f"keep={self.keep!r} is no number of saves from 1; use keep=3, "
                'Keep(latest=3, best=Best("eval_loss")), or Keep(3, every=1) to keep all'
            )
        if wrong:
            raise ValueError("a save policy: " + "; ".join(wrong))

    @property
    def keeping(self) -> Keep:
        return self.keep if isinstance(self.keep, Keep) else Keep(self.keep)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """Seconds from the end of one save to the beginning of the next that lose the least time to
    saves and to what failures undo: Daly, "A higher order estimate of the optimum checkpoint
    interval for restart dumps" (2006), equation 37; Young's sqrt(2 save mtbf) to first order."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


class SaveClock:
    """Says after which steps to save: the same on every process, though their clocks differ.

    Several processes look at a time by the clock of process 0, which they ask seldom: at half of
    what is left, then at half of the rest, and every FARTHEST steps.
    """

    def __init__(
        self,
        every: int | Minutes,
        mtbf_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.every, self.mtbf_s, self.clock = every, mtbf_s, clock
        self.save_s: float | None = None
        """What the last save took, from its call to its commit."""
        self.saved_at = clock()
        self.look = 0
        self.looked: tuple[int, float] | None = None

    def interval_s(self) -> float:
        """Seconds between saves, as known now; at least what a save takes."""
        if isinstance(self.every, Minutes) and self.every.minutes is not None:
            return 60 * self.every.minutes
        if self.save_s is None or self.mtbf_s is None:
            return UNMEASURED_S
        return max(self.save_s, daly_interval(self.save_s, self.mtbf_s))

    def due(self, step: int) -> bool:
        """Whether to save after `step` steps are done; asked after every step."""
        if isinstance(self.every, int):
            return step > 0 and step % self.every == 0
        if step < self.look:
            return False
        now, left = _of_process_0(self.clock(), self.interval_s() - self.clock() + self.saved_at)
        if left <= 0:
            return True
        ahead = 1
        if self.looked is not None and jax.process_count() > 1:
            before, then = self.looked
            step_s = max((now - then) / (step - before), 1e-6)
            ahead = min(max(1, int(left / step_s / 2)), FARTHEST)
        self.look, self.looked = step + ahead, (step, now)
        return False

    def agrees(self, step: int) -> bool:
        """Whether `due(step)` is a collective of its own: nothing else may run on the devices."""
        timed = isinstance(self.every, Minutes) and step >= self.look
        return timed and jax.process_count() > 1

    def saved(self, step: int) -> None:
        """A save after `step` began, or was tried."""
        self.saved_at, self.looked, self.look = self.clock(), None, step + 1


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
