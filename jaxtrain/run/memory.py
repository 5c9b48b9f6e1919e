"""What a device holds in a step at the least, whether its chip leaves a program so much, and what
to do where it had too little."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.mesh.memory_pool import told_fraction
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.mesh.sharding import Dims
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.state import bytes_per_device

PARTS = {
    "params": ("params",),
    "optimizer": ("optimizer",),
    "other": ("rest", "ema", "step", "loss_scale", "skipped", "residuals"),
}
"""Fields of the train state, by what they are told as."""
OURS = "jaxtrain:"
"""What begins our notes on an error."""


def argument_bytes(assembly: Assembly) -> dict[str, int]:
    """Bytes on each device of what a step is given: params, optimizer, other state (a model's own,
    average, step, scale, residuals of compressed sums) and batch."""
    state, splits, sizes = assembly.abstract, assembly.splits, assembly.sizes
    found = {
        part: sum(bytes_per_device(getattr(state, n), getattr(splits, n), sizes) for n in names)
        for part, names in PARTS.items()
    }
    batch = bytes_per_device(assembly.abstract_batch(), assembly.batch_splits, sizes)
    return found | {"batch": batch}


def gradient_bytes(assembly: Assembly) -> int:
    """Of one gradient of every trained leaf, which all are there when their norm is known, in the
    smallest form a step can hold them in: as the optimizer's state is split; in fp32 where sums
    over microbatches are carried, else in the dtype they are made in."""
    e, places = assembly.experiment, assembly.places
    made = jnp.float32 if e.microbatches > 1 else e.precision.compute
    grads: dict[str, Any] = {
        k: jax.ShapeDtypeStruct(leaf.shape, made)
        for k, leaf in assembly.abstract.params.items()
        if places[k].trained
    }
    splits: dict[str, Dims] = {k: places[k].optimizer for k in grads}
    return bytes_per_device(grads, splits, assembly.sizes)


def memory_violations(assembly: Assembly) -> list[str]:
    """A state that no program could fit beside. Simulated devices share a host's memory, of which
    a mesh file says nothing."""
    spec = assembly.spec
    if spec.simulated:
        return []
    parts = argument_bytes(assembly) | {"gradients": gradient_bytes(assembly)}
    least, room = sum(parts.values()), spec.usable_bytes
    if least <= room:
        return []
    told = ", ".join(f"{name} {count / 1e9:.1f}" for name, count in parts.items())
    least_room = f"a program may take {room / 1e9:.1f} GB of a {spec.chip.name}"
    return [
        f"{spec.where}: a step holds {least / 1e9:.1f} GB on each device before any activation "
        f"({told}), and {told_fraction(spec) or least_room}; {_remedy(assembly, room)}"
    ]


def _remedy(assembly: Assembly, room: float) -> str:
    """The state whole, divided by what one device has room for, a twentieth left for what no table
    splits: no split needs fewer of them."""
    alone = replace(assembly, sizes=dict.fromkeys(assembly.sizes, 1))
    whole = sum(argument_bytes(alone).values()) + gradient_bytes(alone)
    devices = math.ceil(1.05 * whole / room)
    if devices > assembly.spec.devices:
        return f"use {devices} devices or more, or a smaller model"
    return (
        f"all of it would fit {devices} device{'s' * (devices > 1)}: split it over more of the "
        f"{assembly.spec.devices}, by a larger fsdp under [axes] and sharding=fsdp()"
    )


@contextmanager
def memory_remedies(spec: MeshSpec) -> Iterator[None]:
    """Where a device has no memory left for what it was asked, the error says what takes less."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # JAX has notes of its own on what jitted functions raise.
        told = any(note.startswith(OURS) for note in getattr(error, "__notes__", ()))
        if "RESOURCE_EXHAUSTED" in str(error) and not told:
            error.add_note(
                f"{OURS} a device has no memory left; use more microbatches or devices, "
                "LayerLoop(remat='full'), or sharding=fsdp() over more of them; `jaxtrain compile` "
                "tells beforehand what a step takes"
            )
            if fraction := told_fraction(spec):
                error.add_note(f"{OURS} {fraction}")
        raise
