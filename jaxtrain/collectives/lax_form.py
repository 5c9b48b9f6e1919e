"""The compiler's own collectives: the plain form, and the twin every kernel is tested against."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import lax

from jaxtrain.collectives.algorithm import only_on
from jaxtrain.collectives.tiles import stack_tiles
from jaxtrain.collectives.vary import vary
from jaxtrain.mesh.axes import MeshAxes


@dataclass(frozen=True)
class Lax:
    """`jax.lax`'s collectives; an `Algorithm`. Sums are in the dtype of what is summed. What has
    no collective of its own there (broadcast, reduce, gather, scatter) is a masked one that does.
    """

    def all_gather(self, x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
        return lax.all_gather(x, axes, axis=dim, tiled=True)

    def reduce_scatter(self, x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
        def along(x: jax.Array) -> jax.Array:
            return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)

        def stacked(x: jax.Array) -> jax.Array:
            return lax.psum_scatter(stack_tiles(x, dim, lax.axis_size(axes)), axes)

        return lax.platform_dependent(x, cpu=stacked, default=along) if dim else along(x)

    def all_reduce(self, x: jax.Array, axes: MeshAxes) -> jax.Array:
        return vary(lax.psum(x, axes), axes)

    def all_to_all(self, x: jax.Array, axes: MeshAxes, split: int, concat: int) -> jax.Array:
        return lax.all_to_all(x, axes, split_axis=split, concat_axis=concat, tiled=True)

    def broadcast(self, x: jax.Array, axes: MeshAxes, root: int) -> jax.Array:
        return self.all_reduce(only_on(root, x, axes), axes)

    def reduce(self, x: jax.Array, axes: MeshAxes, root: int) -> jax.Array:
        return only_on(root, self.all_reduce(x, axes), axes)

    def gather(self, x: jax.Array, axes: MeshAxes, dim: int, root: int) -> jax.Array:
        return only_on(root, self.all_gather(x, axes, dim), axes)

    def scatter(self, x: jax.Array, axes: MeshAxes, dim: int, root: int) -> jax.Array:
        return self.reduce_scatter(only_on(root, x, axes), axes, dim)
