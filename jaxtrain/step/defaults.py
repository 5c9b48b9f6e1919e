"""What a platform does where the experiment leaves it open: collectives, by what was measured."""

from __future__ import annotations

import math

from jaxtrain.collectives.choice import Collectives
from jaxtrain.collectives.ring import Ring
from jaxtrain.mesh.mesh import MeshSpec

MOST_TILES = 32
"""Into how many tiles the product of a weight's gradient is cut by default: those of 4,096 rows are
then 128 or more, below which a TPU's matrix unit is not filled, and all of them are written out in
the program."""


def platform_of(spec: MeshSpec) -> str:
    """JAX's name of the platform the mesh runs on."""
    return "cpu" if spec.simulated else spec.chip.platform


def default_collectives(spec: MeshSpec) -> Collectives:
    """On TPU collective matmuls, for tensor parallelism and for weights' gradients: there the
    compiler hides each hop behind a product, and leaves the plain gather, and the reduce-scatter as
    a whole all-reduce, synchronous (experiments/LOG.md). Elsewhere the compiler's own: on simulated
    devices nothing is hidden, on GPUs nothing is measured yet."""
    if platform_of(spec) != "tpu":
        return Collectives()
    tiles = math.prod(spec.shape[axis] for axis in ("fsdp", "expert"))
    return Collectives(tensor=Ring(), weight_gradients=Ring(1) if 1 < tiles <= MOST_TILES else None)
