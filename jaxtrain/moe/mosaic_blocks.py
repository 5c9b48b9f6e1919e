"""Grouped matmuls of our own in Pallas, by way of Mosaic: for Hopper GPUs.

A program makes one tile of the result by the tensor cores' instructions for a group of four warps,
while the memory unit copies the next tiles into shared memory. As in `triton_blocks`, a tile of
products reads one expert's matrix, and a tile of a gradient is summed in registers, in fp32, over
all blocks of its expert.

JAX's own backend for Triton is deprecated; this one takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.backends import HOPPER_SHARED_BYTES, Ref, mosaic_options, too_old_for_mosaic
from jaxtrain.collectives.vary import vary, varying_axes
from jaxtrain.moe.grouped import Asked, Experts, Owners, RowProducts, Rows
from jaxtrain.moe.tiles import first_blocks, fitting, place_of, product_tiles, size_violations
from jaxtrain.violations import count, power_of_two, raise_violations

LEAST = 64
"""Rows of a tile that tensor cores of Hopper multiply, and columns that a copy moves."""
TILE = "tile"
"""Name of a grid's dim."""
MOST_SUMS = 128 * 128
"""fp32 sums of a tile that the registers of four warps hold, beside what else they need."""


@dataclass(frozen=True)
class MosaicBlocks:
    """Pallas-Mosaic (Hopper GPUs): 16-bit matrices whose dims are multiples of 64, by JAX 0.12 or
    newer.

    largest_block: rows of a block, and of a tile, at the most. columns: of a tile, up to 256.
    depth: how much is multiplied at a time. All three are powers of two from 64 on, and rows times
    columns at most 16,384. stages: tiles that are in shared memory at a time, of each operand, 2 or
    more.
    interpret: run it in JAX's simulator of a GPU, for tests without one.
    Raises ValueError for what it does not take.
    """

    runs_on: ClassVar[str] = "gpu"
    """The platform that it is of."""
    gpu_capability: ClassVar[int] = 9
    """Major compute capability of the GPUs that it is of: Hopper's instructions are no others'."""
    largest_block: int = 128
    columns: int = 128
    depth: int = 64
    stages: int = 3
    interpret: bool = False

    def __post_init__(self) -> None:
        sizes = ("largest_block", "columns", "depth")
        violations = [v for name in sizes for v in power_of_two(name, getattr(self, name), LEAST)]
        # With one there is no tile to copy beside a product.
        violations += count("stages", self.stages, least=2)
        raise_violations(violations or self._too_large())

    def _too_large(self) -> list[str]:
        rows, columns = self.largest_block, self.columns
        if columns > 256:
            most = max(LEAST, min(256, MOST_SUMS // rows))
            return [f"columns={columns} are more than the 256 of a product; use columns={most}"]
        if rows * columns > MOST_SUMS:
            return [
                f"largest_block={rows} x columns={columns} are more sums than registers hold, "
                f"{MOST_SUMS:,}; use largest_block={MOST_SUMS // columns}"
            ]
        needed = 2 * self.depth * max(rows + columns, self._gradient_rows + columns)
        if needed * self.stages <= HOPPER_SHARED_BYTES:
            return []
        most = HOPPER_SHARED_BYTES // needed
        of_least = HOPPER_SHARED_BYTES * self.depth // (needed * LEAST)
        if most >= 2:
            remedy = f"stages={most}"
        else:
            remedy = f"depth={LEAST}" + f" and stages={of_least}" * (self.stages > of_least)
        return [
            f"stages={self.stages} with depth={self.depth} take {needed * self.stages:,} bytes of "
            f"shared memory, and a Hopper GPU has {HOPPER_SHARED_BYTES:,}; use {remedy}"
        ]

    @property
    def _gradient_rows(self) -> int:
        """Of a tile of a gradient, at the most."""
        return min(self.columns, MOST_SUMS // self.columns)

    def violations(self, problem: Asked) -> list[str]:
        violations = too_old_for_mosaic()
        if problem.dtype not in (jnp.bfloat16, jnp.float16):
            violations.append(f"{problem.dtype} is not supported, bfloat16 and float16 are")
        return violations + size_violations(problem, self.largest_block, LEAST)

    def forward(self, rows: Rows, weights: Experts, owners: Owners) -> RowProducts:
        return self._product(rows, weights, owners, transposed=False)

    def backward(
        self, rows: Rows, weights: Experts, owners: Owners, dy: RowProducts
    ) -> tuple[Rows, Experts]:
        dx = self._product(dy, weights, owners, transposed=True)
        experts, n, m = weights.shape
        block = len(rows) // len(owners)
        height, width = fitting(n, self._gradient_rows), fitting(m, self.columns)
        depth = min(block, self.depth)
        begins = first_blocks(owners, experts)
        kernel = partial(_gradient, tile=(height, width, depth), stages=self.stages)
        like = jax.ShapeDtypeStruct(weights.shape, weights.dtype)
        tiles = experts * (n // height) * (m // width)
        return dx, self._call(kernel, tiles, like, rows, dy, begins * (block // depth))

    def _product(
        self, rows: jax.Array, weights: Experts, owners: Owners, *, transposed: bool
    ) -> jax.Array:
        sizes = dict(columns=self.columns, depth=self.depth)
        tile, tiles, like = product_tiles(rows, weights, owners, transposed=transposed, **sizes)
        kernel = partial(_product, tile=tile, stages=self.stages, transposed=transposed)
        return self._call(kernel, tiles, like, rows, weights, owners.astype(jnp.int32))

    def _call(
        self,
        kernel: partial[None],
        tiles: int,
        like: jax.ShapeDtypeStruct,
        *arrays: jax.Array,
    ) -> jax.Array:
        from jax.experimental.pallas import mosaic_gpu

        run = mosaic_gpu.kernel(
            kernel,
            out_type=like,
            grid=(tiles,),
            grid_names=(TILE,),
            kernel_name=f"grouped{kernel.func.__name__}",
            **mosaic_options(interpret=self.interpret),
        )
        # Its results vary over no mesh axis by type, whatever it was given.
        return vary(run(*arrays), varying_axes(*arrays))


def _product(
    rows: Ref,
    weights: Ref,
    owners: Ref,
    out: Ref,
    *,
    tile: tuple[int, int, int],
    stages: int,
    transposed: bool,
) -> None:
    """out[block, columns] = rows[block] weights[owner of block][:, columns]."""
    height, width, depth = tile
    blocks, columns = out.shape[0] // height, out.shape[1] // width
    block, column = place_of(lax.axis_index(TILE), blocks, columns)
    weight = weights.at[owners[block]]
    _multiply(
        (rows, (height, depth), lambda i: (block, i)),
        (weight, (width, depth), lambda i: (column, i))
        if transposed
        else (weight, (depth, width), lambda i: (i, column)),
        out.at[_span(block, height), _span(column, width)],
        pieces=rows.shape[1] // depth,
        stages=stages,
        transpose=(False, transposed),
    )


def _gradient(
    rows: Ref,
    dy: Ref,
    begins: Ref,
    out: Ref,
    *,
    tile: tuple[int, int, int],
    stages: int,
) -> None:
    """out[expert] = the sum over its blocks of rows^T dy. begins: where rows of each expert begin,
    and the last's end, in pieces of as many rows as are multiplied at a time."""
    height, width, depth = tile
    down, across = out.shape[1] // height, out.shape[2] // width
    expert, place = lax.axis_index(TILE) // (down * across), lax.axis_index(TILE) % (down * across)
    row, column = place_of(place, down, across)
    first = begins[expert]
    _multiply(
        (rows, (depth, height), lambda i: (first + i, row)),
        (dy, (depth, width), lambda i: (first + i, column)),
        out.at[expert, _span(row, height), _span(column, width)],
        pieces=begins[expert + 1] - first,
        stages=stages,
        transpose=(True, False),
    )


TiledArray = tuple[Ref, tuple[int, int], Callable[[jax.Array], tuple[jax.Array, jax.Array]]]
"""An array, the shape of its tiles, and the place of the i-th one, in tiles."""


def _multiply(
    left: TiledArray,
    right: TiledArray,
    out: Ref,
    *,
    pieces: int | jax.Array,
    stages: int,
    transpose: tuple[bool, bool],
) -> None:
    """out = the sum over `pieces` of a tile of `left` times one of `right`, each transposed or not,
    in fp32. The copies of the next tiles run beside a product."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu

    def total(sums: Ref) -> jax.Array:
        def step(_: Any, *tiles: Ref) -> None:
            a, b = (
                tile.transpose((1, 0)) if swap else tile
                for tile, swap in zip(tiles, transpose, strict=True)
            )
            mosaic_gpu.wgmma(sums, a, b)
            # The product before has ended: the next tile is copied over what it read.
            mosaic_gpu.wgmma_wait(1)

        specs = [
            mosaic_gpu.BlockSpec(shape, place, delay_release=1) for _, shape, place in (left, right)
        ]
        pipeline = mosaic_gpu.emit_pipeline(
            step, grid=(pieces,), in_specs=specs, max_concurrent_steps=stages
        )
        pipeline(left[0], right[0])
        return sums[...]

    sums = pl.run_scoped(total, mosaic_gpu.ACC(out.shape))

    def write(tile: Ref) -> None:
        tile[...] = sums.astype(tile.dtype)
        mosaic_gpu.commit_smem()
        mosaic_gpu.copy_smem_to_gmem(tile, out)
        mosaic_gpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(write, mosaic_gpu.SMEM(out.shape, out.dtype))


def _span(place: jax.Array, size: int) -> Any:
    from jax.experimental import pallas as pl

    return pl.ds(place * size, size)
