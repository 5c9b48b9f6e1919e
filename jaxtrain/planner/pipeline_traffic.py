"""What the microbatches of a pipelined step send on their way, by arithmetic on its schedule.

Lock-step: a tick with F costs every stage one F's collectives, masked or not, so blocks count by
ticks. Embedding, head and their gradients run once a microbatch, whatever the schedule. Outside
the pipeline tokens are split over (tensor, stage): a stage is handed its share by a gather over
`stage`, and hands it back by a scatter.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxtrain.planner import token_traffic as tokens
from jaxtrain.planner.backward_work import body_work, fetched_again, stack_works
from jaxtrain.planner.facts import PipelineFacts, StepFacts
from jaxtrain.planner.sent import Sent, moved, times, ways
from jaxtrain.planner.token_traffic import PRODUCTS
from jaxtrain.planner.weight_traffic import Leaves, gathers, scatters, to_optimizer

PERIOD = "period."

KEEPS_PRODUCTS = ("dots", "dots_and_attention")
"""Policies that keep the outputs of a layer's products; then only the weights' gradients need their
inputs again."""
NEEDED_OF_BLOCK = {
    "none": (2, 1),
    "full": (0, 0),
    "attention": (1, 0),
    "dots": (2, 1),
    "dots_and_attention": (2, 1),
}
"""By remat policy, (column, row) products that a block makes before the last value it keeps: where
its output is not used, what comes after that is not computed."""


def pipeline_traffic(facts: StepFacts, p: PipelineFacts) -> Iterator[Sent]:
    """Of all microbatches, from the embedding to the gradients as the optimizer takes them, before
    the sums over the axes on which a leaf is whole."""
    microbatch = [*_entering(facts, p), *_leaving(facts, p)]
    exits = facts.trains("embedding", "positions", "prefix.")
    if exits:
        microbatch += _exiting(facts, p)
    yield from times(microbatch, facts.microbatches)
    yield from times(_forward(facts, p), p.forward)
    alone = int(p.ends_alone and not exits)  # what the last tick hands on nobody needs
    yield from times(_backward(facts, p, below=True), p.backward - alone)
    yield from times(_backward(facts, p, below=False), alone)
    yield from times(_weights(facts, p), p.weight)
    yield from times(_handed(facts, p, "activations to the next stage"), p.sent_on)
    yield from times(_handed(facts, p, "gradients to the stage before"), p.sent_back)
    blocks, outside = _parted(facts)
    why = "weights outside the pipeline"
    yield from gathers(facts, why, outside)
    if facts.sharded:
        yield from scatters(facts, f"gradients of {why}", outside)
        yield from to_optimizer(facts, outside)
    else:
        yield from gathers(facts, "weights of all chunks", blocks)
        yield from to_optimizer(facts, facts.leaves)


def _parted(facts: StepFacts) -> tuple[Leaves, Leaves]:
    """Those of the pipeline, and those outside it."""
    blocks = {k: leaf for k, leaf in facts.leaves.items() if k.startswith(PERIOD)}
    return blocks, {k: leaf for k, leaf in facts.leaves.items() if k not in blocks}


def blocks_outside(facts: StepFacts, part: str) -> list[str]:
    """Blocks before ("prefix.") or behind ("suffix.") the pipeline."""
    return [name for name in facts.layers.outside if name.startswith(part)]


def _handed(facts: StepFacts, p: PipelineFacts, why: str) -> list[Sent]:
    """What every stage but one, or with chunks every stage, hands to a neighbour."""
    size = facts.tokens // ways(facts, facts.tensor) * facts.embed
    whole = moved(facts, why, "all_gather", "lax", (p.axis,), facts.compute, size)
    return [Sent(why, "collective-permute", e.axes, e.dtype, e.buffer_bytes, 1) for e in whole]


def _between(facts: StepFacts, p: PipelineFacts, why: str, collective: str) -> list[Sent]:
    """A stage's tokens, gathered from the shares of all stages or scattered to them."""
    size = facts.tokens // ways(facts, facts.tensor) * facts.embed
    return moved(facts, why, collective, facts.tensor_by, (p.axis,), facts.compute, size)


def _entering(facts: StepFacts, p: PipelineFacts) -> Iterator[Sent]:
    """From ids to the first stage."""
    wide = (*facts.tensor, p.axis)
    yield from tokens.scattered(facts, "embedding", wide, 1)
    yield from tokens.forward(facts, wide, len(blocks_outside(facts, "prefix.")))
    yield from _between(facts, p, "pipeline input", "all_gather")


def _exiting(facts: StepFacts, p: PipelineFacts) -> Iterator[Sent]:
    """The gradients that come out of the first stage; blocks there run forward again, but for what
    of the last one is not needed."""
    wide, blocks = (*facts.tensor, p.axis), blocks_outside(facts, "prefix.")
    yield from _between(facts, p, "pipeline input gradients", "reduce_scatter")
    if blocks:
        yield from tokens.scattered(facts, "embedding, again for B", wide, 1)
        needed = NEEDED_OF_BLOCK[facts.layers.remat]
        yield from _rerun(facts, wide, len(blocks) - 1, 1, needed)
    for block in blocks:
        yield from tokens.backward(facts, wide, body_work(facts, [block], below=True))
    yield from tokens.gathered(facts, "embedding, backward", wide, int(facts.trains("embedding")))


def _leaving(facts: StepFacts, p: PipelineFacts) -> Iterator[Sent]:
    """From the last stage through head and loss, and back."""
    wide, blocks = (*facts.tensor, p.axis), blocks_outside(facts, "suffix.")
    yield from _between(facts, p, "pipeline output", "reduce_scatter")
    yield from tokens.forward(facts, wide, len(blocks))
    yield from tokens.head(facts, wide)
    for block in blocks:
        yield from tokens.backward(facts, wide, body_work(facts, [block], below=True))
    yield from _between(facts, p, "pipeline output gradients", "all_gather")


def _forward(facts: StepFacts, p: PipelineFacts) -> Iterator[Sent]:
    """A tick's F: one chunk forward."""
    yield from tokens.forward(facts, facts.tensor, facts.layers.period * p.depth)
    yield from _fetched(facts, p, "weights of a layer", p.depth)


def _backward(facts: StepFacts, p: PipelineFacts, *, below: bool) -> Iterator[Sent]:
    """A tick's B: one chunk forward again, unless F has kept what is needed, and back. below: the
    gradient of its input is needed."""
    layers, axes = facts.layers, facts.tensor
    if not p.kept:
        whole, part = run_again(facts, p)
        needed = needed_of_block(facts, p)
        yield from _rerun(facts, axes, layers.period * whole, layers.period * part, needed)
        turns = whole + part * _needs_weights(facts, p)
        yield from _fetched(facts, p, "weights of a layer, again for B", turns)
    again = not p.weight or layers.remat not in KEEPS_PRODUCTS
    found = stack_works(facts, p.depth, below=below)
    for work, turns in found:
        work = work if again else work._replace(columns_again=0)
        yield from times(tokens.backward(facts, axes, work), turns)
    if not again and layers.mixtures:
        count = layers.mixtures * p.depth
        yield from tokens.gathered(facts, "inputs of experts, again", axes, count)
    yield from _fetched(facts, p, "weights of a layer, backward", fetched_again(facts, found))
    blocks, _ = _parted(facts)
    yield from _weight_gradients(facts, p, _of_experts(facts, blocks) if p.weight else blocks)


def run_again(facts: StepFacts, p: PipelineFacts) -> tuple[int, int]:
    """(turns of a chunk run whole, turns whose result nobody needs): the last one's, unless it is a
    turn of a loop like the others, or goes to the head."""
    layers = facts.layers
    looped = not layers.unroll and not layers.prefetch and p.depth > 1
    return (p.depth, 0) if looped or p.late_head else (p.depth - 1, 1)


def needed_of_block(facts: StepFacts, p: PipelineFacts) -> tuple[int, int]:
    """(column, row) products that make what B keeps of the last block: where there is W, also the
    input of its last product."""
    return NEEDED_OF_BLOCK["none" if p.weight else facts.layers.remat]


def _needs_weights(facts: StepFacts, p: PipelineFacts) -> bool:
    """Whether the last turn of the forward pass that B runs again has its weights gathered: they
    are for what it keeps, or are kept themselves, or come in a loop for the turn after."""
    layers = facts.layers
    ahead = layers.prefetch and not layers.unroll and p.depth > 2
    return any(needed_of_block(facts, p)) or not layers.reshard or ahead


def _rerun(
    facts: StepFacts, axes: tuple[str, ...], whole: int, part: int, needed: tuple[int, int]
) -> Iterator[Sent]:
    """`whole` blocks forward, then `part` of whose last one only the products `needed` are; if it
    needs none, nor do those before it in its turn of the stack."""
    columns, rows = needed
    if part and columns:
        whole += part - 1
    before = PRODUCTS * whole
    yield from tokens.gathered(facts, "columns, again for B", axes, before + columns * (part > 0))
    yield from tokens.scattered(facts, "rows, again for B", axes, before + rows * (part > 0))


def _weights(facts: StepFacts, p: PipelineFacts) -> Iterator[Sent]:
    """A tick's W: the inputs of all products and their outputs' gradients, which lie split, are
    gathered again for the weights'."""
    count = (PRODUCTS * facts.layers.period - facts.layers.mixtures) * p.depth
    yield from tokens.gathered(facts, "columns, for weight gradients", facts.tensor, count)
    yield from tokens.gathered(facts, "rows, for weight gradients", facts.tensor, count)
    blocks, _ = _parted(facts)
    made = _of_experts(facts, blocks)
    yield from _weight_gradients(facts, p, {k: v for k, v in blocks.items() if k not in made})


def _of_experts(facts: StepFacts, blocks: Leaves) -> Leaves:
    """Those whose gradients B makes, W or not."""
    return {k: leaf for k, leaf in blocks.items() if k.startswith(facts.layers.experts)}


def _fetched(facts: StepFacts, p: PipelineFacts, why: str, turns: int) -> Iterator[Sent]:
    """A turn's weights, gathered for use so often; nothing where they are gathered once a step."""
    if facts.sharded:
        blocks, _ = _parted(facts)
        yield from times(gathers(facts, why, blocks, layers=p.chunks * p.depth), turns)


def _weight_gradients(facts: StepFacts, p: PipelineFacts, blocks: Leaves) -> Iterator[Sent]:
    """A chunk's, turn by turn, to where weights rest; then all of them to where the optimizer's
    state does."""
    if facts.sharded:
        layer = scatters(facts, "weight gradients of a layer", blocks, layers=p.chunks * p.depth)
        yield from times(layer, p.depth)
        yield from to_optimizer(facts, blocks, parts=p.chunks)
