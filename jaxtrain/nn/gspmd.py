"""The communicator in which XLA's partitioner chooses the collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxtrain.arrays import Arrays
from jaxtrain.attention.documents import ScoreInputs
from jaxtrain.attention.kernels import Attend
from jaxtrain.collectives.exchange import Exchange
from jaxtrain.collectives.vary import vary
from jaxtrain.mesh.roles import roles_of
from jaxtrain.mesh.sharding import (
    Leaf,
    ShardingRules,
    activation_dims,
    named_sharding,
    partition_spec,
)
from jaxtrain.nn.communicator import (
    CallKeys,
    CallQueries,
    CallStarts,
    ExpertLeaves,
    RunExperts,
    TokenFacts,
)
from jaxtrain.nn.local import Local
from jaxtrain.quantization import crossing
from jaxtrain.quantization.weights import Weights, as_sent, received


@dataclass(frozen=True, eq=False)
class Gspmd(Local):
    """Sharding constraints from the rules; XLA's partitioner chooses the collectives.

    It sums a matmul's partial results in the matmul's dtype: at least `reduce_dtype` for gradients
    of matrices, rounded after the sum; the compute dtype for activations and their gradients."""

    mesh: jax.sharding.Mesh = field(kw_only=True)
    rules: ShardingRules = field(kw_only=True)
    places: Mapping[str, Leaf] = field(kw_only=True)
    reduce_dtype: Any = jnp.float32

    def _place(self, params: Weights, prefix: str, table: str) -> Weights:
        out = {}
        for name, value in params.items():
            split = getattr(self.places[prefix + name], table)
            split = split[len(split) - value.ndim :]
            sharding = named_sharding(self.mesh, split)
            placed = lax.with_sharding_constraint(as_sent(value), sharding)
            out[name] = received(value, placed)
        return out

    def fetch(self, params: Arrays, prefix: str) -> Weights:
        return self._place(super().fetch(params, prefix), prefix, "in_use")

    def scatter(self, grads: Arrays, prefix: str) -> Arrays:
        return self._place(super().scatter(grads, prefix), prefix, "params")

    def multiply(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return _matmul(self.reduce_dtype, x, weight)

    def embed(self, vectors: jax.Array, ids: jax.Array) -> jax.Array:
        return _embed(self.reduce_dtype, vectors, ids)

    def attend(
        self, kernel: Attend, q: CallQueries, k: CallKeys, v: CallKeys, starts: CallStarts
    ) -> CallQueries:
        """Runs the kernel in a shard_map over batch and heads, since XLA cannot partition a kernel
        that merges these two dims into one."""
        sizes = dict(self.mesh.shape)
        table = self.rules.activations
        spec = lambda *axes: partition_spec(activation_dims(axes, table, sizes=sizes))  # noqa: E731
        queries = spec("batch", None, "heads", None)
        keys = spec("batch", None, "kv_heads", None)
        rows: Any = spec("batch", None)
        if isinstance(starts, ScoreInputs):
            of_heads: Any = spec("heads")
            rows = ScoreInputs(rows, of_heads, rows)
        run = jax.shard_map(
            kernel,
            mesh=self.mesh,
            in_specs=(queries, keys, keys, rows),
            out_specs=queries,
            check_vma=False,
        )
        return run(q, k, v, starts)

    def experts(
        self, layer: RunExperts, x: jax.Array, leaves: ExpertLeaves, facts: TokenFacts
    ) -> jax.Array:
        """A shard_map over tokens and hidden units: each device sorts its own tokens, where XLA's
        partitioner would sort those of all. JAX sums the gradients of weights and router, from
        parts as wide as `reduce_dtype`. Outputs and the gradient of x are summed over `tensor` in
        the compute dtype."""
        return _experts(self, layer, x, leaves, facts)

    def _experts(
        self, layer: RunExperts, x: jax.Array, leaves: ExpertLeaves, facts: TokenFacts
    ) -> jax.Array:
        sizes, table = dict(self.mesh.shape), self.rules.activations
        tokens = activation_dims(("batch*seq", None), table, sizes=sizes)
        roles = roles_of(table, sizes)
        split, experts = roles.mlp, roles.experts
        axes = (*tokens[0], *split)
        dtypes = crossing.each(lambda leaf: leaf.dtype, leaves)

        def local(x: jax.Array, leaves: ExpertLeaves, facts: TokenFacts) -> jax.Array:
            x, facts = jax.tree.map(lambda leaf: vary(leaf, axes), (x, facts))
            used = crossing.each(partial(crossing.on_device, axes, experts), leaves, dtypes)
            first = jnp.float32(lax.axis_index(split) == 0) if split else 1.0
            exchange = Exchange(tokens[0], first, experts, chunk=self.expert_chunk)
            out = layer(x, used, facts, exchange)
            return lax.psum(out, split) if split else out

        run = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(
                partition_spec(tokens),
                crossing.each(crossing.specs, leaves, leaves.splits(split, experts)),
                jax.tree.map(lambda _: partition_spec(tokens[:1]), facts),
            ),
            out_specs=partition_spec(tokens),
        )
        return run(x, crossing.each(partial(crossing.widened, self.reduce_dtype), leaves), facts)

    def chunks(self, per_token: jax.Array, count: int, *, rows: int) -> jax.Array:
        # Chunks are cut within rows: consecutive rows would lie on a few devices only.
        inner = per_token.shape[1:]
        split = per_token.reshape(rows, count, -1, *inner)
        return jnp.moveaxis(split, 1, 0).reshape(count, -1, *inner)

    def unchunk(self, chunked: jax.Array, *, rows: int) -> jax.Array:
        count, inner = chunked.shape[0], chunked.shape[2:]
        split = jnp.moveaxis(chunked.reshape(count, rows, -1, *inner), 0, 1)
        return split.reshape(-1, *inner)

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        split = activation_dims(axes, self.rules.activations, sizes=dict(self.mesh.shape))
        return lax.with_sharding_constraint(x, named_sharding(self.mesh, split))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _experts(
    comm: Gspmd, layer: RunExperts, x: jax.Array, leaves: ExpertLeaves, facts: TokenFacts
) -> jax.Array:
    """The experts, recomputed in the backward pass: only inputs are saved. Residuals out of the
    shard_map would be each device's copy of gathered weights, kept as activations are."""
    return comm._experts(layer, x, leaves, facts)


def _experts_backward(
    comm: Gspmd, layer: RunExperts, saved: tuple[Any, ...], dy: jax.Array
) -> tuple[Any, ...]:
    x, leaves, facts = saved

    def run(x: jax.Array, moved: Any) -> jax.Array:
        return comm._experts(layer, x, crossing.each(crossing.with_moved, leaves, moved), facts)

    dx, gradients = jax.vjp(run, x, crossing.each(crossing.moved, leaves))[1](dy)
    return dx, crossing.each(crossing.cotangent, leaves, gradients), None


_experts.defvjp(
    lambda comm, layer, *inputs: (comm._experts(layer, *inputs), inputs), _experts_backward
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(
    reduce_dtype: DTypeLike, x: Float[Array, "tokens n"], weight: Float[Array, "n m"]
) -> Float[Array, "tokens m"]:
    """x [tokens, n] @ weight; the weight's gradient leaves its matmul in `reduce_dtype`."""
    return x @ weight


def _matmul_backward(
    reduce_dtype: DTypeLike, saved: tuple[jax.Array, jax.Array], dy: Float[Array, "tokens m"]
) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    wide = jnp.promote_types(dy.dtype, reduce_dtype)
    dw = jnp.matmul(x.T, dy, preferred_element_type=wide)
    return (dy @ weight.T).astype(x.dtype), dw.astype(weight.dtype)


_matmul.defvjp(lambda dtype, x, weight: (x @ weight, (x, weight)), _matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _embed(
    reduce_dtype: DTypeLike, vectors: Float[Array, "vocab embed"], ids: Int[Array, " tokens"]
) -> Float[Array, "tokens embed"]:
    return vectors[ids]


def _embed_backward(
    reduce_dtype: DTypeLike, saved: tuple[jax.Array, jax.Array], dy: Float[Array, "tokens embed"]
) -> tuple[Float[Array, "vocab embed"], None]:
    vectors, ids = saved
    wide = jnp.promote_types(vectors.dtype, reduce_dtype)
    summed = jnp.zeros(vectors.shape, wide).at[ids].add(dy.astype(wide))
    return summed.astype(vectors.dtype), None


_embed.defvjp(lambda dtype, vectors, ids: (vectors[ids], (vectors, ids)), _embed_backward)
