"""Causal self-attention with grouped queries, and the cache of a decoder that generates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.attention.kernels import SelfAttention
from jaxtrain.attention.rotary.rope import Rope, rotate
from jaxtrain.collectives.vary import Index
from jaxtrain.models.adapters import column, row
from jaxtrain.nn.communicator import Communicator
from jaxtrain.nn.norm import Norm, NormConfig
from jaxtrain.nn.param import constant, normal
from jaxtrain.scores.function import ScoreFunction, dense
from jaxtrain.transformer.place import Context, Place, add_bias


@dataclass(frozen=True)
class AttentionConfig:
    """Causal self-attention with grouped queries (Ainslie et al. 2023).

    kv_heads: None is as many as `heads`. head_dim: None is embed / heads. window: a query sees
    itself and window - 1 tokens before (Mistral). softcap: scores are softcap * tanh(s / softcap).
    scale: of scores, None is head_dim ** -0.5. rope: None with learned positions, with `scores`
      that know positions, or with none at all (NoPE, Kazemnejad et al. 2023).
    scores: a function of each score after scale and softcap, such as `Alibi()` or
      `RelativeBias()`; None for none. No fused kernel has it: `Blockwise` runs.

    qk_norm: of queries and keys by head, None for none. qk_norm_across_heads: it is of all heads
    together, an RMSNorm (OLMo 2). qkv_bias, out_bias: whether the products into queries, keys and
    values, and the one out of the heads, add a bias.
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    rope: Rope | None = Rope()  # noqa: RUF009 (frozen)
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    qk_norm: NormConfig | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_across_heads: bool = False
    scores: ScoreFunction | None = None

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    def size(self, embed: int) -> int:
        """head_dim of a model of this width."""
        return embed // self.heads if self.head_dim is None else self.head_dim

    def rotary_size(self, embed: int) -> int:
        """head_dim of its rotary embedding, in a model of this width."""
        return self.size(embed)

    def empty_cache(self, embed: int, shape: tuple[int, ...], dtype: Any) -> Cache:
        """Returns an empty cache of `shape` [..., rows, max_seq] tokens."""
        sizes = (*shape, self.key_heads, self.size(embed))
        return Cache(jnp.zeros(sizes, dtype), jnp.zeros(sizes, dtype))


class Cache(NamedTuple):
    """Keys and values of past tokens [rows, max_seq, kv_heads, head_dim]."""

    keys: jax.Array
    values: jax.Array


class Attention(nnx.Module):
    """Matrices are two-dimensional, heads folded: [embed, heads * head_dim]."""

    def __init__(self, config: AttentionConfig, place: Place, *, key: jax.Array) -> None:
        self.config, self.place = config, place
        embed, size = place.embed, config.size(place.embed)
        wide, narrow = config.heads * size, config.key_heads * size
        std = place.init.matrix_std(embed, layers=place.layers)
        self.query = normal(key, "query", (embed, wide), ("embed", "heads"), std=std)
        self.key = normal(key, "key", (embed, narrow), ("embed", "kv_heads"), std=std)
        self.value = normal(key, "value", (embed, narrow), ("embed", "kv_heads"), std=std)
        std = place.init.matrix_std(wide, layers=place.layers, residual=True)
        self.out = normal(key, "out", (wide, embed), ("heads", "embed"), std=std)
        if config.qkv_bias:
            self.query_bias = constant(0.0, (wide,), ("heads",))
            self.key_bias = constant(0.0, (narrow,), ("kv_heads",))
            self.value_bias = constant(0.0, (narrow,), ("kv_heads",))
        if config.out_bias:
            self.out_bias = constant(0.0, (embed,), ("embed",))
        if config.scores is not None and config.scores.trained:
            start = jnp.asarray(config.scores.of_heads(config.heads), jnp.float32)
            # One vector of a head after another: to optimizers no matrix.
            self.score_values = nnx.Param(start, axes=("heads", "head_dim")[: start.ndim])
        if config.qk_norm is not None and config.qk_norm_across_heads:
            self.query_norm = Norm(config.qk_norm, wide, axis="heads")
            self.key_norm = Norm(config.qk_norm, narrow, axis="kv_heads")
        elif config.qk_norm is not None:
            self.query_norm = Norm(config.qk_norm, size, axis="head_dim")
            self.key_norm = Norm(config.qk_norm, size, axis="head_dim")

    def __call__(
        self, x: jax.Array, context: Context, comm: Communicator, cache: Cache | None
    ) -> tuple[jax.Array, Cache | None]:
        """x [tokens share, embed] -> the branch's output, same shape, and the cache extended."""
        config = self.config
        q, k, v = self._projections(x, context, comm)
        if cache is None:
            fields = ("window", "softcap", "scale", "scores")
            options: Any = {name: getattr(config, name) for name in fields}
            kernel = SelfAttention(causal=True, kernel=self.place.kernel, **options)
            values = self._values_of_heads(q.shape[2], comm)
            starts = kernel.located(context.starts, values)
            o = comm.attend(kernel, q, k, v, starts)
        else:
            assert context.index is not None, "a cache is read at an index"
            cache = Cache(
                extend(cache.keys, k, context.index), extend(cache.values, v, context.index)
            )
            values = self._values_of_heads(q.shape[2], comm)
            o = _attend_cache(q, cache, context, config, values)
        out = row(comm, self, "out", o.reshape(-1, o.shape[-2] * o.shape[-1]))
        if config.out_bias:
            out = add_bias(out, self.out_bias[...])
        return out, cache

    def _values_of_heads(self, heads: int, comm: Communicator) -> jax.Array | None:
        """What the function of scores has for the `heads` heads that one call sees."""
        function = self.config.scores
        if function is None:
            return None
        if function.trained:
            return self.score_values[...]
        every = jnp.asarray(function.of_heads(self.config.heads))
        first = comm.head_offset(heads)
        return jax.lax.dynamic_slice_in_dim(every, first, heads)

    def _projections(self, x: jax.Array, context: Context, comm: Communicator) -> list[jax.Array]:
        """q, k, v [rows, seq, heads, head_dim], rotated."""
        config = self.config
        flat = column(comm, self, ("query", "key", "value"), x)
        if config.qkv_bias:
            biases = (self.query_bias, self.key_bias, self.value_bias)
            flat = [add_bias(y, b[...]) for y, b in zip(flat, biases, strict=True)]
        if config.qk_norm_across_heads:
            flat[:2] = self._normed_across_heads(flat[:2], comm)
        shape = (*context.positions.shape, -1, config.size(self.place.embed))
        q, k, v = (y.reshape(shape) for y in flat)
        if config.qk_norm is not None and not config.qk_norm_across_heads:
            q, k = self.query_norm(q), self.key_norm(k)
        if config.rope is not None:
            cos, sin = context.ropes[self.place.ropes.index((config.rope, shape[-1]))]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return [q, k, v]

    def _normed_across_heads(self, flat: list[jax.Array], comm: Communicator) -> list[jax.Array]:
        """Queries and keys [tokens, part of the heads' dims], each divided by the root of its mean
        square over all heads. One reduction sums the squares of both over devices."""
        wide = [y.astype(jnp.float32) for y in flat]
        squares = comm.sum_over_heads(jnp.stack([jnp.sum(y * y, axis=-1) for y in wide], axis=-1))
        out = []
        for index, (y, norm) in enumerate(zip(wide, (self.query_norm, self.key_norm), strict=True)):
            dims = self.config.size(self.place.embed) * (
                self.config.key_heads if index else self.config.heads
            )
            out.append(norm.scaled(y, squares[:, index, None] / dims).astype(flat[index].dtype))
        return out


def extend(cache: jax.Array, new: jax.Array, index: Index) -> jax.Array:
    """Returns the cache [rows, max_seq, ...] with [rows, new, ...] written after `index` tokens."""
    return jax.lax.dynamic_update_slice_in_dim(cache, new, start_index=index, axis=1)


def seen_in_cache(index: jax.Array, new: int, max_seq: int, window: int | None = None) -> jax.Array:
    """Mask [new, max_seq] of the cached tokens that each `new` token after `index` others sees."""
    position = index + jnp.arange(new)[:, None]
    seen = jnp.arange(max_seq)[None, :]
    return (seen <= position) if window is None else (seen <= position) & (seen > position - window)


def _attend_cache(
    q: jax.Array,
    cache: Cache,
    context: Context,
    config: AttentionConfig,
    values: jax.Array | None,
) -> jax.Array:
    """Attention of a few new tokens over the cache; dense, scores [rows, heads, new, max_seq].
    values: for the function of scores, by head."""
    rows, new, heads, size = q.shape
    grouped = q.reshape(rows, new, config.key_heads, -1, size)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, cache.keys).astype(jnp.float32)
    scores = scores * (size**-0.5 if config.scale is None else config.scale)
    if config.softcap is not None:
        scores = config.softcap * jnp.tanh(scores / config.softcap)
    assert context.index is not None, "a cache is read at an index"
    visible = seen_in_cache(context.index, new, cache.keys.shape[1], config.window)
    if config.scores is not None and values is not None:
        places = context.index + jnp.arange(new)[None], jnp.arange(cache.keys.shape[1])[None]
        scores = dense(config.scores, scores, values, places, visible[None])
    weights = jax.nn.softmax(jnp.where(visible[None, None, None], scores, -1e30), axis=-1)
    out = jnp.einsum("bkgqs,bskd->bqkgd", weights.astype(q.dtype), cache.values)
    return out.reshape(rows, new, heads, size)
