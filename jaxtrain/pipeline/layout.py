"""Layout of layers on a pipeline's stages, and conversion from the natural order and back.

Position c R + r of the pipeline is chunk c of stage r, and the positions have the layers in order.
A leaf that is stacked over layers rests as [V, slots, ...], the second dim split over `stage`, so
that each device has its own [V, slots / R, ...], and no step moves a weight. If the layers do not
divide evenly, the first positions have one more, and the others a slot of padding: zeros, which no
step changes. Without chunks there is no dim V.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Int32, Shaped

from jaxtrain.mesh.sharding import LogicalAxes

AnyArray = jax.Array | np.ndarray
CHUNKS = "chunks"
"""Logical axis of the dim V."""


@dataclass(frozen=True)
class StageLayout:
    """`layers` (periods) of a model on `stages` of `chunks` each."""

    layers: int
    stages: int
    chunks: int = 1

    @property
    def positions(self) -> int:
        return self.stages * self.chunks

    @property
    def depth(self) -> int:
        """Layers per position (virtual stage), padding included."""
        return -(-self.layers // self.positions)

    @property
    def padding(self) -> int:
        """Slots without a layer."""
        return self.positions * self.depth - self.layers

    @cached_property
    def layer_of(self) -> Int32[np.ndarray, "chunks slots"]:
        """Layer of each of the stages * depth slots of a chunk, -1 for padding."""
        fewest, more = divmod(self.layers, self.positions)
        counts = fewest + (np.arange(self.positions) < more)
        first = np.cumsum(counts) - counts
        slot = np.arange(self.depth)
        layers = np.where(slot < counts[:, None], first[:, None] + slot, -1)
        return layers.reshape(self.chunks, self.stages * self.depth).astype(np.int32)

    @cached_property
    def slot_of(self) -> Int[np.ndarray, " layers"]:
        """Slot of each layer among the slots of all positions."""
        flat = self.layer_of.reshape(-1)
        return np.argsort(np.where(flat < 0, self.layers, flat), kind="stable")[: self.layers]

    @property
    def natural(self) -> bool:
        """True if a leaf in slots equals the natural one."""
        return self.chunks == 1 and not self.padding

    def shape(self, shape: tuple[int, ...], dim: int = 0) -> tuple[int, ...]:
        """Shape in slots of a leaf whose dim `dim` counts layers."""
        lead = self.layer_of.shape if self.chunks > 1 else self.layer_of.shape[1:]
        return (*shape[:dim], *lead, *shape[dim + 1 :])

    def to_slots(self, leaf: AnyArray, dim: int = 0) -> AnyArray:
        """Converts a natural leaf to slots."""
        if self.natural:
            return leaf
        if self.padding:
            flat = self.layer_of.reshape(-1)
            gathered = jnp.take(leaf, np.maximum(flat, 0), axis=dim)
            real = (flat >= 0).reshape([-1 if d == dim else 1 for d in range(leaf.ndim)])
            leaf = jnp.where(real, gathered, jnp.zeros((), leaf.dtype))
        shape = (*leaf.shape[:dim], self.layers, *leaf.shape[dim + 1 :])
        return leaf.reshape(self.shape(shape, dim))

    def from_slots(self, leaf: AnyArray, dim: int = 0) -> AnyArray:
        """Inverse of `to_slots`."""
        if self.natural:
            return leaf
        inner = leaf.shape[dim + (2 if self.chunks > 1 else 1) :]
        flat = leaf.reshape(*leaf.shape[:dim], -1, *inner)
        return flat.take(self.slot_of, axis=dim) if self.padding else flat

    def by_chunk(self, leaf: Shaped[Array, " ..."]) -> Shaped[Array, "chunks depth ..."]:
        """A device's part of a leaf in slots, always with a dim of chunks."""
        return leaf if self.chunks > 1 else leaf[None]

    def from_chunks(self, leaf: Shaped[Array, "chunks depth ..."]) -> Shaped[Array, " ..."]:
        """Inverse of `by_chunk`."""
        return leaf if self.chunks > 1 else leaf[0]

    def axes(self, axes: LogicalAxes) -> LogicalAxes:
        """Logical axes of a leaf in slots, from its `axes` in the natural layout: with several
        chunks, CHUNKS is inserted before the layers' axis."""
        if self.chunks == 1 or "layers" not in axes:
            return axes
        dim = axes.index("layers")
        return (*axes[:dim], CHUNKS, *axes[dim:])


def layers_of_stage(layout: StageLayout, axis: str) -> jax.Array:
    """Layers [chunks, depth] in the slots of this stage, -1 for padding. axis: the stages' mesh
    axis, manual."""
    of_stages = layout.layer_of.reshape(layout.chunks, layout.stages, layout.depth)
    return jnp.asarray(of_stages)[:, lax.axis_index(axis)]


def where_real(real: jax.Array, leaf: jax.Array, dim: int = 0) -> jax.Array:
    """Zeroes a leaf where `real` is False. `real` has the leaf's dims from `dim` on."""
    shape = (*real.shape, *[1] * (leaf.ndim - dim - real.ndim))
    mask = jnp.broadcast_to(real.reshape(*[1] * dim, *shape), leaf.shape)
    return jnp.where(mask, leaf, jnp.zeros((), leaf.dtype))
