"""Padding in a leaf: rows of a table beyond the vocabulary, and a pipeline's slots without a layer.
They are zeros with zero gradients, and so stay zero; but a codec may change a zero."""

from __future__ import annotations

import jax.numpy as jnp

from jaxtrain.arrays import Leaves
from jaxtrain.mesh.sharding import PaddedAxis
from jaxtrain.pipeline.layout import CHUNKS, where_real
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.gradients import Gradients


def without_padding(assembly: Assembly, sums: Gradients) -> Gradients:
    """Returns compressed sums with zeros in every leaf's padding, and in that of the errors: else
    the next sums would add values that were never sent."""
    residuals = sums.residuals
    if "errors" in residuals:
        residuals = {**residuals, "errors": _zero_padding(assembly, residuals["errors"])}
    return sums._replace(grads=_zero_padding(assembly, sums.grads), residuals=residuals)


def _zero_padding(assembly: Assembly, leaves: Leaves) -> Leaves:
    """leaves: named and shaped as parameters; residuals have a leading dim of devices."""
    out = dict(leaves)
    for name, leaf in leaves.items():
        axes = assembly.places[name].axes
        lead = leaf.ndim - len(axes)
        for dim, axis in enumerate(axes, start=lead):
            if isinstance(axis, PaddedAxis) and axis.real < leaf.shape[dim]:
                out[name] = where_real(jnp.arange(leaf.shape[dim]) < axis.real, out[name], dim)
        if assembly.pipeline is not None and "layers" in axes:
            layout = assembly.pipeline.layout
            if layout.padding:
                # Chunks are the dim before that of layers.
                slots = layout.layer_of if CHUNKS in axes else layout.layer_of[0]
                first = lead + axes.index(CHUNKS if CHUNKS in axes else "layers")
                out[name] = where_real(jnp.asarray(slots) >= 0, out[name], first)
    return out
