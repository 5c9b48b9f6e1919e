"""An all-reduce in levels, for networks whose links differ: most bytes stay on the fast ones.

Reduce-scatter over the fast mesh axes, all-reduce what is left over the slow one, all-gather back
(Cho et al. 2019, BlueConnect; Jeaugey 2019, NCCL's tree over rings). One axis a level, and mesh
axes go from the slowest link to the fastest: (data, fsdp) are two levels, (replica, data, fsdp)
three.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax import lax

from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.named import all_gather, link_sum, sum_scatter
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring, flattened
from jaxtrain.collectives.vary import Axes


@dataclass(frozen=True)
class Hierarchical:
    """A sum over mesh axes level by level; what each device sends is `sent_bytes`.

    slow: the algorithm of the all-reduce over the first (slowest) axis. fast: that of the
      reduce-scatters and all-gathers over the others, the last axis first.

    Over one axis there is one level, and it is `slow`'s all-reduce. That is so for every leaf
    under `fsdp()` on a mesh (data, fsdp): there FSDP's own reduce-scatter and gathers are the fast
    level, and what remains is the sum over data.
    """

    slow: Lax | Ring | Recursive = Lax()  # noqa: RUF009 (frozen)
    fast: Lax | Ring | Recursive = Lax()  # noqa: RUF009 (frozen)

    def all_reduce(self, x: jax.Array, axes: Axes) -> jax.Array:
        """The sum of `x`, of any shape, over the devices of `axes`, with equal bits on all of
        them. Padded to a multiple of the fast axes' devices."""
        slowest, *fast = axes
        flat, restore = flattened(x, math.prod(lax.axis_size(axis) for axis in fast))
        for axis in reversed(fast):
            flat = sum_scatter("fast links", flat, (axis,), 0, self.fast)
        flat = link_sum("slow links", flat, (slowest,), self.slow)
        for axis in fast:
            flat = all_gather(flat, (axis,), 0, self.fast)
        return restore(flat)


class LevelBytes(NamedTuple):
    """What crosses the links of one level, in one direction."""

    device: float
    """Sent by each device."""
    node: float
    """Sent by all devices that share one position on this level and the slower ones: a node, where
    the fast links are those within it."""


def sent_bytes(size: int, levels: tuple[int, ...], itemsize: int = 4) -> tuple[LevelBytes, ...]:
    """Bytes of one `Hierarchical.all_reduce` of `size` numbers, for each level.

    levels: devices along each axis, slowest first: (nodes, devices a node), or (sites, nodes,
    devices). With S bytes, padded, on levels (n_1, .. n_k) a device sends 2 (n_i - 1)/n_i * S /
    (n_{i+1} .. n_k) on level i, so a node sends 2 (n_1 - 1)/n_1 * S over the slow links, its
    devices each an equal part of it. A flat ring over the same devices sends as much out of a node
    (2 (n - 1)/n * S), but all of it through one device's link; and it waits for the slow link 2
    (n - 1) times instead of 2 (n_1 - 1) times. Counted for rings and `Lax`; `Recursive` sends
    whole buffers in its all-reduce.
    """
    within = math.prod(levels[1:])
    padded = -(-size // within) * within * itemsize
    found = []
    for i, n in enumerate(levels):
        inner = math.prod(levels[i + 1 :])
        device = 2 * (n - 1) / n * padded / inner
        found.append(LevelBytes(device, device * inner))
    return tuple(found)
