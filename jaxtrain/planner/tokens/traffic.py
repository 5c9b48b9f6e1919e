"""Predicts what moves tokens: tensor-parallel blocks, and the head and loss over a split
vocabulary.

Sequence parallelism (Korthikanti et al. 2022): tokens are gathered before a column-split product
and scattered after a row-split one, twice a block, and the other way round in the backward pass.
`axes` are those that split heads, hidden units and vocabulary: `tensor`, or outside a pipeline
`tensor` and `stage`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from jaxtrain.models.description import Block, ExpertCall
from jaxtrain.planner.backward_work import Work
from jaxtrain.planner.facts import StepFacts
from jaxtrain.planner.sent import MeshAxes, Sent, collective_traffic, times, ways
from jaxtrain.planner.tokens import context, experts
from jaxtrain.planner.values import Tensors, Tokens, Value, chain, gathered, moved, summed


def token_gathers(
    facts: StepFacts, why: str, axes: MeshAxes, gathers: Iterable[Tokens]
) -> Iterator[Sent]:
    """Yields the gathers over `axes` of a microbatch's tokens on a device."""
    yield from _token_collectives(facts, why, "all_gather", axes, gathers)


def token_scatters(
    facts: StepFacts, why: str, axes: MeshAxes, scatters: Iterable[Tokens]
) -> Iterator[Sent]:
    """Yields the reduce-scatters over `axes` of a microbatch's tokens."""
    yield from _token_collectives(facts, why, "reduce_scatter", axes, scatters)


def stream(facts: StepFacts, count: int = 1) -> list[Tokens]:
    """Tokens of the residual stream, `count` times."""
    return [Tokens(facts.model.embed)] * count


def _token_collectives(
    facts: StepFacts, why: str, collective: str, axes: MeshAxes, sent: Iterable[Tokens]
) -> Iterator[Sent]:
    algorithm = facts.algorithms.tensor if axes == facts.tensor else "lax"
    for token, count in Counter(sent).items():
        dtype, size = "uint8" if token.narrow else facts.compute, facts.tokens * token.width
        yield from times(
            collective_traffic(facts, why, collective, algorithm, axes, dtype, size), count
        )


def maxima(
    facts: StepFacts, why: str, axes: MeshAxes, tensors: Iterable[Tensors]
) -> Iterator[Sent]:
    """Yields all-reduces of maximum magnitudes for products in 8 bits, `count` together for each of
    `tensors`.

    They run over all devices that have parts of the tensors. In a pipeline these are a stage's
    devices, unless `axes`, which split the tokens, include all stages; for experts, the devices
    with the same ones. Nothing if scales are those of previous steps.
    """
    if facts.scaling != "current":
        return
    p = facts.pipeline
    every = tuple(a for a in facts.sizes if p is None or a != p.axis or a in axes)
    apart = tuple(a for a in every if a in experts.EXPERT)
    for count, of_experts in tensors:
        over, size = every, count
        if of_experts:
            over, size = tuple(a for a in every if a not in apart), count // ways(facts, apart)
        yield from collective_traffic(facts, why, "all_reduce", "lax", over, "float32", size)


def head_sums(facts: StepFacts, why: str, axes: MeshAxes, widths: Iterable[int]) -> Iterator[Sent]:
    """Yields all-reduces over the devices that split heads, of `widths` numbers of each token."""
    for width in widths:
        size = width * facts.tokens
        yield from collective_traffic(facts, why, "all_reduce", "lax", axes, "float32", size)


def embedding_lookup(facts: StepFacts, axes: MeshAxes, why: str = "embedding") -> Iterator[Sent]:
    """Yields the token scatters of tables that are split over the vocabulary."""
    yield from token_scatters(facts, why, axes, stream(facts, len(facts.model.lookups)))


def embedding_lookup_backward(facts: StepFacts, axes: MeshAxes) -> Iterator[Sent]:
    """Yields the gather for the gradients of those tables that are trained. The look-ups are
    summed, so their gradient is one."""
    trained = facts.trains(*facts.model.lookups)
    yield from token_gathers(facts, "embedding, backward", axes, stream(facts, int(trained)))


def forward(
    facts: StepFacts, axes: MeshAxes, blocks: Iterable[Block], why: str = ""
) -> Iterator[Sent]:
    """Yields the forward collectives of these blocks. why: added to the names of its lines."""
    for block in blocks:
        values = chain((block,), facts.narrow)
        yield from forward_to(facts, axes, values, range(len(values)), why)


def forward_to(
    facts: StepFacts, axes: MeshAxes, values: Sequence[Value], needed: Iterable[int], why: str
) -> Iterator[Sent]:
    """Yields the collectives of the forward pass for the values of a chain with these numbers."""
    needed = list(needed)
    scattered = [Tokens(values[n].width) for n in needed if values[n].kind == "scatter"]
    inputs = [n for number in needed for n in values[number].input_scales]
    yield from maxima(facts, f"greatest inputs{why}", axes, inputs)
    yield from token_gathers(facts, f"columns{why}", axes, gathered(values, needed))
    yield from token_scatters(facts, f"rows{why}", axes, scattered)
    yield from head_sums(facts, f"squares over heads{why}", axes, summed(values, needed))
    yield from context.forward(facts, axes, moved(values, needed), why)
    for number in needed:
        call = values[number].operation
        if values[number].kind == "experts" and isinstance(call, ExpertCall):
            yield from experts.forward(facts, call, why)


def backward(facts: StepFacts, axes: MeshAxes, work: Work) -> Iterator[Sent]:
    """Yields the collectives of the backward pass of one turn of the remat policy's body."""
    yield from maxima(facts, "greatest gradients", axes, work.maxima)
    yield from token_gathers(facts, "rows, backward", axes, work.rows)
    yield from token_scatters(facts, "columns, backward", axes, work.columns)
    again = (*work.columns_again, *work.others_again)
    yield from token_gathers(facts, "columns, again", axes, again)
    yield from token_gathers(facts, "columns, for weight gradients", axes, work.regathered)
    yield from maxima(facts, "greatest inputs, again", axes, work.maxima_again)
    yield from token_scatters(facts, "rows, again", axes, work.rows_again)
    yield from head_sums(facts, "squares over heads, backward", axes, work.sums)
    yield from head_sums(facts, "squares over heads, again", axes, work.sums_again)
    yield from context.backward(facts, axes, work.moved)
    yield from context.forward(facts, axes, work.moved_again, ", again")
    for call, flow in work.experts:
        yield from experts.backward(facts, call, flow=flow)
    for call in work.experts_again:
        yield from experts.again(facts, call)


def head(facts: StepFacts, axes: MeshAxes) -> Iterator[Sent]:
    """Yields the collectives of the vocabulary-parallel head and loss. Every slice of the
    vocabulary sees all tokens."""
    yield from token_gathers(facts, "head", axes, stream(facts))
    alone = () if facts.model.tied else (facts.model.head.leaf,)
    below = any(leaf.trained for name, leaf in facts.leaves.items() if name not in alone)
    yield from token_scatters(facts, "head gradients", axes, stream(facts, int(below)))
    chunk = facts.tokens // facts.chunks
    for why, elements in (("greatest logit", chunk), ("sums over the vocabulary", 2 * chunk)):
        sums = collective_traffic(facts, why, "all_reduce", "lax", axes, "float32", elements)
        yield from times(sums, facts.chunks)
