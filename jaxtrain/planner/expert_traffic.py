"""Predicts what a mixture of experts itself sends: rows to the devices of their experts and back,
and the loads for its auxiliary loss. Tokens are gathered before it and scattered after it like
those of a dense layer (`traffic.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxtrain.mesh.axes import TOKEN_AXES
from jaxtrain.moe.room import chunk_count, sent_rows
from jaxtrain.operations.collectives import Communication, ExpertExchange
from jaxtrain.planner.facts import StepFacts
from jaxtrain.planner.sent import Sent, collective_traffic, times, ways


def forward(
    facts: StepFacts, collectives: Iterable[Communication], why: str = ""
) -> Iterator[Sent]:
    """Yields what mixtures among `collectives` send: rows to experts and back. why: added to the
    names of its lines."""
    for exchange in _exchanges(collectives):
        yield from _forward(facts, exchange, why)


def again(
    facts: StepFacts, collectives: Iterable[Communication], outputs: Iterable[ExpertExchange]
) -> Iterator[Sent]:
    """Yields the collectives of mixtures that a remat policy repeats. For chunks, which are
    recomputed whatever the policy, those whose outputs it reads: outputs."""
    for exchange in _exchanges(collectives):
        if _chunks(facts, exchange) == 1:
            yield from _forward(facts, exchange, ", again")
    for exchange in outputs:
        if _chunks(facts, exchange) > 1:
            yield from _forward(facts, exchange, ", for the policy")


def backward(facts: StepFacts, exchange: ExpertExchange, *, flow: bool) -> Iterator[Sent]:
    """Yields the backward collectives of one layer. flow: the gradient of its input is needed.
    Loads are summed once for the gradient of an auxiliary loss, in whichever pass computes it."""
    chunks = _chunks(facts, exchange)
    if exchange.sums_loads:
        axes, size = tuple(a for a in facts.sizes if a in TOKEN_AXES), exchange.experts
        line = "loads of experts"
        yield from collective_traffic(facts, line, "all_reduce", "lax", axes, "float32", size)
    if chunks > 1:
        yield from _forward(facts, exchange, ", again")
    yield from times(_rows(facts, exchange, "gradients of rows"), chunks * (1 + flow))


def _exchanges(collectives: Iterable[Communication]) -> Iterator[ExpertExchange]:
    return (collective for collective in collectives if isinstance(collective, ExpertExchange))


def _forward(facts: StepFacts, exchange: ExpertExchange, why: str) -> Iterator[Sent]:
    chunks, axes = _chunks(facts, exchange), facts.roles.experts
    size = exchange.experts + ways(facts, axes)
    sent = [
        *_rows(facts, exchange, f"rows to their experts{why}"),
        *_rows(facts, exchange, f"rows back from their experts{why}"),
    ]
    line = f"rows of each expert, and the first of each device{why}"
    sent += collective_traffic(facts, line, "all_to_all", "lax", axes, "int32", size)
    yield from times(sent, chunks)


def _rows(facts: StepFacts, exchange: ExpertExchange, why: str) -> list[Sent]:
    """Returns the sends of all rows of a chunk, once: as many as the buffers have room for. A
    ragged exchange sends rows only; they count as one for each choice, which is the most."""
    axes, algorithm = facts.roles.experts, facts.algorithms.experts
    devices, tokens = ways(facts, axes), facts.tokens // _chunks(facts, exchange)
    sizes = (exchange.experts, devices, exchange.routing_group, exchange.rows_of_group)
    rows, kind = devices * sent_rows(tokens, exchange.per_token, *sizes), "all_to_all"
    if algorithm == "ragged":
        rows, kind, algorithm = min(rows, tokens * exchange.per_token), "ragged_all_to_all", "lax"
    size = rows * facts.model.embed
    return collective_traffic(facts, why, kind, algorithm, axes, facts.compute, size)


def _chunks(facts: StepFacts, exchange: ExpertExchange) -> int:
    return chunk_count(facts.tokens, facts.loop.expert_chunk, exchange.routing_group)
