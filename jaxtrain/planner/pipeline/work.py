"""Predicts a pipelined step's matmul FLOPs and bytes beyond those that it needs.

In lock-step a stage works in every tick, so an idle tick costs as much as a busy one. A stage also
repeats F in B if it keeps its input alone; a remat policy recomputes what it drops; slots of
padding, and padded rows of the vocabulary, are multiplied like others. Not counted: what an
attention kernel itself skips or recomputes, look-ups, norms and activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from jaxtrain.models.description import (
    AttentionCall,
    Block,
    ExpertCall,
    Product,
)
from jaxtrain.planner.backward_work import body_work, needed_for_kept, stack_works
from jaxtrain.planner.facts import FlopFacts, PipelineFacts, StepFacts
from jaxtrain.planner.pipeline.traffic import run_again
from jaxtrain.planner.sent import Sent
from jaxtrain.planner.values import Value, chain


class Work(NamedTuple):
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


def pipeline_flops(facts: StepFacts, p: PipelineFacts, flops: FlopFacts) -> Work:
    """Returns the FLOPs of a step of which every leaf is trained."""
    stages, works = facts.sizes[p.axis], facts.microbatches * p.chunks
    period = facts.model.period
    turn = sum(_all(flops, block) for block in period)
    rerun = 0.0 if p.keeps_residuals else _rerun(facts, p, flops)
    recomputed = sum(
        turns * _remat_flops(flops, period, work.recomputed, split=p.weight > 0)
        for work, turns in stack_works(facts, p.depth, below=True)
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
    size = 2 * facts.model.embed * facts.model.head.padded
    head = 3 * facts.microbatches * flops.rows * flops.seq * size
    return Work(
        flops.needed,
        busy[0] + outside + head - flops.needed,
        busy[1] + again,
        busy[2] + remat,
        sum(ticks) - sum(busy),
    )


def _of_value(flops: FlopFacts, value: Value) -> int:
    """Forward FLOPs of one microbatch; attention counts the full square of scores."""
    operation, tokens = value.operation, flops.rows * flops.seq
    if value.kind in ("columns", "rows", "replicated"):
        assert isinstance(operation, Product)
        return 2 * tokens * sum(weight.size for weight in operation.weights)
    if value.kind == "attention":
        assert isinstance(operation, AttentionCall)
        return flops.rows * operation.flops.flops(flops.seq**2)
    if not isinstance(operation, ExpertCall) or value.kind not in ("router", "experts"):
        return 0
    if value.kind == "router":
        return 2 * tokens * operation.router.size
    routed = operation.per_token * sum(weight.size for weight in operation.weights)
    return 2 * tokens * (routed + sum(weight.size for weight in operation.shared))


def _all(flops: FlopFacts, block: Block) -> int:
    return sum(_of_value(flops, value) for value in chain((block,), flops.narrow))


def _rerun(facts: StepFacts, p: PipelineFacts, flops: FlopFacts) -> float:
    """FLOPs of one chunk forward again in B, without the unneeded values of its last turn."""
    full, part = run_again(facts, p)
    turn = sum(_all(flops, block) for block in facts.model.period)
    needed = _needed(flops, facts.model.period, facts.loop.remat, split=p.weight > 0)
    return full * turn + part * needed


def _needed(
    flops: FlopFacts, blocks: tuple[Block, ...], remat: str, *, split: bool = False
) -> float:
    """Forward FLOPs of blocks, up to what their backward pass keeps."""
    values = chain(blocks, flops.narrow)
    needed = needed_for_kept(blocks, remat, split=split, narrow=flops.narrow)
    return sum(_of_value(flops, values[number]) for number in needed)


def _remat_flops(
    flops: FlopFacts, blocks: tuple[Block, ...], recomputed: Iterable[int], *, split: bool = False
) -> float:
    """Returns the FLOPs that a policy recomputes of a turn of these blocks.

    split: W has the inputs of products saved for it. B then recomputes only attention's scores,
      unless its output is needed for another recomputed value.
    """
    again, values = set(recomputed), chain(blocks, flops.narrow)
    total = sum(_of_value(flops, values[number]) for number in again)
    # A reader of attention reads the next value, which is equal if rows are not split.
    goes_on = {source for number in again for source in values[number].inputs}
    half = [n for n in again if split and values[n].kind == "attention" and n + 1 not in goes_on]
    return total - sum(_of_value(flops, values[n]) for n in half) / 2


def _left_to_weight(facts: StepFacts, flops: FlopFacts) -> float:
    """FLOPs of a turn's weight gradients: those of its products except experts'."""
    values = chain(facts.model.period)
    return sum(_of_value(flops, value) for value in values if value.kind in ("columns", "rows"))


def _outside(facts: StepFacts, flops: FlopFacts) -> tuple[float, float, float]:
    """Returns (needed, F again, remat) of the blocks before and after the pipeline, in a step.
    Those before it run forward again when their gradients are computed."""
    needed = again = remat = 0.0
    for blocks in (facts.model.before, facts.model.after):
        for path, block in blocks.items():
            needed += 3 * _all(flops, block)
            remat += _remat_flops(flops, (block,), body_work(facts, [path], below=True).recomputed)
    if facts.model.before:
        *earlier, last = facts.model.before.values()
        again += sum(_all(flops, block) for block in earlier)
        again += _needed(flops, (last,), facts.loop.remat)
    microbatches = facts.microbatches
    return microbatches * needed, microbatches * again, microbatches * remat


def pipeline_bytes(
    facts: StepFacts,
    p: PipelineFacts,
    traffic: Callable[[StepFacts], list[Sent]],
    share: Mapping[str, Callable[[int], float]],
) -> Work:
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
    return Work(needed, 0.0, full - saved, saved - needed, total - full)
