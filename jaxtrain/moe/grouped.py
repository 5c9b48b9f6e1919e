"""The product of each expert's rows with its own matrix, whatever kernel computes it.

Rows lie expert after expert in blocks of one size, and each block has one expert, its owner. How
large a block is the kernel says: the rows of an expert are padded with zeros to whole ones, and in
blocks of one row nothing is padded.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from jaxtrain.collectives.vary import vary, varying_axes

Rows = Shaped[Array, "rows n"]
RowProducts = Shaped[Array, "rows m"]
Experts = Shaped[Array, "experts n m"]
Owners = Int[Array, " blocks"]


class Asked(NamedTuple):
    """Sizes of a grouped product that a layer asks of a kernel, on one device.

    rows: its tokens, once for each of their experts. embed, hidden: the dims of its matrices.
    checked: True in a shard_map with `check_vma=True`.
    """

    rows: int
    experts: int
    embed: int
    hidden: int
    dtype: np.dtype
    checked: bool = False


@runtime_checkable
class GroupedMatmul(Protocol):
    """A kernel: a value, hashable, static in a traced program."""

    @property
    def largest_block(self) -> int:
        """Largest number of rows that a block may have, a power of two."""
        ...

    def violations(self, problem: Asked) -> list[str]:
        """Returns the reasons why the kernel cannot compute this problem."""
        ...

    def forward(self, rows: Rows, weights: Experts, owners: Owners) -> RowProducts: ...

    def backward(
        self, rows: Rows, weights: Experts, owners: Owners, dy: RowProducts
    ) -> tuple[Rows, Experts]:
        """Gradients of rows and of weights; those summed over rows in fp32."""
        ...


def takes_8_bits(kernel: GroupedMatmul) -> bool:
    """True if `forward` and `backward` take numbers of 8 bits and return fp32: such a kernel has
    `narrow = True`. Others get these numbers in 16 bits."""
    return getattr(kernel, "narrow", False)


def grouped_matmul(
    kernel: GroupedMatmul, rows: Rows, weights: Experts, owners: Owners
) -> RowProducts:
    """Each block of `rows` times the matrix of the expert that owns it, in the dtype of rows."""
    # One type for all, as `attention.fused.attend` has it.
    axes = varying_axes(rows, weights, owners)
    return _multiply(kernel, *(vary(x, axes) for x in (rows, weights, owners)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(kernel: GroupedMatmul, rows: Rows, weights: Experts, owners: Owners) -> RowProducts:
    return kernel.forward(rows, weights, owners)


def _multiply_backward(
    kernel: GroupedMatmul, saved: tuple[Rows, Experts, Owners], dy: RowProducts
) -> tuple[Rows, Experts, None]:
    return *kernel.backward(*saved, dy), None


# By `_multiply` itself, into which remat policies do not look: what they save hangs on no kernel.
_multiply.defvjp(
    lambda kernel, *inputs: (_multiply(kernel, *inputs), inputs),
    _multiply_backward,
)


def block_rows(rows: int, experts: int, largest: int) -> int:
    """Rows of a block: a power of two, so that all padding is a quarter of the rows or less where
    there are enough of them."""
    return min(largest, 1 << max(rows // (4 * experts), 8).bit_length() - 1)


def block_count(rows: int, experts: int, largest: int) -> int:
    """Number of blocks that suffices for any choice of experts. Most are needed if all experts but
    one have one row each."""
    used = min(experts, rows)
    return (rows - used) // block_rows(rows, experts, largest) + used


def blocks_of(
    rows: Shaped[Array, "rows n"], owners: Int[Array, " blocks"]
) -> Shaped[Array, "blocks block n"]:
    """The rows, block by block; all blocks are of one size."""
    block = len(rows) // max(len(owners), 1)  # without a token there is no block
    return rows.reshape(len(owners), block, rows.shape[-1])


def group_sizes(owners: Owners, experts: int, rows: int) -> Int[Array, " experts"]:
    """Rows of each expert, padding included."""
    blocks = jnp.sum(owners[:, None] == jnp.arange(experts)[None], axis=0)
    return (blocks * (rows // max(len(owners), 1))).astype(jnp.int32)
