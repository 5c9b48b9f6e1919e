"""One collective of the source, and how an algorithm's permutes make it up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from jaxtrain.collectives.cost.steps import Permute, itemsize_of, schedule
from jaxtrain.planner.facts import Dims, LeafFacts, StepFacts

MeshAxes = tuple[str, ...]

KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
}
"""The instruction of each collective of `Lax`; the other algorithms are permutes."""


@dataclass(frozen=True)
class Sent:
    """One collective of the source, on each device.

    `why` names the line; `buffer_bytes` is the whole logical buffer, of a permute what it sends;
    `count`: how often in a step.
    """

    why: str
    kind: str
    axes: MeshAxes
    dtype: str
    buffer_bytes: int
    count: int


def times(some: Iterable[Sent], n: int) -> Iterator[Sent]:
    """Each of them n times as often."""
    yield from (replace(each, count=each.count * n) for each in some if n)


def collective_traffic(
    facts: StepFacts,
    why: str,
    collective: str,
    by: str,
    axes: MeshAxes,
    dtype: str,
    elements: int,
) -> list[Sent]:
    """One collective of `elements` in the whole buffer by algorithm `by`."""
    n = ways(facts, axes)
    if n == 1 or not elements:
        return []
    order = tuple(a for a in facts.sizes if a in axes)
    size = elements * itemsize_of(dtype)
    if by == "lax":
        return [Sent(why, KINDS[collective], order, dtype, size, 1)]
    return [
        Sent(why, "collective-permute", crossed, permute.dtype, round(permute.nbytes), step.times)
        for step in schedule(collective, by, n, size, dtype)
        for permute in step.permutes
        for crossed in [_axes_crossed(facts.sizes, axes, permute)]
    ]


def _axes_crossed(sizes: Mapping[str, int], axes: MeshAxes, permute: Permute) -> MeshAxes:
    """The mesh axes along which a permute over `axes` moves anything: a partner far away in a
    product of axes may be a neighbour along one of them."""
    found, n = set(), math.prod(sizes[a] for a in axes)
    for device in permute.senders:
        far = device ^ permute.distance if permute.exchange else device + permute.distance
        here, there = device % n, far % n
        for axis in reversed(axes):
            if here % sizes[axis] != there % sizes[axis]:
                found.add(axis)
            here, there = here // sizes[axis], there // sizes[axis]
    return tuple(a for a in sizes if a in found)


def ways(facts: StepFacts, axes: Iterable[str]) -> int:
    """Devices along mesh axes."""
    return math.prod(facts.sizes[a] for a in axes)


def local_elements(facts: StepFacts, leaf: LeafFacts, split: Dims) -> int:
    """Elements of a leaf that one device holds under a split."""
    return math.prod(leaf.shape) // ways(facts, (a for dim in split for a in dim))
