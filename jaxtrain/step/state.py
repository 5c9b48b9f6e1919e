"""The train state: everything a step reads and writes, and where each leaf lives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.tree_util import GetAttrKey

from jaxtrain.arrays import Leaves
from jaxtrain.compression.residuals import CompressedLeaf, residual_axes, residual_splits
from jaxtrain.mesh.sharding import Leaf, named_sharding
from jaxtrain.optim.gradients import ema_update
from jaxtrain.optim.optimizer import state_axes

STORED = {"model_state": "rest"}  # fields that checkpoints know by another name


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class TrainState:
    """State of a run: a tree of arrays that a step reads and writes, split over the mesh as
    `Experiment.sharding` says. Layers of the stack are stacked in one array.

    step: finished steps, skipped ones included. params: parameters by their paths, such as
    period.0.attention.query. optimizer: its state for the trained parameters. model_state: what
    else a model of one's own keeps, such as BatchStat and RngState, by path. ema: averaged weights
    of the trained parameters, {} without. loss_scale: None without one. skipped: steps whose
    gradient was not finite, which changed no parameter. residuals: state of compressed sums of
    gradients, {} without."""

    step: jax.Array
    params: Leaves
    optimizer: Any
    model_state: Leaves
    ema: Leaves
    loss_scale: Any
    skipped: jax.Array
    residuals: Any = field(default_factory=dict)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[GetAttrKey, Any]], None]:
        return [(GetAttrKey(STORED.get(k, k)), part) for k, part in vars(self).items()], None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Iterable[Any]) -> TrainState:
        return cls(*parts)


def averaged_params(state: TrainState) -> Leaves:
    """Returns the parameters, replaced by their average if one is kept."""
    return {**state.params, **state.ema}


def updated_averages(state: TrainState, params: Leaves, decay: float | None) -> Leaves:
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
    params: Leaves,
    optimizer: Leaves,
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
        model_state={k: ((),) * len(leaf.shape) for k, leaf in abstract.model_state.items()},
        ema={k: params[k] for k in abstract.ema},
        loss_scale=jax.tree.map(lambda leaf: (), abstract.loss_scale),
        skipped=replicated,
        residuals=residuals,
    )


def shardings(abstract: TrainState, splits: TrainState, mesh: jax.sharding.Mesh) -> TrainState:
    """A NamedSharding for every leaf of the state."""
    return jax.tree.map(lambda leaf, split: named_sharding(mesh, split), abstract, splits)
