"""Newton-Schulz on a mesh: each device iterates on whole matrices of its share of the layers.

Left to itself the partitioner gathers, or multiplies split matrices with an all-reduce in each of
the fifteen products. Here a leaf's shards are exchanged once (all-to-all) so that a device holds
whole matrices of a few layers, and exchanged back: 2 (n-1)/n of the leaf's bytes a device, n the
devices it is split over (the scheme of Liu et al. 2025, section 3, without its replication).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.mesh.sharding import Axes, Dims, partition_spec
from jaxtrain.optim.muon import Orthogonalize


def whole_matrices(
    mesh: jax.sharding.Mesh, split_of: Callable[[Axes], Dims], sizes: Mapping[str, int]
) -> Callable[[Orthogonalize, Axes], Orthogonalize]:
    """The `distribute` of `Muon.build` for a mesh with these axes of size > 1.

    `split_of` gives the split at which the optimizer's state of a leaf rests. Leaves that are not
    three-dimensional stacks split over their matrix dims alone are left to the partitioner.
    """

    def distribute(orthogonalize: Orthogonalize, names: Axes) -> Orthogonalize:
        split = split_of(names)
        if len(names) != 3 or split[0] or not any(split):
            return orthogonalize
        ways = math.prod(sizes[a] for dim in split for a in dim)

        def on_device(x: jax.Array) -> jax.Array:
            layers = len(x)
            x = jnp.pad(x, ((0, -layers % ways), (0, 0), (0, 0)))
            for dim in (1, 2):
                x = _exchange(x, split[dim], take=0, give=dim)
            x = orthogonalize(x)
            for dim in (2, 1):
                x = _exchange(x, split[dim], take=dim, give=0)
            return x[:layers]

        spec = partition_spec(split)
        # Over axes that do not split the leaf every device does the same work.
        return jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)

    return distribute


def _exchange(x: jax.Array, axes: tuple[str, ...], *, take: int, give: int) -> jax.Array:
    """Split dim `take` over the devices of `axes` and join their parts of dim `give`."""
    if not axes:
        return x
    return lax.all_to_all(x, axes, split_axis=take, concat_axis=give, tiled=True)
