"""One model, three meanings: what a layer asks of the machine, and who answers.

A layer never names a mesh axis. `Local` is the meaning on one device. `Gspmd` (`gspmd.py`) states
where values live and lets XLA choose the collectives. `Explicit` (`explicit.py`) runs inside one
shard_map in which every mesh axis is manual, and every collective is a line of ours.

The residual stream is a matrix [tokens, embed], tokens = rows * seq in row-major order: XLA:CPU
does not flatten a three-dimensional dot into one gemm (2.2x on a SwiGLU block), and a device's
share under sequence parallelism (Korthikanti et al. 2022) is a contiguous slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtrain.collectives.matmul import Tiled
from jaxtrain.collectives.vary import Index
from jaxtrain.nn.tiles import TiledProducts

Queries = Float[Array, "rows seq heads head_dim"]
Keys = Float[Array, "rows seq kv_heads head_dim"]
Starts = Int[Array, "rows seq"] | None
Arrays = dict[str, jax.Array]
Attend = Callable[..., jax.Array]
Experts = Callable[[jax.Array, jax.Array, tuple[jax.Array, ...]], jax.Array]
"""`moe.layer.moe_layer` of (x, router, weights)."""


Pair = tuple[jax.Array, jax.Array]


@runtime_checkable
class Communicator(Protocol):
    """What a layer may ask for. Shapes are what one call sees: local ones in `Explicit`."""

    @property
    def grouped_matmul(self) -> Any:
        """What multiplies experts' rows, as `moe.layer.moe_layer` takes it; None: the default
        backend's own."""
        ...

    def gather(self, params: Arrays, prefix: str, after: jax.Array) -> tuple[Arrays, jax.Array]:
        """Parameters as they are used: whole over the axes that only split them at rest, in the
        compute dtype; not before `after` exists, which is returned: where a gather stands in the
        source it stays, in the loop over microbatches and in the pass. Differentiable: the adjoint
        is `scatter`."""
        ...

    def fetch(self, params: Arrays, prefix: str) -> Arrays:
        """`gather` without a derivative, for loops that write out their own backward pass."""
        ...

    def scatter(self, grads: Arrays, prefix: str) -> Arrays:
        """Adjoint of `fetch`: gradients summed over those axes, each device keeping its part; none
        of frozen leaves."""
        ...

    def frozen_of(self, params: Arrays, prefix: str) -> frozenset[str]:
        """Those of the leaves named below `prefix` that are frozen: nobody asks for gradients."""
        ...

    def tiled_products(
        self, prefix: str, body_of: Callable[[Any], Callable[..., jax.Array]]
    ) -> TiledProducts | None:
        """How a layer's weights below `prefix` get gradients that are scattered while they are
        made; None where all are scattered by `scatter`. body_of: as of `TiledProducts`."""
        ...

    def column(self, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        """x @ w for weights split by column: [tokens, embed] -> [tokens, part of the columns]."""
        ...

    def row(self, x: jax.Array, weight: jax.Array, *beside: Pair) -> jax.Array:
        """x @ w for a weight split by row, and beside it others, x' @ w' with x' in parts; the
        result is the residual stream's share of all summed."""
        ...

    def multiply(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """x @ w of what lies on the device."""
        ...

    def column_gradients(
        self, x: jax.Array, *dys: jax.Array, tiled: Sequence[Tiled | None] = ()
    ) -> tuple[jax.Array, ...]:
        """Gradients of the weights of `column` from its x and its outputs' cotangents; in tiles
        where `tiled` says of one how."""
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
        """kernel(q, k, v, starts), each device with its rows and heads."""
        ...

    def experts(
        self, kernel: Experts, x: jax.Array, router: jax.Array, weights: tuple[jax.Array, ...]
    ) -> jax.Array:
        """kernel(x, router, weights), x [tokens, embed], the residual stream's share; weights
        [experts, ...] are split over their hidden dim."""
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

    def vocab_offset(self, local: int) -> Index:
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
    frozen: frozenset[str] = frozenset()
    """Full names of frozen leaves."""
    grouped_matmul: Any = None

    def gather(self, params: Arrays, prefix: str, after: jax.Array) -> tuple[Arrays, jax.Array]:
        return self.fetch(params, prefix), after

    def fetch(self, params: Arrays, prefix: str) -> Arrays:
        # One-dim leaves keep their dtype: they are small, and norms are computed in fp32. So do
        # routers, whose choices should hang on rounding as little as they can (Fedus et al. 2022).
        def cast(name: str, value: jax.Array) -> jax.Array:
            kept = value.ndim < 2 or name.split(".")[-1] == "router"
            return value if kept else value.astype(self.compute_dtype)

        return {k: cast(k, v) for k, v in params.items()}

    def scatter(self, grads: Arrays, prefix: str) -> Arrays:
        frozen = self.frozen_of(grads, prefix)
        return {k: g for k, g in grads.items() if k not in frozen}

    def frozen_of(self, params: Arrays, prefix: str) -> frozenset[str]:
        return frozenset(name for name in params if prefix + name in self.frozen)

    def tiled_products(
        self, prefix: str, body_of: Callable[[Any], Callable[..., jax.Array]]
    ) -> TiledProducts | None:
        return None

    def column(self, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(x @ w for w in weights)

    def row(self, x: jax.Array, weight: jax.Array, *beside: Pair) -> jax.Array:
        return sum((x @ w for x, w in beside), start=x @ weight)

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

    def experts(
        self, kernel: Experts, x: jax.Array, router: jax.Array, weights: tuple[jax.Array, ...]
    ) -> jax.Array:
        return kernel(x, router, weights)

    def tokens(self, per_token: jax.Array) -> jax.Array:
        return per_token

    def all_tokens(self, x: jax.Array) -> jax.Array:
        return x

    def scatter_head_gradient(self, dx: jax.Array) -> jax.Array:
        return dx

    def vocab_offset(self, local: int) -> Index:
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


def _gradients(
    x: jax.Array, dys: Sequence[jax.Array], tiled: Sequence[Tiled | None]
) -> tuple[jax.Array, ...]:
    return tuple(
        x.T @ dy if each is None else each.gradient(x, dy).tile
        for dy, each in zip(dys, tiled or (None,) * len(dys), strict=True)
    )
