"""An all-reduce in levels, for networks whose links differ: most bytes stay on the fast ones.

Reduce-scatter over the fast mesh axes, all-reduce what is left over the slow one, all-gather back
(Cho et al. 2019, BlueConnect; Jeaugey 2019, NCCL's tree over rings). One axis a level, and mesh
axes go from the slowest link to the fastest: (data, fsdp) are two levels, (replica, data, fsdp)
three.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
from jax import lax

from jaxtrain.collectives.choice import Exact, algorithm
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.named import all_gather, link_sum, sum_scatter
from jaxtrain.collectives.ring import flatten_padded
from jaxtrain.mesh.axes import MeshAxes
from jaxtrain.violations import raise_violations


@dataclass(frozen=True)
class Hierarchical:
    """A sum over mesh axes level by level; what each device and each node sends is
    `cost.hierarchical`'s to tell.

    slow: the algorithm of the all-reduce over the first (slowest) axis. fast: that of the
      reduce-scatters and all-gathers over the others, the last axis first. Raises ValueError for a
      field that holds no algorithm.

    Over one axis there is one level, and it is `slow`'s all-reduce. That is so for every leaf
    under `fsdp()` on a mesh (data, fsdp): there FSDP's own reduce-scatter and gathers are the fast
    level, and what remains is the sum over data.
    """

    slow: Exact = Lax()  # noqa: RUF009 (frozen)
    fast: Exact = Lax()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        raise_violations(algorithm("slow", self.slow) + algorithm("fast", self.fast))

    def all_reduce(self, x: jax.Array, axes: MeshAxes) -> jax.Array:
        """The sum of `x`, of any shape, over the devices of `axes`, with equal bits on all of
        them. Padded to a multiple of the fast axes' devices."""
        slowest, *fast = axes
        flat, restore = flatten_padded(x, math.prod(lax.axis_size(axis) for axis in fast))
        for axis in reversed(fast):
            flat = sum_scatter("fast links", flat, (axis,), 0, self.fast)
        flat = link_sum("slow links", flat, (slowest,), self.slow)
        for axis in fast:
            flat = all_gather(flat, (axis,), 0, self.fast)
        return restore(flat)
