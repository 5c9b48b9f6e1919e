"""Collectives of weights and gradients between splits at rest, in use and in the optimizer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from typing import NamedTuple

from jaxtrain.mesh.axes import Dims, MeshAxes, keeps_dtype
from jaxtrain.overlap.spans import bundle_count
from jaxtrain.planner.facts import LeafFacts, StepFacts
from jaxtrain.planner.sent import Sent, collective_traffic, local_elements, ways

LeafTable = Mapping[str, LeafFacts]


def fetches(
    facts: StepFacts,
    why: str,
    leaves: LeafTable,
    *,
    layers: int = 1,
    read: Set[str] | None = None,
) -> list[Sent]:
    """Returns the collectives that make a layer's leaves ready for use: gathers, unless they are
    gathered once a step. Before the gather of 8-bit weights, the maximum magnitude of each is
    taken. read: as in `gathers`."""
    scales = weight_maxima(facts, why, leaves, gathered=facts.sharded, read=read)
    if not facts.sharded:
        return scales
    return scales + gathers(facts, why, leaves, layers=layers, read=read)


def weight_maxima(
    facts: StepFacts,
    why: str,
    leaves: LeafTable,
    *,
    gathered: bool,
    read: Set[str] | None = None,
) -> list[Sent]:
    """Returns the all-reduce of the maximum magnitudes of the matrices that a layer multiplies by
    in 8 bits; experts' matrices have one each.

    It runs over the mesh axes that split the matrices at rest if `gathered`, else in use. Experts'
    are reduced separately if devices have different ones. [] if scales are those of previous steps.
    read: as in `gathers`.
    """
    if facts.scaling != "current":
        return []
    narrow, apart = _narrow(facts, leaves), facts.roles.experts
    experts = {k: v for k, v in narrow.items() if apart and k in facts.model.expert_matrices}
    shared = {k: v for k, v in narrow.items() if k not in experts}
    if read is not None:
        shared, experts = ({} if read.isdisjoint(group) else group for group in (shared, experts))
    maxima = _maxima_of(facts, why, shared, gathered, ())
    return maxima + _maxima_of(facts, why, experts, gathered, apart)


def _maxima_of(
    facts: StepFacts, why: str, narrow: LeafTable, gathered: bool, apart: MeshAxes
) -> list[Sent]:
    """Returns the all-reduce of the maxima of matrices scaled together. apart: mesh axes whose
    devices have different experts."""
    split: set[str] = set()
    for leaf in narrow.values():
        dims = leaf.params if gathered else leaf.in_use
        split |= {axis for dim in dims[-2:] for axis in dim}
    axes = tuple(a for a in facts.sizes if a in split)
    count = sum(facts.model.narrowed[name] for name in narrow) // ways(facts, apart)
    return collective_traffic(facts, f"greatest {why}", "all_reduce", "lax", axes, "float32", count)


def _narrow(facts: StepFacts, leaves: LeafTable) -> LeafTable:
    return {k: leaf for k, leaf in leaves.items() if facts.narrow and k in facts.model.narrowed}


def gathers(
    facts: StepFacts,
    why: str,
    leaves: LeafTable,
    *,
    layers: int = 1,
    once: bool = False,
    read: Set[str] | None = None,
) -> list[Sent]:
    """Returns the gathers for use of leaves split at rest: one for each dtype and set of mesh axes.

    Stacked leaves count one layer in `layers`. once: for the whole step; layers then quantise the
    gathered weights themselves. read: the leaves that are used, if not all are; a compiler drops a
    gather of which none is.
    """
    narrow = () if once else _narrow(facts, leaves)

    def dtype(name: str) -> str:
        leaf = leaves[name]
        keeps = keeps_dtype(name, len(leaf.shape) - leaf.stacked)
        used_dtype = leaf.dtype if keeps else facts.compute
        return "uint8" if name in narrow else used_dtype

    sent = []
    algorithm = facts.algorithms.fsdp
    for bundle in _bundles(facts, leaves, dtype, algorithm, layers):
        if read is None or not read.isdisjoint(bundle.names):
            sizes = (bundle.axes, bundle.dtype, bundle.elements)
            sent += collective_traffic(facts, why, "all_gather", algorithm, *sizes)
    return sent


def scatters(facts: StepFacts, why: str, leaves: LeafTable, *, layers: int = 1) -> list[Sent]:
    """Returns the reduce-scatters of trained leaves' gradients, in the dtype of sums."""
    leaves, algorithm, sent = _trained_leaves(leaves), facts.algorithms.weight_gradients, []
    tiled = _tiled(facts, leaves)
    untiled = {k: v for k, v in leaves.items() if k not in tiled}
    for bundle in _bundles(facts, untiled, lambda _: facts.reduce, algorithm, layers):
        sizes = (bundle.axes, bundle.dtype, bundle.elements)
        sent += collective_traffic(facts, why, "reduce_scatter", algorithm, *sizes)
    for leaf, axes in tiled.items():
        size = local_elements(facts, leaves[leaf], leaves[leaf].in_use) // layers
        line = f"{why}, in tiles"
        sent += collective_traffic(
            facts, line, "reduce_scatter", algorithm, axes, facts.reduce, size
        )
    return sent


def _tiled(facts: StepFacts, leaves: LeafTable) -> dict[str, MeshAxes]:
    """Returns the leaves whose gradients are scattered while they are computed, and over which mesh
    axes: products' weights split along exactly one more dim at rest than in use."""
    if not facts.algorithms.tiled:
        return {}
    products = {k: leaves[k] for k in facts.model.stacked_products if k in leaves}
    first, *later = _rounds({k: (v.in_use, v.params) for k, v in products.items()}) or [{}]
    return {
        k: axes for k, axes in first.items() if not any(k in later_round for later_round in later)
    }


def to_optimizer(facts: StepFacts, leaves: LeafTable, *, parts: int = 1) -> Iterator[Sent]:
    """Yields the reduce-scatters of gradients from the backward pass's split to the optimizer's; of
    one part in `parts` of each leaf."""
    leaves = _trained_leaves(leaves)
    begins = {k: leaf.params if facts.sharded else leaf.in_use for k, leaf in leaves.items()}
    elements = {k: local_elements(facts, leaf, begins[k]) // parts for k, leaf in leaves.items()}
    why = "gradients to their optimizer state"
    for round_axes in _rounds({k: (begins[k], leaf.optimizer) for k, leaf in leaves.items()}):
        sent = {k: (axes, "float32", elements[k]) for k, axes in round_axes.items()}
        yield from _together(facts, why, "reduce_scatter", sent)
        elements |= {k: elements[k] // ways(facts, axes) for k, axes in round_axes.items()}


def updated_param_gathers(facts: StepFacts) -> Iterator[Sent]:
    """Yields the gathers of parameters that are updated in shards and used unsharded (ZeRO-1 and
    2), in their own dtype."""
    trained = _trained_leaves(facts.leaves)
    elements = {k: local_elements(facts, leaf, leaf.optimizer) for k, leaf in trained.items()}
    for round_axes in _rounds({k: (leaf.params, leaf.optimizer) for k, leaf in trained.items()}):
        elements |= {k: elements[k] * ways(facts, axes) for k, axes in round_axes.items()}
        leaves = {k: (axes, facts.leaves[k].dtype, elements[k]) for k, axes in round_axes.items()}
        yield from _together(facts, "updated parameters", "all_gather", leaves)


def _trained_leaves(leaves: LeafTable) -> LeafTable:
    return {k: leaf for k, leaf in leaves.items() if leaf.trained}


class _Bundle(NamedTuple):
    """Leaves that are gathered, or whose gradients are scattered, together over mesh axes.
    elements: of the whole leaves."""

    axes: MeshAxes
    dtype: str
    elements: int
    names: tuple[str, ...]


def _bundles(
    facts: StepFacts, leaves: LeafTable, dtype: Callable[[str], str], algorithm: str, layers: int
) -> Iterator[_Bundle]:
    """Yields the bundles of one layer in `layers`.

    Leaves are those split at rest but not in use. `lax` gathers all together; other algorithms
    gather the largest separately. A leaf with several such dims is gathered once for each.
    """
    sizes = {k: local_elements(facts, leaf, leaf.params) // layers for k, leaf in leaves.items()}
    for round_axes in _rounds({name: (leaf.in_use, leaf.params) for name, leaf in leaves.items()}):
        groups: dict[tuple[MeshAxes, str], list[str]] = defaultdict(list)
        for name, axes in round_axes.items():
            sizes[name] *= ways(facts, axes)
            groups[axes, dtype(name)].append(name)
        for key, names in groups.items():
            count = bundle_count(ways(facts, key[0]), doubling=algorithm == "recursive")
            alone = 0 if algorithm == "lax" else count - 1
            by_size = sorted(names, key=lambda name: (-sizes[name], name))
            together = [(name,) for name in by_size[:alone]]
            together += [joined] if (joined := tuple(by_size[alone:])) else []
            for bundle in together:
                yield _Bundle(*key, sum(sizes[name] for name in bundle), bundle)


def _rounds(splits: Mapping[str, tuple[Dims, Dims]]) -> list[dict[str, MeshAxes]]:
    """Returns the mesh axes that differ between two splits of each leaf, (fewer ways, more ways);
    one dim of each leaf a round."""
    between = {
        name: [b[len(a) :] for a, b in zip(fewer, more, strict=True) if a != b]
        for name, (fewer, more) in splits.items()
    }
    rounds = max(map(len, between.values()), default=0)
    return [{k: dims[i] for k, dims in between.items() if i < len(dims)} for i in range(rounds)]


def _together(
    facts: StepFacts, why: str, collective: str, leaves: Mapping[str, tuple[MeshAxes, str, int]]
) -> Iterator[Sent]:
    """Yields a reduce-scatter or all-gather of leaves (mesh axes, dtype, elements of the unsplit
    leaf). Leaves with small shards share one for each dtype and set of axes."""
    small: dict[tuple[MeshAxes, str], int] = defaultdict(int)
    for name, (axes, dtype, elements) in leaves.items():
        if elements // ways(facts, axes) <= facts.sums.small_leaf:
            small[axes, dtype] += elements
            continue
        line = f"{why}: {name}"
        yield from collective_traffic(
            facts, line, collective, facts.algorithms.fsdp, axes, dtype, elements
        )
    for (axes, dtype), elements in small.items():
        line = f"{why}: small leaves"
        yield from collective_traffic(
            facts, line, collective, facts.algorithms.fsdp, axes, dtype, elements
        )
