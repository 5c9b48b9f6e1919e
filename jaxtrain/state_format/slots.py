"""Leaves at rest in slots: the mapping from parts of an array to boxes of the stored leaf.

On pipeline stages a leaf that is stacked over layers is at rest [slots, ...] or [chunks, slots,
...], with padding; a checkpoint has it as [layers, ...]. The conversion moves no layer: index
arithmetic cuts a device's part into boxes of the stored leaf, and joins it from them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.state_format.chunks import Box

ArrayIndex = tuple[Any, ...]


class BoxPiece(NamedTuple):
    """A box of the stored leaf, and the index of its elements in a device's part of the array."""

    box: Box
    place: ArrayIndex


@dataclass(frozen=True, eq=False)
class Slots:
    """Layout of a stored leaf in an array; its dim `dim` counts layers. layer_of: [slots] or
    [chunks, slots], those dims of the array: the layer in each, -1 for padding."""

    dim: int
    layer_of: np.ndarray

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the stored leaf of an array of `shape`."""
        layers = int((self.layer_of >= 0).sum())
        return (*shape[: self.dim], layers, *shape[self.dim + self.layer_of.ndim :])

    def pieces(self, box: Box) -> Iterator[BoxPiece]:
        """Yields the pieces of the stored leaf in part `box` of the array, each layer once and no
        padding. Consecutive layers in neighbouring slots are one piece."""
        dim, last = self.dim, self.dim + self.layer_of.ndim - 1
        first, count = box.start[last], box.shape[last]
        chunks = range(box.start[dim], box.start[dim] + box.shape[dim])
        for chunk in itertools.product(*[chunks] * (last - dim)):
            inside = tuple(c - box.start[dim] for c in chunk)
            for slot, layer, n in _runs(self.layer_of[chunk][first : first + count]):
                yield BoxPiece(
                    Box(
                        (*box.start[:dim], layer, *box.start[last + 1 :]),
                        (*box.shape[:dim], n, *box.shape[last + 1 :]),
                    ),
                    (slice(None),) * dim + (*inside, slice(slot, slot + n)),
                )


AllSlots = Mapping[str, Slots]
"""By leaf; other leaves are stored as they are at rest."""
AS_THEY_REST: AllSlots = {}


def pieces_of(slots: Slots | None, box: Box) -> list[BoxPiece]:
    """Returns `Slots.pieces`, or one piece with all of `box` where the leaf has no slots."""
    return [BoxPiece(box, (...,))] if slots is None else list(slots.pieces(box))


def part_of(
    slots: Slots | None, box: Box, dtype: np.dtype, read: Callable[[Box], np.ndarray]
) -> np.ndarray:
    """Returns part `box` of an array. read: returns boxes of the stored leaf. Padding is zero."""
    if slots is None:
        return read(box)
    out = np.zeros(box.shape, dtype)
    for piece in slots.pieces(box):
        out[piece.place] = read(piece.box)
    return out


def _runs(layers: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yields (first slot, its layer, number of consecutive layers from there); skips padding."""
    slot = 0
    while slot < len(layers):
        layer, n = int(layers[slot]), 1
        while slot + n < len(layers) and layers[slot + n] == layer + n:
            n += 1
        if layer >= 0:
            yield slot, layer, n
            slot += n
        else:
            slot += 1
