"""What an optimizer sends of its own: sums over split dims, and matrices made whole."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from jaxtrain.planner.facts import LeafSumFacts, StepFacts
from jaxtrain.planner.sent import Sent, collective_traffic, local_elements


def optimizer_traffic(facts: StepFacts) -> Iterator[Sent]:
    """All in fp32, as gradients are."""
    for why, parts in facts.optimizer.sums:
        together: dict[tuple[tuple[str, ...], frozenset[str]], int] = defaultdict(int)
        for part in parts:
            over, kept, elements = _leaf_sum(facts, part)
            together[over, kept] += elements
        for (over, _), elements in together.items():
            yield from collective_traffic(
                facts, why, "all_reduce", "lax", over, "float32", elements
            )
    for name, stacked in facts.optimizer.matrices.items():
        yield from _made_whole(facts, name, stacked)


def _leaf_sum(facts: StepFacts, part: LeafSumFacts) -> tuple[tuple[str, ...], frozenset[str], int]:
    """(mesh axes summed over, those the sums are still split over, elements of them a device)."""
    leaf = facts.leaves[part.leaf]
    split = [() if d in part.gone else axes for d, axes in enumerate(leaf.optimizer)]
    inside = {a for d in part.dims for a in split[d]}
    left = [d for d in range(len(split)) if d not in (*part.dims, *part.gone)]
    kept = frozenset(a for d in left for a in split[d])
    ways = math.prod(facts.sizes[a] for a in kept)
    elements = math.prod(leaf.shape[d] for d in left) // ways
    return tuple(a for a in facts.sizes if a in inside), kept, elements


def _made_whole(facts: StepFacts, name: str, stacked: int) -> Iterator[Sent]:
    """A stack of matrices is exchanged so that each device has whole ones, padded to as many as
    there are devices, and back; a single matrix is gathered."""
    leaf = facts.leaves[name]
    inner = [axes for axes in leaf.optimizer[stacked:] if axes]
    held = local_elements(facts, leaf, leaf.optimizer)
    outer = math.prod(facts.sizes[a] for axes in leaf.optimizer[:stacked] for a in axes)
    stack = math.prod(leaf.shape[:stacked]) // outer
    if stack == 1:
        for axes in inner:
            held *= math.prod(facts.sizes[a] for a in axes)
            yield from collective_traffic(
                facts, f"{name} whole", "all_gather", "lax", axes, "float32", held
            )
        return
    ways = math.prod(facts.sizes[a] for axes in inner for a in axes)
    padded = held // stack * (stack + -stack % ways)
    for way in ("whole", "split again"):
        for axes in inner:
            why = f"{name} {way}"
            yield from collective_traffic(facts, why, "all_to_all", "lax", axes, "float32", padded)
