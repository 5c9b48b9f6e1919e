"""Packed documents of random tokens, a corpus defined by its shapes alone, without files.

Imports no JAX: the torch baseline reads the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.data.dataset import Batch
from jaxtrain.sources.document import check_split


@dataclass(frozen=True)
class SyntheticDocuments:
    """Rows packed full with documents, one behind the other; a document that does not fit is cut at
    the end of its row.

    vocab: number of tokens, all as likely. seq: tokens a row. mean: mean length of a document
    before it is cut; lengths are log-normal, `sigma` the standard deviation of their logarithm:
    with 1, half of the documents are shorter than 0.6 of the mean.
    """

    vocab: int
    seq: int
    mean: int = 1000
    sigma: float = 1.0
    isolate_documents: bool = True

    def open(self, split: str, *, seed: int, cache_dir: Path) -> DocumentRows:
        check_split(split)
        return DocumentRows(self, seed + (split == "held_out"))


class DocumentRows:
    """Endless rows; row i is a function of (seed, i)."""

    def __init__(self, config: SyntheticDocuments, seed: int) -> None:
        self.vocab, self.seq, self._config, self._seed = config.vocab, config.seq, config, seed
        self.digest = f"synthetic-documents-{config}-{seed}"
        self.token_bytes = np.zeros(config.vocab, np.int32)

    def __len__(self) -> int:
        return 1 << 20

    def rows(self, indices: np.ndarray) -> Batch:
        rows = [self._row(int(i)) for i in indices]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, index: int) -> Batch:
        c, rng = self._config, np.random.default_rng((self._seed, index))
        median = math.log(c.mean) - c.sigma**2 / 2
        # Documents have one token or more, so `seq` of them fill a row.
        ends = np.cumsum(np.ceil(rng.lognormal(median, c.sigma, c.seq)).astype(np.int64))
        position = np.arange(c.seq)
        document = np.searchsorted(ends, position, side="right")
        begins = np.append(0, ends)[document]
        tokens = rng.integers(0, c.vocab, c.seq + 1, np.int32)
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "segments": (document + 1).astype(np.int32),
            "positions": (position - begins).astype(np.int32),
            "weights": np.append(document[1:] == document[:-1], True).astype(np.float32),
        }

    def encode(self, text: str) -> list[int]:
        raise ValueError("synthetic documents have no text; use TextData to encode")

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def lengths(positions: np.ndarray) -> dict[int, float]:
    """Returns length -> number of documents in rows of `positions` [rows, seq]."""
    starts = np.append(np.flatnonzero(positions.reshape(-1) == 0), positions.size)
    sizes, counts = np.unique(np.diff(starts), return_counts=True)
    return {int(n): float(count) for n, count in zip(sizes, counts, strict=True)}
