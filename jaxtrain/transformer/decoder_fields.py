"""The fields of a decoder, apart from its layers. Checks import them without the layers."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtrain.attention.rotary.rope import Rope
from jaxtrain.nn.norm import NormConfig, RMSNorm
from jaxtrain.nn.param import Initialisation
from jaxtrain.transformer.block import BlockConfig
from jaxtrain.transformer.feed_forward import KINKED
from jaxtrain.transformer.mixture import MoeConfig


@dataclass(frozen=True)
class DecoderFields:
    """A decoder language model; `DecoderConfig`, which has its methods, describes the fields."""

    vocab: int
    embed: int
    layers: int
    period: tuple[BlockConfig, ...]
    prefix: tuple[BlockConfig, ...] = ()
    suffix: tuple[BlockConfig, ...] = ()
    norm: NormConfig = RMSNorm()  # noqa: RUF009 (frozen)
    learned_positions: int | None = None
    tied: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    dropout: float = 0.0
    init: Initialisation = Initialisation()  # noqa: RUF009 (frozen)
    vocab_multiple: int = 1024
    chunk_tokens: int | None = None

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab // self.vocab_multiple) * self.vocab_multiple

    @property
    def periods(self) -> int:
        return (self.layers - len(self.prefix) - len(self.suffix)) // len(self.period)

    @property
    def blocks(self) -> tuple[BlockConfig, ...]:
        """Every layer's block, in natural order."""
        return (*self.prefix, *(self.period * self.periods), *self.suffix)

    @property
    def mixtures(self) -> list[MoeConfig]:
        """The mixtures of experts among the layers."""
        return [block.mlp for block in self.blocks if isinstance(block.mlp, MoeConfig)]

    @property
    def balanced(self) -> bool:
        """True if any layer has experts whose choices are counted."""
        return any(mixture.balance is not None for mixture in self.mixtures)

    @property
    def kinked(self) -> bool:
        """True if the derivative of any layer's activation jumps."""
        return any(block.mlp.activation in KINKED for block in self.blocks)

    @property
    def limited(self) -> bool:
        """True if any layer has experts with a capacity."""
        return any(mixture.capacity is not None for mixture in self.mixtures)

    @property
    def ropes(self) -> tuple[tuple[Rope, int], ...]:
        """The distinct rotary embeddings, each with its head_dim."""
        attentions = (block.attention for block in self.blocks)
        distinct = dict.fromkeys((a.rope, a.rotary_size(self.embed)) for a in attentions)
        return tuple((rope, size) for rope, size in distinct if rope is not None)
