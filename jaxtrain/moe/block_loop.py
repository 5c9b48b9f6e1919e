"""The portable grouped matmul: a loop that multiplies block by block with the weights of its owner.

JAX's own `lax.ragged_dot` is right too, gradients and shard_map included, but where it is no
instruction of the machine it multiplies every row with every expert: on CPU with 8 experts, 4096
rows of 512 and 1024 hidden units it took 150 ms forward and 527 ms backward; this takes 39 and 108.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxtrain.collectives.vary import vary, varying_axes
from jaxtrain.moe.grouped import Asked, Experts, Owners, Products, Rows


@dataclass(frozen=True)
class BlockLoop:
    """Any platform, dtype and shape: a loop over blocks of rows, each times its expert's matrix.

    largest_block: rows that share one reading of an expert's weights, a power of two. 512 are
    enough to be bound by arithmetic where a device makes 500 FLOPs a byte of memory, in 16 bits.
    """

    largest_block: int = 512

    def violations(self, asked: Asked) -> list[str]:
        return []

    def forward(self, rows: Rows, weights: Experts, owners: Owners) -> Products:
        def step(_: tuple[()], at: tuple[jax.Array, jax.Array]) -> tuple[tuple[()], jax.Array]:
            block, owner = at
            return (), block @ _matrix(weights, owner)

        out = lax.scan(step, (), (_blocks(rows, owners), owners))[1]
        return out.reshape(len(rows), weights.shape[-1])

    def backward(
        self, rows: Rows, weights: Experts, owners: Owners, dy: Products
    ) -> tuple[Rows, Experts]:
        def step(dw: jax.Array, at: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            block, dy, owner = at
            made = jnp.matmul(block.T, dy, preferred_element_type=jnp.float32)
            return dw.at[owner].add(made), dy @ _matrix(weights, owner).T

        axes = varying_axes(rows, weights, owners, dy)
        start = vary(jnp.zeros(weights.shape, jnp.float32), axes)
        each = (_blocks(rows, owners), _blocks(dy, owners), owners)
        dw, dx = lax.scan(step, start, each)
        return dx.reshape(rows.shape), dw.astype(weights.dtype)


def _blocks(
    rows: Float[Array, "rows n"], owners: Int[Array, " blocks"]
) -> Float[Array, "blocks block n"]:
    """The rows, block by block; all blocks are of one size."""
    block = len(rows) // max(len(owners), 1)  # without a token there is no block
    return rows.reshape(len(owners), block, rows.shape[-1])


def _matrix(weights: Float[Array, "experts n m"], owner: Int[Array, ""]) -> Float[Array, "n m"]:
    return lax.dynamic_index_in_dim(weights, owner, 0, keepdims=False)
