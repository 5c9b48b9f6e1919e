"""Texts that share rows: each is whole, once, and sees itself alone."""

from __future__ import annotations

import numpy as np
import pytest

from jaxtrain.losses.token_scores import MARKS
from jaxtrain.scoring.texts import FIELDS, TextRows

SEQ = 12
DTYPES = {**FIELDS, MARKS: np.float32}


@pytest.mark.parametrize("lengths", [[2], [13, 13], [2, 5, 13, 7, 3, 4, 2, 2, 9], [2] * 40])
def test_each_text_is_in_one_row_with_its_own_positions(lengths: list[int]) -> None:
    """And a number of each row's own: of all that is packed the texts are found again."""
    random = np.random.default_rng(0)
    texts = [random.integers(1, 99, size=n).tolist() for n in lengths]
    packed = TextRows(texts, SEQ)
    rows = packed.rows(np.arange(len(packed)))
    assert {name: (a.shape, a.dtype) for name, a in rows.items()} == {
        name: ((len(packed), SEQ), np.dtype(dtype)) for name, dtype in DTYPES.items()
    }
    found = []
    for row in range(len(packed)):
        segments = rows["segments"][row]
        assert (segments > 0).tolist() == (rows["weights"][row] == 1).tolist()
        for number in range(1, segments.max() + 1):
            at = np.flatnonzero(segments == number)
            assert at.tolist() == list(range(at[0], at[-1] + 1))
            assert rows["positions"][row, at].tolist() == list(range(len(at)))
            ids, targets = rows["tokens"][row, at].tolist(), rows["targets"][row, at].tolist()
            assert ids[1:] == targets[:-1]
            found.append([*ids, targets[-1]])
    assert sorted(found) == sorted(texts)
    again = packed.of_texts(rows["targets"])
    assert [part.tolist() for part in again] == [text[1:] for text in texts]
    tokens = sum(lengths) - len(lengths)
    assert len(packed) <= max(1, 2 * tokens // SEQ), "rows are filled"


def test_no_texts_are_no_rows() -> None:
    """But say which fields there are."""
    packed = TextRows([], SEQ)
    assert len(packed) == 0 and packed.of_texts(np.zeros((0, SEQ))) == []
    assert {*packed.rows(np.arange(1))} == {*DTYPES}


def test_a_text_of_one_id_takes_no_place() -> None:
    packed = TextRows([[5], [1, 2], [7]], SEQ)
    parts = packed.of_texts(packed.rows(np.arange(1))["targets"])
    assert len(packed) == 1 and [part.tolist() for part in parts] == [[], [2], []]
    assert len(TextRows([[5]], SEQ)) == 0


def test_texts_apart_have_rows_of_their_own() -> None:
    texts = [[1, 2], [3], [4, 5, 6], [7, 8]]
    packed = TextRows(texts, SEQ, apart=True)
    assert len(packed) == 3
    rows = packed.rows(np.arange(3))
    assert (rows["segments"][:, 0] == 1).all() and rows["segments"].max() == 1
    parts = packed.of_texts(rows["targets"])
    assert [part.tolist() for part in parts] == [text[1:] for text in texts]
