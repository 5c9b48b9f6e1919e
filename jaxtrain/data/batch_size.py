"""Rows per step: constant, or growing; where a step's rows begin is a closed form of the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BatchRamp:
    """The batch grows from `start` to `end` rows by `increment` every `steps` steps.

    As in GPT-3 (Brown et al. 2020, appendix B) and Megatron-LM's `rampup-batch-size`.
    """

    start: int
    end: int
    increment: int
    steps: int

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)} counts from 1"
            for name in ("start", "end", "increment", "steps")
            if getattr(self, name) < 1
        ]
        if not problems and (self.end < self.start or (self.end - self.start) % self.increment):
            grown = max(self.end - self.start, 0) // self.increment * self.increment
            problems.append(
                f"end={self.end} is not start={self.start} plus a multiple of "
                f"increment={self.increment}; use end={self.start + grown} "
                f"or {self.start + grown + self.increment}"
            )
        if problems:
            raise ValueError("BatchRamp: " + "; ".join(problems))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every batch that occurs, in order; each compiles a step of its own."""
        return tuple(range(self.start, self.end + 1, self.increment))

    def batch(self, step: int) -> int:
        return min(self.end, self.start + self.increment * (step // self.steps))

    def first_row(self, step: int) -> int:
        """Rows in all steps before `step`."""
        full = min(step // self.steps, (self.end - self.start) // self.increment)
        plateaus = self.steps * (full * self.start + self.increment * (full * (full - 1) // 2))
        return plateaus + (step - full * self.steps) * (self.start + self.increment * full)


def batch_of(batch: int | BatchRamp, step: int) -> int:
    return batch if isinstance(batch, int) else batch.batch(step)


def first_row(batch: int | BatchRamp, step: int) -> int:
    """Rows read before `step`: the data position of a checkpoint, in O(1)."""
    return batch * step if isinstance(batch, int) else batch.first_row(step)


def rows_of_step(batch: int | BatchRamp, step: int) -> np.ndarray:
    """[batch] int64: the global numbers of the rows of `step`."""
    begin = first_row(batch, step)
    return np.arange(begin, begin + batch_of(batch, step), dtype=np.int64)


def row_numbers(
    batch: int | BatchRamp,
    batch_of_step: Callable[[int], int] = lambda step: step,
    shift: int = 0,
) -> Callable[[int], np.ndarray]:
    """step -> the global numbers of its rows: the first of batch `batch_of_step(step)`, which is
    the step itself if none was skipped, plus `shift`. While the batch size grows, a later batch is
    larger, and its last rows are skipped."""
    return lambda step: shift + rows_of_step(batch, batch_of_step(step))[: batch_of(batch, step)]
