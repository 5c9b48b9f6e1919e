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
    """Interface of an optimizer; a user's own needs only these methods, and `Optax` adds them to a
    transformation of optax. Its communication between devices is left to the partitioner. Its
    learning rate is logged if `optax.inject_hyperparams` puts it into the state."""

    def violations(self, steps: int) -> list[str]:
        """Returns the violations of this optimizer in a run of `steps`."""
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
    """Returns the logical axes of every array of an optimizer state, in the state's structure.

    An array belongs to the parameter whose path ends its own path, and has its axes; Adafactor's
    row and column means have the remaining axes, and counts have none.
    state: may be abstract (`jax.eval_shape(transform.init, params)`).
    values: a tree like `axes` of other tuples with an entry for each dim, returned instead.
    Raises ValueError on an array that fits no parameter.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_axes)
    entries = treedef.flatten_up_to(axes if values is None else values)
    by_path = {tuple(path): (names, v) for (path, names), v in zip(flat, entries, strict=True)}

    def entry(path: KeyPath, leaf: jax.Array | jax.ShapeDtypeStruct) -> tuple[Any, ...]:
        start = next((i for i in range(1, len(path)) if path[i:] in by_path), None)
        names: LogicalAxes = ()
        value: tuple[Any, ...] = ()
        if start is not None:
            names, value = by_path[path[start:]]
            remaining = _remaining_dims(names, getattr(path[start - 1], "name", ""))
            names, value = (tuple(dims[dim] for dim in remaining) for dims in (names, value))
        if len(names) != leaf.ndim:
            raise ValueError(
                f"optimizer state {jax.tree_util.keystr(path)} has shape {leaf.shape} and no "
                f"parameter's logical axes fit (found {names}); keep state in trees like the "
                "parameters', or as scalars, as jaxtrain's Adafactor and Muon do"
            )
        return value

    return jax.tree_util.tree_map_with_path(entry, state)


def _remaining_dims(names: LogicalAxes, field: str) -> list[int]:
    """The dims that a `FactoredState` field has not averaged away."""
    dims = leaf_dims(names)
    gone = {"rows": dims.columns, "columns": dims.rows}.get(field, ())
    return [dim for dim in range(len(names)) if dim not in gone]
