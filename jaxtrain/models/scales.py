"""Leaves of delayed scales for the matrices of a block (`quantization.delayed`)."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.description import ModelDescription
from jaxtrain.quantization.delayed import (
    EXPONENTS,
    ROWS,
    SCALES,
    first_table,
    next_table,
    table_of_weight,
)
from jaxtrain.quantization.recipe import Products


def scale_names(description: ModelDescription | None) -> frozenset[str]:
    """Names of such leaves in a model whose products have delayed scales."""
    return frozenset(k + SCALES for k in (() if description is None else description.narrowed))


def add_scales(model: nnx.Module, description: ModelDescription) -> None:
    """Adds to modules of `model` a leaf of scales for each matrix that a layer multiplies by,
    stacked as it is, over experts too. They are zeros, which `first_scales` replaces. Raises
    ValueError if the module has another parameter of that name."""
    for name in description.narrowed:
        *way, last = name.split(".")
        module: Any = model
        for part in way:
            module = module[int(part)] if part.isdigit() else getattr(module, part)
        weight = getattr(module, last)
        *stack, _, _ = weight[...].shape
        *stacked, _, _ = weight.get_metadata()["axes"]
        if hasattr(module, last + SCALES):
            raise ValueError(
                f"the model has a parameter {name}{SCALES}, the name of the delayed scales of "
                f"{name}; give it another name, or use Fp8Products(scaling=None)"
            )
        leaf = nnx.Param(jnp.zeros((*stack, len(ROWS) * EXPONENTS)), axes=(*stacked, None))
        setattr(module, last + SCALES, leaf)


def first_scales(
    params: Mapping[str, Any], scales: Set[str], products: Products | None, derivative: float = 1.0
) -> dict[str, Any]:
    """Returns the parameters with the leaves `scales` as before the first step. derivative: as in
    `first_table`."""
    updated = dict(params)
    for name in scales:
        assert products is not None and products.scaling is not None, "scales of no products"
        weight, forms = params[name.removesuffix(SCALES)], (products.forward, products.backward)
        updated[name] = first_table(weight, *forms, products.scaling.history, derivative)
    return updated


def next_scales(
    params: Mapping[str, jax.Array],
    grads: Mapping[str, jax.Array],
    scales: Set[str],
    products: Products | None,
) -> dict[str, jax.Array]:
    """Leaves `scales` after a step. grads: of all trained leaves; those of `scales` are the step's
    observations."""
    if products is None or products.scaling is None:
        return {}
    history = products.scaling.history
    return {k: next_table(params[k], grads[k], history) for k in scales if k in grads}


def scales_of_weights(
    params: Mapping[str, jax.Array], scales: Set[str], products: Products | None
) -> dict[str, jax.Array]:
    """Leaves `scales` with w's rows computed from the weights of `params`, for weights that no step
    has used: averages may be larger than a run's recent weights."""
    if products is None or products.scaling is None:
        return {}
    weights = {k: params[k.removesuffix(SCALES)] for k in scales}
    return {k: table_of_weight(params[k], w, products.forward) for k, w in weights.items()}
