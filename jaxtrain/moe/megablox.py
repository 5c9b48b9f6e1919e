"""JAX's megablox: grouped matmuls in Pallas, for TPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.moe.grouped import Asked, Experts, Owners, RowProducts, Rows, group_sizes
from jaxtrain.violations import count, power_of_two, raise_violations

LEAST_ROWS = 128
"""Of a tile: with fewer a TPU's matrix unit is not filled."""


@dataclass(frozen=True)
class Megablox:
    """Pallas megablox (TPU): rows of any number to each expert, without padding.

    tile: rows, a power of two, and of a matrix rows and columns, that are multiplied at a time;
    rows of a tile are the most of them, by halves, that divides all rows. interpret: run it in
    Python, for tests without a TPU. In a shard_map it needs `check_vma=False`. Raises ValueError
    for other dtypes than bfloat16 and float32, and for rows that no tile of 128 or more divides.
    """

    runs_on: ClassVar[str] = "tpu"
    """The platform that it is of."""
    tile: tuple[int, int, int] = (512, 1024, 1024)
    interpret: bool = False

    def __post_init__(self) -> None:
        rows, *dims = self.tile
        violations = power_of_two("tile[0]", rows, LEAST_ROWS)
        raise_violations(violations + [v for dim in dims for v in count("tile[1:]", dim)])

    @property
    def largest_block(self) -> int:
        return 1

    def violations(self, problem: Asked) -> list[str]:
        violations = []
        if problem.checked:
            violations.append("shard_map has check_vma=True, which it refuses; set it False")
        if problem.dtype not in (jnp.bfloat16, jnp.float32):
            violations.append(f"{problem.dtype} is not supported, bfloat16 and float32 are")
        if self._rows(problem.rows) < LEAST_ROWS:
            violations.append(
                f"{problem.rows} rows (tokens of a device x experts_per_token) are no multiple of "
                f"{LEAST_ROWS}"
            )
        return violations

    def forward(self, rows: Rows, weights: Experts, owners: Owners) -> RowProducts:
        return self._product(rows, weights, owners, transposed=False)

    def backward(
        self, rows: Rows, weights: Experts, owners: Owners, dy: RowProducts
    ) -> tuple[Rows, Experts]:
        from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

        dx = self._product(dy, weights, owners, transposed=True)
        dw = tgmm(
            rows.T,
            dy,
            group_sizes(owners, len(weights), len(rows)),
            weights.dtype,
            self._tile(len(rows), *weights.shape[1:]),
            interpret=self.interpret,
        )
        return dx, dw

    def _product(
        self, rows: jax.Array, weights: Experts, owners: Owners, *, transposed: bool
    ) -> jax.Array:
        from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

        inner, outer = weights.shape[:0:-1] if transposed else weights.shape[1:]
        return gmm(
            rows,
            weights,
            group_sizes(owners, len(weights), len(rows)),
            rows.dtype,
            self._tile(len(rows), inner, outer),
            transpose_rhs=transposed,
            interpret=self.interpret,
        )

    def _tile(self, rows: int, inner: int, outer: int) -> tuple[int, int, int]:
        return self._rows(rows), min(self.tile[1], inner), min(self.tile[2], outer)

    def _rows(self, rows: int) -> int:
        size = self.tile[0]
        while size > 1 and rows % size:
            size //= 2
        return size
