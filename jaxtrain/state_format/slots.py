"""Leaves that rest in slots: which parts of the stored leaf a part of the array is.

On pipeline stages a leaf that is stacked over layers rests as [slots, ...] or [chunks, slots, ...],
some of them padding; a checkpoint has it as [layers, ...]. No layer is moved for that: what a
device holds is cut, by arithmetic on indices, into boxes of the stored leaf, and put together from
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.state_format.chunks import Box

Index = tuple[Any, ...]


class Piece(NamedTuple):
    """`box` of the stored leaf, and where it lies in an array that holds the part it is of."""

    box: Box
    at: Index


@dataclass(frozen=True, eq=False)
class Slots:
    """How an array holds a stored leaf whose dim `dim` counts layers. layer_of: [slots] or
    [chunks, slots], those dims of the array: the layer in each, -1 where there is none."""

    dim: int
    layer_of: np.ndarray

    def stored(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the stored leaf of an array."""
        layers = int((self.layer_of >= 0).sum())
        return (*shape[: self.dim], layers, *shape[self.dim + self.layer_of.ndim :])

    def pieces(self, box: Box) -> Iterator[Piece]:
        """What part `box` of the array has of the stored leaf, each layer once: neighbours that lie
        side by side are one piece. Nothing of padding."""
        dim, last = self.dim, self.dim + self.layer_of.ndim - 1
        first, count = box.start[last], box.shape[last]
        chunks = range(box.start[dim], box.start[dim] + box.shape[dim])
        for chunk in itertools.product(*[chunks] * (last - dim)):
            here = tuple(c - box.start[dim] for c in chunk)
            for slot, layer, n in _runs(self.layer_of[chunk][first : first + count]):
                yield Piece(
                    Box(
                        (*box.start[:dim], layer, *box.start[last + 1 :]),
                        (*box.shape[:dim], n, *box.shape[last + 1 :]),
                    ),
                    (slice(None),) * dim + (*here, slice(slot, slot + n)),
                )


AllSlots = Mapping[str, Slots]
"""By leaf; those that are not here are stored as they rest."""
AS_THEY_REST: AllSlots = {}


def pieces_of(slots: Slots | None, box: Box) -> list[Piece]:
    """As `Slots.pieces`; all of it where the leaf is stored as it rests."""
    return [Piece(box, (...,))] if slots is None else list(slots.pieces(box))


def part_of(
    slots: Slots | None, box: Box, dtype: np.dtype, read: Callable[[Box], np.ndarray]
) -> np.ndarray:
    """Part `box` of an array, of which `read` gives boxes of the stored leaf; padding is zero."""
    if slots is None:
        return read(box)
    out = np.zeros(box.shape, dtype)
    for piece in slots.pieces(box):
        out[piece.at] = read(piece.box)
    return out


def _runs(layers: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(first slot, its layer, how many follow one another from there) of slots side by side."""
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
