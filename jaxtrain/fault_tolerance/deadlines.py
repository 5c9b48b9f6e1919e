"""How long a process may say nothing, or be in one phase; and which of several is to blame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from jaxtrain.cluster.sampler import EVERY_S, Sample
from jaxtrain.violations import positive, raise_violations

COLLECTIVE = ("step", "first step")
"""Phases in which a process waits for the others."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds. Raises ValueError for one that is not above 0.

    silence: without a word of the thread that tells what a process is at. step: in a step, in
    waiting for a batch, and in one call of a callback; or `step_times` medians of a step, where
    that is longer. join, open, compile, restore, first_step, evaluate, save, finish: in that phase.
    """

    silence: float = 14
    step: float = 14
    step_times: float = 10
    join: float = 300
    open: float = 7200
    compile: float = 3600
    restore: float = 3600
    first_step: float = 600
    evaluate: float = 3600
    save: float = 900
    finish: float = 3600

    def __post_init__(self) -> None:
        raise_violations(
            said for each in fields(self) for said in positive(each.name, getattr(self, each.name))
        )

    def of(self, phase: str, median_s: float) -> float:
        """Of a phase, where a step takes `median_s`."""
        if phase in ("step", "load", "callback"):
            return max(self.step, self.step_times * median_s)
        return getattr(self, {"start": "join"}.get(phase, phase.replace(" ", "_")))


class Late(NamedTuple):
    """A process that is beyond a deadline. what: "silent", or "hangs". seconds: for how long."""

    process: int
    what: str
    seconds: float
    sample: Sample


def late(samples: Mapping[int, Sample], now: float, deadlines: Deadlines) -> list[Late]:
    """The processes to blame when one or more are beyond a deadline; none where none is.

    Those whose sampler is behind come first: the others wait for them. Those in a step wait in its
    collectives for all that are not, and are beyond nothing while one of those is within its own
    deadline. Else those that are not in a step are to blame; else all that are the fewest steps on,
    of whom the last to come may have `EVERY_S` left: before that, the others waited for it. now:
    of the clock that the samples are of.
    """
    beyond = [
        process
        for process, sample in samples.items()
        if _quiet(sample, now) > deadlines.silence
        or now - sample.now.since > _deadline(sample, deadlines)
    ]
    others = [p for p, sample in samples.items() if sample.now.phase not in COLLECTIVE]
    if any(p not in beyond for p in others):
        beyond = [p for p in beyond if p in others or _quiet(samples[p], now) > deadlines.silence]
    if not beyond:
        return []
    behind = min(deadlines.silence, 2.5 * EVERY_S)
    silent = [p for p, sample in samples.items() if _quiet(sample, now) > behind]
    if silent:
        return [Late(p, "silent", _quiet(samples[p], now), samples[p]) for p in silent]
    blamed = [p for p in beyond if p in others] or list(samples)
    least = min(samples[p].now.step for p in blamed)
    last = [p for p in blamed if samples[p].now.step == least]
    if any(now - samples[p].now.since < _deadline(samples[p], deadlines) - EVERY_S for p in last):
        return []
    return [Late(p, "hangs", now - samples[p].now.since, samples[p]) for p in last]


def _deadline(sample: Sample, deadlines: Deadlines) -> float:
    return deadlines.of(sample.now.phase, sample.now.median_s)


def _quiet(sample: Sample, now: float) -> float:
    """Since its sampler last wrote; nothing before it did, which is the phase's matter."""
    return now - sample.at if sample.at else 0.0
