"""The train state: everything a step reads and writes, and where each leaf lives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxtrain.compression.residuals import CompressedLeaf, residual_axes, residual_splits
from jaxtrain.mesh.sharding import Dims, Leaf, named_sharding, ways
from jaxtrain.optim.gradients import ema_update
from jaxtrain.optim.optimizer import state_axes

Arrays = dict[str, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """step counts finished steps, skipped ones included; `skipped` those whose gradient was not
    finite. optimizer: state for the trained parameters. rest: a user model's BatchStat, RngState
    and the like. ema: averaged weights of the trained parameters, or {}. residuals: state of
    compressed sums (`residuals.py`), or {}."""

    step: jax.Array
    params: Arrays
    optimizer: Any
    rest: Arrays
    ema: Arrays
    loss_scale: Any
    skipped: jax.Array
    residuals: Any = field(default_factory=dict)


def averaged_params(state: TrainState) -> Arrays:
    """Returns the parameters, replaced by their average if one is kept."""
    return {**state.params, **state.ema}


def updated_averages(state: TrainState, params: Arrays, decay: float | None) -> Arrays:
    """Returns the average after a step to `params`; {} if none is kept."""
    if decay is None:
        return {}
    return ema_update(state.ema, params, decay, state.step, warmup=True)


def state_splits(
    abstract: TrainState,
    places: Mapping[str, Leaf],
    parts: Mapping[str, CompressedLeaf],
) -> TrainState:
    """Splits of all leaves. Parameters and their average: by the `params` table. Optimizer state:
    by `optimizer` (factored moments along the dims that they keep). Residuals of the compressed
    `parts`: on their devices. Others: replicated."""
    params = {k: place.params for k, place in places.items()}
    optimizer = {k: place.optimizer for k, place in places.items()}
    residuals = residual_splits(abstract.residuals, parts)
    return _for_each_leaf(abstract, places, params, optimizer, residuals)


def state_axes_of(abstract: TrainState, places: Mapping[str, Leaf]) -> TrainState:
    """Logical axes of every leaf that follows a parameter; () for the others."""
    axes = {k: place.axes for k, place in places.items()}
    residuals = residual_axes(abstract.residuals, axes)
    return _for_each_leaf(abstract, places, axes, axes, residuals)


def _for_each_leaf(
    abstract: TrainState,
    places: Mapping[str, Leaf],
    params: Arrays,
    optimizer: Arrays,
    residuals: Any,
) -> TrainState:
    """Returns a tuple for every leaf of the state: the tuples of `params`, `optimizer` and
    `residuals` for theirs, and () for each dim of the others."""
    replicated: Any = ()
    axes = {k: place.axes for k, place in places.items()}
    return TrainState(
        step=replicated,
        params=params,
        optimizer=state_axes(abstract.optimizer, axes, optimizer),
        rest={k: ((),) * len(leaf.shape) for k, leaf in abstract.rest.items()},
        ema={k: params[k] for k in abstract.ema},
        loss_scale=jax.tree.map(lambda leaf: (), abstract.loss_scale),
        skipped=replicated,
        residuals=residuals,
    )


def shardings(abstract: TrainState, splits: TrainState, mesh: jax.sharding.Mesh) -> TrainState:
    """A NamedSharding for every leaf of the state."""
    return jax.tree.map(lambda leaf, split: named_sharding(mesh, split), abstract, splits)


def bytes_per_device(tree: Any, splits: Any, sizes: Mapping[str, int]) -> int:
    """Per-device bytes of the leaves of `tree`."""

    def size(leaf: Any, split: Dims) -> int:
        parts = math.prod(ways(d, sizes) for d in split)
        return math.prod(leaf.shape) // parts * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, tree, splits)))
