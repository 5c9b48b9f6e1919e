"""One model, three meanings: what a layer asks of the machine, and who answers.

A layer never names a mesh axis. `Local` is the meaning on one device. `Gspmd` (`gspmd.py`) states
where values live and lets XLA choose the collectives. `Explicit` (`explicit.py`) runs inside one
shard_map in which every mesh axis is manual, and every collective is a line of ours.

The residual stream is a matrix [rows * seq, embed]: XLA:CPU makes no gemm of a three-dimensional
dot (2.2x on a SwiGLU block), and a device's share (Korthikanti et al. 2022) is a slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from jaxtrain.attention.documents import ScoreInputs
from jaxtrain.collectives.exchange import Exchange
from jaxtrain.collectives.matmul import Tiled
from jaxtrain.collectives.vary import Index, MeshAxes
from jaxtrain.mesh.axes import keeps_dtype
from jaxtrain.mesh.head_chunk import LEAST_CHUNK
from jaxtrain.nn.tiles import TiledProducts
from jaxtrain.quantization import products as quantized
from jaxtrain.quantization.delayed import SCALES
from jaxtrain.quantization.products import QuantizedWeight, Ways
from jaxtrain.quantization.recipe import Products

Queries = Float[Array, "rows seq heads head_dim"]
Keys = Float[Array, "rows seq kv_heads head_dim"]
Starts = Int[Array, "rows row_seq"] | ScoreInputs | None
"""First position of each token's document; rows are complete even where the sequence is cut."""
Arrays = dict[str, jax.Array]
Weights = dict[str, Any]
"""Weights of a layer as it uses them: arrays, and `QuantizedWeight`s for matrices in 8 bits."""
Attend = Callable[..., jax.Array]
Experts = Callable[..., jax.Array]
"""`moe.layer.ExpertLayer` of (x, leaves, facts of tokens, exchange)."""
ExpertLeaves, TokenFacts = Any, Any
"""Types of `moe.layer`."""
Pair = tuple[jax.Array, jax.Array]


@runtime_checkable
class Communicator(Protocol):
    """Operations that a layer may ask for. Shapes are those of one call: local in `Explicit`."""

    @property
    def grouped_matmul(self) -> Any:
        """Grouped product of experts' rows, as `moe.layer.ExpertLayer` takes it; None: the default
        backend's."""
        ...

    @property
    def chunk_tokens(self) -> int:
        """Tokens whose logits exist at one time, if the head's config has no `chunk_tokens`."""
        ...

    @property
    def tied_flops_per_byte(self) -> float | None:
        """FLOPs that the device computes while its link carries one byte of weights. None: permutes
        of weights are not tied to products (`overlap.alongside`)."""
        ...

    def gather(self, params: Arrays, prefix: str, x: PyTree) -> tuple[Weights, PyTree]:
        """Returns parameters as a layer uses them, and x. Weights are gathered over the axes that
        split them only at rest, and in the compute dtype or in 8 bits. The gather waits for x: so
        it keeps its place in the loop over microbatches and in the pass. Its adjoint is
        `scatter`."""
        ...

    def fetch(self, params: Arrays, prefix: str) -> Weights:
        """`gather` without a derivative, for loops that write out their own backward pass."""
        ...

    def scatter(self, grads: Arrays, prefix: str) -> Arrays:
        """Adjoint of `fetch`: sums gradients over those axes, each device keeping its part. Frozen
        leaves get none."""
        ...

    def frozen_of(self, params: Arrays, prefix: str) -> frozenset[str]:
        """Names below `prefix` of the leaves that are frozen and get no gradient."""
        ...

    def tiled_products(
        self, prefix: str, body_of: Callable[[Any], Callable[..., jax.Array]]
    ) -> TiledProducts | None:
        """Returns the weights below `prefix` whose gradients are scattered while they are computed;
        None if `scatter` scatters all. body_of: as in `TiledProducts`."""
        ...

    def column(self, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        """x @ w for weights split by column: [tokens, embed] -> [tokens, part of the columns]."""
        ...

    def row(self, x: jax.Array, weight: jax.Array, *adapters: Pair) -> jax.Array:
        """x @ w for a weight split by row, plus x' @ w' for each adapter (x', w'), x' in parts. The
        result is the residual stream's share of the sum."""
        ...

    def multiply(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """x @ w of local arrays, without communication."""
        ...

    def column_gradients(
        self, x: jax.Array, *dys: jax.Array, tiled: Sequence[Tiled | None] = ()
    ) -> tuple[jax.Array, ...]:
        """Gradients of the weights of `column` from its x and its outputs' cotangents. Entries of
        `tiled` that are not None give a gradient in tiles."""
        ...

    def row_gradients(
        self, x: jax.Array, dy: jax.Array, *, tiled: Sequence[Tiled | None] = ()
    ) -> tuple[jax.Array, ...]:
        """Gradient of the weight of `row` from its x and its output's cotangent."""
        ...

    def embed(self, vectors: jax.Array, ids: jax.Array) -> jax.Array:
        """Rows `ids` [tokens] of the table [vocab, embed]."""
        ...

    def attend(self, kernel: Attend, q: Queries, k: Keys, v: Keys, starts: Starts) -> Queries:
        """kernel(q, k, v, starts) on each device's rows and heads. Where a device has only a part
        of the sequence, the kernel must be a `SelfAttention` of attention/ and gets more
        arguments."""
        ...

    def positions(self, seq: int) -> Int[Array, " seq"]:
        """Positions in their row of the `seq` tokens of a row that one call sees."""
        ...

    def row_seq(self, seq: int) -> int:
        """Tokens of a whole row, of which one call sees `seq`."""
        ...

    def experts(
        self, layer: Experts, x: jax.Array, leaves: ExpertLeaves, facts: TokenFacts
    ) -> jax.Array:
        """layer(x, leaves, facts, exchange) for x [tokens, embed], the residual stream's share.
        Experts' matrices are split over their hidden dim. facts: of all tokens."""
        ...

    def tokens(self, per_token: jax.Array) -> jax.Array:
        """Slice of a per-token array [tokens, ...] that belongs to the residual stream's share."""
        ...

    def all_tokens(self, x: jax.Array) -> jax.Array:
        """Gathers the tokens of all devices that have a share [tokens share, dim] of them.
        Gradients are summed over these devices, as those of `column`'s x are."""
        ...

    def scatter_head_gradient(self, dx: jax.Array) -> jax.Array:
        """Adjoint of `all_tokens` if every device holds a part of the sum."""
        ...

    def vocab_offset(self, local: int) -> Index:
        """First id of this device's slice of the vocabulary."""
        ...

    def head_offset(self, local: int) -> Index:
        """Number of the first of the `local` attention heads that one call sees."""
        ...

    def sum_over_heads(self, squares: jax.Array) -> jax.Array:
        """Sum over the devices that split the heads. squares [tokens, ...]: each device's part.
        Differentiable."""
        ...

    def sum_over_vocab(self, x: jax.Array) -> jax.Array: ...

    def sum_over_row(self, x: jax.Array) -> jax.Array: ...

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
        """States the logical axes of an activation; `batch*seq` names merged tokens."""
        ...


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
        narrow = {k: quantized.scaled_before(weights[k], tables[k], form) for k in delayed_names}
        current = [k for k in names if k not in narrow]
        if current:
            values = quantized.scaled_alike([weights[k] for k in current], form, axes)
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

    def row(self, x: jax.Array, weight: Any, *adapters: Pair) -> jax.Array:
        if isinstance(weight, QuantizedWeight):
            assert not adapters, "adapters are refused where products are in 8 bits"
            return quantized.row(self.ways(), x, weight)
        return sum((self.multiply(*pair) for pair in adapters), start=self.multiply(x, weight))

    def multiply(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return x @ weight

    def column_gradients(
        self, x: jax.Array, *dys: jax.Array, tiled: Sequence[Tiled | None] = ()
    ) -> tuple[jax.Array, ...]:
        return _gradients(x, dys, tiled)

    def row_gradients(
        self, x: jax.Array, dy: jax.Array, *, tiled: Sequence[Tiled | None] = ()
    ) -> tuple[jax.Array, ...]:
        return _gradients(x, (dy,), tiled)

    def embed(self, vectors: jax.Array, ids: jax.Array) -> jax.Array:
        return vectors[ids]

    def attend(self, kernel: Attend, q: Queries, k: Keys, v: Keys, starts: Starts) -> Queries:
        return kernel(q, k, v, starts)

    def positions(self, seq: int) -> Int[Array, " seq"]:
        return jnp.arange(seq, dtype=jnp.int32)

    def row_seq(self, seq: int) -> int:
        return seq

    def experts(
        self, layer: Experts, x: jax.Array, leaves: ExpertLeaves, facts: TokenFacts
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


def _gradients(
    x: jax.Array, dys: Sequence[jax.Array], tiled: Sequence[Tiled | None]
) -> tuple[jax.Array, ...]:
    return tuple(
        x.T @ dy if tile is None else tile.gradient(x, dy).tile
        for dy, tile in zip(dys, tiled or (None,) * len(dys), strict=True)
    )


Gathered = tuple[Weights, PyTree]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather(comm: Communicator, prefix: str, params: Arrays, x: PyTree) -> Gathered:
    """`comm.gather` made of its `fetch` and `scatter`."""
    params, x = lax.optimization_barrier((params, x))
    weights = comm.fetch(params, prefix)
    return {
        k: quantized.standing_for(w, quantized.differentiated(w)) for k, w in weights.items()
    }, x


def _gather_forward(comm: Communicator, prefix: str, params: Arrays, x: PyTree) -> Any:
    # Zero-sized stand-ins carry the dtypes the cotangents must come back in.
    return gather(comm, prefix, params, x), {k: v[:0] for k, v in params.items()}


def _gather_backward(comm: Communicator, prefix: str, like: Arrays, grads: Gathered) -> Any:
    cotangents = {k: quantized.cotangent(g) for k, g in grads[0].items()}
    shards = {k: g.astype(like[k].dtype) for k, g in comm.scatter(cotangents, prefix).items()}
    return {k: shards.get(k) for k in like}, grads[1]


gather.defvjp(_gather_forward, _gather_backward)
