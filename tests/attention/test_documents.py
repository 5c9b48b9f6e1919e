"""Tables of documents against a loop over rows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.attention.documents import document_starts, table

ROWS = {
    "one": [1, 1, 1, 1, 1, 1],
    "three and padding": [1, 2, 2, 3, 0, 0],
    "each its own": [1, 2, 3, 4, 5, 6],
    "an id that comes again is another document": [1, 1, 2, 2, 1, 1],
    "padding alone": [0] * 6,
}


def by_loop(row):
    firsts = [i for i, id in enumerate(row) if i == 0 or row[i - 1] != id]
    return firsts, np.diff([*firsts, len(row)]).tolist()


def test_starts_are_the_firsts_of_runs():
    found = document_starts(jnp.asarray(list(ROWS.values()), jnp.int32))
    for starts, row in zip(found.tolist(), ROWS.values(), strict=True):
        firsts, lengths = by_loop(row)
        assert starts == np.repeat(firsts, lengths).tolist()


@pytest.mark.parametrize("seq", [9216, 9217])
def test_starts_of_long_rows_are_found_block_by_block(seq):
    rng = np.random.default_rng(0)
    rows = np.cumsum(rng.random((2, seq)) < np.array([[2e-4], [0.3]]), axis=1)
    begins = np.pad(rows[:, 1:] != rows[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    expected = np.maximum.accumulate(np.where(begins, np.arange(seq), 0), axis=1)
    np.testing.assert_array_equal(document_starts(jnp.asarray(rows, jnp.int32)), expected)


@pytest.mark.parametrize("spare", [0, 3])
def test_the_table_has_every_document_of_every_row(spare):
    rows = list(ROWS.values())
    firsts, lengths = [], []
    for i, row in enumerate(rows):
        found = by_loop(row)
        firsts += [i * len(row) + at for at in found[0]]
        lengths += found[1]
    tokens = sum(lengths)
    found = table(document_starts(jnp.asarray(rows, jnp.int32)), len(firsts) + spare)
    assert found.count == len(firsts)
    assert found.firsts.tolist() == [*firsts, *[tokens] * (spare + 1)]
    assert found.lengths.tolist() == [*lengths, *[0] * spare]
    assert found.number.reshape(-1).tolist() == np.repeat(range(len(firsts)), lengths).tolist()


def test_more_documents_than_there_is_room_for_are_seen():
    found = table(document_starts(jnp.asarray([[1, 2, 3, 4], [1, 1, 1, 1]], jnp.int32)), 3)
    assert found.count == 5
    assert found.lengths.tolist() == [1, 1, 1]
