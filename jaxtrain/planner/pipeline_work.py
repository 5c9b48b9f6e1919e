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

from jaxtrain.planner.backward_work import body_work, stack_works
from jaxtrain.planner.facts import FlopFacts, PipelineFacts, StepFacts
from jaxtrain.planner.pipeline_traffic import (
    NEEDED_OF_BLOCK,
    blocks_outside,
    needed_of_block,
    run_again,
)
from jaxtrain.planner.sent import Sent

PARTS = {"columns": (("q", "a"), ("u",)), "rows": (("r1",), ("r2",))}
"""What the first and the second column-split and row-split products of a block make, and what is
made of it before the next."""
PRODUCTS = ("q", "r1", "u", "r2")


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

    def told(self, what: str) -> str:
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
    turn = sum(_all(flops, block) for block in facts.layers.in_period)
    rerun = 0.0 if p.kept else _rerun(facts, p, flops)
    made = sum(
        turns * _made(facts, flops, facts.layers.in_period, work.made, split=p.weight > 0)
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
    head = 3 * facts.microbatches * flops.head
    return Work(
        flops.needed,
        busy[0] + beside + head - flops.needed,
        busy[1] + again,
        busy[2] + remat,
        sum(ticks) - sum(busy),
    )


def _all(flops: FlopFacts, block: str) -> int:
    return sum(flops.blocks[block].values())


def _rerun(facts: StepFacts, p: PipelineFacts, flops: FlopFacts) -> float:
    """One chunk forward again in B, but for what of its last turn nobody needs."""
    whole, part = run_again(facts, p)
    *before, last = facts.layers.in_period
    turn = sum(_all(flops, block) for block in facts.layers.in_period)
    needed = _first(flops, last, needed_of_block(facts, p))
    rest = needed + sum(_all(flops, block) for block in before) if needed else 0.0
    return whole * turn + part * rest


def _first(flops: FlopFacts, block: str, needed: tuple[int, int]) -> float:
    """The first so many (column, row) products of a block, and what is made of them."""
    counted = dict(zip(PARTS, needed, strict=True))
    values = [v for name, count in counted.items() for v in sum(PARTS[name][:count], ())]
    return sum(flops.blocks[block][value] for value in values)


def _made(
    facts: StepFacts,
    flops: FlopFacts,
    blocks: list[str],
    made: Iterable[tuple[int, str]],
    *,
    split: bool = False,
) -> float:
    """What a policy has made again of a turn of these blocks. It keeps no product of experts.
    split: W has the inputs of products saved for it; of attention B then needs the scores alone,
    unless its output goes into what else is made again."""
    again = set(made)
    if facts.layers.remat != "none":
        mixed = [i for i, block in enumerate(blocks) if block + "mlp." in facts.layers.experts]
        again |= {(i, value) for i in mixed for value in ("u", "r2")}
    total = sum(flops.blocks[blocks[i]].get(value, 0) for i, value in again)
    half = [i for i, value in again if split and value == "a" and (i, "r1") not in again]
    return total - sum(flops.blocks[blocks[i]]["a"] for i in half) / 2


def _left_to_weight(facts: StepFacts, flops: FlopFacts) -> float:
    """The weights' gradients of a turn: of its products, but for those of experts."""
    total = 0
    for block in facts.layers.in_period:
        mixed = block + "mlp." in facts.layers.experts
        total += sum(flops.blocks[block][v] for v in (("q", "r1") if mixed else PRODUCTS))
    return total


def _outside(facts: StepFacts, flops: FlopFacts) -> tuple[float, float, float]:
    """(needed, F again, remat) of the blocks before and behind the pipeline, in a step. Those
    before it run forward again where their gradients are made."""
    needed = again = remat = 0.0
    for part in ("prefix.", "suffix."):
        blocks = blocks_outside(facts, part)
        for block in blocks:
            needed += 3 * _all(flops, block)
            remat += _made(facts, flops, [block], body_work(facts, [block], below=True).made)
        if part == "prefix." and blocks:
            again += sum(_all(flops, block) for block in blocks[:-1])
            again += _first(flops, blocks[-1], NEEDED_OF_BLOCK[facts.layers.remat])
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
    kept = replace(facts.layers, reshard=True)
    saved = sent(replace(facts, pipeline=replace(busy, kept=True), layers=kept))
    least = replace(kept, remat="none")
    needed = sent(replace(facts, pipeline=replace(busy, kept=True), layers=least))
    return Work(needed, 0.0, full - saved, saved - needed, total - full)
