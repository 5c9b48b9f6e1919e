"""The forward kernel of attention on a Hopper GPU: Dao 2023, FlashAttention-2, algorithm 1."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.attention.online_softmax import MASKED
from jaxtrain.backends import Ref
from jaxtrain.hopper.scores import RowInputs, tile_logits
from jaxtrain.hopper.tiles import (
    BLOCK,
    GRID,
    KernelSetting,
    across,
    call,
    copy_in,
    key_tiles,
    product,
)

LEAST_TOTAL = 1e-37
"""Of a query of which no tile is computed: its output is then 0, its log-sum-exp about MASKED."""


def attention_forward(
    arrays: SimpleNamespace, shared: SimpleNamespace, setting: KernelSetting
) -> None:
    """Writes o and the log-sum-exp of `BLOCK` queries of one head.

    arrays: q, o [batch, seq, heads, head_dim]; k, v likewise with kv_heads; lse [batch, heads,
    seq]; those of `RowInputs`. shared: own, the queries and at the end their o; weights, of a tile;
    sums, the log-sum-exps; barriers.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu

    q, k, v = arrays.q, arrays.k, arrays.v
    batch, head, tile = map(lax.axis_index, GRID)
    query, key_head = tile * BLOCK, head // (q.shape[2] // k.shape[2])
    span = pl.ds(query, BLOCK)
    copy_in([q.at[batch, span, head]], [shared.own], shared.barriers)
    inputs, (scoring, stages, _) = RowInputs.of(arrays), setting
    place, start = inputs.place(batch, head, query), inputs.first_start(batch, query)
    first, count = key_tiles(query, start, k.shape[1], scoring.mask)
    size, layout = q.shape[3], mosaic_gpu.Layout.WGMMA
    parts = list(column_parts(size))

    def step(indices: Any, keys: Ref, values: Ref, carry: Any) -> Any:
        outputs, largest, total = carry
        products = product(BLOCK, shared.own, keys, transposed=True)
        tile_place = inputs.beside(place, batch, (first + indices[0]) * BLOCK)
        logits, _ = tile_logits(products, tile_place, scoring)
        most = jnp.maximum(largest, logits.max(axis=1))
        decay = jnp.exp(largest - most)
        p = jnp.exp(logits - across(most, logits))
        shared.weights[...] = p.astype(q.dtype)
        mosaic_gpu.commit_smem()
        outputs = tuple(
            out * across(decay, out) + product(part.size, shared.weights, values.at[:, part])
            for out, part in zip(outputs, parts, strict=True)
        )
        return outputs, most, total * decay + p.sum(axis=1)

    def constant(value: float, *columns: int) -> jax.Array:
        kind = layout if columns else layout.reduce(1)
        return mosaic_gpu.layout_cast(jnp.full((BLOCK, *columns), value, jnp.float32), kind)

    begin = (tuple(constant(0, part.size) for part in parts), constant(MASKED), constant(0))
    spec = mosaic_gpu.BlockSpec((BLOCK, size), lambda i: (first + i, 0))
    pipeline = mosaic_gpu.emit_pipeline(
        step, grid=(count,), in_specs=[spec, spec], max_concurrent_steps=stages, init_carry=begin
    )
    outputs, largest, total = pipeline(k.at[batch, :, key_head], v.at[batch, :, key_head])
    total = jnp.maximum(total, LEAST_TOTAL)
    for out, part in zip(outputs, parts, strict=True):
        shared.own[:, part] = (out / across(total, out)).astype(q.dtype)
    shared.sums[...] = largest + jnp.log(total)
    mosaic_gpu.commit_smem()
    mosaic_gpu.copy_smem_to_gmem(shared.own, arrays.o.at[batch, span, head])
    mosaic_gpu.copy_smem_to_gmem(shared.sums, arrays.lse.at[batch, head, span])
    mosaic_gpu.wait_smem_to_gmem(0, wait_read_only=True)


def column_parts(size: int) -> Iterator[Any]:
    """Yields spans of columns of a product that registers hold beside its sum: 128, or 64."""
    from jax.experimental import pallas as pl

    width = 128 if size % 128 == 0 else 64
    return (pl.ds(first, width) for first in range(0, size, width))


def run_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, of_rows: RowInputs, setting: KernelSetting
) -> tuple[jax.Array, jax.Array]:
    """Returns o, and the log-sum-exp [batch, heads, seq]."""
    from jax.experimental.pallas import mosaic_gpu

    batch, seq, heads, size = q.shape
    o, lse = call(
        attention_forward,
        (batch, heads, seq // BLOCK),
        setting,
        inputs=dict(q=q, k=k, v=v, **of_rows._asdict()),
        outputs=dict(
            o=jax.ShapeDtypeStruct(q.shape, q.dtype),
            lse=jax.ShapeDtypeStruct((batch, heads, seq), jnp.float32),
        ),
        shared=dict(
            own=mosaic_gpu.SMEM((BLOCK, size), q.dtype),
            weights=mosaic_gpu.SMEM((BLOCK, BLOCK), q.dtype),
            sums=mosaic_gpu.SMEM((BLOCK,), jnp.float32),
            barriers=mosaic_gpu.Barrier(num_barriers=1),
        ),
    )
    return o, lse
