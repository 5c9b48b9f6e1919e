"""Leaves of a model's routers that a step counts in and moves (`moe.tally`, `buffers`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.description import ExpertCall, ModelDescription, operations
from jaxtrain.moe.replay import Replay
from jaxtrain.moe.tally import tally_size

Arrays = Mapping[str, jax.Array]
TALLY, BIAS, REPLAY = "_tally", "_bias", "_replay"
"""What ends the names of such leaves, behind that of a router."""


def every_router(description: ModelDescription) -> Iterator[tuple[str, ExpertCall]]:
    """The name of each router, those of the stack once, and its layer."""
    for path, block in description.blocks.items():
        for each in operations(block):
            if isinstance(each, ExpertCall):
                yield path + each.router.leaf, each


def routers(description: ModelDescription) -> Iterator[tuple[str, ExpertCall]]:
    """Those that are counted."""
    return (each for each in every_router(description) if each[1].tallied)


def replays(description: ModelDescription) -> dict[str, tuple[Replay, range]]:
    """The leaves in which routing is kept: what each layer's holds, and the numbers of layers."""
    return {
        name + REPLAY: (call.replay, description.layers_at(name.removesuffix(call.router.leaf)))
        for name, call in every_router(description)
        if call.replay is not None
    }


def add_tallies(model: nnx.Module, description: ModelDescription) -> None:
    """Gives modules of `model` a tally for each router that is counted, stacked as it is."""
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


def with_seed(params: Arrays, tallies: Set[str], seed: jax.Array) -> dict[str, jax.Array]:
    """The parameters, the `tallies` among them holding what the loss is multiplied by before it is
    differentiated."""
    return {
        k: jnp.broadcast_to(seed, v.shape).astype(v.dtype) if k in tallies else v
        for k, v in params.items()
    }


def next_biases(
    params: Arrays, grads: Arrays, description: ModelDescription | None
) -> dict[str, jax.Array]:
    """Routers' biases after a step, whose tallies are in `grads`: lower for experts above the mean
    load, higher for those below (Wang et al. 2024)."""
    found = {}
    for name, call in () if description is None else routers(description):
        if call.bias_rate and name + TALLY in grads:
            loads, bias = grads[name + TALLY][..., : call.experts], params[name + BIAS]
            mean = jnp.mean(loads, axis=-1, keepdims=True)
            found[name + BIAS] = bias + call.bias_rate * jnp.sign(mean - loads).astype(bias.dtype)
    return found
