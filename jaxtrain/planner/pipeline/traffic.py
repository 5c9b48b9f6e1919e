"""What the microbatches of a pipelined step send on their way, by arithmetic on its schedule.

Lock-step: a tick with F costs every stage one F's collectives, masked or not, so blocks count by
ticks. Embedding, head and their gradients run once a microbatch, whatever the schedule. Outside
the pipeline tokens are split over (tensor, stage): a stage is handed its share by a gather over
`stage`, and hands it back by a scatter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jaxtrain.models.description import (
    STACK,
    Block,
    Elementwise,
    ExpertCall,
    ReplicatedProduct,
    matrices,
    operations,
)
from jaxtrain.planner.backward_work import body_work, fetched_again, needed_for_kept, stack_works
from jaxtrain.planner.facts import PipelineFacts, StepFacts
from jaxtrain.planner.sent import MeshAxes, Sent, collective_traffic, times, ways
from jaxtrain.planner.tokens import traffic as tokens
from jaxtrain.planner.values import Tokens, chain
from jaxtrain.planner.weight_traffic import (
    Leaves,
    fetches,
    gathers,
    scatters,
    to_optimizer,
    weight_maxima,
)

AGAIN = ", again for B"
KEEPS_PRODUCTS = ("dots", "dots_and_attention")
"""Policies that keep the outputs of a layer's products; then only the weights' gradients need their
inputs again."""


def pipeline_traffic(facts: StepFacts, p: PipelineFacts) -> Iterator[Sent]:
    """Of all microbatches, from the embedding to the gradients as the optimizer takes them, before
    the sums over the axes on which a leaf is whole."""
    microbatch = [*_entering(facts, p), *_leaving(facts, p)]
    exits = facts.trains(*facts.model.entering_alone, *facts.model.before)
    if exits:
        microbatch += _exiting(facts, p)
    yield from times(microbatch, facts.microbatches)
    yield from times(_forward(facts, p), p.forward)
    alone = int(p.ends_alone and not exits)  # what the last tick hands on nobody needs
    yield from times(_backward(facts, p, below=True), p.backward - alone)
    yield from times(_backward(facts, p, below=False), alone)
    yield from times(_weights(facts, p), p.weight)
    yield from times(_stage_sends(facts, p, "activations to the next stage"), p.sent_on)
    yield from times(_stage_sends(facts, p, "gradients to the stage before"), p.sent_back)
    blocks, outside = _stack_and_outside(facts)
    why = "weights outside the pipeline"
    yield from gathers(facts, why, outside, once=True)
    if facts.sharded:
        yield from scatters(facts, f"gradients of {why}", outside)
        yield from to_optimizer(facts, outside)
    else:
        yield from gathers(facts, "weights of all chunks", blocks, once=True)
        yield from to_optimizer(facts, facts.leaves)


def _stack_and_outside(facts: StepFacts) -> tuple[Leaves, Leaves]:
    """Those of the pipeline, and those outside it."""
    blocks = {k: leaf for k, leaf in facts.leaves.items() if k.startswith(STACK)}
    return blocks, {k: leaf for k, leaf in facts.leaves.items() if k not in blocks}


def _stage_sends(facts: StepFacts, p: PipelineFacts, why: str) -> list[Sent]:
    """What every stage but one, or with chunks every stage, hands to a neighbour."""
    size = facts.tokens // ways(facts, facts.tensor) * facts.model.embed
    whole = collective_traffic(facts, why, "all_gather", "lax", (p.axis,), facts.compute, size)
    return [Sent(why, "collective-permute", e.axes, e.dtype, e.buffer_bytes, 1) for e in whole]


def _between(facts: StepFacts, p: PipelineFacts, why: str, collective: str) -> list[Sent]:
    """A stage's tokens, gathered from the shares of all stages or scattered to them."""
    size = facts.tokens // ways(facts, facts.tensor) * facts.model.embed
    return collective_traffic(
        facts, why, collective, facts.by.tensor, (p.axis,), facts.compute, size
    )


def _entering(facts: StepFacts, p: PipelineFacts) -> Iterator[Sent]:
    """From ids to the first stage."""
    wide = (*facts.tensor, p.axis)
    yield from tokens.embedding_lookup(facts, wide)
    yield from tokens.forward(facts, wide, facts.model.before.values())
    yield from _maxima(facts, facts.model.before)
    yield from _between(facts, p, "pipeline input", "all_gather")


def _exiting(facts: StepFacts, p: PipelineFacts) -> Iterator[Sent]:
    """The gradients that come out of the first stage; blocks there run forward again, but for what
    of the last one is not needed."""
    wide, before = (*facts.tensor, p.axis), facts.model.before
    yield from _between(facts, p, "pipeline input gradients", "reduce_scatter")
    if before or any(isinstance(each, Elementwise) for each in facts.model.entry):
        yield from tokens.embedding_lookup(facts, wide, f"embedding{AGAIN}")
    if before:
        *whole, last = before.values()
        yield from tokens.forward(facts, wide, whole, AGAIN)
        yield from _rerun_to_kept(facts, wide, (last,))
        rerun = [*before] if _kept(facts, (last,), split=False) else [*before][:-1]
        yield from _maxima(facts, rerun)
    yield from _outside_backward(facts, wide, before)
    yield from tokens.embedding_lookup_backward(facts, wide)


def _leaving(facts: StepFacts, p: PipelineFacts) -> Iterator[Sent]:
    """From the last stage through head and loss, and back."""
    wide, behind = (*facts.tensor, p.axis), facts.model.after
    yield from _between(facts, p, "pipeline output", "reduce_scatter")
    yield from tokens.forward(facts, wide, behind.values())
    yield from _maxima(facts, behind)
    yield from tokens.head(facts, wide)
    yield from _outside_backward(facts, wide, behind)
    yield from _between(facts, p, "pipeline output gradients", "all_gather")


def _outside_backward(facts: StepFacts, wide: MeshAxes, paths: Iterable[str]) -> Iterator[Sent]:
    """Of the blocks at these paths, outside the pipeline."""
    for path in paths:
        work = body_work(facts, [path], below=True)
        yield from tokens.backward(facts, wide, work)
        if work.weights and facts.loop.remat != "none":
            yield from _maxima(facts, [path])


def _maxima(facts: StepFacts, paths: Iterable[str]) -> Iterator[Sent]:
    """Those of the weights of each block at these paths, where it is run."""
    for path in paths:
        leaves = {k: leaf for k, leaf in facts.leaves.items() if k.startswith(path)}
        why = f"weights of {path.rstrip('.')}"
        yield from weight_maxima(facts, why, leaves, gathered=False)


def _forward(facts: StepFacts, p: PipelineFacts) -> Iterator[Sent]:
    """A tick's F: one chunk forward."""
    yield from tokens.forward(facts, facts.tensor, facts.model.period * p.depth)
    yield from _weight_gathers(facts, p, "weights of a layer", p.depth)


def _backward(facts: StepFacts, p: PipelineFacts, *, below: bool) -> Iterator[Sent]:
    """A tick's B: one chunk forward again, unless F has kept what is needed, and back. below: the
    gradient of its input is needed."""
    axes, period = facts.tensor, facts.model.period
    if not p.kept:
        whole, part = run_again(facts, p)
        yield from tokens.forward(facts, axes, period * whole, AGAIN)
        if part:
            split = p.weight > 0
            yield from _rerun_to_kept(facts, axes, period, split=split)
        turns = whole + part * _needs_weights(facts, p)
        yield from _weight_gathers(facts, p, "weights of a layer, again for B", turns)
    again = not p.weight or facts.loop.remat not in KEEPS_PRODUCTS
    found = stack_works(facts, p.depth, below=below)
    for work, turns in found:
        work = work if again else work._replace(columns_again=())
        yield from times(tokens.backward(facts, axes, work), turns)
    yield from _weight_gathers(
        facts, p, "weights of a layer, backward", fetched_again(facts, found)
    )
    blocks, _ = _stack_and_outside(facts)
    yield from _weight_gradients(facts, p, _made_before(facts, blocks) if p.weight else blocks)


def run_again(facts: StepFacts, p: PipelineFacts) -> tuple[int, int]:
    """(turns of a chunk run whole, turns whose result nobody needs): the last one's, unless it is a
    turn of a loop like the others, or goes to the head."""
    looped = not facts.loop.unroll and not facts.loop.prefetch and p.depth > 1
    return (p.depth, 0) if looped or p.late_head else (p.depth - 1, 1)


def _needs_weights(facts: StepFacts, p: PipelineFacts) -> bool:
    """Whether the last turn of the forward pass that B runs again has its weights gathered: they
    are for what it keeps, or are kept themselves, or come in a loop for the turn after."""
    loop = facts.loop
    ahead = loop.prefetch and not loop.unroll and p.depth > 2
    needed = _kept(facts, facts.model.period, split=p.weight > 0)
    return bool(needed) or not loop.reshard or ahead


def _rerun_to_kept(
    facts: StepFacts,
    axes: tuple[str, ...],
    blocks: tuple[Block, ...],
    *,
    split: bool = False,
) -> Iterator[Sent]:
    """A body of blocks forward again as far as what its backward pass finds kept."""
    values = chain(blocks, facts.narrow)
    yield from tokens.forward_to(facts, axes, values, _kept(facts, blocks, split=split), AGAIN)


def _kept(facts: StepFacts, blocks: tuple[Block, ...], *, split: bool) -> frozenset[int]:
    return needed_for_kept(blocks, facts.loop.remat, split=split, narrow=facts.narrow)


def _weights(facts: StepFacts, p: PipelineFacts) -> Iterator[Sent]:
    """A tick's W: the inputs of all products and their outputs' gradients, which lie split, are
    gathered again for the weights'."""
    values = chain(facts.model.period)
    columns, rows = (
        [Tokens(value.width) for value in values if value.kind == kind] * p.depth
        for kind in ("columns", "rows")
    )
    yield from tokens.token_gathers(facts, "columns, for weight gradients", facts.tensor, columns)
    yield from tokens.token_gathers(facts, "rows, for weight gradients", facts.tensor, rows)
    blocks, _ = _stack_and_outside(facts)
    made = _made_before(facts, blocks)
    yield from _weight_gradients(facts, p, {k: v for k, v in blocks.items() if k not in made})


def _made_before(facts: StepFacts, blocks: Leaves) -> Leaves:
    """Matrices whose gradients B makes, W or not."""
    made = {
        path + weight.leaf
        for path, block in facts.model.stacked.items()
        for each in operations(block)
        if isinstance(each, ExpertCall | ReplicatedProduct)
        for weight in matrices(each)
    }
    return {k: leaf for k, leaf in blocks.items() if k in made}


def _weight_gathers(facts: StepFacts, p: PipelineFacts, why: str, turns: int) -> Iterator[Sent]:
    """A turn's weights, made ready for use so often."""
    blocks, _ = _stack_and_outside(facts)
    yield from times(fetches(facts, why, blocks, layers=p.chunks * p.depth), turns)


def _weight_gradients(facts: StepFacts, p: PipelineFacts, blocks: Leaves) -> Iterator[Sent]:
    """A chunk's, turn by turn, to where weights rest; then all of them to where the optimizer's
    state does."""
    if facts.sharded:
        layer = scatters(facts, "weight gradients of a layer", blocks, layers=p.chunks * p.depth)
        yield from times(layer, p.depth)
        yield from to_optimizer(facts, blocks, parts=p.chunks)
