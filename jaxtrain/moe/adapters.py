"""Low-rank adapters of experts (Hu et al. 2021): each expert has a pair of its own.

An expert's matrix w with a pair A, B is used as w + scale A B, which is never formed: its rows go
through A and B as they go through w, by products that are grouped alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jaxtyping import Array, Float

from jaxtrain.collectives.vary import varying_axes
from jaxtrain.moe.block_loop import BlockLoop
from jaxtrain.moe.grouped import Asked, GroupedMatmul, Owners, RowProducts, Rows, grouped_matmul

Pair = tuple[jax.Array, jax.Array]
"""A [experts, n, rank] and B [experts, rank, m]; of one matrix without the first dim."""
AdapterPairs = tuple[Pair | None, ...]
"""Of each of several matrices, None of one without; () where none has any."""


def with_changes(
    kernel: GroupedMatmul,
    rows: Rows,
    products: Sequence[RowProducts],
    pairs: AdapterPairs,
    scale: float,
    owners: Owners,
) -> tuple[RowProducts, ...]:
    """Returns the products of rows with experts' matrices, with what adapters of LoRA add to each.
    products: of the matrices alone. kernel: that of the matrices; it multiplies by A and B too, or
    `BlockLoop` does where it refuses their sizes."""

    def changed(y: RowProducts, pair: Pair | None) -> RowProducts:
        if pair is None:
            return y
        into, out_of = pair
        narrow = _kernel_of_rank(kernel, rows, into)
        z = grouped_matmul(narrow, rows, into, owners) * scale
        return y + grouped_matmul(narrow, z, out_of, owners)

    return tuple(changed(y, pair) for y, pair in zip(products, _each(pairs, products), strict=True))


def products_with_changes(
    x: Float[Array, "tokens n"], weights: Sequence[jax.Array], pairs: AdapterPairs, scale: float
) -> list[jax.Array]:
    """Returns the products of x with matrices [n, m], with what their adapters add."""
    return [
        x @ w if pair is None else x @ w + ((x @ pair[0]) * scale) @ pair[1]
        for w, pair in zip(weights, _each(pairs, weights), strict=True)
    ]


def _each(pairs: AdapterPairs, products: Sequence[object]) -> AdapterPairs:
    return pairs or (None,) * len(products)


def _kernel_of_rank(kernel: GroupedMatmul, rows: Rows, into: jax.Array) -> GroupedMatmul:
    experts, width, rank = into.shape
    checked = bool(varying_axes(rows, into))
    problem = Asked(len(rows), experts, width, rank, rows.dtype, checked)
    return BlockLoop() if kernel.violations(problem) else kernel
