"""Collectives of an optimizer: sums over split dims, and gathers of split matrices."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from jaxtrain.planner.facts import LeafSumFacts, StepFacts
from jaxtrain.planner.sent import Sent, collective_traffic, local_elements


def optimizer_traffic(facts: StepFacts) -> Iterator[Sent]:
    """Yields the collectives of the optimizer, all in fp32."""
    for why, parts in facts.optimizer.sums:
        together: dict[tuple[tuple[str, ...], frozenset[str]], int] = defaultdict(int)
        for part in parts:
            over, still_split, elements = _leaf_sum(facts, part)
            together[over, still_split] += elements
        for (over, _), elements in together.items():
            yield from collective_traffic(
                facts, why, "all_reduce", "lax", over, "float32", elements
            )
    for name, stacked in facts.optimizer.matrices.items():
        yield from _unsplit_matrices(facts, name, stacked)


def _leaf_sum(facts: StepFacts, part: LeafSumFacts) -> tuple[tuple[str, ...], frozenset[str], int]:
    """Returns (mesh axes summed over, axes over which the sums are still split, elements of the
    sums on a device)."""
    leaf = facts.leaves[part.leaf]
    split = [() if d in part.gone else axes for d, axes in enumerate(leaf.optimizer)]
    inside = {a for d in part.dims for a in split[d]}
    remaining = [d for d in range(len(split)) if d not in (*part.dims, *part.gone)]
    still_split = frozenset(a for d in remaining for a in split[d])
    ways = math.prod(facts.sizes[a] for a in still_split)
    elements = math.prod(leaf.shape[d] for d in remaining) // ways
    return tuple(a for a in facts.sizes if a in inside), still_split, elements


def _unsplit_matrices(facts: StepFacts, name: str, stacked: int) -> Iterator[Sent]:
    """Yields the exchanges that give each device unsplit matrices, and split them again.

    A stack of matrices is padded to a multiple of the devices. A single matrix is gathered.
    """
    leaf = facts.leaves[name]
    inner = [axes for axes in leaf.optimizer[stacked:] if axes]
    elements = local_elements(facts, leaf, leaf.optimizer)
    outer = math.prod(facts.sizes[a] for axes in leaf.optimizer[:stacked] for a in axes)
    stack = math.prod(leaf.shape[:stacked]) // outer
    if stack == 1:
        for axes in inner:
            elements *= math.prod(facts.sizes[a] for a in axes)
            yield from collective_traffic(
                facts, f"{name} whole", "all_gather", "lax", axes, "float32", elements
            )
        return
    ways = math.prod(facts.sizes[a] for axes in inner for a in axes)
    padded = elements // stack * (stack + -stack % ways)
    for direction in ("whole", "split again"):
        for axes in inner:
            why = f"{name} {direction}"
            yield from collective_traffic(facts, why, "all_to_all", "lax", axes, "float32", padded)
