"""Predicts the collectives of an explicit step: the predicted side of the contract.

Each entry is a line of the source: what moves, over which mesh axes, how often and how much.
Nothing here reads a program; known rewrites of compilers are in `contract.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Set

from jaxtrain.mesh.axes import MeshAxes
from jaxtrain.models.description import STACK, named_by
from jaxtrain.planner import token_traffic as tokens
from jaxtrain.planner.backward_work import fetched_again, works
from jaxtrain.planner.facts import StepFacts
from jaxtrain.planner.optimizer_traffic import optimizer_traffic
from jaxtrain.planner.pipeline_traffic import pipeline_traffic
from jaxtrain.planner.sent import Sent, collective_traffic, local_elements, times
from jaxtrain.planner.weight_traffic import (
    fetches,
    gathers,
    scatters,
    to_optimizer,
    updated_param_gathers,
)


def step_traffic(facts: StepFacts) -> list[Sent]:
    """Returns all collectives of one training step, the optimizer's included."""
    once = [
        *_gradient_sums(facts),
        *_norms(facts),
        *optimizer_traffic(facts),
        *updated_param_gathers(facts),
    ]
    if (p := facts.pipeline) is not None:
        why, size = "what stages counted of their routers", p.tallied
        once += collective_traffic(facts, why, "all_gather", "lax", (p.axis,), "float32", size)
        return [*pipeline_traffic(facts, p), *once]
    each_microbatch = [*_activations(facts), *tokens.head(facts, facts.roles), *_weights(facts)]
    if facts.sharded:
        each_microbatch += to_optimizer(facts, facts.leaves)
    else:
        once += [
            *gathers(facts, "parameters", facts.leaves, once=True),
            *to_optimizer(facts, facts.leaves),
        ]
    return [*times(each_microbatch, facts.microbatches), *once]


def _weights(facts: StepFacts) -> Iterator[Sent]:
    """Yields the gathers of parameters that are split at rest, in each microbatch, and the scatters
    of their gradients. Leaves that are used together are sent together."""
    model, backward = facts.model, works(facts)
    for prefix in (*model.tables, *model.prefix, *model.suffix, STACK):
        stacked = prefix == STACK
        turns = model.periods if stacked else 1
        leaves = {k: v for k, v in facts.leaves.items() if named_by(k, (prefix,))}
        name = prefix.rstrip(".")
        line = f"weights of {name}"
        yield from times(fetches(facts, line, leaves, layers=turns), turns)
        if stacked:
            again = fetched_again(facts, backward[prefix])
        else:
            computed_again = int(facts.loop.remat != "none")
            again = [(work.read, computed_again) for work, _ in backward.get(prefix, [])]
        for read, count in again:
            repeated = fetches(facts, f"{line}, again", leaves, layers=turns, read=read)
            yield from times(repeated, count)
        if facts.sharded:
            scattered = scatters(facts, f"weight gradients of {name}", leaves, layers=turns)
            yield from times(scattered, turns)


def _activations(facts: StepFacts) -> Iterator[Sent]:
    """Yields the collectives of embedding and blocks."""
    roles = facts.roles
    yield from tokens.embedding_lookup(facts, roles)
    yield from tokens.embedding_lookup_backward(facts, roles)
    yield from tokens.forward(facts, roles, facts.model.layers)
    for work, turns in (work_turns for several in works(facts).values() for work_turns in several):
        yield from times(tokens.backward(facts, roles, work), turns)


def _gradient_sums(facts: StepFacts) -> Iterator[Sent]:
    """Yields the sums of gradients over the axes on which a leaf is replicated: once a step, or,
    for stacked leaves that are summed in the backward pass, once a layer."""
    trained = {name for name, leaf in facts.leaves.items() if leaf.trained}
    layered = {name for name in trained if _by_layer(facts, name)}
    periods = facts.model.periods
    layer = _sums(facts, "gradients of a layer", layered, layers=periods)
    yield from times(layer, periods * facts.microbatches)
    yield from _sums(facts, "gradients", trained - layered)


def _by_layer(facts: StepFacts, name: str) -> bool:
    leaf = facts.leaves[name]
    begins = leaf.params if facts.sharded else leaf.in_use
    return facts.sums.by_layer and name.startswith(STACK) and begins == leaf.optimizer


def _sums(facts: StepFacts, why: str, names: Set[str], layers: int = 1) -> list[Sent]:
    """Returns all-reduces of leaves, or of one layer in `layers`; small leaves in a bucket."""
    buckets: dict[MeshAxes, int] = defaultdict(int)
    sums = []
    for name in sorted(names):
        leaf = facts.leaves[name]
        split = {a for dim in leaf.optimizer for a in dim}
        axes = tuple(a for a in facts.sizes if a not in split)
        elements = local_elements(facts, leaf, leaf.optimizer) // layers
        if name in facts.sums.apart:
            sums += _compressed_sum(facts, name, axes, elements)
        elif elements <= facts.sums.small_leaf:
            buckets[axes] += elements
        else:
            sums += _all_reduce(facts, f"{why}: {name}", axes, elements)
    for axes, elements in buckets.items():
        sums += _all_reduce(facts, f"{why}: small leaves", axes, elements)
    return sums


def _compressed_sum(facts: StepFacts, name: str, axes: MeshAxes, elements: int) -> Iterator[Sent]:
    """Yields the sum of a leaf that the reducer handles: its code to the owners of tiles and back;
    or its two thin factors; or, if the codec cannot act, the leaf itself."""
    algorithm, why, devices = (
        facts.sums.slow,
        f"gradients: {name}",
        math.prod(facts.sizes[a] for a in axes),
    )
    if name in facts.sums.encoded:
        size = devices * facts.sums.encoded[name]
        yield from collective_traffic(
            facts, f"{why}, encoded", "all_to_all", algorithm, axes, "uint8", size
        )
        yield from collective_traffic(
            facts, f"{why}, encoded sums", "all_gather", algorithm, axes, "uint8", size
        )
        return
    for count in facts.sums.factors.get(name, (elements,)):
        yield from _all_reduce(facts, why, axes, count)


def _all_reduce(facts: StepFacts, why: str, axes: MeshAxes, elements: int) -> Iterator[Sent]:
    """Yields one fp32 all-reduce by the reducer: over all axes, or level by level, fastest first;
    or its two collectives in bfloat16."""
    slow, fast = facts.sums.slow, facts.sums.fast
    if facts.sums.rounded:
        devices = math.prod(facts.sizes[a] for a in axes)
        padded = -(-elements // devices) * devices
        for collective in ("all_to_all", "all_gather"):
            yield from collective_traffic(facts, why, collective, slow, axes, "bfloat16", padded)
        return
    if fast is None or not axes:
        yield from collective_traffic(facts, why, "all_reduce", slow, axes, "float32", elements)
        return
    slowest, *faster = axes
    faster_devices = math.prod(facts.sizes[a] for a in faster)
    padded = -(-elements // faster_devices) * faster_devices
    for axis in reversed(faster):
        for collective in ("reduce_scatter", "all_gather"):
            yield from collective_traffic(facts, why, collective, fast, (axis,), "float32", padded)
        padded //= facts.sizes[axis]
    yield from collective_traffic(facts, why, "all_reduce", slow, (slowest,), "float32", padded)


def _norms(facts: StepFacts) -> Iterator[Sent]:
    everywhere = tuple(facts.sizes)
    numbers = {"loss, token count and sums beside them": 2 + len(facts.model.sums)} | {
        f"norm of the {tree}": 1 for tree in ("gradients", "updates", "parameters")
    }
    for why, count in numbers.items():
        yield from collective_traffic(facts, why, "all_reduce", "lax", everywhere, "float32", count)
