"""The communicator in which every collective is a line of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from jaxtrain.arrays import Arrays
from jaxtrain.attention.kernels import Attend
from jaxtrain.collectives.algorithm import Algorithm
from jaxtrain.collectives.choice import Collectives
from jaxtrain.collectives.exchange import Exchange
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.matmul import Tiled, gather_matmul, matmul_scatter, multiply
from jaxtrain.collectives.named import all_gather, sum_over, sum_scatter
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.vary import Index, vary
from jaxtrain.mesh.axes import STACKING_AXES, TOKEN_AXES, MeshAxes, keeps_dtype
from jaxtrain.mesh.roles import Roles
from jaxtrain.mesh.sharding import Leaf, ways
from jaxtrain.nn.bundle import (
    LeafSplits,
    gather_bundle,
    rounds,
    scatter_bundle,
    travelling_together,
)
from jaxtrain.nn.communicator import (
    Adapter,
    CallKeys,
    CallQueries,
    CallStarts,
    ExpertLeaves,
    RunExperts,
    TokenFacts,
)
from jaxtrain.nn.local import Local, gather
from jaxtrain.nn.tiles import LayerFunction, TiledProducts
from jaxtrain.quantization import weights as quantized_weights
from jaxtrain.quantization.delayed import own_tables
from jaxtrain.quantization.weights import QuantizedWeight, Ways, Weights


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
    roles: Roles = Roles()  # noqa: RUF009 (frozen)
    reduce_dtype: Any = jnp.float32
    collectives: Collectives = Collectives()  # noqa: RUF009 (frozen)
    counted: frozenset[str] = frozenset()
    """Full names of leaves whose gradients are token counts, sent in their own dtype."""
    flops_per_byte: float = 0.0
    flops_per_byte_of_rows: float = 0.0
    """FLOPs of a device while its link carries one byte of weights, of rows; 0 if unknown."""
    gather_weights: bool = True
    """False: parameters were gathered outside the differentiated function (once a step)."""
    context: Any = None
    """How attention sees complete rows then: a `context.methods.ContextMethod`."""
    tiled: Mapping[int, Tiled] = field(default_factory=dict)
    """By the `id` of a weight's array: the `Tiled` that is multiplied by in its place."""

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @property
    def tied_flops_per_byte(self) -> float | None:
        used = self.collectives
        permutes = any(not isinstance(choice, Lax) for choice in (used.fsdp, used.scatters))
        return self.flops_per_byte if permutes and self.gather_weights else None

    def gather(self, params: Arrays, prefix: str, x: PyTree) -> tuple[Weights, PyTree]:
        if not self.gather_weights:
            return super().gather(params, prefix, x)
        return gather(self, prefix, params, x)

    def fetch(self, params: Arrays, prefix: str) -> Weights:
        def cast(name: str, value: jax.Array) -> jax.Array:
            axes = self.places[prefix + name].axes
            dims = sum(axis not in STACKING_AXES for axis in axes)
            return value if keeps_dtype(name, dims) else value.astype(self.compute_dtype)

        weights = {k: cast(k, v) for k, v in params.items()}
        for names in self._scaled_together(self.narrow(params, prefix), prefix):
            weights = self.quantize(weights, names, prefix, self._parts_of(names, prefix, params))
        if not self.gather_weights:
            return weights
        sent = {k: quantized_weights.as_sent(w) for k, w in weights.items()}
        algorithm = self.collectives.fsdp
        for split in self._bundles(params, prefix):
            for part in travelling_together(algorithm, split, sent):
                sent = gather_bundle(sent, part, algorithm)
        return {k: quantized_weights.received(w, sent[k]) for k, w in weights.items()}

    def fetch_once(self, params: Arrays) -> Arrays:
        """Returns all parameters by their full names, in the compute dtype, for `pregathered()`.
        Each layer makes its own 8-bit numbers from them."""
        return replace(self, quantized=None).fetch(params, "")

    def _parts_of(self, names: Sequence[str], prefix: str, params: Arrays) -> MeshAxes:
        """Mesh axes over which any of those leaves' matrices is split before it is gathered."""
        split = set()
        for name in names:
            place = self.places[prefix + name]
            dims = place.params if self.gather_weights else place.in_use
            split |= {axis for dim in dims[len(dims) - 2 :] for axis in dim}
        return tuple(axis for axis in self.axes if axis in split)

    def _scaled_together(self, names: list[str], prefix: str) -> list[list[str]]:
        """Divides matrices into those whose greatest magnitudes share an all-reduce. Experts'
        matrices are apart where devices have different experts."""
        if not self.roles.experts:
            return [names]
        apart = [k for k in names if prefix + k in self.expert_matrices]
        return [[k for k in names if k not in apart], apart]

    def tables(self, scales: jax.Array, weight: jax.Array) -> jax.Array:
        if scales.ndim == 1 or not self.roles.experts:
            return scales
        return own_tables(scales, weight.shape[0], self.roles.experts)

    def ways(self) -> Ways:
        # Each stage has another microbatch, unless the stages split the stream too.
        stream, stages = self.roles.stream, self.roles.layers
        maxima = tuple(axis for axis in self.axes if axis in stream or axis not in stages)
        return replace(super().ways(), maxima=maxima, tensor=stream, by=self.collectives.tensor)

    def ways_of_experts(self) -> Ways:
        ways, apart = self.ways(), self.roles.experts
        return replace(ways, maxima=tuple(axis for axis in ways.maxima if axis not in apart))

    def scatter(self, grads: Arrays, prefix: str, tiles: Arrays | None = None) -> Arrays:
        """tiles: gradients of other leaves, which were scattered while they were computed."""
        grads = super().scatter(grads, prefix)
        if not self.gather_weights:
            return grads
        grads = {
            k: g if prefix + k in self.counted else g.astype(self.reduce_dtype)
            for k, g in grads.items()
        }
        algorithm = self.collectives.scatters
        for split in reversed(self._bundles(grads, prefix)):
            for part in travelling_together(algorithm, split, grads):
                grads = scatter_bundle(grads, part, algorithm)
        return {**grads, **(tiles or {})}

    def _bundles(self, params: Weights, prefix: str) -> list[LeafSplits]:
        """Returns rounds of the dims of each parameter that are split only at rest, with their mesh
        axes: what FSDP gathers."""
        splits = {}
        for name, value in params.items():
            place = self.places[prefix + name]
            lead = len(place.axes) - value.ndim
            splits[name] = (place.in_use[lead:], place.params[lead:])
        return rounds(splits)

    def tiled_products(
        self, prefix: str, body_of: Callable[[Any], LayerFunction]
    ) -> TiledProducts | None:
        by_product = isinstance(self.collectives.weight_gradients, Ring) and self.gather_weights
        return TiledProducts(self, prefix, body_of) if by_product else None

    def tiles(self, params: Weights, prefix: str) -> dict[str, Tiled]:
        """Trained parameters of `products` that are gathered along exactly one dim, as `Tiled`s
        without arrays."""
        ring = self.collectives.weight_gradients
        assert isinstance(ring, Ring), "asked for without a ring"
        own = {k: p for k, p in params.items() if prefix + k in self.products - self.frozen}
        first, *later_rounds = self._bundles(own, prefix) or [{}]
        return {
            name: Tiled(None, None, dim, axes, ring, jnp.dtype(self.reduce_dtype))
            for name, (dim, axes) in first.items()
            if not any(name in split for split in later_rounds)
        }

    def tiling(self, tiled: Mapping[int, Tiled]) -> Explicit:
        return replace(self, tiled=tiled)

    def column(self, x: jax.Array, *weights: Any) -> tuple[jax.Array, ...]:
        if isinstance(weights[0], QuantizedWeight):
            return super().column(x, *weights)
        choice, used = self.collectives.tensor, tuple(self.tiled.get(id(w), w) for w in weights)
        if isinstance(choice, Ring):
            return gather_matmul(x, used, self.roles.stream, choice)
        x = gather_tokens("column gradients", self.roles.stream, choice, x)
        return tuple(multiply(x, w) for w in used)

    def row(self, x: jax.Array, weight: Any, adapter: Adapter | None = None) -> jax.Array:
        if isinstance(weight, QuantizedWeight):
            return super().row(x, weight, adapter)
        choice = self.collectives.tensor
        adapters = [] if adapter is None else [self.adapter_pair(x, adapter)]
        xs, weights = zip((x, self.tiled.get(id(weight), weight)), *adapters, strict=True)
        if isinstance(choice, Ring):
            return matmul_scatter(xs, weights, self.roles.stream, choice)
        parts = matmul_scatter(xs, weights, (), Ring())
        return scatter_tokens("row", self.roles.stream, choice, parts)

    def embed(self, vectors: jax.Array, ids: jax.Array) -> jax.Array:
        local = ids - self.vocab_offset(vectors.shape[0])
        in_slice = (local >= 0) & (local < vectors.shape[0])
        rows = vectors[jnp.clip(local, 0, vectors.shape[0] - 1)]
        rows = jnp.where(in_slice[:, None], rows, jnp.zeros((), rows.dtype))
        return scatter_tokens("embedding", self.roles.stream, self.collectives.tensor, rows)

    def attend(
        self, kernel: Attend, q: CallQueries, k: CallKeys, v: CallKeys, starts: CallStarts
    ) -> CallQueries:
        if not self.roles.seq:
            return kernel(q, k, v, starts)
        return self.context(kernel, q, k, v, starts, self.roles.seq)

    def positions(self, seq: int) -> Int[Array, " seq"]:
        if not self.roles.seq:
            return super().positions(seq)
        order = self.context.order(ways(self.roles.seq, self.sizes))
        return order.positions(seq, self.roles.seq)

    def row_seq(self, seq: int) -> int:
        return seq * ways(self.roles.seq, self.sizes)

    def experts(
        self, layer: RunExperts, x: jax.Array, leaves: ExpertLeaves, facts: TokenFacts
    ) -> jax.Array:
        """Every device of `tensor` has all tokens, so the same choices, and its slice of every
        expert. Its outputs are parts of a sum, and so are the gradients that pass through the
        router. The sums over `tensor`, here of x's and elsewhere of the router's gradient,
        therefore count each part once."""
        out = layer(self.all_tokens(x), leaves, facts, self._exchange())
        return scatter_tokens("row", self.roles.stream, self.collectives.tensor, out)

    def _exchange(self) -> Exchange:
        first = jnp.float32(index_in(self.roles.mlp) == 0) if self.roles.mlp else 1.0
        tokens = tuple(axis for axis in self.axes if axis in TOKEN_AXES)
        rows, chunk = self.collectives.experts, self.expert_chunk
        tied = self.flops_per_byte_of_rows if rows.permutes else None
        return Exchange(tokens, first, self.roles.experts, rows, chunk, tied)

    def tokens(self, per_token: jax.Array) -> jax.Array:
        share = per_token.shape[0] // ways(self.roles.stream, self.sizes)
        first = index_in(self.roles.stream) * share
        return lax.dynamic_slice_in_dim(per_token, first, share, axis=0)

    def all_tokens(self, x: jax.Array) -> jax.Array:
        return gather_tokens("column gradients", self.roles.stream, self.collectives.tensor, x)

    def scatter_head_gradient(self, dx: jax.Array) -> jax.Array:
        return sum_scatter("head gradients", dx, self.roles.stream, 0, self.collectives.tensor)

    def vocab_offset(self, local: int) -> Index:
        return index_in(self.roles.vocab) * local

    def head_offset(self, local: int) -> Index:
        return index_in(self.roles.heads) * local

    def sum_over_heads(self, squares: jax.Array) -> jax.Array:
        return _sum_over_heads(self.roles.heads, self.axes, squares)

    def sum_over_vocab(self, x: jax.Array) -> jax.Array:
        return vary(sum_over("vocabulary", x, self.roles.vocab), self.axes)

    def sum_over_row(self, x: jax.Array) -> jax.Array:
        return vary(sum_over("documents", x, self.roles.seq), self.axes)

    def max_over_vocab(self, x: jax.Array) -> jax.Array:
        return vary(lax.pmax(x, self.roles.vocab), self.axes) if self.roles.vocab else x

    def vocab_ways(self) -> int:
        return ways(self.roles.vocab, self.sizes)

    def pregathered(self) -> Explicit:
        """The same communicator, for parameters that were gathered once before."""
        return replace(self, gather_weights=False)


def index_in(axes: MeshAxes) -> Index:
    """Returns the device's position along these mesh axes, 0 if there are none."""
    return lax.axis_index(axes) if axes else 0


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum_over_heads(axes: MeshAxes, every: MeshAxes, x: jax.Array) -> jax.Array:
    """Sum over the devices of `axes`, varying over `every`. Its adjoint is the same sum: each
    device has a part of the cotangent."""
    return vary(sum_over("heads", x, axes), every)


_sum_over_heads.defvjp(
    lambda axes, every, x: (_sum_over_heads(axes, every, x), None),
    lambda axes, every, _, dx: (vary(sum_over("heads", dx, axes), every),),
)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def gather_tokens(name: str, axes: MeshAxes, algorithm: Algorithm, x: jax.Array) -> jax.Array:
    """Gathers tokens of all devices of `axes`. Adjoint: the reduce-scatter registered as `name`."""
    return all_gather(x, axes, 0, algorithm)


gather_tokens.defvjp(
    lambda name, axes, algorithm, x: (all_gather(x, axes, 0, algorithm), None),
    lambda name, axes, algorithm, _, dx: (sum_scatter(name, dx, axes, 0, algorithm),),
)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def scatter_tokens(name: str, axes: MeshAxes, algorithm: Algorithm, x: jax.Array) -> jax.Array:
    """Sums over the devices of `axes` by the reduce-scatter registered as `name`, each keeping its
    tokens. Adjoint: all-gather."""
    return sum_scatter(name, x, axes, 0, algorithm)


scatter_tokens.defvjp(
    lambda name, axes, algorithm, x: (sum_scatter(name, x, axes, 0, algorithm), None),
    lambda name, axes, algorithm, _, dy: (all_gather(dy, axes, 0, algorithm),),
)
