"""Predicts a pipelined step's matmul FLOPs and bytes beyond those that it needs.

In lock-step a stage works in every tick, so an idle tick costs as much as a busy one. A stage also
repeats F in B if it keeps its input alone; a remat policy recomputes what it drops; slots of
padding, and padded rows of the vocabulary, are multiplied like others. Not counted: what an
attention kernel itself skips or recomputes, look-ups, norms and activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from jaxtrain.operations.block import Block, chain
from jaxtrain.operations.collectives import HeadExchange
from jaxtrain.operations.node import Node
from jaxtrain.operations.recompute import block_again, needed_for_saved
from jaxtrain.planner.backward_work import body_work, stack_works
from jaxtrain.planner.facts import FlopFacts, PipelineFacts, StepFacts
from jaxtrain.planner.pipeline_traffic import run_again
from jaxtrain.planner.sent import Sent


class PipelineWork(NamedTuple):
    """Parts of a step's total, in FLOPs of all devices or bytes that each of them sends.

    needed: once for each microbatch; padding: slots and rows of padding; again: F in B; remat:
      recomputation by the policy; idle: all of these in ticks in which a stage has no work.
    """

    needed: float
    padding: float
    again: float
    remat: float
    idle: float

    @property
    def over_needed(self) -> float:
        return sum(self) / self.needed if self.needed else 1.0

    def summary(self, unit: str) -> str:
        """Returns one line of text; shares that round to zero are left out."""
        words = {"idle": "idle ticks", "again": "F again in B", "remat": "remat"}
        words["padding"] = "padding"
        shares = {word: getattr(self, name) / (self.needed or 1.0) for name, word in words.items()}
        parts = [f"{word} {share:.3f}" for word, share in shares.items() if share >= 5e-4]
        details = f" ({', '.join(parts)})" if parts else ""
        return f"{self.over_needed:.3f} times the {unit} it needs{details}"


def pipeline_flops(facts: StepFacts, p: PipelineFacts, flops: FlopFacts) -> PipelineWork:
    """Returns the FLOPs of a step of which every leaf is trained."""
    stages, works = facts.sizes[p.axis], facts.microbatches * p.chunks
    period = facts.model.period
    turn = sum(_all(flops, block) for block in period)
    rerun = 0.0 if p.keeps_residuals else _rerun(facts, p, flops)
    recomputed = sum(
        turns * _remat_flops(flops, period, work.recomputed, split=p.weight > 0)
        for work, turns in stack_works(facts, p.depth, below=True, split=p.weight > 0)
    )
    late = _left_to_weight(facts, flops) if p.weight else 0.0
    gradients = 2 * turn - late

    def run(forward: int, backward: int, weight: int) -> tuple[float, float, float]:
        """Returns (FLOPs of all slots, padding included; F again; remat) in these ticks."""
        once = p.depth * (forward * turn + backward * gradients + weight * late)
        return stages * once, stages * backward * rerun, stages * backward * recomputed

    busy = run(works, works, works if p.weight else 0)
    ticks = run(p.forward, p.backward, p.weight)
    outside, again, remat = _outside(facts, flops)
    size = 2 * facts.model.embed * facts.model.head.padded * facts.model.head.products(facts.chunks)
    head = facts.microbatches * flops.rows * flops.seq * size
    return PipelineWork(
        flops.needed,
        busy[0] + outside + head - flops.needed,
        busy[1] + again,
        busy[2] + remat,
        sum(ticks) - sum(busy),
    )


def _sum(flops: FlopFacts, nodes: Iterable[Node]) -> int:
    """Returns the FLOPs of a forward pass of one microbatch."""
    return sum(node.flops(flops.rows, flops.seq) for node in nodes)


def _all(flops: FlopFacts, block: Block) -> int:
    return _sum(flops, chain((block,), flops.narrow))


def _rerun(facts: StepFacts, p: PipelineFacts, flops: FlopFacts) -> float:
    """FLOPs of one chunk forward again in B, without the unneeded values of its last turn."""
    full, part = run_again(facts, p)
    turn = sum(_all(flops, block) for block in facts.model.period)
    needed = _needed(flops, facts.model.period, facts.loop.remat, split=p.weight > 0)
    return full * turn + part * needed


def _needed(
    flops: FlopFacts, blocks: tuple[Block, ...], remat: str, *, split: bool = False
) -> float:
    """Forward FLOPs of blocks, up to what the policy saves."""
    nodes = chain(blocks, flops.narrow)
    needed = needed_for_saved(blocks, remat, split=split, narrow=flops.narrow)
    return _sum(flops, (nodes[number] for number in needed))


def _remat_flops(
    flops: FlopFacts, blocks: tuple[Block, ...], recomputed: Iterable[int], *, split: bool = False
) -> float:
    """Returns the FLOPs that a policy recomputes of a turn of these blocks.

    split: W has the inputs of products saved for it. B then recomputes only attention's scores,
      unless its output is needed for another recomputed value.
    """
    again, nodes = set(recomputed), chain(blocks, flops.narrow)
    total = _sum(flops, (nodes[number] for number in again))
    if not split:
        return total
    inner = (nodes[number] for number in again if not _output_read(nodes, number, again))
    return total - sum(node.output_flops(flops.rows, flops.seq) for node in inner)


def _output_read(nodes: Sequence[Node], number: int, again: Set[int]) -> bool:
    """Returns True if a recomputed value is computed from a value. Where rows are not split, what a
    `HeadExchange` returns is its input."""
    readers = [n for n in again if number in nodes[n].inputs]
    same = [n for n in readers if isinstance(nodes[n].collective, HeadExchange)]
    return len(same) < len(readers) or any(_output_read(nodes, n, again) for n in same)


def _left_to_weight(facts: StepFacts, flops: FlopFacts) -> float:
    """FLOPs of a turn's weight gradients: those of its products except experts'."""
    nodes = chain(facts.model.period)
    deferred = (node for node in nodes if node.deferred)
    return float(sum(node.product_flops(flops.rows, flops.seq) for node in deferred))


def _outside(facts: StepFacts, flops: FlopFacts) -> tuple[float, float, float]:
    """Returns (needed, F again, remat) of the blocks before and after the pipeline, in a step.
    Those before it run forward again when their gradients are computed."""
    needed = again = remat = 0.0
    for blocks in (facts.model.prefix, facts.model.suffix):
        for path, block in blocks.items():
            needed += 3 * _all(flops, block)
            remat += _remat_flops(flops, (block,), body_work(facts, [path], below=True).recomputed)
    entry_blocks = [*facts.model.prefix.values()]
    for number, block in enumerate(entry_blocks):
        nodes = chain((block,), flops.narrow)
        rerun = block_again(entry_blocks, number, facts.loop.remat, narrow=flops.narrow)
        again += _sum(flops, (nodes[n] for n in rerun))
    microbatches = facts.microbatches
    return microbatches * needed, microbatches * again, microbatches * remat


def pipeline_bytes(
    facts: StepFacts,
    p: PipelineFacts,
    traffic: Callable[[StepFacts], list[Sent]],
    share: Mapping[str, Callable[[int], float]],
) -> PipelineWork:
    """Returns the bytes that each device sends in a step, by cause.

    traffic: lists the collectives of a step. share: for each kind of collective a function from the
    number of devices to the share of the whole buffer that one device sends.
    """

    def sent(facts: StepFacts) -> float:
        return sum(
            collective.count * collective.buffer_bytes * part(collective)
            for collective in traffic(facts)
        )

    def part(collective: Sent) -> float:
        return share[collective.kind](math.prod(facts.sizes[a] for a in collective.axes))

    works = facts.microbatches * p.chunks
    busy = replace(
        p,
        forward=works,
        backward=works,
        weight=works if p.weight else 0,
        sent_on=works,
        sent_back=works,
        ends_alone=False,
    )
    total, full = sent(facts), sent(replace(facts, pipeline=busy))
    resharding = replace(facts.loop, reshard=True)
    saved = sent(replace(facts, pipeline=replace(busy, keeps_residuals=True), loop=resharding))
    least = replace(resharding, remat="none")
    needed = sent(replace(facts, pipeline=replace(busy, keeps_residuals=True), loop=least))
    return PipelineWork(needed, 0.0, full - saved, saved - needed, total - full)
