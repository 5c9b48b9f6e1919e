"""The kernel of the gradients of queries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.backends import Ref
from jaxtrain.hopper.gradients import BackwardInputs, query_rows, score_gradients, weights_of
from jaxtrain.hopper.tiles import BLOCK, GRID, KernelSetting, call, copy_in, key_tiles


def attention_query_gradients(
    arrays: SimpleNamespace, shared: SimpleNamespace, setting: KernelSetting
) -> None:
    """Writes dq of `BLOCK` queries of one head, and their parts of that of the head's value.

    arrays: of `BackwardInputs`; dq as q; dvalues [batch, heads, seq] where the model learns values.
    shared: own, the queries and at the end their dq; cotangents, their do; gradients, of a tile's
    scores; sums, of the head's value; barriers.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu

    q, k, v, learned = arrays.q, arrays.k, arrays.v, hasattr(arrays, "dvalues")
    batch, head, tile = map(lax.axis_index, GRID)
    query, key_head = tile * BLOCK, head // (q.shape[2] // k.shape[2])
    span, own = pl.ds(query, BLOCK), shared.own
    sources = [x.at[batch, span, head] for x in (q, arrays.do)]
    copy_in(sources, [own, shared.cotangents], shared.barriers)
    of_queries = query_rows(arrays, batch, head, query)
    start = of_queries.inputs.first_start(batch, query)
    first, count = key_tiles(query, start, k.shape[1], setting.scoring.mask)

    def total(accumulator: Ref) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        def step(indices: Any, keys: Ref, values: Ref, sums: Any) -> Any:
            first_key = (first + indices[0]) * BLOCK
            p, pull_back = weights_of(own, keys, first_key, of_queries, setting)
            ds, *of_value = score_gradients(p, pull_back, shared.cotangents, values, of_queries)
            shared.gradients[...] = ds.astype(q.dtype)
            mosaic_gpu.commit_smem()
            mosaic_gpu.wgmma(accumulator, shared.gradients, keys)
            mosaic_gpu.wgmma_wait(0)  # both are written next
            return tuple(a + b for a, b in zip(sums, of_value, strict=True))

        spec = mosaic_gpu.BlockSpec((BLOCK, q.shape[3]), lambda i: (first + i, 0))
        pipeline = mosaic_gpu.emit_pipeline(
            step,
            grid=(count,),
            in_specs=[spec, spec],
            max_concurrent_steps=setting.stages,
            init_carry=(jnp.zeros_like(of_queries.lse),) * learned,
        )
        sums = pipeline(k.at[batch, :, key_head], v.at[batch, :, key_head])
        return accumulator[...], sums

    dq, sums = pl.run_scoped(total, mosaic_gpu.ACC((BLOCK, q.shape[3])))
    own[...] = dq.astype(q.dtype)
    if learned:
        shared.sums[...] = sums[0]
    mosaic_gpu.commit_smem()
    mosaic_gpu.copy_smem_to_gmem(own, arrays.dq.at[batch, span, head])
    if learned:
        mosaic_gpu.copy_smem_to_gmem(shared.sums, arrays.dvalues.at[batch, head, span])
    mosaic_gpu.wait_smem_to_gmem(0, wait_read_only=True)


def run_query_gradients(inputs: BackwardInputs, setting: KernelSetting) -> list[jax.Array]:
    """Returns dq, and the gradient of the heads' values where the model learns them."""
    from jax.experimental.pallas import mosaic_gpu

    q, function = inputs.q, setting.scoring.function
    batch, seq, heads, size = q.shape
    outputs = dict(dq=jax.ShapeDtypeStruct(q.shape, q.dtype))
    if function is not None and function.trained:
        outputs["dvalues"] = jax.ShapeDtypeStruct((batch, heads, seq), jnp.float32)
    wide = mosaic_gpu.SMEM((BLOCK, size), q.dtype)
    dq, *dvalues = call(
        attention_query_gradients,
        (batch, heads, seq // BLOCK),
        setting,
        inputs=inputs.by_name(),
        outputs=outputs,
        shared=dict(
            own=wide,
            cotangents=wide,
            gradients=mosaic_gpu.SMEM((BLOCK, BLOCK), q.dtype),
            sums=mosaic_gpu.SMEM((BLOCK,), jnp.float32),
            barriers=mosaic_gpu.Barrier(num_barriers=2),
        ),
    )
    return [dq, *(jnp.sum(x, axis=(0, 2)) for x in dvalues)]
