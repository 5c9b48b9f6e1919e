"""Bytes as tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxtrain.tokenizers.protocol import EOS
from jaxtrain.tokenizers.published import HuggingFaceVocabulary


@dataclass(frozen=True)
class ByteTokenizer:
    """The 256 byte values of UTF-8, and eos = 256. It is its own vocabulary."""

    @property
    def size(self) -> int:
        return 257

    @property
    def eos(self) -> int:
        return 256

    @property
    def bos(self) -> None:
        return None

    @property
    def add_eos(self) -> bool:
        return True

    @property
    def special(self) -> Sequence[str]:
        return ()

    @property
    def key(self) -> str:
        return "bytes"

    @property
    def token_bytes(self) -> np.ndarray:
        return np.where(np.arange(self.size) == self.eos, 0, 1).astype(np.int32)

    def build(
        self, texts: Callable[[], Iterator[str]], *, corpus: str, cache_dir: Path
    ) -> ByteTokenizer:
        return self

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def encode_pairs(
        self, prompts: Sequence[str], texts: Sequence[str]
    ) -> list[tuple[np.ndarray, int]]:
        parts = zip(self.encode_batch(prompts), self.encode_batch(texts), strict=True)
        return [(np.concatenate((prompt, text)), len(prompt)) for prompt, text in parts]

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def save(self, folder: Path) -> str:
        """Nothing to write; the value an experiment names it by."""
        return "ByteTokenizer()"

    def published(self) -> HuggingFaceVocabulary:
        """The same as a tokenizer.json: byte-level BPE without a merge."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        # GPT-2's alphabet: printable bytes stand for themselves, the others for later characters.
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        unprintable = (byte for byte in range(256) if byte not in plain)
        letters = {byte: chr(byte) for byte in plain}
        letters |= {byte: chr(256 + i) for i, byte in enumerate(unprintable)}
        tokenizer = Tokenizer(models.BPE({char: byte for byte, char in letters.items()}, []))
        tokenizer.add_special_tokens([EOS])
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        return HuggingFaceVocabulary(tokenizer.to_str(), eos=EOS)

    def decode(self, ids: Sequence[int]) -> str:
        """Lossless on whole UTF-8; a character cut in two becomes U+FFFD. Eos is left out."""
        return bytes(i for i in ids if i != self.eos).decode("utf-8", errors="replace")
