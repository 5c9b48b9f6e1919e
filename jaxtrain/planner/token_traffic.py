"""What moves tokens: tensor-parallel blocks, and the head and loss over a split vocabulary.

Sequence parallelism (Korthikanti et al. 2022): tokens are gathered before a column-split product
and scattered after a row-split one, twice a block, and the other way round in the backward pass.
`axes` are those that split heads, hidden units and vocabulary: `tensor`, or outside a pipeline
`tensor` and `stage`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jaxtrain.models.description import Block
from jaxtrain.planner.backward_work import Value, Work, chain, count_gathers
from jaxtrain.planner.facts import StepFacts
from jaxtrain.planner.sent import MeshAxes, Sent, collective_traffic, times


def token_gathers(
    facts: StepFacts, why: str, axes: MeshAxes, count: int, narrow: int = 0
) -> Iterator[Sent]:
    """A microbatch's residual stream on a device, gathered over `axes` so often, and of that
    `narrow` times in 8 bits."""
    yield from _token_collectives(facts, why, "all_gather", axes, count - narrow)
    yield from _token_collectives(facts, why, "all_gather", axes, narrow, "uint8")


def token_scatters(facts: StepFacts, why: str, axes: MeshAxes, count: int) -> Iterator[Sent]:
    """The same, summed and scattered."""
    yield from _token_collectives(facts, why, "reduce_scatter", axes, count)


def _token_collectives(
    facts: StepFacts, why: str, collective: str, axes: MeshAxes, count: int, dtype: str = ""
) -> Iterator[Sent]:
    size = facts.tokens * facts.model.embed
    by = facts.by.tensor if axes == facts.tensor else "lax"
    one = collective_traffic(facts, why, collective, by, axes, dtype or facts.compute, size)
    return times(one, count)


def maxima(facts: StepFacts, why: str, axes: MeshAxes, sizes: Iterable[int]) -> Iterator[Sent]:
    """Greatest magnitudes of what products in 8 bits are made of, so many together: over all
    devices that have parts of them, of a pipeline those of a stage unless `axes`, which split the
    tokens, have all stages in them. None where scales are those of the steps before."""
    if facts.scaling != "current":
        return
    p = facts.pipeline
    over = tuple(a for a in facts.sizes if p is None or a != p.axis or a in axes)
    for count in sizes:
        yield from collective_traffic(facts, why, "all_reduce", "lax", over, "float32", count)


def embedding_lookup(facts: StepFacts, axes: MeshAxes, why: str = "embedding") -> Iterator[Sent]:
    """Tokens by the tables that are split over the vocabulary."""
    yield from token_scatters(facts, why, axes, len(facts.model.lookups))


def embedding_lookup_backward(facts: StepFacts, axes: MeshAxes) -> Iterator[Sent]:
    """The gradients of those tables that are trained: of one sum, whose gradient is one."""
    trained = facts.trains(*facts.model.lookups)
    yield from token_gathers(facts, "embedding, backward", axes, int(trained))


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
    kinds = [values[number].kind for number in needed]
    yield from maxima(facts, f"greatest inputs{why}", axes, [1] * kinds.count("narrow"))
    yield from token_gathers(facts, f"columns{why}", axes, *count_gathers(values, needed))
    yield from token_scatters(facts, f"rows{why}", axes, kinds.count("scatter"))


def backward(facts: StepFacts, axes: MeshAxes, work: Work) -> Iterator[Sent]:
    """The backward pass of one turn of the remat policy's body."""
    yield from maxima(facts, "greatest gradients", axes, work.maxima)
    yield from token_gathers(facts, "rows, backward", axes, work.rows, work.narrow_rows)
    yield from token_scatters(facts, "columns, backward", axes, work.columns)
    again = (work.columns_again, work.narrow_again)
    yield from token_gathers(facts, "columns, again", axes, *again)
    found = (work.regathered, work.regathered)
    yield from token_gathers(facts, "columns, for weight gradients", axes, *found)
    yield from maxima(facts, "greatest inputs, again", axes, [1] * work.maxima_again)
    yield from token_scatters(facts, "rows, again", axes, work.rows_again)


def head(facts: StepFacts, axes: MeshAxes) -> Iterator[Sent]:
    """The vocabulary-parallel head and loss: all tokens meet every slice of the vocabulary."""
    yield from token_gathers(facts, "head", axes, 1)
    alone = () if facts.model.tied else (facts.model.head.leaf,)
    below = any(leaf.trained for name, leaf in facts.leaves.items() if name not in alone)
    yield from token_scatters(facts, "head gradients", axes, int(below))
    chunk = facts.tokens // facts.chunks
    for why, each in (("greatest logit", chunk), ("sums over the vocabulary", 2 * chunk)):
        sums = collective_traffic(facts, why, "all_reduce", "lax", axes, "float32", each)
        yield from times(sums, facts.chunks)
