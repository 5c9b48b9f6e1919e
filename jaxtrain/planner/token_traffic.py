"""What moves tokens: tensor-parallel blocks, and the head and loss over a split vocabulary.

Sequence parallelism (Korthikanti et al. 2022): tokens are gathered before a column-split product
and scattered after a row-split one, twice a block, and the other way round in the backward pass.
`axes` are those that split heads, hidden units and vocabulary: `tensor`, or outside a pipeline
`tensor` and `stage`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxtrain.models.description import Block
from jaxtrain.planner.backward_work import Work, counted
from jaxtrain.planner.facts import StepFacts
from jaxtrain.planner.sent import Sent, moved, times

Axes = tuple[str, ...]


def gathered(facts: StepFacts, why: str, axes: Axes, count: int) -> Iterator[Sent]:
    """A microbatch's residual stream on a device, gathered over `axes` so often."""
    yield from _moved(facts, why, "all_gather", axes, count)


def scattered(facts: StepFacts, why: str, axes: Axes, count: int) -> Iterator[Sent]:
    """The same, summed and scattered."""
    yield from _moved(facts, why, "reduce_scatter", axes, count)


def _moved(facts: StepFacts, why: str, collective: str, axes: Axes, count: int) -> Iterator[Sent]:
    size = facts.tokens * facts.model.embed
    by = facts.tensor_by if axes == facts.tensor else "lax"
    one = moved(facts, why, collective, by, axes, facts.compute, size)
    return times(one, count)


def looked_up(facts: StepFacts, axes: Axes, why: str = "embedding") -> Iterator[Sent]:
    """Tokens by the tables that are split over the vocabulary."""
    yield from scattered(facts, why, axes, len(facts.model.lookups))


def looked_up_backward(facts: StepFacts, axes: Axes) -> Iterator[Sent]:
    """The gradients of those tables that are trained."""
    trained = sum(facts.trains(name) for name in facts.model.lookups)
    yield from gathered(facts, "embedding, backward", axes, trained)


def forward(facts: StepFacts, axes: Axes, blocks: Iterable[Block]) -> Iterator[Sent]:
    """The forward pass of these blocks."""
    blocks = list(blocks)
    gathers, scatters = (sum(counted(b, kind) for b in blocks) for kind in ("gather", "scatter"))
    yield from gathered(facts, "columns", axes, gathers)
    yield from scattered(facts, "rows", axes, scatters)


def backward(facts: StepFacts, axes: Axes, work: Work) -> Iterator[Sent]:
    """The backward pass of one turn of the remat policy's body."""
    yield from gathered(facts, "rows, backward", axes, work.rows)
    yield from scattered(facts, "columns, backward", axes, work.columns)
    yield from gathered(facts, "columns, again", axes, work.columns_again)
    yield from scattered(facts, "rows, again", axes, work.rows_again)


def head(facts: StepFacts, axes: Axes) -> Iterator[Sent]:
    """The vocabulary-parallel head and loss: all tokens meet every slice of the vocabulary."""
    yield from gathered(facts, "head", axes, 1)
    alone = () if facts.model.tied else (facts.model.head.leaf,)
    below = any(leaf.trained for name, leaf in facts.leaves.items() if name not in alone)
    yield from scattered(facts, "head gradients", axes, int(below))
    chunk = facts.tokens // facts.chunks
    for why, each in (("greatest logit", chunk), ("sums over the vocabulary", 2 * chunk)):
        sums = moved(facts, why, "all_reduce", "lax", axes, "float32", each)
        yield from times(sums, facts.chunks)
