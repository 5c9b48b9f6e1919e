"""Chunks that restore a leaf are each of its elements, once: against a count of every element."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from jaxtrain.state_format.chunks import MOST_SPLIT_DIMS, Box, Chunk, covers_once
from jaxtrain.state_format.leaves import LeafRecord
from jaxtrain.state_format.manifest import refuse_gaps

SHAPES = [(), (0,), (5,), (3, 0), (4, 3), (1, 6), (2, 3, 4), (2, 1, 3, 2)]


def chunks_of(boxes: list[Box]) -> list[Chunk]:
    return [Chunk("w", box, "", "a.pack", 0, 4 * math.prod(box.shape)) for box in boxes]


def cut_in_two(boxes: list[Box], rng: np.random.Generator) -> list[Box]:
    """The same elements in one box more, where that can be."""
    box = boxes[at := int(rng.integers(len(boxes)))]
    dims = [d for d, n in enumerate(box.shape) if n > 1]
    if not dims:
        return boxes
    dim = int(rng.choice(dims))
    size = int(rng.integers(1, box.shape[dim]))

    def part(begin: int, length: int) -> Box:
        start, shape = list(box.start), list(box.shape)
        start[dim], shape[dim] = start[dim] + begin, length
        return Box(tuple(start), tuple(shape))

    both = [part(0, size), part(size, box.shape[dim] - size)]
    return [*boxes[:at], *both, *boxes[at + 1 :]]


def counts(boxes: list[Box], shape: tuple[int, ...]) -> np.ndarray:
    """In how many boxes every element is."""
    times = np.zeros(shape, int)
    for box in boxes:
        times[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))] += 1
    return times


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exactly_partitions_are_taken(shape: tuple[int, ...]) -> None:
    """Of boxes at random, and of partitions of which one box is moved."""
    rng, leaves = np.random.default_rng(0), {"w": LeafRecord(shape, "float32", None)}
    wrong = 0
    for turn in range(200):
        boxes = [Box((0,) * len(shape), shape)]
        for _ in range(turn % 7):
            boxes = cut_in_two(boxes, rng)
        if turn % 2:
            at = int(rng.integers(len(boxes)))
            free = zip(boxes[at].shape, shape, strict=True)
            start = tuple(int(rng.integers(n - size + 1)) for size, n in free)
            boxes[at] = Box(start, boxes[at].shape)
        once = bool((counts(boxes, shape) == 1).all())
        assert covers_once(boxes, shape) is once
        if once and len(set(boxes)) == len(boxes):
            refuse_gaps(leaves, {"w": chunks_of(boxes)})
        else:
            wrong += 1
            with pytest.raises(ValueError, match=r"chunks of w|part of w"):
                refuse_gaps(leaves, {"w": chunks_of(boxes)})
    assert wrong or max(shape, default=0) <= 1 or 0 in shape


OVERLAPS = {
    "along one dim": ((4,), [((0,), (2,)), ((1,), (2,))]),
    "in the second dim": ((2, 4), [((0, 0), (2, 2)), ((0, 1), (2, 2))]),
    "a cross": ((2, 2), [((0, 0), (1, 2)), ((0, 0), (2, 1))]),
    "beside a chunk in its place": ((6,), [((0,), (2,)), ((2,), (2,)), ((3,), (2,))]),
    "as often as it is missed": ((3, 3), [((0, 0), (2, 2)), ((1, 1), (2, 2)), ((2, 0), (1, 1))]),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_chunks_that_overlap_and_have_the_size_of_the_leaf_are_refused(name: str) -> None:
    """What no chunk has would be memory that nobody wrote."""
    shape, spans = OVERLAPS[name]
    boxes = list(itertools.starmap(Box, spans))
    assert sum(math.prod(box.shape) for box in boxes) == math.prod(shape)
    leaves = {"w": LeafRecord(shape, "float32", None)}
    with pytest.raises(ValueError, match="the chunks of w overlap, and are not all of it"):
        refuse_gaps(leaves, {"w": chunks_of(boxes)})


def test_a_leaf_split_along_many_dims_costs_no_more_than_the_limit() -> None:
    """A forged manifest may say any number of dims."""

    def diagonal(dims: int) -> list[Box]:
        """One element of two along all dims but the last cut, and so on: dims + 1 boxes."""
        boxes = [
            Box((0,) * d + (1,) + (0,) * (dims - d - 1), (1,) * (d + 1) + (2,) * (dims - d - 1))
            for d in range(dims)
        ]
        return [*boxes, Box((0,) * dims, (1,) * dims)]

    assert covers_once(diagonal(MOST_SPLIT_DIMS), (2,) * MOST_SPLIT_DIMS)
    assert not covers_once(diagonal(60), (2,) * 60)
