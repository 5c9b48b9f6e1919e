"""Interfaces of tokenizers: the value in an experiment file, and what encodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

EOS = "<|endoftext|>"


class Vocabulary(Protocol):
    """A tokenizer that is loaded. Picklable, so that other processes can encode with it."""

    @property
    def size(self) -> int:
        """Every id is below it."""
        ...

    @property
    def eos(self) -> int:
        """Ends a text; `encode` never gives it."""
        ...

    @property
    def bos(self) -> int | None:
        """Begins each document, None for nothing; `encode` never gives it."""
        ...

    @property
    def add_eos(self) -> bool:
        """True if eos ends each document."""
        ...

    @property
    def special(self) -> Sequence[str]:
        """Texts of the special tokens: `encode` takes them for text."""
        ...

    @property
    def token_bytes(self) -> np.ndarray:
        """[size] int32: bytes of text each id stands for, 0 for special ones."""
        ...

    @property
    def key(self) -> str:
        """Equal keys encode equally."""
        ...

    def save(self, folder: Path) -> str:
        """Keep it in `folder`; the Python expression an experiment names it by."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def encode_pairs(
        self, prompts: Sequence[str], texts: Sequence[str]
    ) -> list[tuple[np.ndarray, int]]:
        """Returns (ids, n) for each prompt with the text behind it, encoded as one text: the first
        n ids have nothing of `texts`."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Tokenizer(Protocol):
    def build(
        self, texts: Callable[[], Iterator[str]], *, corpus: str, cache_dir: Path
    ) -> Vocabulary:
        """`texts()` is the train split, read only if needed; `corpus` is its fingerprint."""
        ...


def document_start(vocabulary: Vocabulary, text: str) -> list[int]:
    """Returns a text's ids as a document begins."""
    first = [] if vocabulary.bos is None else [vocabulary.bos]
    return [*first, *map(int, vocabulary.encode(text))]
