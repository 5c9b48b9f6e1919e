"""Grouped matmuls of our own in Pallas, by way of Triton: for GPUs.

A program makes one tile of the result. Blocks have one owner each, so a tile of products reads one
expert's matrix; and an expert's blocks lie side by side, so a tile of its gradient sums them in
registers, in fp32, and is written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.backends import TRITON, Ref, missing
from jaxtrain.moe.grouped import Asked, Experts, Owners, RowProducts, Rows, block_count, block_rows
from jaxtrain.moe.tiles import first_blocks, fitting, place_of, product_tiles, size_violations
from jaxtrain.violations import count, power_of_two, raise_violations

LEAST = 16
"""Of each dim of a product that tensor cores take."""
MOST_ELEMENTS = 2**31
"""Of an array: positions in it are counted in 32 bits."""


@dataclass(frozen=True)
class TritonBlocks:
    """Pallas-Triton (GPU): 16-bit matrices whose dims are multiples of 16.

    largest_block: rows of a block, and of a tile, at the most. columns: of a tile. depth: how much
    is multiplied at a time. warps: of a program; all of these are powers of two. stages: of its
    loop. interpret: run it in Python, for tests without a GPU. Raises ValueError for what it does
    not take.
    """

    runs_on: ClassVar[str] = "gpu"
    """The platform that it is of."""
    largest_block: int = 128
    columns: int = 128
    depth: int = 64
    warps: int = 8
    stages: int = 3
    interpret: bool = False

    def __post_init__(self) -> None:
        sizes = ("largest_block", "columns", "depth", "warps")
        violations = [v for name in sizes for v in power_of_two(name, getattr(self, name))]
        raise_violations(violations + count("stages", self.stages))

    def violations(self, problem: Asked) -> list[str]:
        violations = missing(TRITON)
        if problem.dtype not in (jnp.bfloat16, jnp.float16) and not self.interpret:
            violations.append(f"{problem.dtype} is not supported, bfloat16 and float16 are")
        violations += size_violations(problem, self.largest_block, LEAST)
        block = block_rows(problem.rows, problem.experts, self.largest_block)
        matrices = problem.embed * problem.hidden * problem.experts
        rows = block * block_count(problem.rows, problem.experts, self.largest_block)
        arrays = {
            "experts' matrices": matrices,
            "rows padded to whole blocks": rows * max(problem.embed, problem.hidden),
        }
        violations += [
            f"{elements} numbers in the {name}; it takes fewer than {MOST_ELEMENTS}"
            for name, elements in arrays.items()
            if elements >= MOST_ELEMENTS
        ]
        return violations

    def forward(self, rows: Rows, weights: Experts, owners: Owners) -> RowProducts:
        return self._product(rows, weights, owners, transposed=False)

    def backward(
        self, rows: Rows, weights: Experts, owners: Owners, dy: RowProducts
    ) -> tuple[Rows, Experts]:
        dx = self._product(dy, weights, owners, transposed=True)
        experts, n, m = weights.shape
        block = len(rows) // len(owners)
        piece, tile = min(block, self.depth), (fitting(n, self.columns), fitting(m, self.columns))
        kernel = partial(_gradient, tile=tile, piece=piece, pieces=block // piece)
        begins = first_blocks(owners, experts)
        grid = ((n // tile[0]) * (m // tile[1]), experts)
        return dx, self._call(kernel, grid, weights, rows, dy, begins)

    def _product(
        self, rows: jax.Array, weights: Experts, owners: Owners, *, transposed: bool
    ) -> jax.Array:
        sizes = dict(columns=self.columns, depth=self.depth)
        tile, tiles, like = product_tiles(rows, weights, owners, transposed=transposed, **sizes)
        kernel = partial(_product, tile=tile, blocks=len(owners), transposed=transposed)
        return self._call(kernel, (tiles,), like, rows, weights, owners.astype(jnp.int32))

    def _call(
        self,
        kernel: partial[None],
        grid: tuple[int, ...],
        like: jax.Array | jax.ShapeDtypeStruct,
        *arrays: jax.Array,
    ) -> jax.Array:
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import triton

        # Told so, Pallas does not mind `check_vma=True`.
        varies = jax.typeof(arrays[0]).manual_axis_type
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(like.shape, like.dtype, manual_axis_type=varies),
            grid=grid,
            compiler_params=triton.CompilerParams(num_warps=self.warps, num_stages=self.stages),
            interpret=self.interpret,
            name=f"grouped{kernel.func.__name__}",
        )(*arrays)


def _product(
    rows: Ref,
    weights: Ref,
    owners: Ref,
    out: Ref,
    *,
    tile: tuple[int, int, int],
    blocks: int,
    transposed: bool,
) -> None:
    """out[block, columns] = rows[block] weights[owner of block][:, columns]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    height, width, depth = tile
    block, column = place_of(pl.program_id(0), blocks, out.shape[1] // width)
    span, owner = pl.ds(block * height, height), owners[block]
    columns = pl.ds(column * width, width)

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        inner = pl.ds(i * depth, depth)
        w = weights[owner, columns, inner].T if transposed else weights[owner, inner, columns]
        return total + triton.dot(rows[span, inner], w)

    total = jnp.zeros((height, width), jnp.float32)
    total = lax.fori_loop(0, rows.shape[1] // depth, step, total)
    out[span, columns] = total.astype(out.dtype)


def _gradient(
    rows: Ref, dy: Ref, begins: Ref, out: Ref, *, tile: tuple[int, int], piece: int, pieces: int
) -> None:
    """out[expert] = the sum over its blocks of rows^T dy, by `pieces` of a block."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    expert = pl.program_id(1)
    place = place_of(pl.program_id(0), out.shape[1] // tile[0], out.shape[2] // tile[1])
    into, columns = (pl.ds(i * size, size) for i, size in zip(place, tile, strict=True))

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        span = pl.ds(i * piece, piece)
        return total + triton.dot(rows[span, into].T, dy[span, columns])

    first, end = begins[expert] * pieces, begins[expert + 1] * pieces
    total = lax.fori_loop(first, end, step, jnp.zeros(tile, jnp.float32))
    out[expert, into, columns] = total.astype(out.dtype)
