"""What a mixture of experts sends by itself: rows to the devices of their experts and back, and the
loads that its auxiliary loss is made of. Tokens are gathered before it, and scattered after it, as
those of a dense layer (`traffic.py`)."""

from __future__ import annotations

from collections.abc import Iterator

from jaxtrain.mesh.axes import TOKEN_AXES
from jaxtrain.models.description import ExpertCall
from jaxtrain.moe.room import chunk_count, sent_rows
from jaxtrain.planner.facts import StepFacts
from jaxtrain.planner.sent import Sent, collective_traffic, times, ways

EXPERT = ("expert",)


def forward(facts: StepFacts, call: ExpertCall, why: str = "") -> Iterator[Sent]:
    """Of one layer: rows there and back; why: what is added to the names of its lines."""
    chunks, axes = _chunks(facts, call), _axes(facts)
    size = call.experts + ways(facts, axes)
    found = [
        *_rows(facts, call, f"rows to their experts{why}"),
        *_rows(facts, call, f"rows back from their experts{why}"),
    ]
    line = f"rows of each expert, and the first of each device{why}"
    found += collective_traffic(facts, line, "all_to_all", "lax", axes, "int32", size)
    yield from times(found, chunks)


def again(facts: StepFacts, call: ExpertCall) -> Iterator[Sent]:
    """What a remat policy makes again of one layer: nothing of chunks, which make their own again
    whatever the policy."""
    if _chunks(facts, call) == 1:
        yield from forward(facts, call, ", again")


def backward(facts: StepFacts, call: ExpertCall, *, flow: bool) -> Iterator[Sent]:
    """Of one layer. flow: the gradient of its input is needed. Loads are added up for the gradient
    of an auxiliary loss: once, in whichever pass it is made."""
    chunks = _chunks(facts, call)
    if call.sums_loads:
        axes, size = tuple(a for a in facts.sizes if a in TOKEN_AXES), call.experts
        line = "loads of experts"
        yield from collective_traffic(facts, line, "all_reduce", "lax", axes, "float32", size)
    if chunks > 1:
        yield from forward(facts, call, ", again")
    yield from times(_rows(facts, call, "gradients of rows"), chunks * (1 + flow))


def _rows(facts: StepFacts, call: ExpertCall, why: str) -> list[Sent]:
    """All rows of a chunk, once: as many as there is room for, or, where none but rows are sent,
    as if each choice were one, which are as many at the most."""
    axes, by = _axes(facts), facts.by.experts
    devices, tokens = ways(facts, axes), facts.tokens // _chunks(facts, call)
    given = (call.experts, devices, call.routing_group, call.rows_of_group)
    rows, kind = devices * sent_rows(tokens, call.per_token, *given), "all_to_all"
    if by == "ragged":
        rows, kind, by = min(rows, tokens * call.per_token), "ragged_all_to_all", "lax"
    size = rows * facts.model.embed
    return collective_traffic(facts, why, kind, by, axes, facts.compute, size)


def _axes(facts: StepFacts) -> tuple[str, ...]:
    return tuple(a for a in facts.sizes if a in EXPERT)


def _chunks(facts: StepFacts, call: ExpertCall) -> int:
    return chunk_count(facts.tokens, facts.loop.expert_chunk, call.routing_group)
