"""Sizes of a run: its parameters, the least memory that a device needs in a step, whether the chip
has it, and remedies for a device that ran out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.mesh.axes import Dims
from jaxtrain.mesh.memory_pool import told_fraction
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.mesh.sharding import Leaf, PaddedAxis, ways
from jaxtrain.models.buffers import without_buffers
from jaxtrain.pipeline.layout import CHUNKS
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.layer_order import natural_shapes

PARTS = {
    "params": ("params",),
    "optimizer": ("optimizer",),
    "other": ("model_state", "ema", "step", "loss_scale", "skipped", "residuals"),
}
"""Reported part -> fields of the train state."""
OURS = "jaxtrain:"
"""Prefix of jaxtrain's notes on an error."""


def bytes_per_device(tree: Any, splits: Any, sizes: Mapping[str, int]) -> int:
    """Per-device bytes of the leaves of `tree`."""

    def size(leaf: Any, split: Dims) -> int:
        parts = math.prod(ways(d, sizes) for d in split)
        return math.prod(leaf.shape) // parts * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, tree, splits)))


def parameter_counts(assembly: Assembly) -> dict[str, int]:
    """Returns the elements of each parameter, without padded rows of the vocabulary and padded
    slots of a pipeline."""
    shapes = natural_shapes(assembly).params
    places = without_buffers(assembly.places, assembly.buffers)
    return {name: _elements(shapes[name].shape, leaf) for name, leaf in places.items()}


def _elements(shape: tuple[int, ...], leaf: Leaf) -> int:
    """Returns the elements of a leaf without padded rows. shape: in natural layer order."""
    named = zip((axis for axis in leaf.axes if axis != CHUNKS), shape, strict=True)
    return math.prod(axis.real if isinstance(axis, PaddedAxis) else size for axis, size in named)


def argument_bytes(assembly: Assembly) -> dict[str, int]:
    """Per-device bytes of a step's arguments: params, optimizer, other state (a model's own,
    average, step, scale, residuals of compressed sums) and batch."""
    state, splits, sizes = assembly.abstract, assembly.splits, assembly.sizes
    parts = {
        part: sum(bytes_per_device(getattr(state, n), getattr(splits, n), sizes) for n in names)
        for part, names in PARTS.items()
    }
    batch = bytes_per_device(assembly.abstract_batch(), assembly.batch_splits, sizes)
    return parts | {"batch": batch}


def gradient_bytes(assembly: Assembly) -> int:
    """Per-device bytes of the gradients of all trained leaves, which all exist when their norm is
    computed. Smallest form: sharded as the optimizer state; fp32 if sums over microbatches are
    carried, else in the compute dtype."""
    e, places = assembly.experiment, assembly.places
    dtype = jnp.float32 if e.microbatches > 1 else e.precision.compute
    grads: dict[str, Any] = {
        k: jax.ShapeDtypeStruct(leaf.shape, dtype)
        for k, leaf in assembly.abstract.params.items()
        if places[k].trained
    }
    splits: dict[str, Dims] = {k: places[k].optimizer for k in grads}
    return bytes_per_device(grads, splits, assembly.sizes)


def memory_violations(assembly: Assembly) -> list[str]:
    """Violation if state and gradients leave no memory for a program. None for simulated devices:
    they share the host's memory, which a mesh file does not state."""
    spec = assembly.spec
    if spec.simulated:
        return []
    parts = argument_bytes(assembly) | {"gradients": gradient_bytes(assembly)}
    least, room = sum(parts.values()), spec.usable_bytes
    if least <= room:
        return []
    breakdown = ", ".join(f"{name} {count / 1e9:.1f}" for name, count in parts.items())
    least_room = f"a program may take {room / 1e9:.1f} GB of a {spec.chip.name}"
    return [
        f"{spec.where}: a step holds {least / 1e9:.1f} GB on each device before any activation "
        f"({breakdown}), and {told_fraction(spec) or least_room}; {_remedy(assembly, room)}"
    ]


def _remedy(assembly: Assembly, room: float) -> str:
    """Suggests a number of devices. No sharding needs fewer than the unsharded state over one
    device's memory, with 5% more for what none divides. Where that many are not there, it is the
    mesh's, doubled until the part of the state that the experiment's sharding splits fits beside
    what it leaves whole: a dim that divides over the mesh most often divides over that too."""
    now, alone = assembly.spec.devices, replace(assembly, sizes=dict.fromkeys(assembly.sizes, 1))
    now_bytes, total = (
        1.05 * (sum(argument_bytes(a).values()) + gradient_bytes(a)) for a in (assembly, alone)
    )
    devices = math.ceil(total / room)
    if devices <= now:
        return (
            f"all of it would fit {devices} device{'s' * (devices > 1)}: split it over more of the "
            f"{now}, by a larger fsdp under [axes] and sharding=fsdp()"
        )
    unsplit = (now * now_bytes - total) / (now - 1) if now > 1 else 0.0
    if unsplit < room:
        devices = max(devices, math.ceil((total - unsplit) / (room - unsplit)))
    doubled = now * 2 ** math.ceil(math.log2(devices / now))
    if unsplit < room:
        return f"use for example {doubled} devices, or a smaller model"
    return (
        f"{unsplit / 1e9:.1f} GB of it are whole on each device, however many there are: use "
        f"sharding=fsdp() and for example fsdp={doubled} under [axes], or a smaller model"
    )


@contextmanager
def memory_remedies(spec: MeshSpec) -> Iterator[None]:
    """Adds remedies to the error of a device that ran out of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # JAX has notes of its own on what jitted functions raise.
        noted = any(note.startswith(OURS) for note in getattr(error, "__notes__", ()))
        if "RESOURCE_EXHAUSTED" in str(error) and not noted:
            error.add_note(
                f"{OURS} a device has no memory left; use more microbatches or devices, "
                "LayerLoop(remat='full'), or sharding=fsdp() over more of them; `jaxtrain compile` "
                "tells beforehand what a step takes"
            )
            if fraction := told_fraction(spec):
                error.add_note(f"{OURS} {fraction}")
        raise
