"""Cost, memory and idle time of a schedule's tables; and the proof that they are valid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Int

from jaxtrain.pipeline.schedule import Costs, Schedule

Works = Int[np.ndarray, "works stages"]
"""A tick, or a number, of each work on each stage; work m V + c is chunk c of microbatch m."""


@dataclass(frozen=True)
class Span:
    """Consecutive ticks, start to stop - 1, with the same kinds of work."""

    kinds: str
    start: int
    stop: int


def spans(schedule: Schedule) -> list[Span]:
    """Divides the ticks into runs of equal kinds: each run is one loop of the executor."""
    return runs(schedule.tables)


def runs(tables: Mapping[str, np.ndarray]) -> list[Span]:
    """`spans` of tables that are named by the letter of their work."""
    worked = {letter: np.any(table >= 0, axis=1).tolist() for letter, table in tables.items()}
    ticks = len(next(iter(worked.values())))
    kinds = ["".join(k for k, active in worked.items() if active[tick]) for tick in range(ticks)]
    edges = [t for t in range(ticks + 1) if t in (0, ticks) or kinds[t] != kinds[t - 1]]
    return [Span(kinds[a], a, b) for a, b in pairwise(edges)]


def cost(schedule: Schedule, costs: Costs = Costs()) -> float:  # noqa: B008 (frozen)
    """Time of a step. Every tick costs each kind of work that any stage does in it. The head's cost
    is added for each microbatch."""
    durations = costs.of(schedule)
    time = sum(durations[k] * (s.stop - s.start) for s in spans(schedule) for k in s.kinds)
    return time + costs.head * schedule.microbatches


def bubble(schedule: Schedule, costs: Costs = Costs()) -> float:  # noqa: B008 (frozen)
    """Share of the step in which a stage, on average, does no useful work."""
    busy = schedule.microbatches * (schedule.chunks * sum(costs.of(schedule).values()) + costs.head)
    return 1 - busy / cost(schedule, costs)


def times(table: Int[np.ndarray, "ticks stages"], works: int) -> Works:
    """Tick of every work on every stage, from a table in which each occurs once."""
    ticks = np.full((works, table.shape[1]), -1)
    tick, stage = np.nonzero(table >= 0)
    ticks[table[tick, stage], stage] = tick
    return ticks


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """First and last tick in which a work's buffer holds a value, on each stage."""

    first: Works
    last: Works

    def live(self, ticks: int) -> Int[np.ndarray, "{ticks} stages"]:
        """Number of buffers that a stage holds in each tick."""
        begin, end = np.zeros((2, ticks + 1, self.first.shape[1]), int)
        stages = np.broadcast_to(np.arange(self.first.shape[1]), self.first.shape)
        np.add.at(begin, (self.first, stages), 1)
        np.add.at(end, (self.last + 1, stages), 1)
        return (begin - end).cumsum(0)[:-1]


def inputs(schedule: Schedule) -> Lifetimes:
    """Lifetimes of the inputs of F: from the tick after the previous stage produced them (for an
    embedding the tick of its F) to the B that needs them again."""
    works = schedule.microbatches * schedule.chunks
    forward, backward = (times(t, works) for t in (schedule.forward, schedule.backward))
    return Lifetimes(_arrival(forward, schedule, +1) + 1, backward)


def head_waits(schedule: Schedule) -> bool:
    """True if the head's gradient, computed with the last F, would wait for its B. Such a schedule
    (GPipe) runs the head in the tick of that B, on an output that B recomputes."""
    forward, backward = schedule.forward[:, -1], schedule.backward[:, -1]
    ends = (forward >= 0) & (forward % schedule.chunks == schedule.chunks - 1)
    return bool((forward != backward)[ends].any())


def cotangents(schedule: Schedule, *, keep_residuals: bool = False) -> Lifetimes:
    """Lifetimes of B's incoming gradients: from the tick after the next stage produced them to its
    B. The head's starts in the tick of the last F, or of its B if it would wait (`head_waits`).
    With saved residuals B recomputes no output, and the head's gradient does wait."""
    works = schedule.microbatches * schedule.chunks
    forward, backward = (times(t, works) for t in (schedule.forward, schedule.backward))
    first = _arrival(backward, schedule, -1) + 1
    ends = np.arange(works) % schedule.chunks == schedule.chunks - 1
    late = head_waits(schedule) and not keep_residuals
    first[ends, -1] = (backward if late else forward)[ends, -1]
    return Lifetimes(first, backward)


def stashes(schedule: Schedule) -> Lifetimes | None:
    """Lifetimes of the pairs (input, cotangent) of every product, from B to W; None without W."""
    if schedule.weight is None:
        return None
    works = schedule.microbatches * schedule.chunks
    return Lifetimes(times(schedule.backward, works), times(schedule.weight, works))


def _arrival(produced: Works, schedule: Schedule, way: int) -> Works:
    """Tick in which the input of a work is sent, from the previous stage (way 1) or the next one
    (-1). For the pipeline's first position: the tick before its own."""
    works, stages = produced.shape
    sent = np.empty_like(produced)
    work = np.arange(works)
    chunk = work % schedule.chunks
    inner = slice(1, None) if way > 0 else slice(None, -1)
    from_inner = slice(None, -1) if way > 0 else slice(1, None)
    sent[:, inner] = produced[:, from_inner]
    edge, far = (0, stages - 1) if way > 0 else (stages - 1, 0)
    first = chunk == 0 if way > 0 else chunk == schedule.chunks - 1
    sent[~first, edge] = produced[work[~first] - way, far]
    sent[first, edge] = produced[first, edge] - 1
    return sent


def in_flight(schedule: Schedule) -> Int[np.ndarray, " stages"]:
    """Largest number of inputs that each stage holds at once."""
    return inputs(schedule).live(schedule.ticks).max(0)


def slots(schedule: Schedule, *, keep_residuals: bool = False) -> dict[str, int]:
    """Numbers of buffers of a stage, the same on all: for inputs, cotangents, and stashes of W. If
    F saves residuals for B, also for those; inputs are then held only until F."""
    works = schedule.microbatches * schedule.chunks
    lifetimes = {"inputs": inputs(schedule)}
    if keep_residuals:
        forward, backward = (times(t, works) for t in (schedule.forward, schedule.backward))
        lifetimes["inputs"] = Lifetimes(lifetimes["inputs"].first, forward)
        lifetimes["residuals"] = Lifetimes(forward, backward)
    lifetimes["cotangents"] = cotangents(schedule, keep_residuals=keep_residuals)
    stash = stashes(schedule)
    if stash is not None:
        lifetimes["stashes"] = stash
    return {name: int(lifetime.live(schedule.ticks).max()) for name, lifetime in lifetimes.items()}


def violations(schedule: Schedule) -> list[str]:
    """Returns the violations of a table from any source; none is a proof that a step may follow it.

    Every (stage, work) runs F once, B once (and W once), B not before F, W not before B. A value is
    used no earlier than the tick after it was sent (the head's gradient: not before its F).
    """
    problems = [
        f"{name}: table of shape {table.shape} and forward is {schedule.forward.shape}; give every "
        f"table one row for each tick and one column for each of {schedule.stages} stages"
        for name, table in schedule.tables.items()
        if table.ndim != 2 or table.shape != (schedule.ticks, schedule.stages)
    ]
    if problems:
        return problems
    works = schedule.microbatches * schedule.chunks
    for name, table in schedule.tables.items():
        for stage in range(schedule.stages):
            problems += _miscounted(name, stage, table[:, stage], works, schedule.chunks)
    return problems or _early(schedule, works)


def _miscounted(name: str, stage: int, column: np.ndarray, works: int, chunks: int) -> list[str]:
    counts = Counter(int(w) for w in column if w != -1)
    unknown = sorted(w for w in counts if not 0 <= w < works)
    problems = [f"{name} on stage {stage}: work {w} is none of 0 .. {works - 1}" for w in unknown]
    wrong = [w for w in range(works) if counts[w] != 1]
    return problems + [
        f"{name} on stage {stage}: microbatch {w // chunks}, chunk {w % chunks} runs "
        f"{counts[w]} times; it must run once"
        for w in wrong
    ]


def _early(schedule: Schedule, works: int) -> list[str]:
    problems = []

    def check(name: str, due: Works, ticks: Works, reason: str) -> None:
        for work, stage in np.argwhere(ticks < due):
            m, c = divmod(int(work), schedule.chunks)
            problems.append(
                f"{name} of microbatch {m}, chunk {c} on stage {stage} is in tick "
                f"{ticks[work, stage]}, and {reason}: not before tick {due[work, stage]}"
            )

    forward, backward = (times(t, works) for t in (schedule.forward, schedule.backward))
    check("F", inputs(schedule).first, forward, "its input comes from the stage before")
    check(
        "B",
        cotangents(schedule, keep_residuals=True).first,
        backward,
        "its gradient comes from the stage behind",
    )
    check("B", forward, backward, "its F")
    if schedule.weight is not None:
        check("W", backward, times(schedule.weight, works), "its B")
    return problems
