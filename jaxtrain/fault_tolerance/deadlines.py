"""Deadlines of silent processes and of phases, and the processes to blame beyond one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from jaxtrain.cluster.sampler import EVERY_S, ProcessSample
from jaxtrain.violations import positive, raise_violations

COLLECTIVE = ("step", "first step")
"""Phases in which a process waits for the others."""


@dataclass(frozen=True)
class Deadlines:
    """Deadlines in seconds. Raises ValueError for one that is not above 0.

    silence: without a report of the process's sampler thread. step: in a step, in waiting for a
    batch, and in one call of a callback; or `step_times` medians of a step, if that is longer.
    join, open, compile, restore, first_step, evaluate, save, finish: in that phase.
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
            text
            for field in fields(self)
            for text in positive(field.name, getattr(self, field.name))
        )

    def limit_s(self, phase: str, median_s: float) -> float:
        """Deadline of `phase` in seconds, if the median step takes `median_s`."""
        if phase in ("step", "load", "callback"):
            return max(self.step, self.step_times * median_s)
        names = {"start": "join", "exit": "finish"}
        return getattr(self, names.get(phase, phase.replace(" ", "_")))


class Late(NamedTuple):
    """A process beyond a deadline, for `seconds`. kind: "silent" or "hangs"."""

    process: int
    kind: str
    seconds: float
    sample: ProcessSample


def late(samples: Mapping[int, ProcessSample], now: float, deadlines: Deadlines) -> list[Late]:
    """Returns the processes to blame if any is beyond a deadline, else none.

    First those whose sampler is behind: the others wait for them. Processes in a step wait in its
    collectives for all that are not in one, and do not count while one of those is within its own
    deadline. Else the processes outside steps are to blame; else all at the lowest step, once the
    last of them has less than `EVERY_S` left: before that, the others waited for it. now: by the
    clock of the samples.
    """
    beyond = [
        process
        for process, sample in samples.items()
        if _quiet(sample, now) > deadlines.silence
        or now - sample.now.since > _deadline(sample, deadlines)
    ]
    outside_steps = [p for p, sample in samples.items() if sample.now.phase not in COLLECTIVE]
    if any(p not in beyond for p in outside_steps):
        beyond = [
            p for p in beyond if p in outside_steps or _quiet(samples[p], now) > deadlines.silence
        ]
    if not beyond:
        return []
    behind = min(deadlines.silence, 2.5 * EVERY_S)
    silent = [p for p, sample in samples.items() if _quiet(sample, now) > behind]
    if silent:
        return [Late(p, "silent", _quiet(samples[p], now), samples[p]) for p in silent]
    blamed = [p for p in beyond if p in outside_steps] or list(samples)
    least = min(samples[p].now.step for p in blamed)
    last = [p for p in blamed if samples[p].now.step == least]
    if any(now - samples[p].now.since < _deadline(samples[p], deadlines) - EVERY_S for p in last):
        return []
    return [Late(p, "hangs", now - samples[p].now.since, samples[p]) for p in last]


def _deadline(sample: ProcessSample, deadlines: Deadlines) -> float:
    return deadlines.limit_s(sample.now.phase, sample.now.median_s)


def _quiet(sample: ProcessSample, now: float) -> float:
    """Seconds since its sampler last wrote; 0 before it did, when the phase's deadline applies."""
    return now - sample.sampled_at if sample.sampled_at else 0.0
