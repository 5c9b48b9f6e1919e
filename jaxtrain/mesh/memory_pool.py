"""What fraction of a GPU's memory a program may take, and what settles it.

JAX allocates it at its start and takes no more: a program of more fails, though the chip has room.
"""

from __future__ import annotations

from jaxtrain.mesh.hardware import POOL
from jaxtrain.mesh.mesh import MeshSpec

MOST = 0.92
"""What may be asked for in place of `POOL`: the rest is the driver's, and that of libraries with
buffers of their own (NCCL, cuDNN)."""


def memory_fraction(spec: MeshSpec) -> float | None:
    """The part of a GPU's memory that `usable_bytes` is; None of other chips, and where it is not
    known what CUDA reports."""
    if spec.simulated or spec.chip.platform != "gpu" or spec.chip.usable_gbytes is None:
        return None
    return POOL * spec.usable_bytes / (spec.chip.usable_gbytes * 1e9)


def told_fraction(spec: MeshSpec) -> str:
    """How much of a GPU a program may take, and how it may take more; "" of other chips."""
    part = memory_fraction(spec)
    if part is None:
        return ""
    room = spec.usable_bytes / 1e9
    told = f"a program may take {room:.1f} GB, {part:.0%} of the memory of a {spec.chip.name}"
    if spec.facts.usable_gbytes is not None:
        return f"{told}: start it with XLA_CLIENT_MEM_FRACTION={part:.2f}"
    more = MOST / part * room
    return (
        f"{told}, as JAX allocates it; with XLA_CLIENT_MEM_FRACTION={MOST} it may take {more:.1f}: "
        f"then write usable_gbytes = {more:.1f} under [facts] in {spec.where}"
    )
