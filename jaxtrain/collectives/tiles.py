"""An array as tiles of one dim, stacked on a new first dim: what a reduce-scatter of a dim other
than the first begins with.

It is a transposition, which XLA:CPU writes a number at a time: of [4096, 256] floats in 8 tiles, on
8 simulated devices, 18 to 35 ms for the 6 that copying tile by tile takes (experiments/LOG.md; the
way back, after a gather, is no faster so). Elsewhere it is left to the compiler, which knows the
layout that its collective wants.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

MOST_SLICES = 32
"""Of more tiles a program would have too many instructions."""


def stack_tiles(x: Shaped[Array, ...], dim: int, tiles: int) -> Shaped[Array, "{tiles} ..."]:
    """[.., tiles * size, ..] -> [tiles, .., size, ..]; `tiles` divides the dim."""
    size = x.shape[dim] // tiles

    def transposed(x: jax.Array) -> jax.Array:
        apart = x.reshape(*x.shape[:dim], tiles, size, *x.shape[dim + 1 :])
        return jnp.moveaxis(apart, dim, 0)

    def sliced(x: jax.Array) -> jax.Array:
        starts = range(0, x.shape[dim], size)
        return jnp.stack([lax.slice_in_dim(x, i, i + size, axis=dim) for i in starts])

    if dim == 0 or not 1 < tiles <= MOST_SLICES or not x.size:
        return transposed(x)
    return lax.platform_dependent(x, cpu=sliced, default=transposed)
