"""A state read back from its checkpoint, onto this mesh or another."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxtrain.checkpoint.manager import CheckpointManager
from jaxtrain.mesh.sharding import named_sharding
from jaxtrain.train.assembly import Assembly
from jaxtrain.train.residuals import no_residuals, redistributed, stored_splits
from jaxtrain.train.state import TrainState

PREFIX = "residuals."


def restored(
    assembly: Assembly, where: TrainState, checkpoints: CheckpointManager, step: int
) -> TrainState:
    """The state saved as `step`, on the devices of `where`.

    All of it is equal to the bit to what was saved but for residuals of a mesh with other devices
    to sum over: those are read as they are and dealt out again, for which each device holds as
    many times its share of them as there were devices. Raises what `CheckpointManager.restore`
    does.
    """
    shapes = checkpoints.shapes(step)
    stored = {k.removeprefix(PREFIX): v for k, v in shapes.items() if k.startswith(PREFIX)}
    template = jax.tree.map(_placed, assembly.abstract, where)
    if _shapes(assembly.abstract.residuals) == stored or not _same_leaves(assembly, stored):
        return checkpoints.restore(step, template)[0]  # which says what is missing
    sharding: Any = where.step
    splits = stored_splits(assembly.abstract.residuals, assembly.splits.residuals, stored)

    def as_stored(path: Any, leaf: Any, split: Any) -> jax.ShapeDtypeStruct:
        shape, at = stored[_name(path)], named_sharding(sharding.mesh, split)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=at)

    residuals = jax.tree_util.tree_map_with_path(as_stored, assembly.abstract.residuals, splits)
    state = checkpoints.restore(step, replace(template, residuals=residuals))[0]
    deal = partial(_dealt, assembly=assembly)
    return replace(state, residuals=jax.jit(deal, out_shardings=where.residuals)(state.residuals))


def _dealt(stored: Any, assembly: Assembly) -> Any:
    e = assembly.experiment
    first = no_residuals(e.execution.reducer, assembly.parts, e.seed)
    return redistributed(stored, assembly.abstract.residuals, first)


def _placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _shapes(residuals: Any) -> dict[str, tuple[int, ...]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(residuals)
    return {_name(path): tuple(leaf.shape) for path, leaf in flat}


def _same_leaves(assembly: Assembly, stored: dict[str, tuple[int, ...]]) -> bool:
    return _shapes(assembly.abstract.residuals).keys() == stored.keys()
