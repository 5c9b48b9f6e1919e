"""Leaves of a model's routers in which a step counts, and which it updates (`moe.tally`,
`buffers`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.description import ModelDescription
from jaxtrain.moe.replay import Replay
from jaxtrain.moe.tally import tally_size
from jaxtrain.operations.block import mixtures
from jaxtrain.operations.experts import ExpertCall

TALLY, BIAS, REPLAY = "_tally", "_bias", "_replay"
"""Suffixes of the names of such leaves, after a router's name."""


def every_router(description: ModelDescription) -> Iterator[tuple[str, ExpertCall]]:
    """Yields the name of each router, those of the stack once, and its operation."""
    for path, block in description.blocks.items():
        for call in mixtures(block):
            yield path + call.router.leaf, call


def routers(description: ModelDescription) -> Iterator[tuple[str, ExpertCall]]:
    """Routers whose choices are counted."""
    return (router for router in every_router(description) if router[1].tallied)


def replays(description: ModelDescription) -> dict[str, tuple[Replay, range]]:
    """Leaves that record routing: the format of a layer's record, and the numbers of layers."""
    return {
        name + REPLAY: (call.replay, description.layers_at(name.removesuffix(call.router.leaf)))
        for name, call in every_router(description)
        if call.replay is not None
    }


def add_tallies(model: nnx.Module, description: ModelDescription) -> None:
    """Adds to modules of `model` a tally for each router that is counted, stacked as it is."""
    for name, call in routers(description):
        *way, last = name.split(".")
        module: Any = model
        for part in way:
            module = module[int(part)] if part.isdigit() else getattr(module, part)
        router = getattr(module, last)
        *stack, _, _ = router[...].shape
        *stacked, _, _ = router.get_metadata()["axes"]
        leaf = nnx.Param(jnp.ones((*stack, tally_size(call.experts))), axes=(*stacked, None))
        setattr(module, last + TALLY, leaf)


def with_grad_scale(
    params: Mapping[str, jax.Array], tallies: Set[str], scale: jax.Array
) -> dict[str, jax.Array]:
    """Returns the parameters, with `tallies` set to the factor of the differentiated loss."""
    return {
        k: jnp.broadcast_to(scale, v.shape).astype(v.dtype) if k in tallies else v
        for k, v in params.items()
    }


def next_biases(
    params: Mapping[str, jax.Array],
    grads: Mapping[str, jax.Array],
    description: ModelDescription | None,
) -> dict[str, jax.Array]:
    """Routers' biases after a step, whose tallies are in `grads`: lower for experts above the mean
    load, higher for those below (Wang et al. 2024)."""
    biases = {}
    for name, call in () if description is None else routers(description):
        if call.bias_rate and name + TALLY in grads:
            loads, bias = grads[name + TALLY][..., : call.experts], params[name + BIAS]
            mean = jnp.mean(loads, axis=-1, keepdims=True)
            biases[name + BIAS] = bias + call.bias_rate * jnp.sign(mean - loads).astype(bias.dtype)
    return biases
