"""Reads a state from its checkpoint, onto this mesh or another."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.checkpoint.committed import CommittedSteps
from jaxtrain.checkpoint.manager import CheckpointManager
from jaxtrain.checkpoint.tiers import Checkpoints
from jaxtrain.compression.residuals import no_residuals, redistribute, stored_splits
from jaxtrain.files.pointer import checkpoints_in
from jaxtrain.mesh.sharding import named_sharding
from jaxtrain.state_format.leaves import named_leaves
from jaxtrain.state_format.manifest import Manifest
from jaxtrain.step.assembly import Assembly
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


def state_mismatches(assembly: Assembly, manifest: Manifest) -> list[str]:
    """Returns each leaf of a saved state that the assembly's lacks, or has with another shape or
    dtype, and each that is not there, one line each: `restore_state` would refuse them. Needs no
    device."""
    stored, problems = dict(manifest.leaves), []
    for name, leaf in named_leaves(natural_shapes(assembly)).items():
        expected = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
        found = stored.pop(name, None)
        redistributed = found is not None and name.startswith(PREFIX)
        if str(found) != expected and not redistributed:
            problems.append(f"{name}: {found or 'not'} there, expected {expected}")
    return problems + [f"{name}: {found} there, not kept here" for name, found in stored.items()]


def _deal_out(stored: Any, at_rest: AtRest) -> Any:
    e, parts = at_rest.assembly.experiment, at_rest.assembly.parts
    first = no_residuals(e.execution.reducer, parts, e.seed)
    return redistribute(stored, at_rest.assembly.abstract.residuals, first)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _shapes(residuals: Any) -> dict[str, tuple[int, ...]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(residuals)
    return {_name(path): tuple(leaf.shape) for path, leaf in flat}


def restore_for_evaluation(at_rest: AtRest, manifest: Manifest, run: Path, step: int) -> TrainState:
    """Returns a saved state without what only training needs, on this mesh: a parameter's average
    where the template has one, else the parameter, and a user's model's other state. Raises
    DamagedCheckpoint, and ValueError where the step lacks one."""
    template = at_rest.template
    params = {k: leaf for k, leaf in template.params.items() if k not in template.ema}
    parts = {"params": params, "rest": template.model_state, "ema": template.ema}
    names = named_leaves(parts)
    stored = {k: leaf for k, leaf in manifest.leaves.items() if k in names}
    slots = {k: order for k, order in at_rest.slots.items() if k in names}
    saves = CommittedSteps(checkpoints_in(run))
    arrays = saves.restore_from(manifest._replace(leaves=stored), step, parts, slots)[0]
    number = jnp.int32(step)
    unused: Any = dict(optimizer=(), loss_scale=None, residuals={})
    read = dict(params=arrays["params"], model_state=arrays["rest"], ema=arrays["ema"])
    return replace(template, step=number, skipped=number * 0, **read, **unused)
