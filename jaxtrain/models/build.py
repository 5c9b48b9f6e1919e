"""Builds the module of a model: a described one, with or without adapters, or a user's own."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxtrain.attention.kernels import AttentionKernel
from jaxtrain.losses.objective import Objective
from jaxtrain.models.adapters import Adapters, add_adapters
from jaxtrain.models.layered import ModelConfig
from jaxtrain.models.routers import add_tallies
from jaxtrain.models.scales import add_scales
from jaxtrain.nn.module import ModuleSplit, build, take_apart


def build_model(
    model: Any,
    key: jax.Array,
    *,
    kernel: AttentionKernel | None = None,
    adapters: Adapters | None = None,
    scales: bool = False,
    tallies: bool = False,
    objective: Objective | None = None,
) -> nnx.Module:
    """Returns the module with its initial parameters, a function of `key`. kernel: of attention.
    adapters, scales: added to its matrices. tallies: added to its routers. objective: replaces its
    loss. All need a model with a description. A user's own model is a config with `build(rngs)`, or
    a function of `nnx.Rngs`."""
    if not isinstance(model, ModelConfig):
        make = getattr(model, "build", model)
        return build(lambda key: make(nnx.Rngs(key)), key)

    def make_described(key: jax.Array) -> nnx.Module:
        module: Any = model.build(key, kernel=kernel)
        if adapters is not None:
            add_adapters(module, adapters, model.describe(), key)
        if scales:
            add_scales(module, model.describe())
        if tallies:
            add_tallies(module, model.describe())
        if objective is not None:
            module.objective = objective
        return module

    return build(make_described, key)


def abstract_model(
    model: Any,
    *,
    adapters: Adapters | None = None,
    kernel: AttentionKernel | None = None,
    scales: bool = False,
    tallies: bool = False,
    objective: Objective | None = None,
) -> ModuleSplit:
    """Returns `take_apart` of the module that `build_model` makes with these options, with shapes
    instead of arrays. Raises ValueError for logical axes that do not match a leaf's dims."""

    def make() -> nnx.Module:
        added: Any = dict(adapters=adapters, scales=scales, tallies=tallies)
        return build_model(model, jax.random.key(0), kernel=kernel, objective=objective, **added)

    return take_apart(nnx.eval_shape(make))
