"""Reference compressors: what a language model on bytes has to beat.

Both are in bits per byte. The bigram model predicts what the language model is asked to predict:
every byte of a document after its first, and the end of the document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jaxtrain.data.text import TextData

END = 256
SYMBOLS = 257
CHUNK_BYTES = 4 << 20


def unigram_bits(corpus: Iterable[bytes]) -> float:
    """Entropy of the corpus's distribution of bytes, bits per byte (Shannon 1948)."""
    counts = np.zeros(256, dtype=np.int64)
    for document in corpus:
        counts += np.bincount(np.frombuffer(document, dtype=np.uint8), minlength=256)
    if not counts.sum():
        raise ValueError("the corpus has no bytes; its entropy is undefined")
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def interpolated_bigram_bits(train: Iterable[bytes], held_out: Iterable[bytes]) -> float:
    """Bits per byte of `held_out` under a bigram model of `train`.

    p(b | a) = w2 c(ab)/c(a) + w1 c(b)/n + w0/257, the weights by deleted interpolation (Jelinek
    and Mercer 1980): EM on every tenth document of `train` with counts from the others; then the
    counts are those of all of `train`.
    """
    fitted, deleted = _halves(train)
    weights = _expectation_maximisation(_components(fitted), deleted)
    test = pair_counts(held_out)
    predicted = int(test[:, :END].sum())
    if not predicted:
        raise ValueError("held_out has no document of two bytes or more; nothing is predicted")
    parts = _components(fitted + deleted)
    mixed = sum(weight * part for weight, part in zip(weights, parts, strict=True))
    return float(-(test * np.log2(mixed)).sum() / predicted)


def reference_bits(data: TextData) -> dict[str, float]:
    """Both for the corpus of an experiment: the unigram entropy of both splits together, the
    bigram trained on one and tested on the other. One pass over the text, seconds per 100 MB.
    """
    train = [document.text.encode("utf-8") for document in data.documents("train")]
    held_out = [document.text.encode("utf-8") for document in data.documents("held_out")]
    return {
        "unigram_bits_per_byte": unigram_bits((*train, *held_out)),
        "bigram_bits_per_byte": interpolated_bigram_bits(train, held_out),
    }


def pair_counts(documents: Iterable[bytes]) -> np.ndarray:
    """[256, 257] int64: how often each symbol (256 is the end) follows each byte."""
    counts = np.zeros(SYMBOLS * SYMBOLS, dtype=np.int64)
    for symbols in _chunks(documents):
        pairs = symbols[:-1] * SYMBOLS + symbols[1:]
        counts += np.bincount(pairs, minlength=len(counts))
    # The row of END counts first bytes of documents, which nothing before them predicts.
    return counts.reshape(SYMBOLS, SYMBOLS)[:END]


def _chunks(documents: Iterable[bytes]) -> Iterator[np.ndarray]:
    """Yields documents, each between ENDs, joined to arrays of a few MB: counting per file is
    slow."""
    joined: list[np.ndarray] = []
    size = 0
    end = np.array([END], dtype=np.int32)
    for document in documents:
        joined += [np.frombuffer(document, dtype=np.uint8), end]
        size += len(document)
        if size > CHUNK_BYTES:
            yield np.concatenate([end, *joined])
            joined, size = [], 0
    if joined:
        yield np.concatenate([end, *joined])


class _Components(NamedTuple):
    """Each broadcasts to [256, 257] probabilities."""

    bigram: np.ndarray
    unigram: np.ndarray
    uniform: np.ndarray


def _components(counts: np.ndarray) -> _Components:
    total = counts.sum(axis=1, keepdims=True)
    unigram = counts.sum(axis=0, keepdims=True) / max(counts.sum(), 1)
    # A byte never seen before another: the unigram stands in, so that the rows stay distributions.
    bigram = np.where(total > 0, counts / np.maximum(total, 1), unigram)
    return _Components(
        bigram=bigram,
        unigram=np.broadcast_to(unigram, counts.shape),
        uniform=np.full(counts.shape, 1.0 / SYMBOLS),
    )


def _halves(train: Iterable[bytes]) -> tuple[np.ndarray, np.ndarray]:
    documents = list(train)
    if not documents:
        raise ValueError("no training documents; the weights need 1 or more")
    if len(documents) == 1:
        cut = len(documents[0]) // 10
        documents = [documents[0][:cut], documents[0][cut:]]
    deleted = documents[::10]
    fitted = [document for i, document in enumerate(documents) if i % 10]
    return pair_counts(fitted), pair_counts(deleted)


def _expectation_maximisation(parts: _Components, counts: np.ndarray) -> np.ndarray:
    """[3] weights that maximise the likelihood of `counts`, with one pseudo-count for each.

    Convex, so the start does not matter. The pseudo-count keeps the uniform part alive when every
    pair of `counts` was seen before: an unseen one must not be infinitely long.
    """
    weights = np.full(len(parts), 1.0 / len(parts))
    for _ in range(50):
        joint = np.stack([w * part for w, part in zip(weights, parts, strict=True)])
        expected = (joint / joint.sum(axis=0) * counts).sum(axis=(1, 2)) + 1.0
        weights = expected / expected.sum()
    return weights
