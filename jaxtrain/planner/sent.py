"""One collective of the source, and the permutes of which an algorithm builds it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from jaxtrain.collectives.cost.steps import Permute, itemsize_of, schedule
from jaxtrain.mesh.axes import Dims, MeshAxes
from jaxtrain.planner.facts import LeafFacts, StepFacts

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

    why: label of its line. buffer_bytes: bytes of the whole logical buffer; for a permute, those it
      sends. count: how often in a step.
    """

    why: str
    kind: str
    axes: MeshAxes
    dtype: str
    buffer_bytes: int
    count: int


def times(collectives: Iterable[Sent], n: int) -> Iterator[Sent]:
    """Yields each collective with its count multiplied by n; nothing if n is 0."""
    yield from (replace(collective, count=collective.count * n) for collective in collectives if n)


def collective_traffic(
    facts: StepFacts,
    why: str,
    collective: str,
    algorithm: str,
    axes: MeshAxes,
    dtype: str,
    elements: int,
) -> list[Sent]:
    """Returns one collective of a global buffer of `elements` by the named algorithm."""
    devices = ways(facts, axes)
    if devices == 1 or not elements:
        return []
    order = tuple(a for a in facts.sizes if a in axes)
    size = elements * itemsize_of(dtype)
    if algorithm == "lax":
        return [Sent(why, KINDS[collective], order, dtype, size, 1)]
    return [
        Sent(why, "collective-permute", crossed, permute.dtype, round(permute.nbytes), step.times)
        for step in schedule(collective, algorithm, devices, size, dtype)
        for permute in step.permutes
        for crossed in [_axes_crossed(facts.sizes, axes, permute)]
    ]


def _axes_crossed(sizes: Mapping[str, int], axes: MeshAxes, permute: Permute) -> MeshAxes:
    """Returns the mesh axes along which a permute over `axes` moves data. A partner that is far
    away in a product of axes may be a neighbour along one of them."""
    crossed, devices = set(), math.prod(sizes[a] for a in axes)
    for device in permute.senders:
        partner = device ^ permute.distance if permute.exchange else device + permute.distance
        source, target = device % devices, partner % devices
        for axis in reversed(axes):
            if source % sizes[axis] != target % sizes[axis]:
                crossed.add(axis)
            source, target = source // sizes[axis], target // sizes[axis]
    return tuple(a for a in sizes if a in crossed)


def ways(facts: StepFacts, axes: Iterable[str]) -> int:
    """Returns the number of devices along mesh axes."""
    return math.prod(facts.sizes[a] for a in axes)


def local_elements(facts: StepFacts, leaf: LeafFacts, split: Dims) -> int:
    """Returns the elements of a leaf that one device holds under a split."""
    return math.prod(leaf.shape) // ways(facts, (a for dim in split for a in dim))
