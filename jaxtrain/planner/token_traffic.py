"""What moves tokens: tensor-parallel blocks, and the head and loss over a split vocabulary.

Sequence parallelism (Korthikanti et al. 2022): tokens are gathered before a column-split product
and scattered after a row-split one, twice a block, and the other way round in the backward pass.
`axes` are those that split heads, hidden units and vocabulary: `tensor`, or outside a pipeline
`tensor` and `stage`.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxtrain.planner.backward_work import Work
from jaxtrain.planner.facts import StepFacts
from jaxtrain.planner.sent import Sent, moved, times

Axes = tuple[str, ...]
PRODUCTS = 2
"""Column-split products of a block, and row-split ones: attention's and the feed-forward's."""


def gathered(facts: StepFacts, why: str, axes: Axes, count: int) -> Iterator[Sent]:
    """A microbatch's residual stream on a device, gathered over `axes` so often."""
    yield from _moved(facts, why, "all_gather", axes, count)


def scattered(facts: StepFacts, why: str, axes: Axes, count: int) -> Iterator[Sent]:
    """The same, summed and scattered."""
    yield from _moved(facts, why, "reduce_scatter", axes, count)


def _moved(facts: StepFacts, why: str, collective: str, axes: Axes, count: int) -> Iterator[Sent]:
    size = facts.tokens * facts.embed
    by = facts.tensor_by if axes == facts.tensor else "lax"
    one = moved(facts, why, collective, by, axes, facts.compute, size)
    return times(one, count)


def forward(facts: StepFacts, axes: Axes, blocks: int) -> Iterator[Sent]:
    """The forward pass of so many blocks."""
    yield from gathered(facts, "columns", axes, PRODUCTS * blocks)
    yield from scattered(facts, "rows", axes, PRODUCTS * blocks)


def backward(facts: StepFacts, axes: Axes, work: Work) -> Iterator[Sent]:
    """The backward pass of one turn of the remat policy's body."""
    yield from gathered(facts, "rows, backward", axes, work.rows)
    yield from scattered(facts, "columns, backward", axes, work.columns)
    yield from gathered(facts, "columns, again", axes, work.columns_again)
    yield from scattered(facts, "rows, again", axes, work.rows_again)


def head(facts: StepFacts, axes: Axes) -> Iterator[Sent]:
    """The vocabulary-parallel head and loss: all tokens meet every slice of the vocabulary."""
    yield from gathered(facts, "head", axes, 1)
    below = any(leaf.trained for name, leaf in facts.leaves.items() if name != "head")
    yield from scattered(facts, "head gradients", axes, int(below))
    chunk = facts.tokens // facts.chunks
    for why, each in (("greatest logit", chunk), ("sums over the vocabulary", 2 * chunk)):
        sums = moved(facts, why, "all_reduce", "lax", axes, "float32", each)
        yield from times(sums, facts.chunks)
