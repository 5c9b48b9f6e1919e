"""A state as chunks, and the digest of each.

A chunk is a box of one leaf, as one device holds it, cut further where it is large. Its digest is
of what it is (leaf, place, dtype) and of its bytes, taken from the host's copy before they are
written: bytes that belong elsewhere are as wrong as bytes that changed.
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
"""The most a chunk holds: a reader verifies whole chunks, however little of one it needs."""
MOST_SPLIT_DIMS = 12
"""Along no more dims is a leaf in chunks: work to check them doubles with every dim."""


class Box(NamedTuple):
    """Part of an array: `shape` elements from `start` on."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def within(self, other: Box) -> tuple[slice, ...]:
        """Where this box lies in an array that holds just `other`."""
        places = zip(self.start, other.start, self.shape, strict=True)
        return tuple(slice(a - b, a - b + n) for a, b, n in places)

    def meet(self, other: Box) -> Box | None:
        """What both cover; None where they do not touch."""
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
    """What a manifest says of a chunk: where it belongs, its digest, and where its bytes are."""

    leaf: str
    box: Box
    digest: str
    pack: str
    offset: int
    size: int

    @classmethod
    def from_json(cls, row: list[Any]) -> Chunk:
        """A chunk as JSON reads it back."""
        leaf, (start, shape), *rest = row
        return cls(leaf, Box(tuple(start), tuple(shape)), *rest)


def digest(leaf: str, box: Box, data: np.ndarray, like: str | None = None) -> str:
    """Of what a chunk is and of its bytes. like: a digest that it is compared with; raises as
    `hashing.hasher`."""
    taken = hasher_of(leaf, box, data.dtype, like)
    taken.update(as_bytes(data))
    return taken.hexdigest()


def hasher_of(leaf: str, box: Box, dtype: np.dtype, like: str | None = None) -> Hasher:
    """What `digest` begins with, to be updated with the bytes as they come."""
    return hasher(f"{leaf} {box.start} {box.shape} {dtype.name} ".encode(), like)


def as_bytes(data: np.ndarray) -> memoryview:
    """The elements' bytes, row after row; a view where they already lie so."""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data


def boxes_of(
    places: Mapping[jax.Device, tuple[slice, ...] | None], shape: tuple[int, ...]
) -> dict[Box, list[jax.Device]]:
    """The distinct boxes of an array that devices hold, as shardings give them, each with those
    that hold it."""
    found: dict[Box, list[jax.Device]] = {}
    for device, index in places.items():
        found.setdefault(box_of(index or (), shape), []).append(device)
    return found


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """The box of an index as shardings give it."""
    spans = [part.indices(n)[:2] for part, n in zip(index, shape, strict=True)]
    return Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


def covers_once(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether boxes inside an array of that shape are each of its elements, once.

    The signed corners of a box are the differences, along every dim, of the function that is 1 in
    it and 0 elsewhere; such differences determine a function. So corners that sum to those of the
    whole array belong to boxes that are it, in one pass over them. False too where boxes are split
    along more than `MOST_SPLIT_DIMS`.
    """
    if 0 in shape:
        return True
    split = [d for d, n in enumerate(shape) if any(box.shape[d] != n for box in boxes)]
    if len(split) > MOST_SPLIT_DIMS:
        return False
    whole, total = Box((0,) * len(shape), shape), Counter[tuple[int, ...]]()
    for box, sign in [(whole, -1), *((box, 1) for box in boxes)]:
        ends = [((box.start[d], 1), (box.start[d] + box.shape[d], -1)) for d in split]
        for corner in itertools.product(*ends):
            total[tuple(at for at, _ in corner)] += sign * math.prod(s for _, s in corner)
    return not any(total.values())


def cut(part: Part, largest: int = CHUNK_BYTES) -> Iterator[Part]:
    """`part` in pieces of at most `largest` bytes (or one element), along its first dims, so that
    each is contiguous where the part is."""
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
