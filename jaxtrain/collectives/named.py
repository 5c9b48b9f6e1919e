"""Every reduction of the explicit step is here by name, so that a test can break each in turn.

`check_vma` catches a forgotten reduction only over axes absent from a leaf's spec, and a `psum`
too many doubles silently. A reduction that is in this table and nowhere else can be removed or
doubled by a test, which must then see the certificate fail (`tests/train/test_mutation.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax

from jaxtrain.collectives import algorithm
from jaxtrain.collectives.algorithm import Algorithm
from jaxtrain.collectives.vary import Axes


def _sum(x: jax.Array, axes: Axes) -> jax.Array:
    return lax.psum(x, axes)


SUMS: dict[str, Callable[[jax.Array, Axes], jax.Array]] = {
    "loss": _sum,
    "gradients": _sum,
    "small gradients": _sum,
    "gradient norm": _sum,
    "vocabulary": _sum,
}
"""All-reduces: loss and token count; gradients of leaves over the axes they are whole on; the same
for small leaves in one bucket; squared norms; exp-sums and target logits of the vocabulary."""

SUM_SCATTERS: dict[str, Callable[[jax.Array, Axes, int, Algorithm], jax.Array]] = {
    "weight gradients": algorithm.reduce_scatter,
    "optimizer gradients": algorithm.reduce_scatter,
    "row": algorithm.reduce_scatter,
    "column gradients": algorithm.reduce_scatter,
    "embedding": algorithm.reduce_scatter,
    "head gradients": algorithm.reduce_scatter,
}
"""Reduce-scatters: adjoint of the FSDP gather; gradients to ZeRO-1/2 owners; outputs of row-split
matmuls; adjoint of the token gather; vocabulary-parallel lookup; input gradient of the head. Those
made within a matmul are in `matmul.PRODUCT_SCATTERS`."""


def sum_over(name: str, x: jax.Array, axes: Axes) -> jax.Array:
    """`x` summed over mesh axes `axes` by the reduction registered as `name`."""
    return SUMS[name](x, axes) if axes else x


def sum_scatter(name: str, x: jax.Array, axes: Axes, dim: int, by: Algorithm) -> jax.Array:
    """As `sum_over`, each device keeping its tile of `dim`."""
    return SUM_SCATTERS[name](x, axes, dim, by) if axes else x


def all_gather(x: jax.Array, axes: Axes, dim: int, by: Algorithm) -> jax.Array:
    """The tiles of `dim` from all devices of `axes`, in order."""
    return algorithm.all_gather(x, axes, dim, by)
