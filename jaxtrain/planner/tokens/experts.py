"""Predicts what a mixture of experts itself sends: rows to the devices of their experts and back,
and the loads for its auxiliary loss. Tokens are gathered before it and scattered after it like
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
    """Yields the collectives of one layer: rows to experts and back. why: added to the names of its
    lines."""
    chunks, axes = _chunks(facts, call), _axes(facts)
    size = call.experts + ways(facts, axes)
    sent = [
        *_rows(facts, call, f"rows to their experts{why}"),
        *_rows(facts, call, f"rows back from their experts{why}"),
    ]
    line = f"rows of each expert, and the first of each device{why}"
    sent += collective_traffic(facts, line, "all_to_all", "lax", axes, "int32", size)
    yield from times(sent, chunks)


def again(facts: StepFacts, call: ExpertCall) -> Iterator[Sent]:
    """Yields the collectives of one layer that a remat policy repeats. Nothing for chunks, which
    are recomputed whatever the policy."""
    if _chunks(facts, call) == 1:
        yield from forward(facts, call, ", again")


def backward(facts: StepFacts, call: ExpertCall, *, flow: bool) -> Iterator[Sent]:
    """Yields the backward collectives of one layer. flow: the gradient of its input is needed.
    Loads are summed once for the gradient of an auxiliary loss, in whichever pass computes it."""
    chunks = _chunks(facts, call)
    if call.sums_loads:
        axes, size = tuple(a for a in facts.sizes if a in TOKEN_AXES), call.experts
        line = "loads of experts"
        yield from collective_traffic(facts, line, "all_reduce", "lax", axes, "float32", size)
    if chunks > 1:
        yield from forward(facts, call, ", again")
    yield from times(_rows(facts, call, "gradients of rows"), chunks * (1 + flow))


def _rows(facts: StepFacts, call: ExpertCall, why: str) -> list[Sent]:
    """Returns the sends of all rows of a chunk, once: as many as the buffers have room for. A
    ragged exchange sends rows only; they count as one for each choice, which is the most."""
    axes, algorithm = _axes(facts), facts.algorithms.experts
    devices, tokens = ways(facts, axes), facts.tokens // _chunks(facts, call)
    sizes = (call.experts, devices, call.routing_group, call.rows_of_group)
    rows, kind = devices * sent_rows(tokens, call.per_token, *sizes), "all_to_all"
    if algorithm == "ragged":
        rows, kind, algorithm = min(rows, tokens * call.per_token), "ragged_all_to_all", "lax"
    size = rows * facts.model.embed
    return collective_traffic(facts, why, kind, algorithm, axes, facts.compute, size)


def _axes(facts: StepFacts) -> tuple[str, ...]:
    return tuple(a for a in facts.sizes if a in EXPERT)


def _chunks(facts: StepFacts, call: ExpertCall) -> int:
    return chunk_count(facts.tokens, facts.loop.expert_chunk, call.routing_group)
