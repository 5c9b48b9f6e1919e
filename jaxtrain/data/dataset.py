"""Interfaces of data for the trainer: two protocols, which a user's own data may satisfy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

Batch = dict[str, np.ndarray]
"""Arrays of shape [rows, seq]:

    tokens     int32    inputs
    targets    int32    the token that follows each input
    segments   int32    0 on padding, else 1, 2, .. numbers the documents within the row; attention
                        stays within equal segments, so all are 1 when documents are not isolated
    positions  int32    restart in each document, or 0 .. seq-1 when documents are not isolated
    weights    float32  of the loss at each position: 0 on padding, on prompt tokens, and on a
                        target of another document when documents are isolated; may be left out
                        where all are 1
"""


class Dataset(Protocol):
    """Rows in random access.

    Law: `rows(indices)` is a pure function of (digest, seed, indices), so a batch is a function of
    (seed, step) on any number of processes, after any restart.
    """

    vocab: int
    seq: int
    digest: str
    token_bytes: np.ndarray
    """[vocab] int32: bytes of text that each id stands for, 0 for special ones. Bits per byte is
    the summed loss in bits over the summed `token_bytes[targets]`, both weighted."""

    def __len__(self) -> int:
        """Rows in one epoch."""
        ...

    def rows(self, indices: np.ndarray) -> Batch:
        """Rows by global number (int64, >= 0); number // len is the epoch."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Data(Protocol):
    """The value in an experiment file's `data` field, a frozen dataclass."""

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Dataset:
        """The split `train` or `held_out`; whatever is derived may be kept in `cache_dir`."""
        ...
