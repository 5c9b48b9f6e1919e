"""What moves tokens: tensor-parallel blocks, and the head and loss over a split vocabulary.

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
    facts: StepFacts, why: str, axes: MeshAxes, found: Iterable[Tokens]
) -> Iterator[Sent]:
    """A microbatch's tokens on a device, gathered over `axes`."""
    yield from _token_collectives(facts, why, "all_gather", axes, found)


def token_scatters(
    facts: StepFacts, why: str, axes: MeshAxes, found: Iterable[Tokens]
) -> Iterator[Sent]:
    """The same, summed and scattered."""
    yield from _token_collectives(facts, why, "reduce_scatter", axes, found)


def stream(facts: StepFacts, count: int = 1) -> list[Tokens]:
    """Those of the residual stream, so often."""
    return [Tokens(facts.model.embed)] * count


def _token_collectives(
    facts: StepFacts, why: str, collective: str, axes: MeshAxes, found: Iterable[Tokens]
) -> Iterator[Sent]:
    by = facts.by.tensor if axes == facts.tensor else "lax"
    for each, count in Counter(found).items():
        dtype, size = "uint8" if each.narrow else facts.compute, facts.tokens * each.width
        yield from times(collective_traffic(facts, why, collective, by, axes, dtype, size), count)


def maxima(facts: StepFacts, why: str, axes: MeshAxes, found: Iterable[Tensors]) -> Iterator[Sent]:
    """Greatest magnitudes of what products in 8 bits are made of, so many together: over all
    devices that have parts of them, of a pipeline those of a stage unless `axes`, which split the
    tokens, have all stages in them, of experts those that have the same ones. None where scales are
    those of the steps before."""
    if facts.scaling != "current":
        return
    p = facts.pipeline
    every = tuple(a for a in facts.sizes if p is None or a != p.axis or a in axes)
    apart = tuple(a for a in every if a in experts.EXPERT)
    for count, of_experts in found:
        over, size = every, count
        if of_experts:
            over, size = tuple(a for a in every if a not in apart), count // ways(facts, apart)
        yield from collective_traffic(facts, why, "all_reduce", "lax", over, "float32", size)


def head_sums(facts: StepFacts, why: str, axes: MeshAxes, found: Iterable[int]) -> Iterator[Sent]:
    """Sums over the devices that have parts of the heads, of so many numbers of each token."""
    for each in found:
        size = each * facts.tokens
        yield from collective_traffic(facts, why, "all_reduce", "lax", axes, "float32", size)


def embedding_lookup(facts: StepFacts, axes: MeshAxes, why: str = "embedding") -> Iterator[Sent]:
    """Tokens by the tables that are split over the vocabulary."""
    yield from token_scatters(facts, why, axes, stream(facts, len(facts.model.lookups)))


def embedding_lookup_backward(facts: StepFacts, axes: MeshAxes) -> Iterator[Sent]:
    """The gradients of those tables that are trained: of one sum, whose gradient is one."""
    trained = facts.trains(*facts.model.lookups)
    yield from token_gathers(facts, "embedding, backward", axes, stream(facts, int(trained)))


def forward(
    facts: StepFacts, axes: MeshAxes, blocks: Iterable[Block], why: str = ""
) -> Iterator[Sent]:
    """The forward pass of these blocks; why: what is added to the names of its lines."""
    for block in blocks:
        values = chain((block,), facts.narrow)
        yield from forward_to(facts, axes, values, range(len(values)), why)


def forward_to(
    facts: StepFacts, axes: MeshAxes, values: Sequence[Value], needed: Iterable[int], why: str
) -> Iterator[Sent]:
    """The forward pass as far as these values of a chain, by their numbers."""
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
    """The backward pass of one turn of the remat policy's body."""
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
    """The vocabulary-parallel head and loss: all tokens meet every slice of the vocabulary."""
    yield from token_gathers(facts, "head", axes, stream(facts))
    alone = () if facts.model.tied else (facts.model.head.leaf,)
    below = any(leaf.trained for name, leaf in facts.leaves.items() if name not in alone)
    yield from token_scatters(facts, "head gradients", axes, stream(facts, int(below)))
    chunk = facts.tokens // facts.chunks
    for why, each in (("greatest logit", chunk), ("sums over the vocabulary", 2 * chunk)):
        sums = collective_traffic(facts, why, "all_reduce", "lax", axes, "float32", each)
        yield from times(sums, facts.chunks)
