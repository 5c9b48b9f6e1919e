"""The communicator of one device, whose meaning the others keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

from jaxtrain.arrays import Arrays
from jaxtrain.attention.kernels import Attend
from jaxtrain.collectives.exchange import Exchange
from jaxtrain.collectives.matmul import Tiled
from jaxtrain.collectives.vary import Index
from jaxtrain.mesh.axes import MeshAxes, keeps_dtype
from jaxtrain.mesh.head_chunk import LEAST_CHUNK
from jaxtrain.nn.communicator import (
    Adapter,
    CallKeys,
    CallQueries,
    CallStarts,
    Communicator,
    ExpertLeaves,
    Operand,
    RunExperts,
    TokenFacts,
)
from jaxtrain.nn.tiles import TiledProducts
from jaxtrain.quantization import products as quantized
from jaxtrain.quantization import weights as quantized_weights
from jaxtrain.quantization.delayed import SCALES
from jaxtrain.quantization.formats import Scaled
from jaxtrain.quantization.recipe import Products
from jaxtrain.quantization.weights import QuantizedWeight, Ways, Weights


@dataclass(frozen=True)
class Local:
    """Everything on one device; no communication. The meaning the other two must keep."""

    compute_dtype: Any = jnp.float32
    frozen: frozenset[str] = frozenset()
    """Full names of frozen leaves."""
    grouped_matmul: Any = None
    chunk_tokens: int = LEAST_CHUNK
    expert_chunk: int | None = None
    """Tokens of a device that are sent to their experts at one time; None: all."""
    quantized: Products | None = None
    """How layers multiply by the matrices of `products`; None: in the compute dtype."""
    products: frozenset[str] = frozenset()
    """Full names of matrices that a layer multiplies by once, by `column` or `row`."""
    expert_matrices: frozenset[str] = frozenset()
    """Full names of the experts' matrices, which `experts` multiplies by."""

    @property
    def tied_flops_per_byte(self) -> float | None:
        return None

    def gather(self, params: Arrays, prefix: str, x: PyTree) -> tuple[Weights, PyTree]:
        if not self.narrow(params, prefix):
            return self.fetch(params, prefix), x
        return gather(self, prefix, params, x)

    def fetch(self, params: Arrays, prefix: str) -> Weights:
        def cast(name: str, value: jax.Array) -> jax.Array:
            keep = keeps_dtype(name, value.ndim)
            return value if keep else value.astype(self.compute_dtype)

        weights = {k: cast(k, v) for k, v in params.items()}
        return self.quantize(weights, self.narrow(params, prefix), prefix)

    def narrow(self, params: Arrays, prefix: str) -> list[str]:
        """Names below `prefix` of the parameters that are used in 8 bits."""
        every = frozenset() if self.quantized is None else self.products | self.expert_matrices
        return [k for k in params if prefix + k in every]

    def quantize(
        self, weights: Weights, names: Sequence[str], prefix: str, axes: MeshAxes = ()
    ) -> Weights:
        """Returns the weights below `prefix` with those of `names` in 8 bits. The parts of a weight
        on the devices of `axes` get one scale: from one all-reduce for all weights, or from delayed
        scales. Delayed scales that are frozen, and so never updated, are not read."""
        if self.quantized is None or not names:
            return weights
        form, delayed = self.quantized.forward, self.quantized.scaling is not None
        delayed_names = [k for k in names if delayed and prefix + k + SCALES not in self.frozen]
        tables = {k: self.tables(weights[k + SCALES], weights[k]) for k in delayed_names}
        narrow = {
            k: quantized_weights.scaled_before(weights[k], tables[k], form) for k in delayed_names
        }
        current = [k for k in names if k not in narrow]
        if current:
            values = quantized_weights.scaled_alike([weights[k] for k in current], form, axes)
            pairs = zip(current, values, strict=True)
            narrow |= {k: QuantizedWeight(v, None, weights[k].dtype) for k, v in pairs}
        of_experts = {k: w for k, w in narrow.items() if prefix + k in self.expert_matrices}
        return {
            **weights,
            **narrow,
            **{k: replace(w, ways=self.ways_of_experts()) for k, w in of_experts.items()},
        }

    def tables(self, scales: jax.Array, weight: jax.Array) -> jax.Array:
        """Selects from a leaf of delayed scales those of the local weight."""
        return scales

    def ways(self) -> Ways:
        """Settings of the products in 8 bits: formats, dtype and collectives."""
        assert self.quantized is not None, "asked for without products in 8 bits"
        return Ways(self.quantized, self.compute_dtype)

    def ways_of_experts(self) -> Ways:
        """`ways` for matrices whose scales are per expert."""
        return self.ways()

    def scatter(self, grads: Arrays, prefix: str) -> Arrays:
        frozen = self.frozen_of(grads, prefix)
        return {k: g for k, g in grads.items() if k not in frozen}

    def frozen_of(self, params: Arrays, prefix: str) -> frozenset[str]:
        return frozenset(name for name in params if prefix + name in self.frozen)

    def tiled_products(
        self, prefix: str, body_of: Callable[[Any], Callable[..., jax.Array]]
    ) -> TiledProducts | None:
        return None

    def column(self, x: jax.Array, *weights: Any) -> tuple[jax.Array, ...]:
        if isinstance(weights[0], QuantizedWeight):
            return quantized.column(self.ways(), x, weights)
        return tuple(self.multiply(x, w) for w in weights)

    def row(self, x: jax.Array, weight: Any, adapter: Adapter | None = None) -> jax.Array:
        if isinstance(weight, QuantizedWeight):
            pair, scale = (None, 1.0) if adapter is None else (adapter[:2], adapter.scale)
            return quantized.row(self.ways(), x, weight, pair, scale)
        y = self.multiply(x, weight)
        return y if adapter is None else y + self.multiply(*self.adapter_pair(x, adapter))

    def adapter_pair(self, x: jax.Array, adapter: Adapter) -> tuple[jax.Array, jax.Array]:
        """Returns (x', b), whose product is the adapter's change of `row`'s result."""
        return self.multiply(x, adapter.a) * adapter.scale, adapter.b

    def multiply(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return x @ weight

    def column_gradients(
        self, x: Operand, *dys: Any, tiled: Sequence[Tiled | None] = ()
    ) -> tuple[jax.Array, ...]:
        tiled = tiled or (None,) * len(dys)
        if isinstance(x, Scaled):
            return _arrays(quantized.column_gradients(self.ways(), x, dys, tiled))
        tokens = self.all_tokens(x)
        pairs = zip(dys, tiled, strict=True)
        return _arrays(_gradient(tokens, dy, tile) for dy, tile in pairs)

    def row_gradients(
        self, x: Operand, dy: Any, *, tiled: Sequence[Tiled | None] = ()
    ) -> tuple[jax.Array, ...]:
        (tile,) = tiled or (None,)
        if isinstance(x, Scaled):
            return _arrays([quantized.row_gradients(self.ways(), x, dy, tile)])
        return _arrays([_gradient(x, self.all_tokens(dy), tile)])

    def embed(self, vectors: jax.Array, ids: jax.Array) -> jax.Array:
        return vectors[ids]

    def attend(
        self, kernel: Attend, q: CallQueries, k: CallKeys, v: CallKeys, starts: CallStarts
    ) -> CallQueries:
        return kernel(q, k, v, starts)

    def positions(self, seq: int) -> Int[Array, " seq"]:
        return jnp.arange(seq, dtype=jnp.int32)

    def row_seq(self, seq: int) -> int:
        return seq

    def experts(
        self, layer: RunExperts, x: jax.Array, leaves: ExpertLeaves, facts: TokenFacts
    ) -> jax.Array:
        return layer(x, leaves, facts, Exchange(chunk=self.expert_chunk))

    def tokens(self, per_token: jax.Array) -> jax.Array:
        return per_token

    def all_tokens(self, x: jax.Array) -> jax.Array:
        return x

    def scatter_head_gradient(self, dx: jax.Array) -> jax.Array:
        return dx

    def vocab_offset(self, local: int) -> Index:
        return 0

    def head_offset(self, local: int) -> Index:
        return 0

    def sum_over_heads(self, squares: jax.Array) -> jax.Array:
        return squares

    def sum_over_vocab(self, x: jax.Array) -> jax.Array:
        return x

    def sum_over_row(self, x: jax.Array) -> jax.Array:
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


def _gradient(x: jax.Array, dy: jax.Array, tile: Tiled | None) -> jax.Array | Tiled:
    return x.T @ dy if tile is None else tile.gradient(x, dy)


def _arrays(gradients: Iterable[jax.Array | Tiled]) -> tuple[jax.Array, ...]:
    """Returns arrays as they are, and the tiles of tiled ones."""
    return tuple(each.tile if isinstance(each, Tiled) else each for each in gradients)


GatheredWeights = tuple[Weights, PyTree]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather(comm: Communicator, prefix: str, params: Arrays, x: PyTree) -> GatheredWeights:
    """`comm.gather` made of its `fetch` and `scatter`."""
    params, x = lax.optimization_barrier((params, x))
    weights = comm.fetch(params, prefix)
    return {
        k: quantized_weights.standing_for(w, quantized_weights.differentiated(w))
        for k, w in weights.items()
    }, x


def _gather_forward(comm: Communicator, prefix: str, params: Arrays, x: PyTree) -> Any:
    # Zero-sized stand-ins carry the dtypes the cotangents must come back in.
    return gather(comm, prefix, params, x), {k: v[:0] for k, v in params.items()}


def _gather_backward(comm: Communicator, prefix: str, like: Arrays, grads: GatheredWeights) -> Any:
    cotangents = {k: quantized_weights.cotangent(g) for k, g in grads[0].items()}
    shards = {k: g.astype(like[k].dtype) for k, g in comm.scatter(cotangents, prefix).items()}
    return {k: shards.get(k) for k in like}, grads[1]


gather.defvjp(_gather_forward, _gather_backward)
