"""Reads a state from its checkpoint, onto this mesh or another."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from jaxtrain.checkpoint.manager import CheckpointManager
from jaxtrain.checkpoint.tiers import Checkpoints
from jaxtrain.compression.residuals import no_residuals, redistribute, stored_splits
from jaxtrain.mesh.sharding import named_sharding
from jaxtrain.step.layer_order import AtRest, natural_shapes, placed
from jaxtrain.step.state import TrainState

PREFIX = "residuals."


def restore_state(
    at_rest: AtRest, checkpoints: Checkpoints | CheckpointManager, step: int
) -> TrainState:
    """Returns the state saved at `step`, sharded at rest on this mesh; a device reads its own
    shards.

    The state equals the saved one to the bit, except residuals saved on a mesh that sums over other
    devices. These are read as saved and redistributed: a device needs its share of them times the
    old number of devices. Raises what `Checkpoints.restore` raises.
    """
    leaves = checkpoints.manifest(step).leaves.items()
    stored = {k.removeprefix(PREFIX): leaf.shape for k, leaf in leaves if k.startswith(PREFIX)}
    expected = _shapes(natural_shapes(at_rest.assembly).residuals)
    if expected == stored or expected.keys() != stored.keys():
        # If the leaves differ, the manager names the missing ones.
        return checkpoints.restore(step, at_rest.template, at_rest.slots)[0]
    abstract = at_rest.assembly.abstract.residuals
    splits = stored_splits(abstract, at_rest.assembly.splits.residuals, stored)

    def as_stored(path: Any, leaf: Any, split: Any) -> jax.ShapeDtypeStruct:
        name = _name(path)
        # Errors have a leading device dim, here of the saved mesh; layers stay in slots.
        errors = name.startswith("errors.")
        shape = (stored[name][0], *leaf.shape[1:]) if errors else stored[name]
        return placed(jax.ShapeDtypeStruct(shape, leaf.dtype), named_sharding(at_rest.mesh, split))

    residuals = jax.tree_util.tree_map_with_path(as_stored, abstract, splits)
    template = replace(at_rest.template, residuals=residuals)
    state = checkpoints.restore(step, template, at_rest.slots)[0]
    deal = jax.jit(partial(_deal_out, at_rest=at_rest), out_shardings=at_rest.shardings.residuals)
    return replace(state, residuals=jax.block_until_ready(deal(state.residuals)))


def _deal_out(stored: Any, at_rest: AtRest) -> Any:
    e, parts = at_rest.assembly.experiment, at_rest.assembly.parts
    first = no_residuals(e.execution.reducer, parts, e.seed)
    return redistribute(stored, at_rest.assembly.abstract.residuals, first)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _shapes(residuals: Any) -> dict[str, tuple[int, ...]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(residuals)
    return {_name(path): tuple(leaf.shape) for path, leaf in flat}
