"""Tiles of a product: their sizes, and the order in which programs make them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxtrain.moe.grouped import Asked, Owners, block_rows

GROUPED = 8
"""Rows of tiles that are worked on together."""


def size_violations(problem: Asked, largest_block: int, least: int) -> list[str]:
    """Returns a violation for each dim that is no multiple of `least`, and for blocks of fewer
    rows."""
    violations = [
        f"{name}={size} on a device is not a multiple of {least}"
        for name, size in (("embed", problem.embed), ("hidden", problem.hidden))
        if size % least
    ]
    block = block_rows(problem.rows, problem.experts, largest_block)
    if block < least:
        violations.append(
            f"{problem.rows} rows (tokens of a device x experts_per_token) for "
            f"{problem.experts} experts are too few: blocks of {block}, at least {least}"
        )
    return violations


def first_blocks(owners: Owners, experts: int) -> Int[Array, " _"]:
    """Returns the first block of each expert, and the number of all blocks."""
    return jnp.sum(owners[None] < jnp.arange(experts + 1)[:, None], axis=1, dtype=jnp.int32)


def fitting(size: int, most: int) -> int:
    """Returns the largest power of two up to `most` that divides size."""
    return min(most, size & -size)


def product_tiles(
    rows: jax.Array,
    weights: jax.Array,
    owners: Owners,
    *,
    columns: int,
    depth: int,
    transposed: bool,
) -> tuple[tuple[int, int, int], int, jax.ShapeDtypeStruct]:
    """Returns the tiles of rows times their experts' matrices, or these transposed: (rows, columns,
    depth) of one, their number, and shape and dtype of the result. columns, depth: the most."""
    inner, outer = weights.shape[:0:-1] if transposed else weights.shape[1:]
    height, width = len(rows) // len(owners), fitting(outer, columns)
    result = jax.ShapeDtypeStruct((len(rows), outer), rows.dtype)
    return (height, width, fitting(inner, depth)), len(owners) * (outer // width), result


def place_of(program: jax.Array, rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
    """Returns (row, column) of a program's tile: column after column of `GROUPED` rows, then the
    next. So programs that run at a time work on a square of tiles rather than on a line of them,
    and what they read they share in the cache (Tillet et al. 2019, "Triton")."""
    first = program // (GROUPED * columns) * GROUPED
    within = program % (GROUPED * columns)
    several = jnp.minimum(rows - first, GROUPED)
    return first + within % several, within // several
