"""Multi-head latent attention: keys and values of all heads from one small vector of a token.

DeepSeek-AI 2024, "DeepSeek-V2", section 2.1 (equations 9 to 19, and appendix C). All keys and
values of a token come from its *latent*, except one rotary key that the heads share. In training
each head's keys and values are expanded from it. In generation the expansion is absorbed into
queries and outputs, so that the cache holds only the latent and the rotary key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtrain.attention.kernels import SelfAttention
from jaxtrain.attention.rotary.rope import Rope, rotate
from jaxtrain.attention.rotary.scaling import Yarn
from jaxtrain.models.adapters import column, matrix, replicated, row
from jaxtrain.nn.communicator import Communicator
from jaxtrain.nn.norm import Norm, NormConfig, RMSNorm
from jaxtrain.nn.param import normal
from jaxtrain.transformer.attention import extend, seen_in_cache
from jaxtrain.transformer.place import Context, Place


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Causal self-attention whose keys and values are made of a latent of each token.

    heads: each has queries, keys and values of its own. latent: the width of what the last two are
    made of (DeepSeek-V2 and V3: 512). query_latent: of another latent, of which queries are made
    (V3: 1536); None makes them of the token itself (V2-Lite). Both are normed, by `norm`. rope: of
    the rotary part of queries and of the key that all heads share.

    nope_head_dim, rope_head_dim: the parts of a query or key without and with positions;
    value_head_dim: of a value, which may differ from both together: the shorter of the two is
    padded with zeros, for kernels take one head_dim. scale: of scores, None is
    (nope_head_dim + rope_head_dim) ** -0.5, times the square of 0.1 mscale_all_dim ln(factor) + 1
    where `rope` is scaled by a Yarn with an mscale_all_dim.
    """

    heads: int
    latent: int = 512
    nope_head_dim: int = 128
    rope_head_dim: int = 64
    value_head_dim: int = 128
    query_latent: int | None = None
    rope: Rope = Rope()  # noqa: RUF009 (frozen)
    norm: NormConfig = RMSNorm(1e-6)  # noqa: RUF009 (frozen)
    scale: float | None = None

    @property
    def head_dim(self) -> int:
        """head_dim of queries and keys, both parts."""
        return self.nope_head_dim + self.rope_head_dim

    def rotary_size(self, embed: int) -> int:
        """head_dim of its rotary embedding, in a model of this width."""
        return self.rope_head_dim

    def empty_cache(self, embed: int, shape: tuple[int, ...], dtype: Any) -> LatentCache:
        """Returns an empty cache of `shape` [..., rows, max_seq] tokens."""
        sizes = (self.latent, self.rope_head_dim)
        return LatentCache(*(jnp.zeros((*shape, size), dtype) for size in sizes))

    def scoring_scale(self) -> float:
        """Factor of the scores."""
        if self.scale is not None:
            return self.scale
        scaling, m = self.rope.scaling, 1.0
        if isinstance(scaling, Yarn) and scaling.mscale_all_dim is not None:
            m = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0
        return self.head_dim**-0.5 * m * m


class LatentCache(NamedTuple):
    """Normed latents of past tokens [rows, max_seq, latent], and their rotated rotary keys [rows,
    max_seq, rope_head_dim]."""

    latents: jax.Array
    rope_keys: jax.Array


class LatentAttention(nnx.Module):
    """Matrices are two-dimensional, heads folded: of `query` (or `query_up`) a head has its nope
    columns, then its rotary ones; of `latent_up` those of its key, then those of its value. The
    last columns of `latent_down` make the rotary key.

    Under tensor parallelism heads are split. What makes latents is whole on every device and
    multiplies its share of the tokens; latents are gathered, not tokens.
    """

    def __init__(self, config: LatentAttentionConfig, place: Place, *, key: jax.Array) -> None:
        self.config, self.place = config, place
        embed, layers, c = place.embed, place.layers, config

        def drawn(name: str, rows: int, columns: int, axes: tuple[str | None, str | None]) -> Any:
            std = place.init.matrix_std(rows, layers=layers, residual=name == "out")
            return normal(key, name, (rows, columns), axes, std=std)

        wide = c.heads * c.head_dim
        if c.query_latent is None:
            self.query = drawn("query", embed, wide, ("embed", "heads"))
        else:
            self.query_down = drawn("query_down", embed, c.query_latent, ("embed", None))
            self.query_norm = Norm(c.norm, c.query_latent, axis="latent")
            self.query_up = drawn("query_up", c.query_latent, wide, ("latent", "heads"))
        down = c.latent + c.rope_head_dim
        self.latent_down = drawn("latent_down", embed, down, ("embed", None))
        self.latent_norm = Norm(c.norm, c.latent, axis="latent")
        up = c.heads * (c.nope_head_dim + c.value_head_dim)
        self.latent_up = drawn("latent_up", c.latent, up, ("latent", "heads"))
        self.out = drawn("out", c.heads * c.value_head_dim, embed, ("heads", "embed"))

    def __call__(
        self, x: jax.Array, context: Context, comm: Communicator, cache: LatentCache | None
    ) -> tuple[jax.Array, LatentCache | None]:
        """x [tokens share, embed] -> the branch's output, same shape, and the cache extended."""
        q = self._queries(x, comm)
        down = replicated(comm, self, "latent_down", x)
        latent, rope_key = jnp.split(down, [self.config.latent], axis=1)
        latent = self.latent_norm(latent)
        if cache is None:
            o = self._expanded(q, latent, rope_key, context, comm)
        else:
            o, cache = self._absorbed(q, latent, rope_key, context, cache)
        return row(comm, self, "out", o.reshape(-1, o.shape[-2] * o.shape[-1])), cache

    def _queries(self, x: jax.Array, comm: Communicator) -> jax.Array:
        """Queries [tokens, heads * head_dim], not rotated."""
        if self.config.query_latent is None:
            return column(comm, self, ("query",), x)[0]
        latent = self.query_norm(replicated(comm, self, "query_down", x))
        return column(comm, self, ("query_up",), latent)[0]

    def _expanded(
        self,
        q: jax.Array,
        latent: jax.Array,
        rope_key: jax.Array,
        context: Context,
        comm: Communicator,
    ) -> Float[Array, "rows seq heads value_head_dim"]:
        """Attention to keys and values of each head, expanded from the latents of all tokens."""
        c, shape = self.config, context.positions.shape
        (up,) = column(comm, self, ("latent_up",), latent)
        rope_key = comm.all_tokens(rope_key).reshape(*shape, 1, -1)
        up = up.reshape(*shape, -1, c.nope_head_dim + c.value_head_dim)
        key, value = jnp.split(up, [c.nope_head_dim], axis=-1)
        query, rope_query = self._turned(q.reshape(*shape, -1, c.head_dim), context)
        (rope_key,) = self._rotate(context, rope_key)
        shared = jnp.broadcast_to(rope_key, (*key.shape[:-1], c.rope_head_dim))
        q = jnp.concatenate([query, rope_query], axis=-1)
        k = jnp.concatenate([key, shared], axis=-1)
        size = max(c.head_dim, c.value_head_dim)
        q, k, v = (_padded(heads, size) for heads in (q, k, value))
        kernel = SelfAttention(kernel=self.place.kernel, scale=c.scoring_scale())
        return comm.attend(kernel, q, k, v, context.starts)[..., : c.value_head_dim]

    def _absorbed(
        self,
        q: jax.Array,
        latent: jax.Array,
        rope_key: jax.Array,
        context: Context,
        cache: LatentCache,
    ) -> tuple[Float[Array, "rows new heads value_head_dim"], LatentCache]:
        """Attention of a few new tokens, without expanded keys or values of past ones. For a head's
        key W c and query q, q . W c = (W^T q) . c; a value is expanded after the sum."""
        c, shape = self.config, context.positions.shape
        assert context.index is not None, "a cache is read at an index"
        query, rope_query = self._turned(q.reshape(*shape, -1, c.head_dim), context)
        (rope_key,) = self._rotate(context, rope_key.reshape(*shape, 1, -1))
        cache = LatentCache(
            extend(cache.latents, latent.reshape(*shape, -1), context.index),
            extend(cache.rope_keys, rope_key[:, :, 0], context.index),
        )
        up = matrix(self, "latent_up").reshape(c.latent, -1, c.nope_head_dim + c.value_head_dim)
        to_key, to_value = jnp.split(up, [c.nope_head_dim], axis=-1)
        # b row, q new token, s token of the cache, h head, l latent, d dim of a head
        query = jnp.einsum("bqhd,lhd->bqhl", query, to_key)
        scores = jnp.einsum("bqhl,bsl->bhqs", query, cache.latents)
        scores += jnp.einsum("bqhd,bsd->bhqs", rope_query, cache.rope_keys)
        scores = scores.astype(jnp.float32) * c.scoring_scale()
        seen = seen_in_cache(context.index, shape[1], cache.latents.shape[1])
        weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -1e30), axis=-1)
        latents = jnp.einsum("bhqs,bsl->bqhl", weights.astype(latent.dtype), cache.latents)
        return jnp.einsum("bqhl,lhd->bqhd", latents, to_value), cache

    def _turned(self, q: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """Returns the nope part of queries [rows, seq, heads, head_dim], and the rotary part,
        rotated."""
        query, rope_query = jnp.split(q, [self.config.nope_head_dim], axis=-1)
        return query, self._rotate(context, rope_query)[0]

    def _rotate(self, context: Context, *parts: jax.Array) -> list[jax.Array]:
        rope = (self.config.rope, self.config.rope_head_dim)
        cos, sin = context.ropes[self.place.ropes.index(rope)]
        return [rotate(part, cos, sin) for part in parts]


def _padded(
    x: Float[Array, "rows seq heads _"], size: int
) -> Float[Array, "rows seq heads {size}"]:
    """Appends zeros to heads of fewer dims: they change no score and no sum."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, size - x.shape[-1])))
