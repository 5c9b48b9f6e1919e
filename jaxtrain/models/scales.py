"""Leaves of delayed scales beside the matrices of a block (`nn.quantized.delayed`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.description import ModelDescription
from jaxtrain.nn.quantized.delayed import (
    EXPONENTS,
    ROWS,
    SCALES,
    first_table,
    is_scales,
    next_table,
)
from jaxtrain.nn.quantized.recipe import Products


def add_scales(model: nnx.Module, description: ModelDescription) -> None:
    """Gives modules of `model` a leaf of scales for each matrix that a layer multiplies by, stacked
    as it is; zeros, which `first_scales` replaces."""
    for name in description.products:
        *way, last = name.split(".")
        module: Any = model
        for part in way:
            module = module[int(part)] if part.isdigit() else getattr(module, part)
        weight = getattr(module, last)
        *stack, _, _ = weight[...].shape
        *stacked, _, _ = weight.get_metadata()["axes"]
        leaf = nnx.Param(jnp.zeros((*stack, len(ROWS) * EXPONENTS)), axes=(*stacked, None))
        setattr(module, last + SCALES, leaf)


def first_scales(params: Mapping[str, Any], products: Products | None) -> dict[str, Any]:
    """The parameters, each leaf of scales among them as before the first step."""
    found = dict(params)
    for name in filter(is_scales, params):
        assert products is not None and products.scaling is not None, "scales of no products"
        weight, forms = params[name.removesuffix(SCALES)], (products.forward, products.backward)
        found[name] = first_table(weight, *forms, products.scaling.history)
    return found


def next_scales(
    params: Mapping[str, jax.Array], grads: Mapping[str, jax.Array], products: Products | None
) -> dict[str, jax.Array]:
    """The leaves of scales after a step. grads: of all leaves; of these what the step saw."""
    if products is None or products.scaling is None:
        return {}
    history = products.scaling.history
    found = {k: g for k, g in grads.items() if is_scales(k)}
    return {k: next_table(params[k], g, history) for k, g in found.items()}
