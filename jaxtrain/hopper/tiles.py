"""Tiles of `BLOCK` queries and keys on a Hopper GPU: which are computed, and their products.

Called while Mosaic traces a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.attention.online_softmax import AttentionMask, Scoring
from jaxtrain.backends import Ref

BLOCK = 64
"""Rows that four warps multiply at a time."""
GRID = ("batch", "head", "tile")
"""What each program of a kernel is of."""


class KernelSetting(NamedTuple):
    """Options of a call's kernels. stages: tiles of a pipeline in shared memory at a time.
    compiling: options of Mosaic."""

    scoring: Scoring
    stages: int
    compiling: Mapping[str, Any]


def call(
    kernel: Callable[[SimpleNamespace, SimpleNamespace, KernelSetting], None],
    grid: tuple[int, int, int],
    setting: KernelSetting,
    *,
    inputs: Mapping[str, jax.Array | None],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    shared: Mapping[str, Any],
) -> list[jax.Array]:
    """Returns the outputs of a kernel. It is called with the arrays by name, the inputs (None where
    they are) and the outputs, with what is in shared memory, and the setting. grid: numbers of
    programs."""
    from jax.experimental.pallas import mosaic_gpu

    present = {name: array for name, array in inputs.items() if array is not None}

    def body(*memories: Ref, **in_shared: Ref) -> None:
        by_name = dict(zip((*present, *outputs), memories, strict=True))
        arrays = SimpleNamespace(**(dict.fromkeys(inputs) | by_name))
        kernel(arrays, SimpleNamespace(**in_shared), setting)

    run = mosaic_gpu.kernel(
        body,
        kernel_name=kernel.__name__,
        out_type=list(outputs.values()),
        scratch_types=shared,
        grid=grid,
        grid_names=GRID,
        **setting.compiling,
    )
    return run(*present.values())


def copy_in(sources: Sequence[Ref], targets: Sequence[Ref], barriers: Ref) -> None:
    """Copies arrays into shared memory, and waits for all of them."""
    from jax.experimental.pallas import mosaic_gpu

    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        mosaic_gpu.copy_gmem_to_smem(source, target, barriers.at[i])
    for i in range(len(sources)):
        mosaic_gpu.barrier_wait(barriers.at[i])


def product(columns: int, left: Ref, right: Ref, *, transposed: bool = False) -> jax.Array:
    """Returns left @ right, or left @ right^T, of tiles in shared memory, in fp32: [BLOCK,
    columns]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu

    def total(sums: Ref) -> jax.Array:
        mosaic_gpu.wgmma(sums, left, right.transpose((1, 0)) if transposed else right)
        return sums[...]

    return pl.run_scoped(total, mosaic_gpu.ACC((BLOCK, columns)))


def rows(values: Ref, first: jax.Array) -> jax.Array:
    """Returns the entries of `BLOCK` queries, one for each row of a tile of scores."""
    return _load(values, first, over=1)


def columns(values: Ref, first: jax.Array) -> jax.Array:
    """Returns the entries of `BLOCK` keys, one for each column of a tile of scores."""
    return _load(values, first, over=0)


def _load(values: Ref, first: jax.Array, *, over: int) -> jax.Array:
    """Returns `BLOCK` entries, laid out as a sum over a dim of a tile of scores is."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu

    layout = mosaic_gpu.Layout.WGMMA.reduce(over)
    return mosaic_gpu.load(values.at[pl.ds(first, BLOCK)], layout=layout, optimized=False)


def across(values: jax.Array, like: jax.Array) -> jax.Array:
    """Returns a value for each row, in all of its columns."""
    return lax.broadcast_in_dim(values, like.shape, (0,))


def down(values: jax.Array, like: jax.Array) -> jax.Array:
    """Returns a value for each column, in all of its rows."""
    return lax.broadcast_in_dim(values, like.shape, (1,))


def key_tiles(
    queries: jax.Array, first_start: jax.Array | None, seq: int, mask: AttentionMask
) -> tuple[jax.Array, jax.Array]:
    """Returns (first, number) of the tiles of keys that some of the queries from `queries` on see.
    first_start: where the document of the first of them begins."""
    first, last = jnp.int32(0), jnp.int32(seq // BLOCK)
    if mask.causal:
        last = jnp.clip((queries + BLOCK - 1 + mask.offset) // BLOCK + 1, 0, last)
    if mask.window is not None:
        first = jnp.maximum(first, (queries + mask.offset - mask.window + 1) // BLOCK)
    if first_start is not None:
        first = jnp.maximum(first, first_start // BLOCK)
    return first, jnp.maximum(last - first, 0)


def query_tiles(
    keys: jax.Array, end: jax.Array | None, seq: int, mask: AttentionMask
) -> tuple[jax.Array, jax.Array]:
    """Returns (first, number) of the tiles of queries that see some of the keys from `keys` on.
    end: the first query whose document begins behind these keys."""
    first, last = jnp.int32(0), jnp.int32(seq // BLOCK)
    if mask.causal:
        first = jnp.maximum(first, (keys - mask.offset) // BLOCK)
    if mask.window is not None:
        farthest = keys + BLOCK - 1 + mask.window - 1 - mask.offset
        last = jnp.clip(farthest // BLOCK + 1, 0, last)
    if end is not None:
        last = jnp.minimum(last, (end + BLOCK - 1) // BLOCK)
    return first, jnp.maximum(last - first, 0)
