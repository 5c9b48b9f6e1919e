"""A schedule in the executor's form: the work of each tick, and its buffers.

A stage's buffers hold one microbatch's activations each, and are numbered. A work gets the lowest
number that is free for all the time it needs one. Lifetimes are intervals, so the number of buffers
is the largest number that are held at once (`analysis.slots`).
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxtrain.pipeline.analysis import (
    Lifetimes,
    Span,
    Works,
    cotangents,
    head_waits,
    inputs,
    runs,
    stashes,
    times,
)
from jaxtrain.pipeline.schedule import Schedule

TickTable = Int[np.ndarray, "ticks stages"]


class SlotTables(NamedTuple):
    """int32 tables, [ticks, stages] (or [ticks], which every stage reads); -1: nothing. In a tick
    of the executor: its row of each.

    forward, backward, weight: the work. Next to each, the numbers of its buffers: of its input, its
    cotangent, F's residuals for B, and B's stash for W. enter, leave, exit: the microbatch that
    comes out of the embedding, goes into the head, and whose gradient comes back to the embedding.
    receive_input, receive_cotangent: the buffers for values that a neighbour sends.
    """

    forward: Any
    forward_input: Any
    forward_residuals: Any
    enter: Any
    leave: Any
    leave_cotangent: Any
    receive_input: Any
    backward: Any
    backward_input: Any
    backward_residuals: Any
    backward_cotangent: Any
    backward_stash: Any
    exit: Any
    receive_cotangent: Any
    weight: Any
    weight_stash: Any

    @property
    def spans(self) -> list[Span]:
        """Divides the ticks into runs of equal kinds: each is one loop of the executor."""
        return runs({"F": self.forward, "B": self.backward, "W": self.weight})


class StageBuffers(NamedTuple):
    """Numbers of buffers of a stage. late_head: the head runs with the last stage's B."""

    inputs: int
    cotangents: int
    residuals: int
    stashes: int
    late_head: bool = False


def number_buffers(life: Lifetimes) -> Works:
    """Number of the buffer of each work on each stage: the lowest that is free during its lifetime.
    Intervals are taken by their start, so no more numbers are used than overlap."""
    numbers = np.empty_like(life.first)
    for stage in range(numbers.shape[1]):
        free: list[int] = []
        busy: list[tuple[int, int]] = []  # (last tick, number)
        for work in np.argsort(life.first[:, stage], kind="stable"):
            while busy and busy[0][0] < life.first[work, stage]:
                heapq.heappush(free, heapq.heappop(busy)[1])
            number = heapq.heappop(free) if free else len(busy)
            numbers[work, stage] = number
            heapq.heappush(busy, (int(life.last[work, stage]), number))
    return numbers


def training(schedule: Schedule, *, keep_residuals: bool) -> tuple[SlotTables, StageBuffers]:
    """Tables of a training step. keep_residuals: F saves residuals for B, which otherwise
    recomputes them from the input; an input is then free after its F."""
    works = schedule.microbatches * schedule.chunks
    forward, backward = (times(t, works) for t in (schedule.forward, schedule.backward))
    input_life = inputs(schedule)
    residuals_of = np.zeros_like(forward)
    if keep_residuals:
        residuals_of = number_buffers(Lifetimes(forward, backward))
        input_life = Lifetimes(input_life.first, forward)
    stashed, weight = stashes(schedule), schedule.weight
    stash = np.zeros_like(forward) if stashed is None else number_buffers(stashed)
    if weight is None:
        weight = np.full_like(schedule.forward, -1)
    input_of = number_buffers(input_life)
    cotangent_of = number_buffers(cotangents(schedule, keep_residuals=keep_residuals))
    rows = _forward_rows(schedule, input_of, residuals_of)
    head = schedule.forward
    if head_waits(schedule) and not keep_residuals:
        head = schedule.backward
        rows = rows._replace(leave=_microbatches(head[:, -1], schedule.chunks, schedule.chunks - 1))
    rows = rows._replace(
        leave_cotangent=np.where(rows.leave >= 0, _at(head, cotangent_of)[:, -1], -1),
        backward=schedule.backward,
        backward_input=_at(schedule.backward, input_of),
        backward_residuals=_at(schedule.backward, residuals_of),
        backward_cotangent=_at(schedule.backward, cotangent_of),
        backward_stash=_at(schedule.backward, stash),
        exit=_microbatches(schedule.backward[:, 0], schedule.chunks, 0),
        receive_cotangent=_receive(schedule.backward, cotangent_of, schedule.chunks, -1),
        weight=weight,
        weight_stash=_at(weight, stash),
    )
    count = StageBuffers(
        int(input_of.max()) + 1,
        int(cotangent_of.max()) + 1,
        int(residuals_of.max()) + 1 if keep_residuals else 0,
        0 if stashed is None else int(stash.max()) + 1,
        head is schedule.backward,
    )
    return SlotTables(*(table.astype(np.int32) for table in rows)), count


def forward_only(schedule: Schedule) -> tuple[SlotTables, StageBuffers]:
    """Tables of an evaluation: F of every work, in the schedule's order."""
    works = schedule.microbatches * schedule.chunks
    last = int(np.nonzero((schedule.forward >= 0).any(1))[0][-1]) + 1
    forward = times(schedule.forward, works)
    input_of = number_buffers(Lifetimes(inputs(schedule).first, forward))
    rows = _forward_rows(schedule, input_of, np.zeros_like(forward))
    count = StageBuffers(int(input_of.max()) + 1, 0, 0, 0)
    return SlotTables(*(table[:last].astype(np.int32) for table in rows)), count


def _forward_rows(schedule: Schedule, input_of: Works, residuals_of: Works) -> SlotTables:
    """Tables of F alone, from the buffers of each work's input and residuals."""
    none, of_all = np.full_like(schedule.forward, -1), schedule.forward[:, 0] * 0 - 1
    last = schedule.chunks - 1
    return SlotTables(
        forward=schedule.forward,
        forward_input=_at(schedule.forward, input_of),
        forward_residuals=_at(schedule.forward, residuals_of),
        enter=_microbatches(schedule.forward[:, 0], schedule.chunks, 0),
        leave=_microbatches(schedule.forward[:, -1], schedule.chunks, last),
        leave_cotangent=of_all,
        receive_input=_receive(schedule.forward, input_of, schedule.chunks, +1),
        backward=none,
        backward_input=none,
        backward_residuals=none,
        backward_cotangent=none,
        backward_stash=none,
        exit=of_all,
        receive_cotangent=none,
        weight=none,
        weight_stash=none,
    )


def _at(table: TickTable, number: Works) -> TickTable:
    """Number of the work in each entry, -1 if there is none."""
    stages = np.arange(table.shape[1])
    return np.where(table >= 0, number[np.maximum(table, 0), stages], -1)


def _microbatches(
    column: Int[np.ndarray, " ticks"], chunks: int, chunk: int
) -> Int[np.ndarray, " ticks"]:
    """Microbatch of a stage's work in the ticks in which its chunk is `chunk`, -1 in others."""
    return np.where((column >= 0) & (column % chunks == chunk), column // chunks, -1)


def _receive(table: TickTable, number: Works, chunks: int, way: int) -> TickTable:
    """Buffer for the value that a neighbour sends at a tick's end: the previous stage (way 1), or
    the next (-1). From the last stage to the first it goes to the next chunk."""
    sent = np.roll(table, way, axis=1)
    edge = 0 if way > 0 else table.shape[1] - 1
    ends = chunks - 1 if way > 0 else 0
    wrapped = sent[:, edge]
    follows = (wrapped >= 0) & (wrapped % chunks != ends)
    sent[:, edge] = np.where(follows, wrapped + way, -1)
    return _at(sent, number)
