"""Every exact reduction of the explicit step is here by name: a test can break each in turn.

(Those of a compressed reducer are held to a law of their own: what it sums and what it keeps are
together the true sum.)

`check_vma` catches a forgotten reduction only over axes absent from a leaf's spec, and a `psum`
too many doubles silently. A reduction that is in this table and nowhere else can be removed or
doubled by a test, which must then see the certificate fail (`tests/certificate/test_mutation.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
from jax import lax

from jaxtrain.collectives import algorithm as collectives
from jaxtrain.collectives.algorithm import Algorithm
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.vary import same
from jaxtrain.mesh.axes import MeshAxes


@runtime_checkable
class AllReduce(Protocol):
    """Whatever sums over devices: an `Algorithm`, or several in levels (`hierarchical.py`)."""

    def all_reduce(self, x: jax.Array, axes: MeshAxes) -> jax.Array:
        """The sum over the devices of `axes`, with equal bits on all of them."""
        ...


def _sum(x: jax.Array, axes: MeshAxes) -> jax.Array:
    return lax.psum(x, axes)


def _all_reduce(x: jax.Array, axes: MeshAxes, reducer: AllReduce) -> jax.Array:
    # JAX's types already know that the compiler's own sum is equal everywhere.
    return _sum(x, axes) if isinstance(reducer, Lax) else same(reducer.all_reduce(x, axes), axes)


SUMS: dict[str, Callable[[jax.Array, MeshAxes], jax.Array]] = {
    "loss": _sum,
    "gradient norm": _sum,
    "vocabulary": _sum,
    "heads": _sum,
    "optimizer": _sum,
    "expert loads": _sum,
    "documents": _sum,
}
"""All-reduces: loss and token count; squared norms; exp-sums and target logits of the
vocabulary; squares of a norm over all heads, and their gradients; sums that an optimizer makes of a
leaf; choices of each expert; sums over a document's tokens, where rows are split."""

GRADIENT_SUMS: dict[str, Callable[[jax.Array, MeshAxes, AllReduce], jax.Array]] = {
    "gradients": _all_reduce,
    "small gradients": _all_reduce,
    "layer gradients": _all_reduce,
}
"""All-reduces by the experiment's reducer, of gradients over the axes a leaf is whole on: leaf by
leaf; small leaves in buckets; either of them within the backward pass of their layer."""

LINK_SUMS: dict[str, Callable[[jax.Array, MeshAxes, Algorithm], jax.Array]] = {
    "slow links": collectives.all_reduce,
}
"""The all-reduce within a hierarchical one; its reduce-scatters are in SUM_SCATTERS."""

SUM_SCATTERS: dict[str, Callable[[jax.Array, MeshAxes, int, Algorithm], jax.Array]] = {
    "weight gradients": collectives.reduce_scatter,
    "optimizer gradients": collectives.reduce_scatter,
    "row": collectives.reduce_scatter,
    "column gradients": collectives.reduce_scatter,
    "embedding": collectives.reduce_scatter,
    "head gradients": collectives.reduce_scatter,
    "fast links": collectives.reduce_scatter,
    "pipeline output": collectives.reduce_scatter,
    "pipeline input gradients": collectives.reduce_scatter,
    "gathered key gradients": collectives.reduce_scatter,
}
"""Reduce-scatters: adjoint of the FSDP gather; gradients to ZeRO-1/2 owners; outputs of row-split
matmuls; adjoint of the token gather; vocabulary-parallel lookup; input gradient of the head; those
of hierarchical sums; what the last stage hands to all of them, and the gradient of what all hand to
the first; gradients of keys that were gathered over `context`. Those made within a matmul are in
`matmul.PRODUCT_SCATTERS`, of keys that travel in `context.ring.KEY_SUMS`."""


def sum_over(name: str, x: jax.Array, axes: MeshAxes) -> jax.Array:
    """`x` summed over the mesh axes `axes`, as `lax.psum` does, by the reduction registered as
    `name` in SUMS. Without axes, here as below, x itself."""
    return SUMS[name](x, axes) if axes else x


def gradient_sum(name: str, x: jax.Array, axes: MeshAxes, reducer: AllReduce) -> jax.Array:
    """Returns a gradient summed over `axes`, typed as equal on all their devices. Names are those
    of GRADIENT_SUMS."""
    return GRADIENT_SUMS[name](x, axes, reducer) if axes else x


def link_sum(name: str, x: jax.Array, axes: MeshAxes, algorithm: Algorithm) -> jax.Array:
    """Returns a sum over `axes`, typed as varying: one level of a hierarchical sum. Names are those
    of LINK_SUMS."""
    return LINK_SUMS[name](x, axes, algorithm) if axes else x


def sum_scatter(
    name: str, x: jax.Array, axes: MeshAxes, dim: int, algorithm: Algorithm
) -> jax.Array:
    """Returns this device's tile of `dim` of the sum over `axes`, as `lax.psum_scatter` does. Names
    are those of SUM_SCATTERS. Raises ValueError if the devices do not divide the dim."""
    return SUM_SCATTERS[name](x, axes, dim, algorithm) if axes else x


def all_gather(x: jax.Array, axes: MeshAxes, dim: int, algorithm: Algorithm) -> jax.Array:
    """Returns the tiles of `dim` from all devices of `axes`, joined in order of their numbers, as
    `lax.all_gather(tiled=True)` does. It is no reduction, so it has no name."""
    return collectives.all_gather(x, axes, dim, algorithm)
