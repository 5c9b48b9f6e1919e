"""The collectives of an explicit step, by arithmetic: the predicted side of the contract.

Each entry is a line of the source: what moves, over which mesh axes, how often and how much.
Nothing here has seen a program; what a compiler is known to rewrite is in `contract.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace

from jaxtrain.planner.facts import Dims, LeafFacts, StepFacts
from jaxtrain.planner.optimizer_traffic import optimizer_traffic
from jaxtrain.planner.sent import Sent, local_elements, moved, times, ways

Axes = tuple[str, ...]


def step_traffic(facts: StepFacts) -> list[Sent]:
    """Everything that one training step sends, optimizer included."""
    micro = [*_activations(facts), *_head(facts)]
    once = [*_summed(facts), *_norms(facts), *optimizer_traffic(facts), *_updated(facts)]
    if facts.sharded:
        micro += [*_weights(facts), *_scattered(facts)]
    else:
        once += [*_gathers(facts, "parameters", facts.leaves), *_scattered(facts)]
    return [*times(micro, facts.microbatches), *once]


def _weights(facts: StepFacts) -> Iterator[Sent]:
    """Parameters that rest split, gathered for use; their gradients scattered back. Leaves that are
    used together travel together."""
    layers = facts.layers
    for prefix in (*layers.tables, *layers.outside, "period."):
        stacked = prefix == "period."
        turns = layers.periods if stacked else 1
        leaves = {k: v for k, v in facts.leaves.items() if k.startswith(prefix)}
        name = prefix.rstrip(".")
        gathers = _gathers(facts, f"weights of {name}", leaves, layers=layers.periods)
        yield from times(gathers, turns)
        again = _fetches_again(facts) if stacked else prefix in layers.outside and layers.remat
        repeated = [replace(each, why=f"{each.why}, again") for each in gathers]
        yield from times(repeated, int(again))
        for axes, dtype, elements in _grouped(facts, leaves, lambda leaf: facts.reduce):
            why = f"weight gradients of {name}"
            elements //= layers.periods if stacked else 1
            scatter = moved(facts, why, "reduce_scatter", facts.fsdp_by, axes, dtype, elements)
            yield from times(scatter, turns)


def _fetches_again(facts: StepFacts) -> int:
    """How often the backward pass gathers a layer's weights. A prefetching loop does it once more
    than there are layers: its last turn fetches for a turn that does not come. (A loop of one turn
    is no loop to a compiler, which then drops what is not used.)"""
    layers = facts.layers
    if not layers.reshard:
        return 0
    looped = layers.prefetch and not layers.unroll and layers.periods > 2
    return layers.periods + looped


def _gathers(
    facts: StepFacts, why: str, leaves: Mapping[str, LeafFacts], *, layers: int = 1
) -> list[Sent]:
    """One all-gather for each dtype and set of mesh axes; of one layer in `layers`, where leaves
    are stacked."""

    def dtype(leaf: LeafFacts) -> str:
        return facts.compute if len(leaf.shape) - leaf.stacked > 1 else leaf.dtype

    found = []
    for axes, name, elements in _grouped(facts, leaves, dtype):
        elements //= layers if all(leaf.stacked for leaf in leaves.values()) else 1
        found += moved(facts, why, "all_gather", facts.fsdp_by, axes, name, elements)
    return found


def _grouped(
    facts: StepFacts, leaves: Mapping[str, LeafFacts], dtype: Callable[[LeafFacts], str]
) -> Iterator[tuple[Axes, str, int]]:
    """(mesh axes gathered, dtype, elements then) of leaves that are split at rest only: those that
    are gathered together. A leaf with several such dims takes a turn for each."""
    held = {name: local_elements(facts, leaf, leaf.params) for name, leaf in leaves.items()}
    for turn in _rounds({name: (leaf.in_use, leaf.params) for name, leaf in leaves.items()}):
        found: dict[tuple[Axes, str], int] = defaultdict(int)
        for name, axes in turn.items():
            held[name] *= ways(facts, axes)
            found[axes, dtype(leaves[name])] += held[name]
        yield from ((*key, elements) for key, elements in found.items())


def _rounds(splits: Mapping[str, tuple[Dims, Dims]]) -> list[dict[str, Axes]]:
    """The mesh axes that lie between two splits of each leaf, (fewer ways, more ways): a dim of
    each leaf a round."""
    between = {
        name: [b[len(a) :] for a, b in zip(fewer, more, strict=True) if a != b]
        for name, (fewer, more) in splits.items()
    }
    turns = max(map(len, between.values()), default=0)
    return [{k: dims[i] for k, dims in between.items() if i < len(dims)} for i in range(turns)]


def _together(
    facts: StepFacts, why: str, collective: str, leaves: Mapping[str, tuple[Axes, str, int]]
) -> Iterator[Sent]:
    """A reduce-scatter or all-gather of leaves (mesh axes, dtype, elements of the whole); those of
    which a device's part is small in one for each dtype and set of axes."""
    small: dict[tuple[Axes, str], int] = defaultdict(int)
    for name, (axes, dtype, elements) in leaves.items():
        if elements // ways(facts, axes) <= facts.sums.small_leaf:
            small[axes, dtype] += elements
            continue
        line = f"{why}: {name}"
        yield from moved(facts, line, collective, facts.fsdp_by, axes, dtype, elements)
    for (axes, dtype), elements in small.items():
        line = f"{why}: small leaves"
        yield from moved(facts, line, collective, facts.fsdp_by, axes, dtype, elements)


def _activations(facts: StepFacts) -> Iterator[Sent]:
    """Sequence parallelism over `tensor` (Korthikanti et al. 2022): tokens are gathered before a
    column-split product and scattered after a row-split one, twice a block, and the other way round
    in the backward pass."""

    def sent(why: str, collective: str, count: int) -> Iterator[Sent]:
        size = facts.tokens * facts.embed
        one = moved(facts, why, collective, facts.tensor_by, facts.tensor, facts.compute, size)
        return times(one, count)

    yield from sent("embedding", "reduce_scatter", 1)
    yield from sent("embedding, backward", "all_gather", 1)
    blocks = len(facts.layers.outside) + facts.layers.period * facts.layers.periods
    for way in ("", ", backward"):
        gather, scatter = ("columns", "rows") if not way else ("rows", "columns")
        yield from sent(f"{gather}{way}", "all_gather", 2 * blocks)
        yield from sent(f"{scatter}{way}", "reduce_scatter", 2 * blocks)
    if facts.layers.remat:
        # What a body returns is not needed to differentiate it: its last scatter is not repeated.
        bodies = len(facts.layers.outside) + facts.layers.periods
        yield from sent("columns, again", "all_gather", 2 * blocks)
        yield from sent("rows, again", "reduce_scatter", 2 * blocks - bodies)


def _head(facts: StepFacts) -> Iterator[Sent]:
    """The vocabulary-parallel head and loss: all tokens meet every slice of the vocabulary."""
    by, axes, size = facts.tensor_by, facts.tensor, facts.tokens * facts.embed
    yield from moved(facts, "head", "all_gather", by, axes, facts.compute, size)
    yield from moved(facts, "head gradients", "reduce_scatter", by, axes, facts.compute, size)
    chunk = facts.tokens // facts.chunks
    for why, each in (("greatest logit", chunk), ("sums over the vocabulary", 2 * chunk)):
        sums = moved(facts, why, "all_reduce", "lax", axes, "float32", each)
        yield from times(sums, facts.chunks)


def _scattered(facts: StepFacts) -> Iterator[Sent]:
    """Gradients on their way from where the backward pass leaves them to the optimizer's split."""
    begins = {k: leaf.params if facts.sharded else leaf.in_use for k, leaf in facts.leaves.items()}
    held = {k: local_elements(facts, leaf, begins[k]) for k, leaf in facts.leaves.items()}
    why = "gradients to their optimizer state"
    for turn in _rounds({k: (begins[k], leaf.optimizer) for k, leaf in facts.leaves.items()}):
        leaves = {k: (axes, "float32", held[k]) for k, axes in turn.items()}
        yield from _together(facts, why, "reduce_scatter", leaves)
        held |= {k: held[k] // ways(facts, axes) for k, axes in turn.items()}


def _summed(facts: StepFacts) -> Iterator[Sent]:
    """Gradients over the axes on which a leaf is whole: once a step, but for the stacked leaves
    that are summed layer by layer in the backward pass."""
    layered = {name for name, leaf in facts.leaves.items() if _by_layer(facts, leaf)}
    layer = _sums(facts, "gradients of a layer", layered, layers=facts.layers.periods)
    yield from times(layer, facts.layers.periods * facts.microbatches)
    yield from _sums(facts, "gradients", facts.leaves.keys() - layered)


def _by_layer(facts: StepFacts, leaf: LeafFacts) -> bool:
    begins = leaf.params if facts.sharded else leaf.in_use
    return facts.sums.by_layer and leaf.stacked and begins == leaf.optimizer


def _sums(facts: StepFacts, why: str, names: Set[str], layers: int = 1) -> list[Sent]:
    """All-reduces of leaves, or of one layer in `layers` of each; small ones in a bucket."""
    buckets: dict[Axes, int] = defaultdict(int)
    found = []
    for name in sorted(names):
        leaf = facts.leaves[name]
        split = {a for dim in leaf.optimizer for a in dim}
        axes = tuple(a for a in facts.sizes if a not in split)
        elements = local_elements(facts, leaf, leaf.optimizer) // layers
        if name in facts.sums.apart:
            found += _compressed(facts, name, axes, elements)
        elif elements <= facts.sums.small_leaf:
            buckets[axes] += elements
        else:
            found += _all_reduced(facts, f"{why}: {name}", axes, elements)
    for axes, elements in buckets.items():
        found += _all_reduced(facts, f"{why}: small leaves", axes, elements)
    return found


def _compressed(facts: StepFacts, name: str, axes: Axes, elements: int) -> Iterator[Sent]:
    """The sum of a leaf that the reducer takes: its code to the owners of tiles and back; or two
    thin factors of it; or, where the codec cannot act, all of it."""
    by, why, n = facts.sums.slow, f"gradients: {name}", math.prod(facts.sizes[a] for a in axes)
    if name in facts.sums.encoded:
        size = n * facts.sums.encoded[name]
        yield from moved(facts, f"{why}, encoded", "all_to_all", by, axes, "uint8", size)
        yield from moved(facts, f"{why}, encoded sums", "all_gather", by, axes, "uint8", size)
        return
    for each in facts.sums.factors.get(name, (elements,)):
        yield from _all_reduced(facts, why, axes, each)


def _all_reduced(facts: StepFacts, why: str, axes: Axes, elements: int) -> Iterator[Sent]:
    """One fp32 all-reduce by the reducer: of all axes, or level by level, fastest first."""
    slow, fast = facts.sums.slow, facts.sums.fast
    if fast is None or not axes:
        yield from moved(facts, why, "all_reduce", slow, axes, "float32", elements)
        return
    slowest, *others = axes
    within = math.prod(facts.sizes[a] for a in others)
    held = -(-elements // within) * within
    for axis in reversed(others):
        for collective in ("reduce_scatter", "all_gather"):
            yield from moved(facts, why, collective, fast, (axis,), "float32", held)
        held //= facts.sizes[axis]
    yield from moved(facts, why, "all_reduce", slow, (slowest,), "float32", held)


def _norms(facts: StepFacts) -> Iterator[Sent]:
    everywhere = tuple(facts.sizes)
    numbers = {"loss and token count": 2} | {
        f"norm of the {what}": 1 for what in ("gradients", "updates", "parameters")
    }
    for why, count in numbers.items():
        yield from moved(facts, why, "all_reduce", "lax", everywhere, "float32", count)


def _updated(facts: StepFacts) -> Iterator[Sent]:
    """Parameters updated in parts and used whole (ZeRO-1 and 2): gathered in their own dtype."""
    held = {k: local_elements(facts, leaf, leaf.optimizer) for k, leaf in facts.leaves.items()}
    for turn in _rounds({k: (leaf.params, leaf.optimizer) for k, leaf in facts.leaves.items()}):
        held |= {k: held[k] * ways(facts, axes) for k, axes in turn.items()}
        leaves = {k: (axes, facts.leaves[k].dtype, held[k]) for k, axes in turn.items()}
        yield from _together(facts, "updated parameters", "all_gather", leaves)
