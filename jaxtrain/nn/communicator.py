"""One model, three meanings: what a layer asks of the machine, and who answers.

A layer never names a mesh axis. `Local` is the meaning on one device. `Gspmd` states where values
live and lets XLA choose the collectives. `Explicit` runs inside one shard_map in which every mesh
axis is manual, and every collective is a line of ours.

The residual stream is a matrix [tokens, embed], tokens = rows * seq in row-major order: XLA:CPU
does not flatten a three-dimensional dot into one gemm (2.2x on a SwiGLU block), and a device's
share under sequence parallelism (Korthikanti et al. 2022) is a contiguous slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.collectives.named import all_gather, sum_over, sum_scatter, vary
from jaxtrain.mesh.sharding import (
    Leaf,
    ShardingRules,
    activation_dims,
    named_sharding,
    partition_spec,
    ways,
)
from jaxtrain.nn.bundle import gather_bundle, scatter_bundle

Params = dict[str, jax.Array]
Attend = Callable[..., jax.Array]


class Communicator(Protocol):
    """What a layer may ask for. Shapes are what one call sees: local ones in `Explicit`."""

    def gather(self, params: Params, prefix: str) -> Params:
        """Parameters as they are used: whole over the axes that only split them at rest, in the
        compute dtype. Differentiable: the adjoint is `scatter`."""
        ...

    def fetch(self, params: Params, prefix: str) -> Params:
        """`gather` without a derivative, for loops that write out their own backward pass."""
        ...

    def scatter(self, grads: Params, prefix: str) -> Params:
        """Adjoint of `fetch`: gradients summed over those axes, each device keeping its part."""
        ...

    def column(self, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        """x @ w for weights split by column: [tokens, embed] -> [tokens, part of the columns]."""
        ...

    def row(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """x @ w for a weight split by row; the result is the residual stream's share."""
        ...

    def embed(self, vectors: jax.Array, ids: jax.Array) -> jax.Array:
        """Rows `ids` [tokens] of the table [vocab, embed]."""
        ...

    def attend(self, kernel: Attend, q: Any, k: Any, v: Any, segments: Any) -> jax.Array:
        """kernel(q, k, v, segments) with q [rows, seq, heads, head_dim], split over heads."""
        ...

    def tokens(self, per_token: jax.Array) -> jax.Array:
        """The share of a per-token array [tokens, ...] that lies beside the residual stream."""
        ...

    def all_tokens(self, x: jax.Array) -> jax.Array:
        """The whole of the residual stream's tokens, for a vocabulary-split head."""
        ...

    def scatter_head_gradient(self, dx: jax.Array) -> jax.Array:
        """Adjoint of `all_tokens` when every device holds a part of the sum."""
        ...

    def vocab_offset(self, local: int) -> Any:
        """The first id of this device's slice of the vocabulary."""
        ...

    def sum_over_vocab(self, x: jax.Array) -> jax.Array: ...

    def max_over_vocab(self, x: jax.Array) -> jax.Array: ...

    def vocab_ways(self) -> int: ...

    def chunks(self, per_token: jax.Array, count: int, *, rows: int) -> jax.Array:
        """[tokens, ...] -> [count, tokens / count, ...], every chunk spread over all devices;
        `count` divides tokens / rows."""
        ...

    def unchunk(self, chunked: jax.Array, *, rows: int) -> jax.Array:
        """Inverse of `chunks`."""
        ...

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """State the logical axes of an activation; `batch*seq` names merged tokens."""
        ...


@dataclass(frozen=True)
class Local:
    """Everything on one device; no communication. The meaning the other two must keep."""

    compute_dtype: Any = jnp.float32

    def gather(self, params: Params, prefix: str) -> Params:
        # One-dim leaves keep their dtype: they are small, and norms are computed in fp32.
        dtype = self.compute_dtype
        return {k: v.astype(dtype) if v.ndim > 1 else v for k, v in params.items()}

    def fetch(self, params: Params, prefix: str) -> Params:
        return Local.gather(self, params, prefix)

    def scatter(self, grads: Params, prefix: str) -> Params:
        return grads

    def column(self, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(x @ w for w in weights)

    def row(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return x @ weight

    def embed(self, vectors: jax.Array, ids: jax.Array) -> jax.Array:
        return vectors[ids]

    def attend(self, kernel: Attend, q: Any, k: Any, v: Any, segments: Any) -> jax.Array:
        return kernel(q, k, v, segments)

    def tokens(self, per_token: jax.Array) -> jax.Array:
        return per_token

    def all_tokens(self, x: jax.Array) -> jax.Array:
        return x

    def scatter_head_gradient(self, dx: jax.Array) -> jax.Array:
        return dx

    def vocab_offset(self, local: int) -> Any:
        return 0

    def sum_over_vocab(self, x: jax.Array) -> jax.Array:
        return x

    def max_over_vocab(self, x: jax.Array) -> jax.Array:
        return x

    def vocab_ways(self) -> int:
        return 1

    def chunks(self, per_token: jax.Array, count: int, *, rows: int) -> jax.Array:
        return per_token.reshape(count, -1, *per_token.shape[1:])

    def unchunk(self, chunked: jax.Array, *, rows: int) -> jax.Array:
        return chunked.reshape(-1, *chunked.shape[2:])

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        return x


@dataclass(frozen=True, eq=False)
class Gspmd(Local):
    """Sharding constraints from the rules; XLA's partitioner chooses the collectives.

    It sums a matmul's partial results in the matmul's dtype: for gradients of matrices at least
    `reduce_dtype`, rounded after the sum; for activations and theirs the compute dtype."""

    mesh: jax.sharding.Mesh = field(kw_only=True)
    rules: ShardingRules = field(kw_only=True)
    places: Mapping[str, Leaf] = field(kw_only=True)
    reduce_dtype: Any = jnp.float32

    def _place(self, params: Params, prefix: str, what: str) -> Params:
        out = {}
        for name, value in params.items():
            split = getattr(self.places[prefix + name], what)
            split = split[len(split) - value.ndim :]
            sharding = named_sharding(self.mesh, split)
            out[name] = lax.with_sharding_constraint(value, sharding)
        return out

    def gather(self, params: Params, prefix: str) -> Params:
        return self._place(super().gather(params, prefix), prefix, "in_use")

    def fetch(self, params: Params, prefix: str) -> Params:
        return self.gather(params, prefix)

    def scatter(self, grads: Params, prefix: str) -> Params:
        return self._place(grads, prefix, "params")

    def column(self, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(_matmul(self.reduce_dtype, x, w) for w in weights)

    def row(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return _matmul(self.reduce_dtype, x, weight)

    def embed(self, vectors: jax.Array, ids: jax.Array) -> jax.Array:
        return _embed(self.reduce_dtype, vectors, ids)

    def attend(self, kernel: Attend, q: Any, k: Any, v: Any, segments: Any) -> jax.Array:
        """A shard_map over batch and heads: XLA cannot partition a kernel that folds the two."""
        sizes = dict(self.mesh.shape)
        table = self.rules.activations
        spec = lambda *axes: partition_spec(activation_dims(axes, table, sizes=sizes))  # noqa: E731
        queries = spec("batch", None, "heads", None)
        keys = spec("batch", None, "kv_heads", None)
        run = jax.shard_map(
            kernel,
            mesh=self.mesh,
            in_specs=(queries, keys, keys, spec("batch", None)),
            out_specs=queries,
            check_vma=False,
        )
        return run(q, k, v, segments)

    def chunks(self, per_token: jax.Array, count: int, *, rows: int) -> jax.Array:
        # Within rows: a run of whole rows would lie on a few devices only.
        rest = per_token.shape[1:]
        split = per_token.reshape(rows, count, -1, *rest)
        return jnp.moveaxis(split, 1, 0).reshape(count, -1, *rest)

    def unchunk(self, chunked: jax.Array, *, rows: int) -> jax.Array:
        count, rest = chunked.shape[0], chunked.shape[2:]
        split = jnp.moveaxis(chunked.reshape(count, rows, -1, *rest), 0, 1)
        return split.reshape(-1, *rest)

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        split = activation_dims(axes, self.rules.activations, sizes=dict(self.mesh.shape))
        return lax.with_sharding_constraint(x, named_sharding(self.mesh, split))


@dataclass(frozen=True, eq=False)
class Explicit(Local):
    """Inside a shard_map over the whole mesh; all values vary over all its axes.

    FSDP is an all-gather per block and a reduce-scatter back; tensor parallelism is Megatron's
    sequence-parallel form: tokens are gathered before a column-split matmul and their partial
    sums reduce-scattered after a row-split one. Those sums, of activations and their gradients
    over `tensor`, are in the compute dtype, as Megatron's; weight gradients' in `reduce_dtype`.
    """

    sizes: Mapping[str, int] = field(kw_only=True)
    """Mesh axes of size > 1, in mesh order."""
    places: Mapping[str, Leaf] = field(kw_only=True)
    tensor: tuple[str, ...] = ()
    """Mesh axes over which heads, hidden units and vocabulary are split."""
    reduce_dtype: Any = jnp.float32
    gather_weights: bool = True
    """False: parameters were gathered outside the differentiated function (once a step)."""

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    def gather(self, params: Params, prefix: str) -> Params:
        if not self.gather_weights:
            return super().gather(params, prefix)
        return _gather(self, prefix, params)

    def fetch(self, params: Params, prefix: str) -> Params:
        if not self.gather_weights:
            return super().gather(params, prefix)
        return gather_bundle(super().gather(params, prefix), self._gathered(params, prefix))

    def scatter(self, grads: Params, prefix: str) -> Params:
        if not self.gather_weights:
            return grads
        grads = {k: g.astype(self.reduce_dtype) for k, g in grads.items()}
        return scatter_bundle(grads, self._gathered(grads, prefix))

    def _gathered(self, params: Params, prefix: str) -> dict[str, tuple[int, tuple[str, ...]]]:
        """name -> (dim, mesh axes) of every parameter that is split at rest only."""
        found = {}
        for name, value in params.items():
            place = self.places[prefix + name]
            lead = len(place.axes) - value.ndim
            for dim, (rest, use) in enumerate(zip(place.params, place.in_use, strict=True)):
                if rest != use:
                    found[name] = (dim - lead, rest[len(use) :])
        return found

    def column(self, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        x = _gather_tokens(self.tensor, x)
        return tuple(x @ w for w in weights)

    def row(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return _scatter_tokens("row", self.tensor, x @ weight)

    def embed(self, vectors: jax.Array, ids: jax.Array) -> jax.Array:
        local = ids - self.vocab_offset(vectors.shape[0])
        mine = (local >= 0) & (local < vectors.shape[0])
        found = vectors[jnp.clip(local, 0, vectors.shape[0] - 1)]
        found = jnp.where(mine[:, None], found, jnp.zeros((), found.dtype))
        return _scatter_tokens("embedding", self.tensor, found)

    def tokens(self, per_token: jax.Array) -> jax.Array:
        share = per_token.shape[0] // self.vocab_ways()
        return lax.dynamic_slice_in_dim(per_token, self._tensor_index() * share, share, axis=0)

    def all_tokens(self, x: jax.Array) -> jax.Array:
        return all_gather(x, self.tensor, 0)

    def scatter_head_gradient(self, dx: jax.Array) -> jax.Array:
        return sum_scatter("head gradients", dx, self.tensor, 0)

    def _tensor_index(self) -> Any:
        return lax.axis_index(self.tensor) if self.tensor else 0

    def vocab_offset(self, local: int) -> Any:
        return self._tensor_index() * local

    def sum_over_vocab(self, x: jax.Array) -> jax.Array:
        return vary(sum_over("vocabulary", x, self.tensor), self.axes)

    def max_over_vocab(self, x: jax.Array) -> jax.Array:
        return vary(lax.pmax(x, self.tensor), self.axes) if self.tensor else x

    def vocab_ways(self) -> int:
        return ways(self.tensor, self.sizes)

    def whole(self) -> Explicit:
        """The same, for parameters that were gathered once before."""
        return replace(self, gather_weights=False)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(reduce_dtype: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [tokens, n] @ weight; the weight's gradient leaves its matmul in `reduce_dtype`."""
    return x @ weight


def _matmul_backward(reduce_dtype: Any, saved: tuple[Any, Any], dy: Any) -> tuple[Any, Any]:
    x, weight = saved
    wide = jnp.promote_types(dy.dtype, reduce_dtype)
    dw = jnp.matmul(x.T, dy, preferred_element_type=wide)
    return (dy @ weight.T).astype(x.dtype), dw.astype(weight.dtype)


_matmul.defvjp(lambda dtype, x, weight: (x @ weight, (x, weight)), _matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embed(reduce_dtype: Any, vectors: jax.Array, ids: jax.Array) -> jax.Array:
    return vectors[ids]


def _embed_backward(reduce_dtype: Any, saved: tuple[Any, Any], dy: Any) -> tuple[Any, None]:
    vectors, ids = saved
    wide = jnp.promote_types(vectors.dtype, reduce_dtype)
    summed = jnp.zeros(vectors.shape, wide).at[ids].add(dy.astype(wide))
    return summed.astype(vectors.dtype), None


_embed.defvjp(lambda dtype, vectors, ids: (vectors[ids], (vectors, ids)), _embed_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(comm: Explicit, prefix: str, params: Params) -> Params:
    return comm.fetch(params, prefix)


def _gather_forward(comm: Explicit, prefix: str, params: Params) -> tuple[Params, Params]:
    # Zero-sized stand-ins carry the dtypes the cotangents must come back in.
    return comm.fetch(params, prefix), {k: v[:0] for k, v in params.items()}


def _gather_backward(comm: Explicit, prefix: str, like: Params, grads: Params) -> tuple[Params]:
    scattered = comm.scatter(grads, prefix)
    return ({k: g.astype(like[k].dtype) for k, g in scattered.items()},)


_gather.defvjp(_gather_forward, _gather_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_tokens(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    return all_gather(x, axes, 0)


_gather_tokens.defvjp(
    lambda axes, x: (all_gather(x, axes, 0), None),
    lambda axes, _, dx: (sum_scatter("column gradients", dx, axes, 0),),
)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scatter_tokens(name: str, axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    return sum_scatter(name, x, axes, 0)


_scatter_tokens.defvjp(
    lambda name, axes, x: (sum_scatter(name, x, axes, 0), None),
    lambda name, axes, _, dy: (all_gather(dy, axes, 0),),
)
