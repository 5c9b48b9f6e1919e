"""Mixtures: exact proportions, each part in its own order, any row without the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from jaxtrain.data.mixture import Mixture, MixtureDataset, MixtureOrder
from jaxtrain.sources import StdlibSource

WEIGHTS = [(1.0,), (0.5, 0.5), (1, 2, 5), (0.7, 0.299, 0.001), (3e-6, 1.0), (0.1,) * 10]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_counts_follow_the_weights_at_every_block(weights: tuple[float, ...]) -> None:
    order = MixtureOrder(weights, seed=0)
    shares = np.array(weights) / sum(weights)
    previous = np.zeros(len(weights))
    for block in [*range(1, 200), 10_000, 10_001]:
        counts = order.before(block)
        rows = block * order.block
        assert counts.sum() == rows
        # One row of rounding, and 2**-30 of the rows for the weights themselves.
        assert np.abs(counts - shares * rows).max() <= 1 + rows * 2.0**-29
        if block != 10_000:
            assert (counts >= previous).all()
        previous = counts


@pytest.mark.parametrize("weights", [w for w in WEIGHTS if min(w) > 1e-4])
def test_each_part_is_read_in_its_own_order_without_gaps(weights: tuple[float, ...]) -> None:
    order = MixtureOrder(weights, seed=5)
    turn = order.turns(np.arange(3 * order.block))
    for part in range(len(weights)):
        own = turn.row[turn.part == part]
        np.testing.assert_array_equal(own, np.arange(len(own)))
    shuffled = np.random.default_rng(0).permutation(3 * order.block)
    np.testing.assert_array_equal(order.turns(shuffled).part, turn.part[shuffled])
    np.testing.assert_array_equal(order.turns(shuffled).row, turn.row[shuffled])


def test_seeds_give_different_turns_of_equal_counts() -> None:
    turns = [MixtureOrder((1, 1), seed=s).turns(np.arange(256)).part for s in range(3)]
    assert len({tuple(t) for t in turns}) == 3
    assert {int(t.sum()) for t in turns} == {128}


@pytest.mark.parametrize("lengths", [(1, 1), (1, 1000), (100, 37), (5000, 900), (256, 256)])
@pytest.mark.parametrize("weights", [(1, 1), (1, 9)])
def test_rows_within_is_the_longest_run_without_repeats(
    lengths: tuple[int, int], weights: tuple[int, int]
) -> None:
    order = MixtureOrder(weights, seed=2)
    found = order.rows_within(np.array(lengths))
    turn = order.turns(np.arange(found + 1))
    over = turn.row >= np.array(lengths)[turn.part]
    assert not over[:found].any() and over[found]


class Fake:
    """A dataset whose row n is [name, n]."""

    seq = 2

    def __init__(self, name: int, *, length: int, vocab: int = 257) -> None:
        self.name, self.length, self.vocab = name, length, vocab
        self.digest = str(name)
        self.token_bytes = np.ones(vocab, np.int32)

    def __len__(self) -> int:
        return self.length

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"tokens": np.stack([np.full_like(indices, self.name), indices], axis=1)}

    def encode(self, text: str) -> list[int]:
        return [len(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "x" * len(ids)


def test_rows_come_from_the_part_and_row_of_their_turn() -> None:
    parts = [(weight, Fake(n, length=40)) for n, weight in enumerate((1.0, 3.0))]
    data = MixtureDataset(parts, seed=1)
    numbers = np.array([300, 2, 1000, 2, 0])
    turn = data.order.turns(numbers)
    expected = np.stack([turn.part, turn.row], axis=1)
    np.testing.assert_array_equal(data.rows(numbers)["tokens"], expected)
    assert data.rows(numbers[:0])["tokens"].shape == (0, 2)
    assert 40 <= len(data) <= 80
    assert data.encode("abc") == [3] and data.decode([1]) == "x"
    other = MixtureDataset([(2.0, parts[0][1]), (3.0, parts[1][1])], seed=1)
    assert data.digest != other.digest


def test_bad_mixtures_are_refused() -> None:
    source = StdlibSource()
    with pytest.raises(ValueError, match="parts is empty"):
        Mixture(())
    with pytest.raises(ValueError, match=r"weight 0 of .* is not positive.*itself a Mixture"):
        Mixture(((0, source), (1.0, Mixture(((1.0, source),)))))
    for parts in (3, ((0.7, 3),), (("a", source),), ((0.5, source, 1),), [(0.5, source)]):
        with pytest.raises(ValueError, match=r"Mixture: parts is .*give a tuple of"):
            Mixture(parts)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="below a millionth"):
        Mixture(((1e-9, source), (1.0, source)))
    parts = [(1.0, Fake(0, length=4, vocab=vocab)) for vocab in (10, 11)]
    with pytest.raises(ValueError, match="one vocab and seq; found vocab=11"):
        MixtureDataset(parts, seed=0)
