"""What a pipelined step does over what it needs to: matmul FLOPs and bytes, by arithmetic.

In lock-step a stage works in every tick, so an idle one costs what a busy one does. Beside that a
stage runs its F again in B where it keeps the input alone, a remat policy has what it drops made
again, and slots of padding, and padded rows of the vocabulary, are multiplied like others. What an
attention kernel itself skips or makes again is not in it, nor are look-ups, norms and activations.
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
    """Parts of all that is done, in FLOPs of all devices or bytes that each of them sends.

    needed: once for each microbatch; padding: on slots and rows of nothing; again: F in B; remat:
    what a policy has made again; idle: all of these in ticks in which a stage has no work.
    """

    needed: float
    padding: float
    again: float
    remat: float
    idle: float

    @property
    def over_needed(self) -> float:
        return sum(self) / self.needed if self.needed else 1.0

    def summary(self, what: str) -> str:
        """In words; shares that round to nothing are left out."""
        words = {"idle": "idle ticks", "again": "F again in B", "remat": "remat"}
        words["padding"] = "padding"
        shares = {said: getattr(self, name) / (self.needed or 1.0) for name, said in words.items()}
        parts = [f"{said} {share:.3f}" for said, share in shares.items() if share >= 5e-4]
        beside = f" ({', '.join(parts)})" if parts else ""
        return f"{self.over_needed:.3f} times the {what} it needs{beside}"


def pipeline_flops(facts: StepFacts, p: PipelineFacts, flops: FlopFacts) -> Work:
    """FLOPs of a step of which every leaf is trained."""
    stages, works = facts.sizes[p.axis], facts.microbatches * p.chunks
    period = facts.model.period
    turn = sum(_all(flops, block) for block in period)
    rerun = 0.0 if p.kept else _rerun(facts, p, flops)
    made = sum(
        turns * _remat_flops(flops, period, work.made, split=p.weight > 0)
        for work, turns in stack_works(facts, p.depth, below=True)
    )
    late = _left_to_weight(facts, flops) if p.weight else 0.0
    gradients = 2 * turn - late

    def run(forward: int, backward: int, weight: int) -> tuple[float, float, float]:
        """(what is needed of slots, padding too; F again; remat) in so many ticks."""
        once = p.depth * (forward * turn + backward * gradients + weight * late)
        return stages * once, stages * backward * rerun, stages * backward * made

    busy = run(works, works, works if p.weight else 0)
    ticks = run(p.forward, p.backward, p.weight)
    beside, again, remat = _outside(facts, flops)
    size = 2 * facts.model.embed * facts.model.head.padded
    head = 3 * facts.microbatches * flops.rows * flops.seq * size
    return Work(
        flops.needed,
        busy[0] + beside + head - flops.needed,
        busy[1] + again,
        busy[2] + remat,
        sum(ticks) - sum(busy),
    )


def _of_value(flops: FlopFacts, value: Value) -> int:
    """Forward, on one microbatch; of attention the whole square of scores."""
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
    met = operation.per_token * sum(weight.size for weight in operation.weights)
    return 2 * tokens * (met + sum(weight.size for weight in operation.shared))


def _all(flops: FlopFacts, block: Block) -> int:
    return sum(_of_value(flops, value) for value in chain((block,), flops.narrow))


def _rerun(facts: StepFacts, p: PipelineFacts, flops: FlopFacts) -> float:
    """One chunk forward again in B, but for what of its last turn nobody needs."""
    whole, part = run_again(facts, p)
    turn = sum(_all(flops, block) for block in facts.model.period)
    rest = _needed(flops, facts.model.period, facts.loop.remat, split=p.weight > 0)
    return whole * turn + part * rest


def _needed(
    flops: FlopFacts, blocks: tuple[Block, ...], remat: str, *, split: bool = False
) -> float:
    """Of a body of blocks forward, as far as what its backward pass finds kept."""
    values = chain(blocks, flops.narrow)
    needed = needed_for_kept(blocks, remat, split=split, narrow=flops.narrow)
    return sum(_of_value(flops, values[number]) for number in needed)


def _remat_flops(
    flops: FlopFacts, blocks: tuple[Block, ...], made: Iterable[int], *, split: bool = False
) -> float:
    """What a policy has made again of a turn of these blocks. split: W has the inputs of products
    saved for it; of attention B then needs the scores alone, unless its output goes into what else
    is made again."""
    again, values = set(made), chain(blocks, flops.narrow)
    total = sum(_of_value(flops, values[number]) for number in again)
    # What reads attention reads the value after it, the same of whole rows.
    goes_on = {of for number in again for of in values[number].of}
    half = [n for n in again if split and values[n].kind == "attention" and n + 1 not in goes_on]
    return total - sum(_of_value(flops, values[n]) for n in half) / 2


def _left_to_weight(facts: StepFacts, flops: FlopFacts) -> float:
    """The weights' gradients of a turn: of its products, but for those of experts."""
    values = chain(facts.model.period)
    return sum(_of_value(flops, value) for value in values if value.kind in ("columns", "rows"))


def _outside(facts: StepFacts, flops: FlopFacts) -> tuple[float, float, float]:
    """(needed, F again, remat) of the blocks before and behind the pipeline, in a step. Those
    before it run forward again where their gradients are made."""
    needed = again = remat = 0.0
    for blocks in (facts.model.before, facts.model.after):
        for path, block in blocks.items():
            needed += 3 * _all(flops, block)
            remat += _remat_flops(flops, (block,), body_work(facts, [path], below=True).made)
    if facts.model.before:
        *whole, last = facts.model.before.values()
        again += sum(_all(flops, block) for block in whole)
        again += _needed(flops, (last,), facts.loop.remat)
    m = facts.microbatches
    return m * needed, m * again, m * remat


def pipeline_bytes(
    facts: StepFacts,
    p: PipelineFacts,
    traffic: Callable[[StepFacts], list[Sent]],
    share: Mapping[str, Callable[[int], float]],
) -> Work:
    """Bytes that each device sends in a step; share: of a whole buffer, by kind and devices."""

    def sent(facts: StepFacts) -> float:
        return sum(each.count * each.buffer_bytes * part(each) for each in traffic(facts))

    def part(each: Sent) -> float:
        return share[each.kind](math.prod(facts.sizes[a] for a in each.axes))

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
    kept = replace(facts.loop, reshard=True)
    saved = sent(replace(facts, pipeline=replace(busy, kept=True), loop=kept))
    least = replace(kept, remat="none")
    needed = sent(replace(facts, pipeline=replace(busy, kept=True), loop=least))
    return Work(needed, 0.0, full - saved, saved - needed, total - full)
