"""A state read back from its checkpoint, onto this mesh or another."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxtrain.checkpoint.tiers import Checkpoints
from jaxtrain.mesh.sharding import named_sharding
from jaxtrain.train.natural import NaturalOrder
from jaxtrain.train.residuals import no_residuals, redistributed, stored_splits
from jaxtrain.train.state import TrainState

PREFIX = "residuals."


def restored(order: NaturalOrder, checkpoints: Checkpoints, step: int) -> TrainState:
    """The state saved as `step`, on the mesh of `order`: read in natural order and laid.

    All of it is equal to the bit to what was saved but for residuals of a mesh with other devices
    to sum over: those are read as they are and dealt out again, for which each device holds as
    many times its share of them as there were devices. Raises what `Checkpoints.restore`
    does.
    """
    leaves = checkpoints.manifest(step).leaves.items()
    stored = {k.removeprefix(PREFIX): leaf.shape for k, leaf in leaves if k.startswith(PREFIX)}
    wanted, where = order.form.abstract, order.shardings
    template = jax.tree.map(_placed, wanted, where)
    if _shapes(wanted.residuals) == stored or _shapes(wanted.residuals).keys() != stored.keys():
        # Of other leaves the manager says which are missing.
        return order.laid(checkpoints.restore(step, template)[0])
    splits = stored_splits(wanted.residuals, order.form.splits.residuals, stored)

    def as_stored(path: Any, leaf: Any, split: Any) -> jax.ShapeDtypeStruct:
        shape, at = stored[_name(path)], named_sharding(order.mesh, split)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=at)

    residuals = jax.tree_util.tree_map_with_path(as_stored, wanted.residuals, splits)
    state = checkpoints.restore(step, replace(template, residuals=residuals))[0]
    deal = jax.jit(partial(_dealt, order=order), out_shardings=where.residuals)
    return order.laid(replace(state, residuals=jax.block_until_ready(deal(state.residuals))))


def _dealt(stored: Any, order: NaturalOrder) -> Any:
    assembly = order.assembly
    e = assembly.experiment
    first = no_residuals(e.execution.reducer, assembly.parts, e.seed)
    return redistributed(stored, order.form.abstract.residuals, first)


def _placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _shapes(residuals: Any) -> dict[str, tuple[int, ...]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(residuals)
    return {_name(path): tuple(leaf.shape) for path, leaf in flat}
