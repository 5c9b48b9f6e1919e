"""Every reduction of the explicit step is here by name, so that a test can break each in turn.

`check_vma` catches a forgotten reduction only over axes absent from a leaf's spec, and a `psum`
too many doubles silently. A reduction that is in this table and nowhere else can be removed or
doubled by a test, which must then see the certificate fail (`tests/train/test_mutation.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax

Axes = tuple[str, ...]


def _sum(x: jax.Array, axes: Axes) -> jax.Array:
    return lax.psum(x, axes)


def _sum_scatter(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """Sum over `axes` and keep this device's part of `dim`; sends (n-1)/n of x's bytes."""
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


SUMS: dict[str, Callable[[jax.Array, Axes], jax.Array]] = {
    "loss": _sum,
    "gradients": _sum,
    "small gradients": _sum,
    "gradient norm": _sum,
    "vocabulary": _sum,
}
"""All-reduces: loss and token count; gradients of leaves over the axes they are whole on; the same
for small leaves in one bucket; squared norms; exp-sums and target logits of the vocabulary."""

SUM_SCATTERS: dict[str, Callable[[jax.Array, Axes, int], jax.Array]] = {
    "weight gradients": _sum_scatter,
    "optimizer gradients": _sum_scatter,
    "row": _sum_scatter,
    "column gradients": _sum_scatter,
    "embedding": _sum_scatter,
    "head gradients": _sum_scatter,
}
"""Reduce-scatters: adjoint of the FSDP gather; gradients to ZeRO-1/2 owners; outputs of row-split
matmuls; adjoint of the token gather; vocabulary-parallel lookup; input gradient of the head."""


def sum_over(name: str, x: jax.Array, axes: Axes) -> jax.Array:
    """`x` summed over mesh axes `axes` by the reduction registered as `name`."""
    return SUMS[name](x, axes) if axes else x


def sum_scatter(name: str, x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """As `sum_over`, each device keeping its tile of `dim`."""
    return SUM_SCATTERS[name](x, axes, dim) if axes else x


def all_gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """The tiles of `dim` from all devices of `axes`, in order; sends (n-1)/n of the result."""
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def vary(x: jax.Array, axes: Axes) -> jax.Array:
    """`x` typed as varying over `axes` (nothing moves): inside the step every value varies."""
    present = jax.typeof(x).manual_axis_type.varying
    missing = tuple(a for a in axes if a not in present)
    return lax.pcast(x, missing, to="varying") if missing else x
