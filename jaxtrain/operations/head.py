"""The end of a model: logits over a vocabulary, and their loss."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Head:
    """Logits and loss over a vocabulary that is split, by `losses.cross_entropy`. leaf: its table
    [padded, embed]. vocab: real rows. padded: all rows. chunk_tokens: as in `HeadConfig`.
    of_pairs: the loss is one of pairs, by `losses.preferences`."""

    leaf: str
    vocab: int
    padded: int
    chunk_tokens: int | None = None
    of_pairs: bool = False

    def passes(self, chunks: int) -> int:
        """Times that a step of training computes the logits, in so many chunks of tokens: for pairs
        twice, but those of a single chunk are kept."""
        return 2 if self.of_pairs and chunks > 1 else 1

    def products(self, chunks: int) -> int:
        """Products with the table in a step of training: logits, and two gradients."""
        return self.passes(chunks) + 2
