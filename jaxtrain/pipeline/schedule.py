"""Pipeline schedules as integer tables: the work of each stage in each tick.

The pipeline is lock-step: in a tick every stage runs the same kinds of work, F then B then W,
masked where it has none. So a tick costs as much as its kinds, even for idle stages.

Stage r holds the blocks of chunks c = 0 .. V-1, the pipeline's positions c R + r. A work number is
microbatch * V + chunk; -1 is no work. Microbatches enter in groups of R that go through one chunk
after another, so microbatch g R + i on chunk c has place p = g R V + c R + i in line. Stage r runs
its F in tick p + r. Its B (with chunks mirrored) comes V R - 1 ticks after the line's start plus R
- 1 - r, as soon as the gradient can be there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from jaxtrain.violations import did_you_mean, raise_violations

ENTRIES = 2**23
"""Most entries of one table: ten times the largest published pipelines; takes some seconds."""

KINDS = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble")


@dataclass(frozen=True, eq=False)
class Schedule:
    """Tables [ticks, stages] of work numbers. weight: None if B also computes weight gradients;
    else B computes the input's gradient alone, and W the weights'."""

    kind: str
    stages: int
    microbatches: int
    chunks: int
    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray | None = None

    @property
    def ticks(self) -> int:
        return len(self.forward)

    @property
    def tables(self) -> dict[str, np.ndarray]:
        """Existing tables by the letter of their work, in the order of a tick."""
        tables = {"F": self.forward, "B": self.backward}
        return tables if self.weight is None else {**tables, "W": self.weight}


@dataclass(frozen=True)
class Costs:
    """Time of one stage's work on one microbatch, all its chunks together, in any unit. head: time
    of the head and the loss, forward and backward, which every stage shares. whole: time of a B
    that also computes the weights' gradients, in a schedule without W; None: backward + weight."""

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    head: float = 0.0
    whole: float | None = None

    def __post_init__(self) -> None:
        times = {k: v for k, v in vars(self).items() if v is not None}
        wrong = [f"{k}={v!r} must be a time of at least 0" for k, v in times.items() if not v >= 0]
        if not wrong and not self.forward + self.backward + self.weight:
            wrong.append("forward, backward and weight are all 0; give one of them a time")
        raise_violations(wrong, "costs")

    def of(self, schedule: Schedule) -> dict[str, float]:
        """Times of one chunk, by letter."""
        last = {"B": self.backward, "W": self.weight}
        if schedule.weight is None:
            last = {"B": self.backward + self.weight if self.whole is None else self.whole}
        return {k: v / schedule.chunks for k, v in {"F": self.forward, **last}.items()}


def make_schedule(kind: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Returns the table of one of KINDS, for any number of microbatches. If there are chunks, and
    `stages` does not divide the microbatches, the last group is short and costs as much as a full
    one.

    Raises ValueError with all violations: an unknown kind, numbers below 1, chunks with a schedule
    that has none, `interleaved` with one.
    """
    raise_violations(_violations(kind, stages, microbatches, chunks), f"schedule {kind}")
    r = np.arange(stages)
    m, c = np.divmod(np.arange(microbatches * chunks), chunks)
    group, i = np.divmod(m, stages)
    enters = (group * chunks + c) * stages + i
    returns = (group * chunks + chunks - 1 - c) * stages + i
    begin = chunks * stages - 1
    if kind == "gpipe":
        begin = int(enters.max()) + stages
    last = begin + returns.max() + stages
    forward = _table(enters[:, None] + r, last)
    backward = _table(begin + returns[:, None] + stages - 1 - r, last)
    weight = None
    if kind == "zero_bubble":
        # W runs once every stage has run the work's B: no stage waits for another.
        weight = _table(begin + returns[:, None] + stages - 1 + 0 * r, last)
    return Schedule(kind, stages, microbatches, chunks, forward, backward, weight)


def _table(
    ticks: Int[np.ndarray, "works stages"], length: int | np.integer
) -> Int[np.ndarray, "length stages"]:
    """Table of `length` ticks, from the tick of every work on every stage."""
    table = np.full((length, ticks.shape[1]), -1)
    works, stages = np.indices(ticks.shape)
    table[ticks, stages] = works
    return table


def nearest_kind(word: object) -> str:
    """`did_you_mean` that also knows 1F1B as papers write it."""
    return did_you_mean(str(word).replace("1", "one_"), KINDS)


def _violations(kind: str, stages: int, microbatches: int, chunks: int) -> list[str]:
    problems = [
        f"{name}={value!r} must be a whole number of at least 1"
        for name, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]
    entries = 0 if problems else stages * chunks * (microbatches + stages)
    if entries > ENTRIES:
        problems.append(
            f"stages={stages}, microbatches={microbatches}, chunks={chunks}: a table of some "
            f"{entries:,} entries; use fewer microbatches or stages, for {ENTRIES:,} at most"
        )
    if kind not in KINDS:
        problems.append(f"kind={kind!r} is no schedule{nearest_kind(kind)}")
    if kind in ("gpipe", "one_f_one_b") and isinstance(chunks, int) and chunks > 1:
        problems.append(
            f"{kind} has no chunks, and chunks={chunks}; use interleaved or zero_bubble"
        )
    if kind == "interleaved" and chunks == 1:
        problems.append("interleaved with chunks=1 is one_f_one_b; name that, or give more chunks")
    return problems
