"""Predicts what a mixture of experts itself sends: rows to the devices of their experts and back,
and the loads for its auxiliary loss. Tokens are gathered before it and scattered after it like
those of a dense layer (`traffic.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxtrain.mesh.axes import TOKEN_AXES
from jaxtrain.moe.room import sent_rows
from jaxtrain.operations.collectives import Communication, ExpertExchange
from jaxtrain.planner.backward_work import MixtureWork
from jaxtrain.planner.facts import StepFacts
from jaxtrain.planner.sent import Sent, collective_traffic, times, ways


def forward(
    facts: StepFacts, collectives: Iterable[Communication], why: str = ""
) -> Iterator[Sent]:
    """Yields what mixtures among `collectives` send: rows to experts and back. why: added to the
    names of its lines."""
    for exchange in collectives:
        if isinstance(exchange, ExpertExchange):
            yield from _forward(facts, exchange, why)


def backward(facts: StepFacts, work: MixtureWork) -> Iterator[Sent]:
    """Yields the backward collectives of one layer. Loads are summed once for the gradient of an
    auxiliary loss, in whichever pass computes it.

    Rows are sent again where the remat policy has saved none, and of chunks always, as far as
    gradients read them and what comes back. For the outputs of chunks, that the policy reads, once
    more.
    """
    exchange = work.exchange
    chunks = facts.expert_chunks(exchange.routing_group)
    if work.any and exchange.sums_loads:
        axes, size = tuple(a for a in facts.sizes if a in TOKEN_AXES), exchange.experts
        line = "loads of experts"
        yield from collective_traffic(facts, line, "all_reduce", "lax", axes, "float32", size)
    if chunks > 1 and work.outputs:
        yield from _forward(facts, exchange, ", for the policy")
    back = work.shares or (chunks == 1 and work.outputs)
    if (chunks > 1 or work.again) and (work.rows or back):
        yield from _forward(facts, exchange, ", again", back=back)
    count = chunks * (work.rows + work.tokens)
    yield from times(_rows(facts, exchange, "gradients of rows"), count)


def _forward(
    facts: StepFacts, exchange: ExpertExchange, why: str, *, back: bool = True
) -> Iterator[Sent]:
    """Yields what a forward pass sends. back: results come back."""
    chunks, axes = facts.expert_chunks(exchange.routing_group), facts.roles.experts
    size = exchange.experts + ways(facts, axes)
    sent = _rows(facts, exchange, f"rows to their experts{why}")
    if back:
        sent += _rows(facts, exchange, f"rows back from their experts{why}")
    line = f"rows of each expert, and the first of each device{why}"
    sent += collective_traffic(facts, line, "all_to_all", "lax", axes, "int32", size)
    yield from times(sent, chunks)


def _rows(facts: StepFacts, exchange: ExpertExchange, why: str) -> list[Sent]:
    """Returns the sends of all rows of a chunk, once: as many as the buffers have room for. A
    ragged exchange sends rows only; they count as one for each choice, which is the most."""
    axes, algorithm = facts.roles.experts, facts.algorithms.experts
    devices, tokens = ways(facts, axes), facts.tokens // facts.expert_chunks(exchange.routing_group)
    sizes = (exchange.experts, devices, exchange.routing_group, exchange.rows_of_group)
    rows, kind = devices * sent_rows(tokens, exchange.per_token, *sizes), "all_to_all"
    if algorithm == "ragged":
        rows, kind, algorithm = min(rows, tokens * exchange.per_token), "ragged_all_to_all", "lax"
    size = rows * exchange.width
    return collective_traffic(facts, why, kind, algorithm, axes, facts.compute, size)
