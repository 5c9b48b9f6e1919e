"""Default collectives of each platform, chosen by measurement."""

from __future__ import annotations

import math
from dataclasses import replace

from jaxtrain.collectives.choice import Collectives
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.rows import Padded
from jaxtrain.mesh.axes import EXPERT_AXES, TABLE
from jaxtrain.mesh.mesh import MeshSpec

MOST_TILES = 32
"""Into how many tiles the product of a weight's gradient is cut by default: those of 4,096 rows are
then 128 or more, below which a TPU's matrix unit is not filled, and all of them are written out in
the program."""
MOST_PEERS = 32
"""Among how many devices rows of experts travel by permutes: each sends to every other one, and all
of these are written out in the program. Beyond, they were not compared with the compiler's own."""


def default_collectives(spec: MeshSpec) -> Collectives:
    """On TPU permutes of ours, which are tied to products (`overlap.alongside`, `matmul.py`): the
    compiler leaves its own gathers, and the reduce-scatter as a whole all-reduce, synchronous
    (experiments/LOG.md). Weights by recursive doubling; their gradients within products, or beyond
    MOST_TILES by recursive halving; for tensor parallelism collective matmuls. Rows of experts
    directly to each device, which the compiler hides in part, and `Execution.expert_chunk` ties to
    products. Elsewhere the compiler's own: on simulated devices nothing is hidden, on GPUs nothing
    is measured yet."""
    if spec.platform != "tpu":
        return Collectives()
    tiles = math.prod(spec.shape[row.name] for row in TABLE if row.parameters)
    experts = math.prod(spec.shape[axis] for axis in EXPERT_AXES)
    rows = Padded(Ring()) if experts <= MOST_PEERS else Padded()
    chosen = Collectives(tensor=Ring(), experts=rows)
    if tiles == 1:
        return chosen
    by_product = Ring(1) if tiles <= MOST_TILES else None
    return replace(chosen, fsdp=Recursive(), weight_gradients=by_product)
