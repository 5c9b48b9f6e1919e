"""Tokens from a random bigram chain: data for benchmarks and certificates, made on the spot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from jaxtrain.data.dataset import Batch
from jaxtrain.sources.document import check_split
from jaxtrain.violations import INT32_MAX, count

NO_TEXT = "a bigram chain has no text; use TextData to encode"


@dataclass(frozen=True)
class BigramChain:
    """Each token has `successors` equally likely ones, so the best loss is log(successors) nats.

    With `isolate_documents` rows are cut into documents of random lengths, some end in padding,
    some targets weigh nothing and every eighth row is all padding: the ragged case.

    vocab: number of tokens. seq: tokens a row.
    """

    vocab: int
    seq: int
    successors: int = 4
    isolate_documents: bool = False
    of_pairs: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("vocab", "seq", "successors"):
            if problems := count(name, getattr(self, name), 1, INT32_MAX):
                raise ValueError(problems[0])

    def open(self, split: str, *, seed: int, cache_dir: Path) -> _ChainDataset:
        check_split(split)
        if split == "held_out":
            return _ChainDataset(self, seed=seed + 1, length=1024)
        return _ChainDataset(self, seed=seed, length=1 << 20)


class _ChainDataset:
    """Endless rows; row i is a function of (seed, i). length: of what is called an epoch."""

    def __init__(self, config: BigramChain, *, seed: int, length: int) -> None:
        self._length = length
        self.vocab, self.seq, self._config, self._seed = config.vocab, config.seq, config, seed
        self.digest = f"bigram-chain-{config.vocab}-{config.successors}-{seed}"
        self.token_bytes = np.zeros(config.vocab, np.int64)
        shape = (config.vocab, config.successors)
        self._next = np.random.default_rng(0).integers(0, config.vocab, shape)

    def __len__(self) -> int:
        return self._length

    def rows(self, indices: np.ndarray) -> Batch:
        rows = [self._row(int(i)) for i in indices]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, index: int) -> Batch:
        rng = np.random.default_rng((self._seed, index))
        choice = rng.integers(0, self._config.successors, self.seq)
        stream = np.empty(self.seq + 1, np.int32)
        stream[0] = rng.integers(0, self.vocab)
        for i in range(self.seq):
            stream[i + 1] = self._next[stream[i], choice[i]]
        row = {
            "tokens": stream[:-1],
            "targets": stream[1:],
            "weights": np.ones(self.seq, np.float32),
        }
        return row | self._documents(index, rng, row) if self._config.isolate_documents else row

    def _documents(self, index: int, rng: np.random.Generator, row: Batch) -> Batch:
        starts = rng.random(self.seq) < 3 / self.seq
        starts[0] = True
        segments = np.cumsum(starts).astype(np.int32)
        begin = np.maximum.accumulate(np.where(starts, np.arange(self.seq), 0))
        used = 0 if index % 8 == 7 else int(rng.integers(self.seq // 2, self.seq + 1))
        inside = np.arange(self.seq) < used
        weights = inside & ~np.append(starts[1:], False) & (rng.random(self.seq) < 0.8)
        return {
            "segments": np.where(inside, segments, 0).astype(np.int32),
            "positions": (np.arange(self.seq) - begin).astype(np.int32),
            "weights": row["weights"] * weights,
        }

    def encode(self, text: str) -> list[int]:
        raise ValueError(NO_TEXT)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))
