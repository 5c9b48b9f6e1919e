"""The collectives of an explicit step, by arithmetic: the predicted side of the contract.

Each entry is a line of the source: what moves, over which mesh axes, how often and how much.
Nothing here has seen a program; what a compiler is known to rewrite is in `contract.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import replace

from jaxtrain.planner.facts import LeafFacts, StepFacts
from jaxtrain.planner.optimizer_traffic import optimizer_traffic
from jaxtrain.planner.sent import Sent, local_elements, moved, times


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
        for (axes, dtype), elements in _grouped(facts, leaves, lambda leaf: facts.reduce).items():
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
    for (axes, name), elements in _grouped(facts, leaves, dtype).items():
        elements //= layers if all(leaf.stacked for leaf in leaves.values()) else 1
        found += moved(facts, why, "all_gather", facts.fsdp_by, axes, name, elements)
    return found


def _grouped(
    facts: StepFacts, leaves: Mapping[str, LeafFacts], dtype: Callable[[LeafFacts], str]
) -> dict[tuple[tuple[str, ...], str], int]:
    """(mesh axes gathered, dtype) -> elements as used, of leaves that are split at rest only."""
    found: dict[tuple[tuple[str, ...], str], int] = defaultdict(int)
    for leaf in leaves.values():
        axes = next(
            (r[len(u) :] for r, u in zip(leaf.params, leaf.in_use, strict=True) if r != u), ()
        )
        if axes:
            found[axes, dtype(leaf)] += local_elements(facts, leaf, leaf.in_use)
    return found


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
    for name, leaf in facts.leaves.items():
        now = leaf.params if facts.sharded else leaf.in_use
        elements = local_elements(facts, leaf, now)
        for begins, ends in zip(now, leaf.optimizer, strict=True):
            axes = ends[len(begins) :]
            why = f"gradient of {name} to its optimizer state"
            yield from moved(facts, why, "reduce_scatter", facts.fsdp_by, axes, "float32", elements)
            elements //= math.prod(facts.sizes[a] for a in axes)


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
    buckets: dict[tuple[str, ...], int] = defaultdict(int)
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


def _compressed(
    facts: StepFacts, name: str, axes: tuple[str, ...], elements: int
) -> Iterator[Sent]:
    """The sum of a leaf that the reducer takes: its code to the owners of tiles and back; or two
    thin factors of it; or, where the codec cannot act, all of it."""
    by, why, n = facts.sums.slow, f"gradients: {name}", math.prod(facts.sizes[a] for a in axes)
    if name in facts.sums.encoded:
        size = n * facts.sums.encoded[name]
        yield from moved(facts, f"{why}, encoded", "all_to_all", by, axes, "uint8", size)
        yield from moved(facts, f"{why}, encoded sums", "all_gather", by, axes, "uint8", size)
        return
    for each in facts.sums.factors.get(name, (elements,)):
        yield from moved(facts, why, "all_reduce", by, axes, "float32", each)


def _all_reduced(
    facts: StepFacts, why: str, axes: tuple[str, ...], elements: int
) -> Iterator[Sent]:
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
    for name, leaf in facts.leaves.items():
        elements = local_elements(facts, leaf, leaf.optimizer)
        for rests, updated in zip(leaf.params, leaf.optimizer, strict=True):
            axes = updated[len(rests) :]
            elements *= math.prod(facts.sizes[a] for a in axes)
            why = f"{name}, updated"
            yield from moved(facts, why, "all_gather", "lax", axes, leaf.dtype, elements)
