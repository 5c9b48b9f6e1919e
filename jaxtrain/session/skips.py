"""Which rows of the data a step takes: those of its batch, or a later one if some are skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

Skip = tuple[int, int]
"""(steps, batches): after `steps` steps, `batches` batches are skipped."""


class Skips(NamedTuple):
    """configured: skips of the experiment. detected: skips after spikes, in the order of their
    steps. Steps and batches are counted from 0: without skips, step n takes batch n. shift: added
    to the number of each row, in a run that began as a branch with other batches or other data."""

    configured: tuple[Skip, ...] = ()
    detected: tuple[Skip, ...] = ()
    shift: int = 0

    def batch(self, step: int) -> int:
        """Number of the batch that `step` takes."""
        return step + sum(
            batches for steps, batches in (*self.configured, *self.detected) if steps <= step
        )

    def before(self, step: int) -> list[Skip]:
        """Skips that took effect before `step`; a save at `step` records them."""
        return sorted(skip for skip in (*self.configured, *self.detected) if skip[0] < step)

    @property
    def pairs(self) -> tuple[Skip, ...]:
        """The skips in the form of `Health.skip_batches`."""
        batches_after = Counter[int]()
        for step, batches in (*self.configured, *self.detected):
            batches_after[step] += batches
        return tuple(sorted(batches_after.items()))

    def back_to(self, step: int, end: int, more: int) -> Skips:
        """Skips of a run that went back to `step`: its next batch follows those of the steps before
        `end` and `more` further ones. Detected skips from `step` on are replaced."""
        earlier = self._replace(detected=tuple(skip for skip in self.detected if skip[0] < step))
        batches = self.batch(end - 1) + 1 + more - earlier.batch(step)
        return earlier._replace(detected=(*earlier.detected, (step, batches)))


def skips_from(step: int, configured: Sequence[Skip], saved: Sequence[Sequence[int]]) -> Skips:
    """Skips of a run that goes on after `step` steps; `saved`: those recorded in the save. Raises
    ValueError if the experiment has other skips before that step."""
    detected: list[Skip] = [(steps, batches) for steps, batches in saved]
    for skip in configured:
        if skip in detected:
            detected.remove(skip)
        elif skip[0] < step:
            raise ValueError(
                f"skip_batches has {skip}, and the run has come to step {step} without it: skip "
                f"after {step} steps or more, take the pair out, or remove the saves newer than "
                f"step {skip[0]} to go on from there"
            )
    return Skips(tuple(configured), tuple(detected))
