"""One transformer block: attention and a feed-forward layer around the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.attention.kernels import attention
from jaxtrain.collectives.vary import Index
from jaxtrain.models.adapters import column, row
from jaxtrain.models.description import (
    AttentionCall,
    Bias,
    ColumnParallel,
    Elementwise,
    ExpertCall,
    Operation,
    Residual,
    RowParallel,
    Weight,
)
from jaxtrain.models.description import Block as BlockDescription
from jaxtrain.moe.layer import moe_layer
from jaxtrain.nn.communicator import Communicator
from jaxtrain.nn.dropout import DropoutKeys, dropout
from jaxtrain.nn.norm import Norm, NormConfig, RMSNorm
from jaxtrain.nn.param import Initialisation, constant, named_key, normal
from jaxtrain.nn.rotary import Rope, rotate

Activation = Callable[[jax.Array], jax.Array]


def gelu_tanh(x: jax.Array) -> jax.Array:
    """GELU by its tanh approximation, as GPT-2 uses it (Hendrycks & Gimpel 2016)."""
    return jax.nn.gelu(x, approximate=True)


def gelu_exact(x: jax.Array) -> jax.Array:
    """GELU by the error function."""
    return jax.nn.gelu(x, approximate=False)


def silu(x: jax.Array) -> jax.Array:
    """x * sigmoid(x)."""
    return x * jax.nn.sigmoid(x)


@dataclass(frozen=True)
class AttentionConfig:
    """Causal self-attention with grouped queries (Ainslie et al. 2023).

    kv_heads: None is as many as `heads`. head_dim: None is embed / heads. window: a query sees
    itself and window - 1 tokens before (Mistral). softcap: scores are softcap * tanh(s / softcap).
    scale: of scores, None is head_dim ** -0.5. rope: None with learned positions.

    qk_norm: of queries and keys by head, None for none. qkv_bias, out_bias: whether the
    products into queries, keys and values, and the one out of the heads, add a bias.
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

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    def size(self, embed: int) -> int:
        """head_dim of a model of this width."""
        return embed // self.heads if self.head_dim is None else self.head_dim


@dataclass(frozen=True)
class MlpConfig:
    """activation(x gate) * (x up) when gated (SwiGLU; Shazeer 2020), else activation(x up).

    hidden: width between the products. bias: whether each product adds one.
    activation: of the gate, or of the only product. gated: whether there is one.
    """

    hidden: int
    activation: Activation = silu
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of `experts` feed-forward layers, each as `MlpConfig` has one, of which every token
    goes through the `experts_per_token` that its router gives the most (Jiang et al. 2024).

    No token is dropped, and nothing but the loss keeps the experts' loads even. The shares of the
    chosen experts sum to 1: with experts_per_token=1 the router has no gradient.

    hidden, activation, gated: of each expert, as in `MlpConfig`.
    """

    hidden: int
    experts: int
    experts_per_token: int = 2
    activation: Activation = silu
    gated: bool = True


@dataclass(frozen=True)
class BlockConfig:
    """x + attention(norm(x)), then x + mlp(norm(x)); each branch is scaled and dropped out.

    norm: of both branches' inputs. residual_scale: what a branch is multiplied by before it is
    added. dropout: the share of a branch's outputs that are dropped.
    attention, mlp: the two branches.
    """

    attention: AttentionConfig
    mlp: MlpConfig | MoeConfig
    norm: NormConfig = RMSNorm()  # noqa: RUF009 (frozen)
    residual_scale: float = 1.0
    dropout: float = 0.0


class Cache(NamedTuple):
    """Keys and values of past tokens [rows, max_seq, kv_heads, head_dim]."""

    keys: jax.Array
    values: jax.Array


class Context(NamedTuple):
    """What all blocks of a forward pass share; arrays only, none differentiated.

    positions [rows, seq]; starts [rows, seq], of each position the first of its document, or None;
    ropes: (cos, sin) of each of `Place.ropes`; keys: dropout's, None in evaluation; index: tokens
    already in the caches (generation).
    """

    positions: jax.Array
    starts: jax.Array | None
    ropes: tuple[tuple[jax.Array, jax.Array], ...]
    keys: DropoutKeys | None
    index: jax.Array | None = None


class Place(NamedTuple):
    """Static facts a block is built with."""

    embed: int
    layers: int
    init: Initialisation
    ropes: tuple[tuple[Rope, int], ...]
    """The distinct (rotary embedding, head_dim) of the model, in the order of `Context.ropes`."""
    kernel: Any
    """Attention kernel, None lets the platform choose."""


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
        if config.qk_norm is not None:
            self.query_norm = Norm(config.qk_norm, size, axis="head_dim")
            self.key_norm = Norm(config.qk_norm, size, axis="head_dim")

    def __call__(
        self, x: jax.Array, context: Context, comm: Communicator, cache: Cache | None
    ) -> tuple[jax.Array, Cache | None]:
        """x [tokens share, embed] -> the branch's output, same shape, and the cache extended."""
        config = self.config
        q, k, v = self._projections(x, context, comm)
        kernel = partial(
            attention,
            causal=True,
            window=config.window,
            softcap=config.softcap,
            scale=config.scale,
            kernel=self.place.kernel,
        )
        if cache is None:
            o = comm.attend(lambda q, k, v, s: kernel(q, k, v, starts=s), q, k, v, context.starts)
        else:
            assert context.index is not None, "a cache is read at an index"
            cache = _extend(cache, k, v, context.index)
            o = _attend_cache(q, cache, context, config)
        out = row(comm, self, "out", o.reshape(-1, o.shape[-2] * o.shape[-1]))
        if config.out_bias:
            out = add_bias(out, self.out_bias[...])
        return out, cache

    def _projections(self, x: jax.Array, context: Context, comm: Communicator) -> list[jax.Array]:
        """q, k, v [rows, seq, heads, head_dim], rotated."""
        config = self.config
        flat = column(comm, self, ("query", "key", "value"), x)
        if config.qkv_bias:
            biases = (self.query_bias, self.key_bias, self.value_bias)
            flat = [add_bias(y, b[...]) for y, b in zip(flat, biases, strict=True)]
        shape = (*context.positions.shape, -1, config.size(self.place.embed))
        q, k, v = (y.reshape(shape) for y in flat)
        if config.qk_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if config.rope is not None:
            cos, sin = context.ropes[self.place.ropes.index((config.rope, shape[-1]))]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return [q, k, v]


def _extend(cache: Cache, k: jax.Array, v: jax.Array, index: Index) -> Cache:
    write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=index, axis=1)
    return Cache(write(cache.keys, k), write(cache.values, v))


def _attend_cache(
    q: jax.Array, cache: Cache, context: Context, config: AttentionConfig
) -> jax.Array:
    """Attention of a few new tokens over the cache; dense, scores [rows, heads, new, max_seq]."""
    rows, new, heads, size = q.shape
    grouped = q.reshape(rows, new, config.key_heads, -1, size)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", grouped, cache.keys).astype(jnp.float32)
    scores = scores * (size**-0.5 if config.scale is None else config.scale)
    if config.softcap is not None:
        scores = config.softcap * jnp.tanh(scores / config.softcap)
    assert context.index is not None, "a cache is read at an index"
    at = context.index + jnp.arange(new)[:, None]
    seen = jnp.arange(cache.keys.shape[1])[None, :]
    visible = seen <= at
    if config.window is not None:
        visible = visible & (seen > at - config.window)
    weights = jax.nn.softmax(jnp.where(visible[None, None, None], scores, -1e30), axis=-1)
    out = jnp.einsum("bkgqs,bskd->bqkgd", weights.astype(q.dtype), cache.values)
    return out.reshape(rows, new, heads, size)


class Mlp(nnx.Module):
    def __init__(self, config: MlpConfig, place: Place, *, key: jax.Array) -> None:
        self.config = config
        embed, hidden = place.embed, config.hidden
        std = place.init.matrix_std(embed, layers=place.layers)
        if config.gated:
            self.gate = normal(key, "gate", (embed, hidden), ("embed", "mlp"), std=std)
        self.up = normal(key, "up", (embed, hidden), ("embed", "mlp"), std=std)
        std = place.init.matrix_std(hidden, layers=place.layers, residual=True)
        self.down = normal(key, "down", (hidden, embed), ("mlp", "embed"), std=std)
        if config.bias:
            if config.gated:
                self.gate_bias = constant(0.0, (hidden,), ("mlp",))
            self.up_bias = constant(0.0, (hidden,), ("mlp",))
            self.down_bias = constant(0.0, (embed,), ("embed",))

    def __call__(self, x: jax.Array, comm: Communicator) -> jax.Array:
        """x [tokens share, embed] -> same shape."""
        config, names = self.config, ("gate", "up") if self.config.gated else ("up",)
        hidden = column(comm, self, names, x)
        if config.bias:
            biases = (getattr(self, f"{name}_bias")[...] for name in names)
            hidden = [add_bias(h, b) for h, b in zip(hidden, biases, strict=True)]
        h = config.activation(hidden[0])
        out = row(comm, self, "down", h * hidden[1] if config.gated else h)
        return add_bias(out, self.down_bias[...]) if config.bias else out


class Moe(nnx.Module):
    def __init__(self, config: MoeConfig, place: Place, *, key: jax.Array) -> None:
        self.config = config
        embed, hidden, n = place.embed, config.hidden, config.experts
        std = place.init.matrix_std(embed, layers=place.layers)
        self.router = normal(key, "router", (embed, n), ("embed", "experts"), std=std)
        into = ("experts", "embed", "mlp")
        if config.gated:
            self.gate = normal(key, "gate", (n, embed, hidden), into, std=std)
        self.up = normal(key, "up", (n, embed, hidden), into, std=std)
        std = place.init.matrix_std(hidden, layers=place.layers, residual=True)
        self.down = normal(key, "down", (n, hidden, embed), ("experts", "mlp", "embed"), std=std)

    def __call__(self, x: jax.Array, comm: Communicator) -> jax.Array:
        """x [tokens share, embed] -> same shape."""
        config = self.config
        names = ("gate", "up", "down") if config.gated else ("up", "down")
        kernel = partial(
            moe_layer,
            k=config.experts_per_token,
            activation=config.activation,
            kernel=comm.grouped_matmul,
        )
        weights = tuple(getattr(self, name)[...] for name in names)
        return comm.experts(kernel, x, self.router[...], weights)


class Block(nnx.Module):
    def __init__(self, config: BlockConfig, place: Place, *, key: jax.Array) -> None:
        self.config = config
        self.attention_norm = Norm(config.norm, place.embed)
        self.attention = Attention(config.attention, place, key=named_key(key, "attention"))
        self.mlp_norm = Norm(config.norm, place.embed)
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
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """x [tokens share, embed]; `layer` is the layer's number in natural order (dropout)."""
        scale = self.config.residual_scale

        def add(x: jax.Array, branch: jax.Array, name: str) -> jax.Array:
            rate = self.config.dropout
            branch = dropout(branch, rate, context.keys, name=name, layer=layer)
            branch = branch if scale == 1.0 else branch * scale
            return comm.constrain(x + branch, "batch*seq", "embed")

        with jax.named_scope("attention"):
            out, cache = self.attention(self.attention_norm(x), context, comm, cache)
            x = add(x, out, "attention")
        with jax.named_scope("mlp"):
            x = add(x, self.mlp(self.mlp_norm(x), comm), "mlp")
        return x, cache


def describe_block(config: BlockConfig, embed: int) -> BlockDescription:
    """What a block of a model of this width does, in the order in which it does it."""
    a, size = config.attention, config.attention.size(embed)
    wide, narrow = a.heads * size, a.key_heads * size
    into = {"query": wide, "key": narrow, "value": narrow}
    columns = ColumnParallel(tuple(Weight(f"attention.{k}", embed, n) for k, n in into.items()))
    biases = tuple(f"attention.{k}_bias" for k in into) if a.qkv_bias else ()
    norms = () if a.qk_norm is None else ("attention.query_norm.", "attention.key_norm.")
    attention = (
        Elementwise(("attention_norm.",)),
        columns,
        Elementwise((*biases, *norms)),
        AttentionCall(a.heads, a.key_heads, size, True, a.window, a.softcap),
        RowParallel(Weight("attention.out", wide, embed)),
        *([Bias(("attention.out_bias",))] if a.out_bias else []),
    )
    return (
        Residual(attention),
        Residual((Elementwise(("mlp_norm.",)), *_describe_mlp(config, embed))),
    )


def _describe_mlp(config: BlockConfig, embed: int) -> tuple[Operation, ...]:
    mlp = config.mlp
    names = ("mlp.gate", "mlp.up") if mlp.gated else ("mlp.up",)
    into = tuple(Weight(name, embed, mlp.hidden) for name in names)
    down = Weight("mlp.down", mlp.hidden, embed)
    if isinstance(mlp, MoeConfig):
        router = Weight("mlp.router", embed, mlp.experts)
        return (ExpertCall(router, (*into, down), mlp.experts, mlp.experts_per_token),)
    biases = tuple(f"{name}_bias" for name in names) if mlp.bias else ()
    out = [Bias(("mlp.down_bias",))] if mlp.bias else []
    return (ColumnParallel(into), Elementwise(biases), RowParallel(down), *out)


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """[tokens, dim] + [dim] in the dtype of y; the gradient of `bias` is summed in fp32."""
    return (y.astype(jnp.float32) + bias.astype(jnp.float32)[None]).astype(y.dtype)
