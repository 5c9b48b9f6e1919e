"""The end of a model: logits over a vocabulary, and their loss."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Head:
    """Logits and loss over a vocabulary that is split, by `nn.loss.cross_entropy`. leaf: its table
    [padded, embed]. vocab: real rows. padded: all rows. chunk_tokens: as in `HeadConfig`."""

    leaf: str
    vocab: int
    padded: int
    chunk_tokens: int | None = None
