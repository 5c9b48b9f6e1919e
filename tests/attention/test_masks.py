"""What tiles of an attention mask say of themselves, against the dense mask of every small size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.attention.documents import document_starts
from jaxtrain.attention.online_softmax import AttentionMask, Scoring
from jaxtrain.attention.tiling import Tiling

SEQ = 6
MASKS = [
    AttentionMask(causal=False),
    *(AttentionMask(window=w, offset=o) for w in (None, *range(1, SEQ + 2)) for o in range(4)),
    AttentionMask(window=9, offset=SEQ),
    AttentionMask(window=2, offset=SEQ),
]


def dense(mask: AttentionMask, seq: int = SEQ) -> np.ndarray:
    """Whether query i, `offset` places on, sees key j: by the words of `AttentionMask` alone."""
    seen = np.zeros((seq, seq), bool)
    for i, j in itertools.product(range(seq), repeat=2):
        place = i + mask.offset
        first = 0 if mask.window is None else place - mask.window + 1
        seen[i, j] = not mask.causal or first <= j <= place
    return seen


def runs(seq: int = SEQ) -> Iterator[range]:
    return itertools.starmap(range, itertools.combinations(range(seq + 1), 2))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_tile_is_visible_in_part_or_whole_as_the_dense_mask_is(mask: AttentionMask) -> None:
    """Every tile of every size; and the keys of some queries are the shortest run of them."""
    seen, at = dense(mask), jnp.arange(SEQ)
    assert (np.asarray(mask.visible(at[:, None], at[None])) == seen).all()
    for queries in runs():
        rows = seen[queries.start : queries.stop]
        for keys in runs():
            tile = rows[:, keys.start : keys.stop]
            assert mask.tile(queries, keys) == (tile.any(), tile.all()), (queries, keys)
        columns = np.flatnonzero(rows.any(0))
        wanted = range(columns[0], columns[-1] + 1) if len(columns) else range(0)
        assert list(mask.keys(queries, SEQ)) == list(wanted), queries


ROWS = [[1, 1, 1, 1, 1, 1], [1, 2, 2, 2, 3, 0]]


@pytest.mark.parametrize(
    "mask", [AttentionMask(), AttentionMask(causal=False), AttentionMask(window=2)], ids=str
)
@pytest.mark.parametrize("documents", [False, True])
def test_only_what_nothing_hides_has_no_mask(mask: AttentionMask, documents: bool) -> None:
    """Of tiles that are written out; documents hide what a mask by position shows."""
    seen = np.broadcast_to(dense(mask), (len(ROWS), SEQ, SEQ))
    ids, starts = np.array(ROWS), None
    if documents:
        seen = seen & (ids[:, :, None] == ids[:, None])
        starts = (document_starts(jnp.asarray(ids)),) * 2
    tiling = Tiling(2, 3, SEQ, Scoring(mask, 1.0), starts)
    for queries, keys in itertools.product([range(0, 2), range(1, 4), range(4, 6)], runs()):
        tile = seen[:, queries.start : queries.stop, keys.start : keys.stop]
        shown, *_ = tiling.written_out(queries, keys)
        if shown is None:
            assert tile.all()
        else:
            assert (np.asarray(shown) == tile).all()
            assert documents or not tile.all()
