"""Which batch of the data a step takes, where some were skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

Skip = tuple[int, int]
"""(steps, batches): after so many steps so many batches are passed over."""


class Skips(NamedTuple):
    """told: those of the experiment. found: those of spikes, in the order of their steps. Steps and
    batches are both counted from 0: without any, step n takes batch n."""

    told: tuple[Skip, ...] = ()
    found: tuple[Skip, ...] = ()

    def batch(self, step: int) -> int:
        """The one that `step` takes."""
        return step + sum(batches for after, batches in (*self.told, *self.found) if after <= step)

    def before(self, step: int) -> list[Skip]:
        """Those that the steps before `step` were taken with: what a save after them says."""
        return sorted(each for each in (*self.told, *self.found) if each[0] < step)

    @property
    def pairs(self) -> tuple[Skip, ...]:
        """All, as `Health.skip_batches` of another run has them."""
        after = Counter[int]()
        for step, batches in (*self.told, *self.found):
            after[step] += batches
        return tuple(sorted(after.items()))

    def back_to(self, step: int, end: int, more: int) -> Skips:
        """After so many steps the batches come that follow those of the steps before `end`, and
        `more` after them. What was found from `step` on is among these."""
        kept = self._replace(found=tuple(each for each in self.found if each[0] < step))
        batches = self.batch(end - 1) + 1 + more - kept.batch(step)
        return kept._replace(found=(*kept.found, (step, batches)))


def skips_from(step: int, told: Sequence[Skip], saved: Sequence[Sequence[int]]) -> Skips:
    """Those of a run that goes on after `step` steps, of which the save says what was skipped.
    Raises ValueError where the experiment has told of others before that step."""
    rest: list[Skip] = [(after, batches) for after, batches in saved]
    for each in told:
        if each in rest:
            rest.remove(each)
        elif each[0] < step:
            raise ValueError(
                f"skip_batches has {each}, and the run has come to step {step} without it: skip "
                f"after {step} steps or more, take the pair out, or remove the saves newer than "
                f"step {each[0]} to go on from there"
            )
    return Skips(tuple(told), tuple(rest))
