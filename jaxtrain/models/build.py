"""The module of a model: one that describes itself, with adapters or without, or a user's own."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxtrain.attention.kernels import AttentionKernel
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
) -> nnx.Module:
    """The module with its initial parameters, a function of `key`. kernel: of attention; adapters,
    and leaves of delayed scales: put beside its matrices; tallies: beside its routers; all only of
    a model that describes itself. A user's own is `build(rngs)` of a config, or a function of
    `nnx.Rngs`."""
    if not isinstance(model, ModelConfig):
        make = getattr(model, "build", model)
        return build(lambda key: make(nnx.Rngs(key)), key)

    def made(key: jax.Array) -> nnx.Module:
        module: Any = model.build(key, kernel=kernel)
        if adapters is not None:
            add_adapters(module, adapters, model.describe(), key)
        if scales:
            add_scales(module, model.describe())
        if tallies:
            add_tallies(module, model.describe())
        return module

    return build(made, key)


def abstract_model(
    model: Any,
    *,
    adapters: Adapters | None = None,
    kernel: AttentionKernel | None = None,
    scales: bool = False,
    tallies: bool = False,
) -> ModuleSplit:
    """The module taken apart, shapes in place of arrays. Raises ValueError as `take_apart`."""

    def make() -> nnx.Module:
        how: Any = dict(kernel=kernel, adapters=adapters, scales=scales, tallies=tallies)
        return build_model(model, jax.random.key(0), **how)

    return take_apart(nnx.eval_shape(make))
