"""Fraction of a GPU's memory that a program may use, and the setting that changes it.

JAX allocates this fraction when it starts, and never more: a larger program fails even if the chip
has memory left.
"""

from __future__ import annotations

from jaxtrain.mesh.hardware import POOL
from jaxtrain.mesh.mesh import MeshSpec

MOST = 0.92
"""Largest fraction to set in place of `POOL`: the driver and libraries with buffers of their own
(NCCL, cuDNN) need the remainder."""


def memory_fraction(spec: MeshSpec) -> float | None:
    """Returns `usable_bytes` as a fraction of a GPU's memory; None for other chips, and if the
    memory that CUDA reports is unknown."""
    if spec.simulated or spec.chip.platform != "gpu" or spec.chip.usable_gbytes is None:
        return None
    return POOL * spec.usable_bytes / (spec.chip.usable_gbytes * 1e9)


def told_fraction(spec: MeshSpec) -> str:
    """Returns a sentence about the memory of a GPU that a program may use, and the setting for
    more; "" for other chips."""
    fraction = memory_fraction(spec)
    if fraction is None:
        return ""
    usable = spec.usable_bytes / 1e9
    limit = (
        f"a program may take {usable:.1f} GB, {fraction:.0%} of the memory of a {spec.chip.name}"
    )
    if spec.facts.usable_gbytes is not None:
        return f"{limit}: start it with XLA_CLIENT_MEM_FRACTION={fraction:.2f}"
    more = MOST / fraction * usable
    return (
        f"{limit}, as JAX allocates it; with XLA_CLIENT_MEM_FRACTION={MOST} it may take "
        f"{more:.1f}: then write usable_gbytes = {more:.1f} under [facts] in {spec.where}"
    )
