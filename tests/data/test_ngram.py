"""Reference compressors against counts and probabilities taken one at a time."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.data import ngram
from jaxtrain.data.ngram import interpolated_bigram_bits, pair_counts, reference_bits, unigram_bits
from jaxtrain.data.text import TextData
from jaxtrain.data.token_file import TokenFiles
from jaxtrain.sources import TextFiles

RNG = np.random.default_rng(0)
DOCUMENTS = [bytes(RNG.integers(97, 100, n).tolist()) for n in (50, 3, 1, 20, 0, 7, 31, 12)]


@pytest.mark.parametrize(
    "corpus, bits",
    [([bytes(range(256))], 8.0), ([b"abab", b"ab"], 1.0), ([b"aaaa"], 0.0), ([b"aab", b"c"], 1.5)],
)
def test_unigram_entropy_in_closed_form(corpus: list[bytes], bits: float) -> None:
    assert unigram_bits(corpus) == pytest.approx(bits)


@pytest.mark.parametrize("chunk", [1, 40, 1 << 20])
def test_pairs_are_counted_within_documents(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "CHUNK_BYTES", chunk)
    expected: Counter[tuple[int, int]] = Counter()
    for document in DOCUMENTS:
        symbols = [*document, 256]
        expected.update(itertools.pairwise(symbols))
    counts = pair_counts(DOCUMENTS)
    assert {(a, b): counts[a, b] for a, b in zip(*np.nonzero(counts), strict=True)} == expected


def best_bits(train: list[bytes], held_out: list[bytes]) -> float:
    """The same model, its weights found by trying a grid instead of EM."""

    def model(counts: np.ndarray, w: tuple[float, float, float]) -> np.ndarray:
        unigram = counts.sum(0) / counts.sum()
        totals = counts.sum(1)
        bigram = np.array([c / t if t else unigram for c, t in zip(counts, totals, strict=True)])
        return w[0] * bigram + w[1] * unigram[None, :] + w[2] / 257

    def bits(p: np.ndarray, counts: np.ndarray) -> float:
        return -float((counts * np.log2(p)).sum()) / counts[:, :256].sum()

    deleted = pair_counts(train[::10])
    fitted = pair_counts([d for i, d in enumerate(train) if i % 10])
    steps = np.arange(0.02, 1, 0.04)
    grid = [(a, b, 1 - a - b) for a in steps for b in steps if a + b < 1]
    chosen = min(grid, key=lambda w: bits(model(fitted, w), deleted))
    return bits(model(fitted + deleted, chosen), pair_counts(held_out))


def test_bigram_bits_equal_those_of_a_grid_search() -> None:
    # A walk on a ring with jumps, so that all three parts of the model earn a weight.
    def walk(n: int) -> bytes:
        jumps = np.where(RNG.random(n) < 0.4, RNG.integers(0, 64, n), 1)
        return bytes((np.cumsum(jumps) % 64 + 3 * RNG.integers(0, 2, n)).tolist())

    train, held_out = [walk(60) for _ in range(40)], [walk(60) for _ in range(10)]
    found = interpolated_bigram_bits(train, held_out)
    assert found == pytest.approx(best_bits(train, held_out), rel=0.005)
    assert found < unigram_bits(held_out) - 0.05


def test_bigram_bits_of_known_processes() -> None:
    uniform = [bytes(RNG.integers(0, 4, 5000).tolist()) for _ in range(20)]
    assert interpolated_bigram_bits(uniform[:15], uniform[15:]) == pytest.approx(2.0, abs=0.01)
    # Each byte decides the next: only the ends cost anything.
    cycle = [bytes(range(8)) * 500] * 20
    assert interpolated_bigram_bits(cycle, cycle[:2]) < 0.02
    # A byte never seen costs, but not infinitely.
    assert math.isfinite(interpolated_bigram_bits(cycle, [b"\xff\xfe"]))


def test_reference_bits_of_an_experiments_data(tmp_path: Path) -> None:
    for i, document in enumerate(DOCUMENTS):
        (tmp_path / f"{i}.txt").write_bytes(document)
    held_out = (str(tmp_path / "0.txt"), str(tmp_path / "5.txt"))
    data = TextData(source=TextFiles(str(tmp_path / "*.txt"), held_out_patterns=held_out))
    train = [d for i, d in enumerate(DOCUMENTS) if i not in (0, 5) and d]
    assert reference_bits(data) == {
        "unigram_bits_per_byte": unigram_bits(DOCUMENTS),
        "bigram_bits_per_byte": interpolated_bigram_bits(train, [DOCUMENTS[0], DOCUMENTS[5]]),
    }


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="no bytes"):
        unigram_bits([b""])
    with pytest.raises(ValueError, match="nothing is predicted"):
        interpolated_bigram_bits([b"ab", b"ab"], [b""])
    with pytest.raises(ValueError, match="no training documents"):
        interpolated_bigram_bits([], [b"ab"])
    text = b"a text long enough to be cut in two. " * 9
    cut = [text[: len(text) // 10], text[len(text) // 10 :]]
    whole = interpolated_bigram_bits([text], [text])  # one document is cut for the weights
    assert whole == interpolated_bigram_bits(cut, [text])
    with pytest.raises(ValueError, match="holds tokens, no text"):
        reference_bits(TextData(source=TokenFiles("x")))
