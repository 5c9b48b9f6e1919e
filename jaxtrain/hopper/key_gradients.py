"""The kernel of the gradients of keys and values."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.backends import Ref
from jaxtrain.hopper.gradients import BackwardInputs, query_rows, score_gradients, weights_of
from jaxtrain.hopper.tiles import BLOCK, GRID, KernelSetting, call, copy_in, query_tiles

RESULTS = ("dk", "dv")


def attention_key_gradients(
    arrays: SimpleNamespace, shared: SimpleNamespace, setting: KernelSetting
) -> None:
    """Writes gradients of `BLOCK` keys and values of one key head, summed over the queries of all
    heads that read it.

    arrays: of `BackwardInputs`; ends as `document_ends`, None without documents; dk, dv or both, as
    k. shared: keys and values, at the end their gradients; weights and gradients, of a tile's
    scores; barriers.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu

    q, k = arrays.q, arrays.k
    batch, key_head, tile = map(lax.axis_index, GRID)
    group, size, first_key = q.shape[2] // k.shape[2], q.shape[3], tile * BLOCK
    span = pl.ds(first_key, BLOCK)
    sources = [x.at[batch, span, key_head] for x in (k, arrays.v)]
    copy_in(sources, [shared.keys, shared.values], shared.barriers)
    end = None if arrays.ends is None else arrays.ends[batch, tile]
    first, count = query_tiles(first_key, end, q.shape[1], setting.scoring.mask)
    results = [name for name in RESULTS if hasattr(arrays, name)]

    def total(*accumulators: Ref) -> tuple[jax.Array, ...]:
        sums = dict(zip(results, accumulators, strict=True))

        def step(indices: Any, queries: Ref, cotangents: Ref) -> None:
            head, query = key_head * group + indices[0], (first + indices[1]) * BLOCK
            of_queries = query_rows(arrays, batch, head, query)
            p, pull_back = weights_of(queries, shared.keys, first_key, of_queries, setting)
            if "dv" in sums:
                shared.weights[...] = p.astype(q.dtype)
            if "dk" in sums:
                ds, *_ = score_gradients(p, pull_back, cotangents, shared.values, of_queries)
                shared.gradients[...] = ds.astype(q.dtype)
            mosaic_gpu.commit_smem()
            if "dv" in sums:
                mosaic_gpu.wgmma(sums["dv"], shared.weights.transpose((1, 0)), cotangents)
            if "dk" in sums:
                mosaic_gpu.wgmma(sums["dk"], shared.gradients.transpose((1, 0)), queries)
            mosaic_gpu.wgmma_wait(0)  # what they read is written next

        spec = mosaic_gpu.BlockSpec(
            (BLOCK, None, size), lambda g, i: (first + i, key_head * group + g, 0)
        )
        stages, grid = setting.stages, (group, count)
        pipeline = mosaic_gpu.emit_pipeline(
            step, grid=grid, in_specs=[spec, spec], max_concurrent_steps=stages
        )
        pipeline(q.at[batch], arrays.do.at[batch])
        return tuple(accumulator[...] for accumulator in accumulators)

    totals = pl.run_scoped(total, *[mosaic_gpu.ACC((BLOCK, size))] * len(results))
    for name, sums in zip(results, totals, strict=True):
        tile_of = shared.keys if name == "dk" else shared.values
        tile_of[...] = sums.astype(q.dtype)
        mosaic_gpu.commit_smem()
        mosaic_gpu.copy_smem_to_gmem(tile_of, getattr(arrays, name).at[batch, span, key_head])
    mosaic_gpu.wait_smem_to_gmem(0, wait_read_only=True)


def run_key_gradients(inputs: BackwardInputs, setting: KernelSetting) -> list[jax.Array]:
    """Returns dk and dv. Registers hold the sums of both for a head_dim of 128, and of one for 256:
    two kernels then."""
    if inputs.k.shape[3] <= 128:
        return _run(inputs, RESULTS, setting)
    return [_run(inputs, (name,), setting)[0] for name in RESULTS]


def _run(
    inputs: BackwardInputs, results: tuple[str, ...], setting: KernelSetting
) -> list[jax.Array]:
    from jax.experimental.pallas import mosaic_gpu

    k, starts = inputs.k, inputs.of_rows.starts
    batch, seq, kv_heads, size = k.shape
    wide, scores = (mosaic_gpu.SMEM((BLOCK, n), k.dtype) for n in (size, BLOCK))
    ends = None if starts is None else document_ends(starts)
    return call(
        attention_key_gradients,
        (batch, kv_heads, seq // BLOCK),
        setting,
        inputs=inputs.by_name() | {"ends": ends},
        outputs=dict.fromkeys(results, jax.ShapeDtypeStruct(k.shape, k.dtype)),
        shared=dict(
            keys=wide,
            values=wide,
            weights=scores,
            gradients=scores,
            barriers=mosaic_gpu.Barrier(num_barriers=2),
        ),
    )


def document_ends(starts: jax.Array) -> jax.Array:
    """Returns the first query whose document begins behind each tile of keys, [batch, tiles]."""
    last_keys = jnp.arange(BLOCK - 1, starts.shape[1], BLOCK, dtype=jnp.int32)
    count = partial(jnp.searchsorted, side="right")
    return jax.vmap(count, (0, None))(starts, last_keys).astype(jnp.int32)
