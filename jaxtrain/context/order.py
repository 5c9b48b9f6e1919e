"""Order of a row's tokens on the devices over which the sequence is split.

In contiguous order device i of n has part i of n equal parts of a row. Causal attention then gives
the last device n times the work of the first. In zig-zag order a row is split into 2n chunks and
device i has chunks i and 2n-1-i, an early one and a late one, so that all devices have the same
work (Brandon et al. 2023, "Striped Attention", describe the problem; Dubey et al. 2024, Llama 3,
use this order).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxtrain.collectives.vary import Index
from jaxtrain.mesh.axes import MeshAxes

Positions = TypeVar("Positions", bound=Any)


@dataclass(frozen=True)
class Order:
    """Order of a row on `groups` groups of devices; within a group tokens are contiguous. zigzag:
    each group has a chunk from the beginning and one from the end of the row."""

    groups: int
    zigzag: bool

    def natural(self, places: Positions, seq: int, select: Callable[..., Any]) -> Positions:
        """Returns the positions in a row of `seq` tokens of the tokens at `places`. select: `where`
        of NumPy or JAX."""
        if not self.zigzag:
            return places
        size = seq // (2 * self.groups)
        block = places // size
        group, late = block // 2, block % 2
        chunk = select(late == 1, 2 * self.groups - 1 - group, group)
        return chunk * size + places % size

    def permutation(self, seq: int) -> np.ndarray:
        """[seq], of each place the position in the row."""
        return self.natural(np.arange(seq), seq, np.where)

    def positions(self, local: int, axes: MeshAxes) -> Int[Array, " local"]:
        """Positions of this device's tokens, inside a shard_map in which `axes` split the row."""
        first = lax.axis_index(axes) * local
        places = first + jnp.arange(local, dtype=jnp.int32)
        return self.natural(places, local * lax.axis_size(axes), jnp.where)

    def take(self, row: jax.Array, group: Index) -> jax.Array:
        """The tokens of a group from whole rows [rows, seq], in the order in which it has them."""
        if not self.zigzag:
            return self._chunk(row, group, self.groups)
        ends = (self.chunk(row, group), self.chunk(row, 2 * self.groups - 1 - group))
        return jnp.concatenate(ends, axis=1)

    def chunk(self, row: jax.Array, number: Index) -> jax.Array:
        """One of the chunks of zig-zag order from whole rows [rows, seq]."""
        return self._chunk(row, number, 2 * self.groups)

    def _chunk(self, row: jax.Array, number: Index, count: int) -> jax.Array:
        size = row.shape[1] // count
        return lax.dynamic_slice_in_dim(row, number * size, size, axis=1)
