"""A state as chunks, and the digest of each.

A chunk is a box of one leaf, as one device has it, cut further where it is large. Its digest is of
its leaf, place, dtype and bytes, taken from the host's copy before they are written. So bytes of
another place are detected as well as changed bytes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.state_format.hashing import Hasher, hasher

CHUNK_BYTES = 16 * 2**20
"""Largest chunk. A reader verifies whole chunks, even if it needs a small part."""
MOST_SPLIT_DIMS = 12
"""Most dims along which a leaf is split: the work of a check doubles with every dim."""


class Box(NamedTuple):
    """Part of an array: `shape` elements from `start` on."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def within(self, other: Box) -> tuple[slice, ...]:
        """Returns the index of this box in an array of box `other`."""
        places = zip(self.start, other.start, self.shape, strict=True)
        return tuple(slice(a - b, a - b + n) for a, b, n in places)

    def intersect(self, other: Box) -> Box | None:
        """Returns the intersection; None where it is empty."""
        start = tuple(map(max, self.start, other.start))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        shape = tuple(end - a for a, end in zip(start, ends, strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None


class Part(NamedTuple):
    """A box of a leaf with its elements on the host."""

    leaf: str
    box: Box
    data: np.ndarray


class Chunk(NamedTuple):
    """A manifest's entry of a chunk: its place in a leaf, its digest, and the location of its
    bytes."""

    leaf: str
    box: Box
    digest: str
    pack: str
    offset: int
    size: int

    @classmethod
    def from_json(cls, row: list[Any]) -> Chunk:
        """Returns a chunk from its JSON row."""
        leaf, (start, shape), *fields = row
        return cls(leaf, Box(tuple(start), tuple(shape)), *fields)


def digest(leaf: str, box: Box, data: np.ndarray, like: str | None = None) -> str:
    """Returns the digest of a box of a leaf: of its name, place, dtype and bytes. like: a digest
    that it will be compared with; raises as `hashing.hasher`."""
    running = hasher_of(leaf, box, data.dtype, like)
    running.update(as_bytes(data))
    return running.hexdigest()


def hasher_of(leaf: str, box: Box, dtype: np.dtype, like: str | None = None) -> Hasher:
    """Returns the hasher of `digest`, to be updated with the bytes."""
    return hasher(f"{leaf} {box.start} {box.shape} {dtype.name} ".encode(), like)


def as_bytes(data: np.ndarray) -> memoryview:
    """Returns the elements' bytes in C order; a view where they are contiguous."""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data


def boxes_of(
    places: Mapping[jax.Device, tuple[slice, ...] | None], shape: tuple[int, ...]
) -> dict[Box, list[jax.Device]]:
    """Returns the distinct boxes of an array, each with the devices that have it. places: device ->
    index, as shardings give it."""
    devices_of: dict[Box, list[jax.Device]] = {}
    for device, index in places.items():
        devices_of.setdefault(box_of(index or (), shape), []).append(device)
    return devices_of


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """Returns the box of an index as shardings give it."""
    spans = [part.indices(n)[:2] for part, n in zip(index, shape, strict=True)]
    return Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


def covers_once(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """True if boxes inside an array of that shape cover each of its elements once.

    The signed corners of a box are the differences, along every dim, of the function that is 1 in
    it and 0 elsewhere; such differences determine a function. So if the corners of the boxes sum to
    those of the whole array, the boxes cover it once; one pass over the boxes is enough. False too
    where boxes are split along more than `MOST_SPLIT_DIMS`.
    """
    if 0 in shape:
        return True
    split = [d for d, n in enumerate(shape) if any(box.shape[d] != n for box in boxes)]
    if len(split) > MOST_SPLIT_DIMS:
        return False
    array, total = Box((0,) * len(shape), shape), Counter[tuple[int, ...]]()
    for box, sign in [(array, -1), *((box, 1) for box in boxes)]:
        ends = [((box.start[d], 1), (box.start[d] + box.shape[d], -1)) for d in split]
        for corner in itertools.product(*ends):
            total[tuple(end for end, _ in corner)] += sign * math.prod(s for _, s in corner)
    return not any(total.values())


def cut(part: Part, largest: int = CHUNK_BYTES) -> Iterator[Part]:
    """Yields `part` in pieces of at most `largest` bytes (or one element), along its first dims, so
    that each is contiguous where the part is."""
    shape = part.box.shape
    dim = next((d for d, n in enumerate(shape) if n > 1), None)
    if part.data.nbytes <= largest or dim is None:
        yield part
        return
    row = part.data.nbytes // shape[dim]
    rows = max(1, largest // row)
    for first in range(0, shape[dim], rows):
        data: Any = part.data[(slice(None),) * dim + (slice(first, first + rows),)]
        start = (*part.box.start[:dim], part.box.start[dim] + first, *part.box.start[dim + 1 :])
        yield from cut(Part(part.leaf, Box(start, data.shape), data), largest)
