"""Predicts what the microbatches of a pipelined step send, from its schedule.

Stages run in lock-step: a tick with F costs every stage one F's collectives, masked or not, so
blocks count by ticks. Embedding, head and their gradients run once a microbatch, whatever the
schedule. Outside the pipeline tokens are split over (tensor, stage): a gather over `stage` gives a
stage its input, and a scatter returns its output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace

from jaxtrain.mesh.roles import Roles
from jaxtrain.models.description import STACK
from jaxtrain.operations.block import Block, chain, deferred_matrices, matrices
from jaxtrain.operations.recompute import block_again, members_read, needed_for_saved
from jaxtrain.planner import token_traffic as tokens
from jaxtrain.planner.backward_work import body_work, fetched_again, stack_works, with_adapters
from jaxtrain.planner.facts import PipelineFacts, StepFacts
from jaxtrain.planner.sent import Sent, collective_traffic, times, ways
from jaxtrain.planner.weight_traffic import (
    LeafTable,
    fetches,
    gathers,
    scatters,
    to_optimizer,
    weight_maxima,
)

AGAIN = ", again for B"


def pipeline_traffic(facts: StepFacts, p: PipelineFacts) -> Iterator[Sent]:
    """Yields the collectives of a pipelined step, from the embedding to the gradients in the
    optimizer's split. `step_traffic` adds the sums over the axes on which a leaf is replicated."""
    microbatch = [*_entering(facts, p), *_leaving(facts, p)]
    exits = facts.trains(*facts.model.entering_alone, *facts.model.prefix)
    if exits:
        microbatch += _exiting(facts, p)
    yield from times(microbatch, facts.microbatches)
    yield from times(_forward(facts, p), p.forward)
    alone = int(p.ends_alone and not exits)  # the last tick's output is not needed
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


def _stack_and_outside(facts: StepFacts) -> tuple[LeafTable, LeafTable]:
    """Returns the leaves of the pipeline, and those outside it."""
    blocks = {k: leaf for k, leaf in facts.leaves.items() if k.startswith(STACK)}
    return blocks, {k: leaf for k, leaf in facts.leaves.items() if k not in blocks}


def _stage_sends(facts: StepFacts, p: PipelineFacts, why: str) -> Iterator[Sent]:
    """Yields what every stage but one, or with chunks every stage, sends to a neighbour."""
    for gather in _between(facts, p, why, "all_gather", "lax"):
        yield replace(gather, kind="collective-permute", count=1)


def _between(
    facts: StepFacts, p: PipelineFacts, why: str, collective: str, algorithm: str = ""
) -> Iterator[Sent]:
    """Yields, for each member of the stream, a collective over stages of a device's tokens: those
    of the shards of all stages gathered, or scattered to them."""
    algorithm, split = algorithm or facts.algorithms.tensor, ways(facts, facts.roles.stream)
    for member in facts.model.members.values():
        if member.leaves or "output" not in why:
            size = facts.tokens // split * member.width
            args = (facts, why, collective, algorithm, (p.axis,), facts.compute, size)
            yield from collective_traffic(*args)


def _entering(facts: StepFacts, p: PipelineFacts) -> Iterator[Sent]:
    """Yields the collectives from ids to the first stage."""
    wide = facts.roles.outside_stack()
    yield from tokens.embedding_lookup(facts, wide)
    yield from tokens.forward(facts, wide, facts.model.prefix.values())
    yield from _maxima(facts, facts.model.prefix)
    yield from _between(facts, p, "pipeline input", "all_gather")


def _exiting(facts: StepFacts, p: PipelineFacts) -> Iterator[Sent]:
    """Yields the collectives of the gradients that leave the first stage. Blocks before it run
    forward again, except for unneeded values of the last one."""
    wide, entry_blocks = facts.roles.outside_stack(), facts.model.prefix
    blocks = [*entry_blocks.values()]
    yield from _between(facts, p, "pipeline input gradients", "reduce_scatter")
    read = members_read((facts.model.entry, *blocks), facts.narrow)
    yield from tokens.embedding_lookup(facts, wide, f"embedding{AGAIN}", read)
    for number, (path, block) in enumerate(entry_blocks.items()):
        again = block_again(blocks, number, facts.loop.remat, narrow=facts.narrow)
        nodes = chain((block,), facts.narrow)
        yield from tokens.forward_to(facts, wide, nodes, sorted(again), AGAIN)
        yield from _maxima(facts, [path] if again else [])
    yield from _outside_backward(facts, wide, entry_blocks)
    yield from tokens.embedding_lookup_backward(facts, wide)


def _leaving(facts: StepFacts, p: PipelineFacts) -> Iterator[Sent]:
    """Yields the collectives from the last stage through head and loss, and back."""
    wide, behind = facts.roles.outside_stack(), facts.model.suffix
    yield from _between(facts, p, "pipeline output", "reduce_scatter")
    yield from tokens.forward(facts, wide, behind.values())
    yield from _maxima(facts, behind)
    yield from tokens.head(facts, wide)
    yield from _outside_backward(facts, wide, behind)
    yield from _between(facts, p, "pipeline output gradients", "all_gather")


def _outside_backward(facts: StepFacts, wide: Roles, paths: Iterable[str]) -> Iterator[Sent]:
    """Yields the backward collectives of the blocks at these paths, outside the pipeline."""
    for path in paths:
        work = body_work(facts, [path], below=True)
        yield from tokens.backward(facts, wide, work)
        if work.read and facts.loop.remat != "none":
            yield from _maxima(facts, [path])


def _maxima(facts: StepFacts, paths: Iterable[str]) -> Iterator[Sent]:
    """Yields the maxima of the weights of each block at these paths."""
    for path in paths:
        leaves = {k: leaf for k, leaf in facts.leaves.items() if k.startswith(path)}
        why = f"weights of {path.rstrip('.')}"
        yield from weight_maxima(facts, why, leaves, gathered=False)


def _forward(facts: StepFacts, p: PipelineFacts) -> Iterator[Sent]:
    """Yields the collectives of a tick's F: one chunk forward."""
    yield from tokens.forward(facts, facts.roles, facts.model.period * p.depth)
    yield from _weight_gathers(facts, p, "weights of a layer", p.depth)


def _backward(facts: StepFacts, p: PipelineFacts, *, below: bool) -> Iterator[Sent]:
    """Yields the collectives of a tick's B: one chunk forward again, unless F has kept what B
    needs, and backward. below: the gradient of its input is needed."""
    roles, period = facts.roles, facts.model.period
    if not p.keeps_residuals:
        full, part = run_again(facts, p)
        yield from tokens.forward(facts, roles, period * full, AGAIN)
        if part:
            nodes = chain(period, facts.narrow)
            saved = _saved(facts, period, split=p.weight > 0)
            yield from tokens.forward_to(facts, roles, nodes, saved, AGAIN)
        why = "weights of a layer, again for B"
        yield from _weight_gathers(facts, p, why, full)
        yield from _weight_gathers(facts, p, why, part, _read_again(facts, p))
    turn_works = stack_works(facts, p.depth, below=below, split=p.weight > 0)
    for work, turns in turn_works:
        yield from times(tokens.backward(facts, roles, work), turns)
    for read, count in fetched_again(facts, turn_works):
        yield from _weight_gathers(facts, p, "weights of a layer, backward", count, read)
    blocks, _ = _stack_and_outside(facts)
    yield from _weight_gradients(facts, p, _made_before(facts, blocks) if p.weight else blocks)


def run_again(facts: StepFacts, p: PipelineFacts) -> tuple[int, int]:
    """Returns (turns of a chunk run in full, turns whose result is not needed). The last turn's
    result is not needed, unless the turn is one of a loop, or goes to the head."""
    looped = not facts.loop.unroll and not facts.loop.prefetch and p.depth > 1
    return (p.depth, 0) if looped or p.late_head else (p.depth - 1, 1)


def _read_again(facts: StepFacts, p: PipelineFacts) -> Set[str] | None:
    """Returns the leaves of a layer that the last turn of the forward pass that B repeats reads:
    those that compute the values it keeps. None for all, because weights are kept, or because a
    loop prefetches them for the next turn."""
    loop = facts.loop
    ahead = loop.prefetch and not loop.unroll and p.depth > 2
    if not loop.reshard or ahead:
        return None
    nodes, paths = chain(facts.model.period, facts.narrow), [*facts.model.stacked]
    needed = [nodes[n] for n in _saved(facts, facts.model.period, split=p.weight > 0)]
    read = {name for n in needed for name in with_adapters(paths[n.block], n.leaves)}
    beginnings = tuple(name for name in read if name.endswith("."))
    return {k for k in facts.leaves if k in read or k.startswith(beginnings)}


def _saved(facts: StepFacts, blocks: tuple[Block, ...], *, split: bool) -> frozenset[int]:
    return needed_for_saved(blocks, facts.loop.remat, split=split, narrow=facts.narrow)


def _weights(facts: StepFacts, p: PipelineFacts) -> Iterator[Sent]:
    """Yields the collectives of a tick's W: gathers, for the weights' gradients, of all products'
    inputs and output gradients, which are stored split."""
    collectives = (node.deferred_gather for node in chain(facts.model.period, facts.narrow))
    gathers = [collective for collective in collectives if collective is not None] * p.depth
    why = "products, for weight gradients"
    yield from tokens.token_collectives(facts, why, facts.roles, gathers)
    blocks, _ = _stack_and_outside(facts)
    made_by_b = _made_before(facts, blocks)
    yield from _weight_gradients(facts, p, {k: v for k, v in blocks.items() if k not in made_by_b})


def _made_before(facts: StepFacts, blocks: LeafTable) -> LeafTable:
    """Returns the matrices whose gradients B computes even if there is a W."""
    names = {
        path + weight.leaf
        for path, block in facts.model.stacked.items()
        for weight in {*matrices(block)} - {*deferred_matrices(block)}
    }
    return {k: leaf for k, leaf in blocks.items() if k in names}


def _weight_gathers(
    facts: StepFacts, p: PipelineFacts, why: str, turns: int, read: Set[str] | None = None
) -> Iterator[Sent]:
    """Yields the gathers of a turn's weights, once for each of `turns`. read: as in `gathers`."""
    blocks, _ = _stack_and_outside(facts)
    yield from times(fetches(facts, why, blocks, layers=p.chunks * p.depth, read=read), turns)


def _weight_gradients(facts: StepFacts, p: PipelineFacts, blocks: LeafTable) -> Iterator[Sent]:
    """Yields the scatters of a chunk's gradients: turn by turn to the weights' split at rest, then
    all of them to the optimizer's split."""
    if facts.sharded:
        layer = scatters(facts, "weight gradients of a layer", blocks, layers=p.chunks * p.depth)
        yield from times(layer, p.depth)
        yield from to_optimizer(facts, blocks, parts=p.chunks)
