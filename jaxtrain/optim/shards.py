"""Operations that optimizers do across a leaf's shards: sums over dims, and functions of matrices.

On leaves that are split over devices these are the optimizer's communication. `Whole` leaves it to
the partitioner, `distributed.OnMesh` states it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxtrain.mesh.sharding import LogicalAxes, PaddedAxis
from jaxtrain.optim.leaves import leaf_dims, real_size

ByMatrix = Callable[[jax.Array], jax.Array]
"""A function of a stack of matrices [..., rows, columns] that treats each by itself and keeps the
shape. Of a leaf with several dims that make rows or columns it gets them as they are."""


class LeafSum(NamedTuple):
    """A sum of `x` over `dims`, which stay, with size 1. `x` has a dim for each of the logical axes
    `names`; those of size 1 were summed before."""

    x: jax.Array
    names: LogicalAxes
    dims: tuple[int, ...]


@runtime_checkable
class Shards(Protocol):
    """Whatever an optimizer computes of more than one number at a time."""

    def sums(self, parts: Sequence[LeafSum]) -> list[jax.Array]:
        """Returns all sums in one call, so that many small ones cost one collective."""
        ...

    def by_matrix(self, function: ByMatrix, x: jax.Array, names: LogicalAxes) -> jax.Array:
        """`function` of a leaf with these logical axes."""
        ...


class Whole:
    """Computes on leaves as if they were whole. If a leaf is split, XLA's partitioner adds the
    communication."""

    def sums(self, parts: Sequence[LeafSum]) -> list[jax.Array]:
        return [x.sum(dims, keepdims=True) for x, _, dims in parts]

    def by_matrix(self, function: ByMatrix, x: jax.Array, names: LogicalAxes) -> jax.Array:
        del names
        return function(x)


WHOLE = Whole()


def squares_of_layers(x: jax.Array, names: LogicalAxes) -> LeafSum:
    """The sum of squares of each layer's tensor, in fp32."""
    dims = leaf_dims(names)
    return LeafSum(jnp.square(x.astype(jnp.float32)), names, (*dims.rows, *dims.columns))


def real_means(shards: Shards, parts: Sequence[LeafSum]) -> list[jax.Array]:
    """The means instead of the sums, padding left out.

    Law: does not depend on how far an axis is padded.
    """
    sums = shards.sums([LeafSum(_without_padding(p), p.names, p.dims) for p in parts])
    sizes = [real_size(p.x.shape, p.names, p.dims) for p in parts]
    return [total / size for total, size in zip(sums, sizes, strict=True)]


def _without_padding(part: LeafSum) -> jax.Array:
    x, names, dims = part
    for dim in dims:
        name = names[dim]
        if isinstance(name, PaddedAxis) and name.real < x.shape[dim]:
            index = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
            x = jnp.where(index < name.real, x, 0)
    return x
