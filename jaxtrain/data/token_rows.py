"""Rows of tokenised documents in random access; how documents fill them is a subclass's."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from jaxtrain.data.dataset import Batch
from jaxtrain.data.token_file import TokenStore
from jaxtrain.files.cache import mark_used
from jaxtrain.files.cache_entries import DAY_S
from jaxtrain.tokenizers import Vocabulary
from jaxtrain.tokenizers.protocol import document_start


class TokenRows(ABC):
    """A `Dataset` over tokenised documents.

    packing: names the way in which documents fill rows, for the digest.
    """

    def __init__(
        self,
        store: TokenStore,
        vocabulary: Vocabulary,
        *,
        seq: int,
        isolate_documents: bool,
        seed: int,
        cache_dir: Path,
        packing: str,
    ) -> None:
        self.store = store
        self.vocabulary = vocabulary
        self.seq = seq
        self.isolate_documents = isolate_documents
        self.seed = seed
        self.cache_dir = cache_dir
        self.vocab = vocabulary.size
        self.token_bytes = vocabulary.token_bytes
        self._marked = time.monotonic()
        made_of = (store.digest, vocabulary.key, seq, isolate_documents, packing)
        self.digest = sha256(repr(made_of).encode()).hexdigest()

    @abstractmethod
    def __len__(self) -> int:
        """Rows in one epoch."""

    @abstractmethod
    def _pack(self, rows: np.ndarray, epoch: int) -> Batch:
        """Returns rows by their numbers in an epoch."""

    def encode(self, text: str) -> list[int]:
        """A text's ids as a document begins."""
        return document_start(self.vocabulary, text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.vocabulary.decode(ids)

    def rows(self, indices: np.ndarray) -> Batch:
        indices = np.asarray(indices, dtype=np.int64)
        if indices.ndim != 1 or (len(indices) and indices.min() < 0):
            raise ValueError(f"rows are numbered 0, 1, .. in one dim; found {indices}")
        self._mark_daily()
        epochs, rows = np.divmod(indices, len(self))
        present = np.unique(epochs)
        if len(present) < 2:
            return self._pack(rows, int(present[0]) if len(present) else 0)
        batch: Batch = {}
        for epoch in present:
            chosen = epochs == epoch
            for name, part in self._pack(rows[chosen], int(epoch)).items():
                shape = (len(indices), self.seq)
                batch.setdefault(name, np.empty(shape, dtype=part.dtype))[chosen] = part
        return batch

    def in_cache(self) -> list[Path]:
        """Returns the entries of the cache that rows are read from."""
        return [file.path for file in self.store.files if file.path.parent == self.cache_dir]

    def _mark_daily(self) -> None:
        """A run of months uses what it reads from, and nobody is to take that for unused."""
        now = time.monotonic()
        if now - self._marked >= DAY_S:
            self._marked = now
            for path in self.in_cache():
                mark_used(path)

    def _tokens(self, addresses: np.ndarray) -> np.ndarray:
        tokens = self.store.gather(addresses)
        # Long files are not scanned when opened, so every batch is looked at.
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab:
            bad = (tokens < 0) | (tokens >= self.vocab)
            self.store.refuse(int(addresses[bad][0]), vocab=self.vocab)
        return tokens
