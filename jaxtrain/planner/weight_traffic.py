"""What moves weights and their gradients between how they rest, are used and are updated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from jaxtrain.mesh.axes import keeps_dtype
from jaxtrain.overlap.spans import bundle_count
from jaxtrain.planner.facts import Dims, LeafFacts, StepFacts
from jaxtrain.planner.sent import MeshAxes, Sent, collective_traffic, local_elements, ways
from jaxtrain.planner.tokens.experts import EXPERT

Leaves = Mapping[str, LeafFacts]


def fetches(facts: StepFacts, why: str, leaves: Leaves, *, layers: int = 1) -> list[Sent]:
    """The leaves of a layer made ready for use: gathered, where they are not once a step; those
    that are multiplied by in 8 bits so, after the greatest magnitude of each is known."""
    found = weight_maxima(facts, why, leaves, gathered=facts.sharded)
    return found + (gathers(facts, why, leaves, layers=layers) if facts.sharded else [])


def weight_maxima(facts: StepFacts, why: str, leaves: Leaves, *, gathered: bool) -> list[Sent]:
    """The greatest magnitudes of the matrices that a layer multiplies by in 8 bits, of experts each
    one's, together: over the mesh axes that split them where it takes them, at rest if they are
    `gathered` then. Experts' apart where devices have other ones. None where scales are those of
    the steps before."""
    if facts.scaling != "current":
        return []
    narrow, apart = _narrow(facts, leaves), tuple(a for a in facts.sizes if a in EXPERT)
    experts = {k: v for k, v in narrow.items() if apart and k in facts.model.expert_matrices}
    others = {k: v for k, v in narrow.items() if k not in experts}
    found = _maxima_of(facts, why, others, gathered, ())
    return found + _maxima_of(facts, why, experts, gathered, apart)


def _maxima_of(
    facts: StepFacts, why: str, narrow: Leaves, gathered: bool, apart: MeshAxes
) -> list[Sent]:
    """Of matrices that are scaled together. apart: mesh axes whose devices have other experts."""
    split: set[str] = set()
    for leaf in narrow.values():
        dims = leaf.params if gathered else leaf.in_use
        split |= {axis for dim in dims[-2:] for axis in dim}
    axes = tuple(a for a in facts.sizes if a in split)
    count = sum(facts.model.narrowed[name] for name in narrow) // ways(facts, apart)
    return collective_traffic(facts, f"greatest {why}", "all_reduce", "lax", axes, "float32", count)


def _narrow(facts: StepFacts, leaves: Leaves) -> Leaves:
    return {k: leaf for k, leaf in leaves.items() if facts.narrow and k in facts.model.narrowed}


def gathers(
    facts: StepFacts, why: str, leaves: Leaves, *, layers: int = 1, once: bool = False
) -> list[Sent]:
    """Leaves that rest split, gathered for use: one all-gather for each dtype and set of mesh axes.
    Of one layer in `layers`, where leaves are stacked. once: for all of a step, in which layers
    make 8-bit numbers of them."""
    narrow = () if once else _narrow(facts, leaves)

    def dtype(name: str) -> str:
        leaf = leaves[name]
        kept = keeps_dtype(name, len(leaf.shape) - leaf.stacked)
        whole = leaf.dtype if kept else facts.compute
        return "uint8" if name in narrow else whole

    found = []
    by = facts.by.fsdp
    for axes, name, elements in _group(facts, leaves, dtype, by, layers):
        found += collective_traffic(facts, why, "all_gather", by, axes, name, elements)
    return found


def scatters(facts: StepFacts, why: str, leaves: Leaves, *, layers: int = 1) -> list[Sent]:
    """Gradients of those that are trained summed and scattered back, in the dtype of sums."""
    leaves, by, found = _trained_leaves(leaves), facts.by.weight_gradients, []
    tiled = _tiled(facts, leaves)
    others = {k: v for k, v in leaves.items() if k not in tiled}
    for axes, name, elements in _group(facts, others, lambda _: facts.reduce, by, layers):
        found += collective_traffic(facts, why, "reduce_scatter", by, axes, name, elements)
    for leaf, axes in tiled.items():
        size = local_elements(facts, leaves[leaf], leaves[leaf].in_use) // layers
        line = f"{why}, in tiles"
        found += collective_traffic(facts, line, "reduce_scatter", by, axes, facts.reduce, size)
    return found


def _tiled(facts: StepFacts, leaves: Leaves) -> dict[str, MeshAxes]:
    """Leaves whose gradients are scattered while they are made, and over which mesh axes: products'
    that are split along one dim more at rest than in use."""
    if not facts.by.tiled:
        return {}
    those = {k: leaves[k] for k in facts.model.stacked_products if k in leaves}
    first, *others = _rounds({k: (v.in_use, v.params) for k, v in those.items()}) or [{}]
    return {k: axes for k, axes in first.items() if not any(k in turn for turn in others)}


def to_optimizer(facts: StepFacts, leaves: Leaves, *, parts: int = 1) -> Iterator[Sent]:
    """Gradients on their way from where the backward pass leaves them to the optimizer's split; of
    one part in `parts` of each leaf."""
    leaves = _trained_leaves(leaves)
    begins = {k: leaf.params if facts.sharded else leaf.in_use for k, leaf in leaves.items()}
    held = {k: local_elements(facts, leaf, begins[k]) // parts for k, leaf in leaves.items()}
    why = "gradients to their optimizer state"
    for turn in _rounds({k: (begins[k], leaf.optimizer) for k, leaf in leaves.items()}):
        found = {k: (axes, "float32", held[k]) for k, axes in turn.items()}
        yield from _together(facts, why, "reduce_scatter", found)
        held |= {k: held[k] // ways(facts, axes) for k, axes in turn.items()}


def updated_param_gathers(facts: StepFacts) -> Iterator[Sent]:
    """Parameters updated in parts and used whole (ZeRO-1 and 2): gathered in their own dtype."""
    trained = _trained_leaves(facts.leaves)
    held = {k: local_elements(facts, leaf, leaf.optimizer) for k, leaf in trained.items()}
    for turn in _rounds({k: (leaf.params, leaf.optimizer) for k, leaf in trained.items()}):
        held |= {k: held[k] * ways(facts, axes) for k, axes in turn.items()}
        leaves = {k: (axes, facts.leaves[k].dtype, held[k]) for k, axes in turn.items()}
        yield from _together(facts, "updated parameters", "all_gather", leaves)


def _trained_leaves(leaves: Leaves) -> Leaves:
    return {k: leaf for k, leaf in leaves.items() if leaf.trained}


def _group(
    facts: StepFacts, leaves: Leaves, dtype: Callable[[str], str], by: str, layers: int
) -> Iterator[tuple[MeshAxes, str, int]]:
    """(mesh axes gathered, dtype, elements then) of one layer in `layers`, of leaves that are split
    at rest only: those that are gathered together, by `lax` all, else all but the largest. A leaf
    with several such dims takes a turn for each."""
    held = {k: local_elements(facts, leaf, leaf.params) // layers for k, leaf in leaves.items()}
    for turn in _rounds({name: (leaf.in_use, leaf.params) for name, leaf in leaves.items()}):
        found: dict[tuple[MeshAxes, str], list[int]] = defaultdict(list)
        for name, axes in turn.items():
            held[name] *= ways(facts, axes)
            found[axes, dtype(name)].append(held[name])
        for key, elements in found.items():
            count = bundle_count(ways(facts, key[0]), doubling=by == "recursive")
            alone = 0 if by == "lax" else count - 1
            by_size = sorted(elements, reverse=True)
            yield from ((*key, each) for each in by_size[:alone])
            if rest := by_size[alone:]:
                yield *key, sum(rest)


def _rounds(splits: Mapping[str, tuple[Dims, Dims]]) -> list[dict[str, MeshAxes]]:
    """The mesh axes that lie between two splits of each leaf, (fewer ways, more ways): a dim of
    each leaf a round."""
    between = {
        name: [b[len(a) :] for a, b in zip(fewer, more, strict=True) if a != b]
        for name, (fewer, more) in splits.items()
    }
    turns = max(map(len, between.values()), default=0)
    return [{k: dims[i] for k, dims in between.items() if i < len(dims)} for i in range(turns)]


def _together(
    facts: StepFacts, why: str, collective: str, leaves: Mapping[str, tuple[MeshAxes, str, int]]
) -> Iterator[Sent]:
    """A reduce-scatter or all-gather of leaves (mesh axes, dtype, elements of the whole); those of
    which a device's part is small in one for each dtype and set of axes."""
    small: dict[tuple[MeshAxes, str], int] = defaultdict(int)
    for name, (axes, dtype, elements) in leaves.items():
        if elements // ways(facts, axes) <= facts.sums.small_leaf:
            small[axes, dtype] += elements
            continue
        line = f"{why}: {name}"
        yield from collective_traffic(facts, line, collective, facts.by.fsdp, axes, dtype, elements)
    for (axes, dtype), elements in small.items():
        line = f"{why}: small leaves"
        yield from collective_traffic(facts, line, collective, facts.by.fsdp, axes, dtype, elements)
