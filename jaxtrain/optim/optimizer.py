"""The optimizers as values, and where their state lives.

An optimizer is a frozen dataclass held by the experiment; `.build` makes the optax transformation
for a tree of logical axes. Law for each: one update of a stacked tree equals the same optimizer on
an unstacked list of layers whose weights are two-dim matrices.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import optax
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from jaxtrain.mesh.sharding import LogicalAxes
from jaxtrain.optim.adafactor import Adafactor
from jaxtrain.optim.elementwise import SGD, AdamW, Lion
from jaxtrain.optim.layerwise import Lamb, Lars
from jaxtrain.optim.leaves import (
    AxesTree,
    everything,
    hidden_matrices,
    is_axes,
    leaf_dims,
    matrices,
)
from jaxtrain.optim.muon import Muon

__all__ = [
    "ELEMENTWISE",
    "SGD",
    "SHARDED",
    "Adafactor",
    "AdamW",
    "Lamb",
    "Lars",
    "Lion",
    "Muon",
    "Optimizer",
    "everything",
    "hidden_matrices",
    "matrices",
    "state_axes",
]


@runtime_checkable
class Optimizer(Protocol):
    """What a training run asks of an optimizer; a user's own need only have these, and `Optax` has
    them for a transformation of optax's. What it needs beyond each number by itself is the
    partitioner's to find. Its learning rate is logged where `optax.inject_hyperparams` puts it into
    the state."""

    def violations(self, steps: int) -> list[str]:
        """What is wrong with this optimizer in a run of `steps`; empty when all is well."""
        ...

    def build(self, axes: AxesTree, *, steps: int, batch: int) -> optax.GradientTransformation:
        """The transformation for parameters with these logical axes.

        `batch` is the experiment's batch, in the unit of `ScaledRate.reference_batch`. Raises
        ValueError with all violations, and in `init` where axes and shapes disagree.
        """
        ...


ELEMENTWISE = (AdamW, SGD, Lion)
"""Optimizers that move each number by itself: nothing is sent."""

SHARDED = (Adafactor, Lamb, Lars, Muon)
"""Optimizers that need more than that, and whose `build` takes the `shards` to ask for it."""


def state_axes(state: PyTree, axes: AxesTree, values: PyTree = None) -> PyTree:
    """The logical axes of every array of an optimizer state, in the state's own structure.

    `state` may be abstract (`jax.eval_shape(transform.init, params)`). An array belongs to the
    parameter whose path ends its own path, and has its axes, or those left of them in Adafactor's
    row and column means; counts have none. `values`: a tree like `axes` of other tuples with an
    entry for each dim, which are given instead. Raises ValueError on an array that fits no
    parameter.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_axes)
    given = treedef.flatten_up_to(axes if values is None else values)
    by_path = {tuple(path): (names, v) for (path, names), v in zip(flat, given, strict=True)}

    def of(path: KeyPath, leaf: jax.Array | jax.ShapeDtypeStruct) -> tuple[Any, ...]:
        start = next((i for i in range(1, len(path)) if path[i:] in by_path), None)
        names: LogicalAxes = ()
        found: tuple[Any, ...] = ()
        if start is not None:
            names, found = by_path[path[start:]]
            kept = _remaining_dims(names, getattr(path[start - 1], "name", ""))
            names, found = (tuple(each[dim] for dim in kept) for each in (names, found))
        if len(names) != leaf.ndim:
            where = jax.tree_util.keystr(path)
            raise ValueError(
                f"optimizer state {where} has shape {leaf.shape} and no parameter's logical axes "
                f"fit (found {names}); keep state in trees like the parameters', or as scalars, "
                "as jaxtrain's Adafactor and Muon do"
            )
        return found

    return jax.tree_util.tree_map_with_path(of, state)


def _remaining_dims(names: LogicalAxes, field: str) -> list[int]:
    """The dims that a `FactoredState` field has not averaged away."""
    dims = leaf_dims(names)
    gone = {"rows": dims.columns, "columns": dims.rows}.get(field, ())
    return [dim for dim in range(len(names)) if dim not in gone]
