"""Parts of an array in slots are parts of the stored leaf: each layer once, padding never."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxtrain.pipeline.layout import StageLayout
from jaxtrain.state_format.chunks import Box
from jaxtrain.state_format.slots import Slots, pieces_of

LAYOUTS = [
    (layers, stages, chunks)
    for layers, stages, chunks in itertools.product(range(1, 10), (1, 2, 3, 4), (1, 2, 3))
]


@pytest.mark.parametrize("dim", [0, 1])
def test_any_parts_of_an_array_in_slots_are_the_whole_leaf(dim: int) -> None:
    """Cut into boxes at random, as devices hold them or not: what the pieces say is put together
    from their numbers and held against what was laid, element by element."""
    rng = np.random.default_rng(0)
    for layers, stages, chunks in LAYOUTS:
        layout = StageLayout(layers, stages, chunks)
        layer_of = layout.layer_of if chunks > 1 else layout.layer_of[0]
        slots = Slots(dim, layer_of)
        leaf = rng.normal(size=(2, layers, 3)[1 - dim :])
        shape = (*leaf.shape[:dim], *layer_of.shape, *leaf.shape[dim + 1 :])
        assert slots.stored(shape) == leaf.shape
        array = np.full(shape, np.nan)
        for at, layer in np.ndenumerate(layer_of):
            if layer >= 0:
                array[(slice(None),) * dim + at] = leaf[(slice(None),) * dim + (layer,)]
        out, times = np.zeros(leaf.shape), np.zeros(leaf.shape, int)
        for box in boxes(shape, rng):
            data = array[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))]
            for piece in pieces_of(slots, box):
                assert data[piece.place].shape == piece.box.shape
                where = piece.box.within(Box((0,) * leaf.ndim, leaf.shape))
                out[where] = data[piece.place]
                times[where] += 1
        assert (times == 1).all() and (out == leaf).all(), (layers, stages, chunks)


def test_neighbours_that_do_not_follow_one_another_are_pieces_of_their_own() -> None:
    """In whatever order a schedule would have the layers."""
    found = list(Slots(0, np.array([3, 1, 2, -1, 0, 5, 4, -1])).pieces(Box((0, 7), (8, 2))))
    assert [(piece.box.start, piece.box.shape) for piece in found] == [
        ((3, 7), (1, 2)), ((1, 7), (2, 2)), ((0, 7), (1, 2)), ((5, 7), (1, 2)), ((4, 7), (1, 2))
    ]  # fmt: skip
    assert [piece.place for piece in found] == [
        (slice(a, b),) for a, b in ((0, 1), (1, 3), (4, 5), (5, 6), (6, 7))
    ]


def boxes(shape: tuple[int, ...], rng: np.random.Generator) -> list[Box]:
    """An array cut along every dim, somewhere."""
    spans = []
    for n in shape:
        ends = sorted({0, n, *map(int, rng.integers(0, n + 1, 2))})
        spans.append([(a, b - a) for a, b in itertools.pairwise(ends)])
    parts = [zip(*span, strict=True) for span in itertools.product(*spans)]
    return [Box(*map(tuple, part)) for part in parts]


def test_a_position_is_one_piece_of_each_chunk() -> None:
    """So a chunk of the checkpoint is as large as what a device holds side by side."""
    layout = StageLayout(13, 4, 2)
    per_stage = layout.depth
    for stage in range(4):
        box = Box((0, stage * per_stage, 0), (2, per_stage, 5))
        found = [piece.box for piece in pieces_of(Slots(0, layout.layer_of), box)]
        assert len(found) == 2 and all(piece.shape[1:] == (5,) for piece in found)
    padding = Box((3,), (1,))
    assert not pieces_of(Slots(0, StageLayout(3, 4).layer_of[0]), padding)


def test_what_rests_as_it_is_stored_is_one_piece() -> None:
    box = Box((2, 0), (3, 4))
    ((found, at),) = pieces_of(None, box)
    data = np.arange(12).reshape(3, 4)
    assert found == box and data[at] is not data and (data[at] == data).all()
    scalar = np.asarray(np.int32(7))
    ((_, at),) = pieces_of(None, Box((), ()))
    assert isinstance(scalar[at], np.ndarray)
