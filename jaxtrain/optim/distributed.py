"""An optimizer's own communication on a mesh, stated: it is what the contract predicts.

Left to itself the partitioner gathers whole leaves, or multiplies split matrices with an all-reduce
in each of Newton-Schulz's fifteen products.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxtrain.collectives.buckets import Bucket
from jaxtrain.collectives.named import sum_over
from jaxtrain.mesh.axes import Dims
from jaxtrain.mesh.sharding import LogicalAxes, partition_spec
from jaxtrain.optim.leaves import leaf_dims
from jaxtrain.optim.shards import ByMatrix, LeafSum


@dataclass(frozen=True, eq=False)
class OnMesh:
    """`Shards` of leaves that rest on `mesh` as `split_of` their logical axes says; `sizes`: mesh
    axes of size > 1, in mesh order."""

    mesh: jax.sharding.Mesh
    split_of: Callable[[LogicalAxes], Dims]
    sizes: Mapping[str, int]

    def sums(self, parts: Sequence[LeafSum]) -> list[jax.Array]:
        """Returns each part summed over its dims, which stay with size 1: on each device, then over
        devices by one all-reduce for each set of mesh axes."""
        if not parts:
            return []
        splits = [self._split(part) for part in parts]
        reduced = [
            tuple(() if dim in part.dims else axes for dim, axes in enumerate(split))
            for part, split in zip(parts, splits, strict=True)
        ]
        together: dict[tuple[tuple[str, ...], frozenset[str]], list[str]] = defaultdict(list)
        for i, (old, new) in enumerate(zip(splits, reduced, strict=True)):
            remaining = frozenset(_axes(new))
            over = tuple(a for a in self.sizes if a in _axes(old) - remaining)
            together[over, remaining].append(str(i))
        buckets = [Bucket(over, tuple(names)) for (over, _), names in together.items()]

        def on_device(arrays: list[jax.Array]) -> list[jax.Array]:
            pairs = enumerate(zip(arrays, parts, strict=True))
            sums = {str(i): x.sum(p.dims, keepdims=True) for i, (x, p) in pairs}
            for bucket in buckets:
                total = sum_over("optimizer", bucket.concatenate(sums), bucket.axes)
                sums |= bucket.split(total, sums)
            return list(sums.values())

        run = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=([partition_spec(split) for split in splits],),
            out_specs=[partition_spec(split) for split in reduced],
        )
        return run([part.x for part in parts])

    def _split(self, part: LeafSum) -> Dims:
        pairs = zip(part.x.shape, self.split_of(part.names), strict=True)
        return tuple(() if size == 1 else axes for size, axes in pairs)

    def by_matrix(self, function: ByMatrix, x: jax.Array, names: LogicalAxes) -> jax.Array:
        """Applies `function` to the whole matrices of a leaf, and returns the leaf's shards.

        The n devices over which the matrices are split exchange shards (all-to-all), so that each
        holds whole matrices of a few layers, and exchange them back: 2 (n-1)/n of a device's bytes
        (Liu et al. 2025, section 3, without its replication). A single matrix is gathered instead,
        and every device does the same work on it."""
        split, stacked = self.split_of(names), leaf_dims(names).stacked
        inner = {dim: axes for dim, axes in enumerate(split[stacked:], start=1) if axes}
        ways = math.prod(self.sizes[a] for axes in inner.values() for a in axes)

        def on_device(local: Float[Array, " ..."]) -> Float[Array, " ..."]:
            stack = local.reshape(-1, *local.shape[stacked:])
            if len(stack) == 1:
                return _on_gathered(function, stack, inner).reshape(local.shape)
            padding = [(0, 0)] * stack.ndim
            padding[0] = (0, -len(stack) % ways)
            matrices = jnp.pad(stack, padding)
            for dim, axes in inner.items():
                matrices = _exchange(matrices, axes, take=0, give=dim)
            matrices = function(matrices)
            for dim, axes in reversed(inner.items()):
                matrices = _exchange(matrices, axes, take=dim, give=0)
            return matrices[: len(stack)].reshape(local.shape)

        if not inner:
            on_device = function
        spec = partition_spec(split)
        # Over axes that do not split the leaf every device does the same work.
        return jax.shard_map(on_device, mesh=self.mesh, in_specs=spec, out_specs=spec)(x)


def _axes(split: Dims) -> set[str]:
    return {axis for dim in split for axis in dim}


def _exchange(x: jax.Array, axes: tuple[str, ...], *, take: int, give: int) -> jax.Array:
    """Split dim `take` over the devices of `axes` and join their parts of dim `give`."""
    return lax.all_to_all(x, axes, split_axis=take, concat_axis=give, tiled=True)


def _on_gathered(
    function: ByMatrix, x: jax.Array, split: Mapping[int, tuple[str, ...]]
) -> jax.Array:
    """Gathers `x` along its split dims, applies `function`, returns this device's part."""
    matrix = x
    for dim, axes in split.items():
        matrix = lax.all_gather(matrix, axes, axis=dim, tiled=True)
    matrix = function(matrix)
    for dim, axes in split.items():
        size = x.shape[dim]
        matrix = lax.dynamic_slice_in_dim(matrix, lax.axis_index(axes) * size, size, dim)
    return matrix
