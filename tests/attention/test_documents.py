"""Tables of documents against a loop over rows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.attention.documents import document_starts, group, table

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


def documents_of(rows):
    """(first token of the batch, tokens) of every document."""
    return [
        (i * len(row) + first, length)
        for i, row in enumerate(rows)
        for first, length in zip(*by_loop(row), strict=True)
    ]


def test_the_table_has_every_document_of_every_row():
    rows = list(ROWS.values())
    firsts, lengths = zip(*documents_of(rows), strict=True)
    found = table(document_starts(jnp.asarray(rows, jnp.int32)))
    tokens, spare = sum(lengths), sum(lengths) - len(firsts)
    assert found.firsts.tolist() == [*firsts, *[tokens] * spare]
    assert found.lengths.tolist() == [*lengths, *[0] * spare]
    assert found.number.reshape(-1).tolist() == np.repeat(range(len(firsts)), lengths).tolist()
    assert found.position.reshape(-1).tolist() == [i for n in lengths for i in range(n)]


@pytest.mark.parametrize("spare", [-2, 0, 3])
@pytest.mark.parametrize(("above", "longest"), [(0, 1), (1, 3), (3, 6), (0, 6), (6, 9)])
def test_a_group_has_the_documents_of_its_lengths_in_their_order(above, longest, spare):
    rows = list(ROWS.values())
    every = documents_of(rows)
    wanted = [document for document in every if above < document[1] <= longest]
    room = max(1, len(wanted) + spare)
    found = group(table(document_starts(jnp.asarray(rows, jnp.int32))), above, longest, room)
    kept, tokens = wanted[:room], sum(length for _, length in every)
    beyond = room - len(kept)
    assert found.count == len(wanted)
    assert found.firsts.tolist() == [*(at for at, _ in kept), *[tokens] * (beyond + 1)]
    assert found.lengths.tolist() == [*(n for _, n in kept), *[0] * beyond]
    slots = [(kept.index(document) if document in kept else room) for document in every]
    assert found.slot.reshape(-1).tolist() == np.repeat(slots, [n for _, n in every]).tolist()
