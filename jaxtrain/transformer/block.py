"""One transformer block: attention and a feed-forward layer around the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxtrain.collectives.vary import Index
from jaxtrain.nn.communicator import Communicator
from jaxtrain.nn.dropout import dropout
from jaxtrain.nn.norm import Norm, NormConfig, RMSNorm
from jaxtrain.nn.param import named_key
from jaxtrain.transformer.attention import Attention, AttentionConfig, Cache
from jaxtrain.transformer.feed_forward import Mlp, MlpConfig
from jaxtrain.transformer.latent import (
    LatentAttention,
    LatentAttentionConfig,
    LatentCache,
)
from jaxtrain.transformer.mixture import Moe, MoeConfig
from jaxtrain.transformer.place import Context, Place


@dataclass(frozen=True)
class BlockConfig:
    """x + post_norm(attention(norm(x))), then x + post_norm(mlp(norm(x))); each branch is scaled
    and dropped out.

    norm: of both branches' inputs, None for none. post_norm: of their outputs, None for none. With
    the first alone it is Llama's block, with both Gemma 2's (Gemma Team 2024), with the second
    alone OLMo 2's (OLMo Team 2024); each branch has norms of its own.
    residual_scale: what a branch is multiplied by before it is added. dropout: the share of a
    branch's outputs that are dropped. attention, mlp: the two branches.
    """

    attention: AttentionConfig | LatentAttentionConfig
    mlp: MlpConfig | MoeConfig
    norm: NormConfig | None = RMSNorm()  # noqa: RUF009 (frozen)
    residual_scale: float = 1.0
    dropout: float = 0.0
    post_norm: NormConfig | None = None


class DecoderBlock(nnx.Module):
    def __init__(self, config: BlockConfig, place: Place, *, key: jax.Array) -> None:
        self.config = config
        for branch in ("attention", "mlp"):
            if config.norm is not None:
                setattr(self, f"{branch}_norm", Norm(config.norm, place.embed))
            if config.post_norm is not None:
                setattr(self, f"{branch}_post_norm", Norm(config.post_norm, place.embed))
        attention, own = config.attention, named_key(key, "attention")
        self.attention: Any = (
            LatentAttention(attention, place, key=own)
            if isinstance(attention, LatentAttentionConfig)
            else Attention(attention, place, key=own)
        )
        own, mlp = named_key(key, "mlp"), config.mlp
        self.mlp = (
            Moe(mlp, place, key=own) if isinstance(mlp, MoeConfig) else Mlp(mlp, place, key=own)
        )

    def __call__(
        self,
        x: jax.Array,
        context: Context,
        comm: Communicator,
        *,
        layer: Index,
        cache: Cache | LatentCache | None = None,
    ) -> tuple[jax.Array, Cache | LatentCache | None]:
        """x [tokens share, embed]; `layer` is the layer's number in natural order (dropout)."""
        scale = self.config.residual_scale

        def normed(x: jax.Array, name: str) -> jax.Array:
            return getattr(self, name)(x) if hasattr(self, name) else x

        def add(x: jax.Array, branch: jax.Array, name: str) -> jax.Array:
            branch, rate = normed(branch, f"{name}_post_norm"), self.config.dropout
            branch = dropout(branch, rate, context.keys, name=name, layer=layer)
            branch = branch if scale == 1.0 else branch * scale
            return comm.constrain(x + branch, "batch*seq", "embed")

        with jax.named_scope("attention"):
            out, cache = self.attention(normed(x, "attention_norm"), context, comm, cache)
            x = add(x, out, "attention")
        with jax.named_scope("mlp"):
            h, mlp = normed(x, "mlp_norm"), self.mlp
            h = mlp(h, context, comm) if isinstance(mlp, Moe) else mlp(h, comm)
            x = add(x, h, "mlp")
        return x, cache
