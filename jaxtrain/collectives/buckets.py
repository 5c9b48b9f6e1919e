"""Small leaves travel together: one collective for all of them, so that what a step sends costs as
many latencies as it has large leaves and kinds of small ones (Li et al. 2020, PyTorch DDP).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jaxtrain.mesh.axes import MeshAxes

SMALL_LEAF = 16384
"""Elements of one device's part; at 64 KiB of fp32 a message's latency begins to weigh less than
its bytes."""


class Bucket(NamedTuple):
    """Leaves that are summed over the same mesh axes in the same dtype."""

    axes: MeshAxes
    names: tuple[str, ...]

    def concatenate(self, leaves: Mapping[str, jax.Array]) -> Shaped[Array, " elements"]:
        """Returns the elements of all its leaves, one leaf after another."""
        return jnp.concatenate([leaves[name].reshape(-1) for name in self.names])

    def split(
        self, flat: Shaped[Array, " elements"], like: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """The leaves again, out of `concatenate`; `like`: leaves of their shapes."""
        out, start = {}, 0
        for name in self.names:
            size = math.prod(like[name].shape)
            out[name] = flat[start : start + size].reshape(like[name].shape)
            start += size
        return out


def buckets(
    leaves: Mapping[str, jax.Array], axes: Mapping[str, MeshAxes], small_leaf: int
) -> list[Bucket]:
    """Returns one bucket for each set of axes and dtype, of leaves of up to `small_leaf` elements,
    in order of their first leaf. Leaves that are summed over no axes are in none."""
    groups: dict[tuple[MeshAxes, str], list[str]] = defaultdict(list)
    for name, leaf in leaves.items():
        if axes[name] and leaf.size <= small_leaf:
            groups[axes[name], str(leaf.dtype)].append(name)
    return [Bucket(over, tuple(names)) for (over, _), names in groups.items()]
