"""Low-rank adapters of the matrices of a block (LoRA: Hu et al. 2021).

A matrix w [in, out] with an adapter is used as w + scale A B, which is formed only for export: x w
+ scale (x A) B keeps small changes to w that bf16 would round away, and needs no matrix of w's
size. If w is split by column, x is gathered once for w and A; if by row, both products are parts of
one sum. So the collectives are those without adapters. Where products are in 8 bits, A and B stay
in the compute dtype and multiply what was rounded for w.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.collectives.vary import Index
from jaxtrain.mesh.axes import STACKING_AXES
from jaxtrain.models.description import ADAPTER_A as INTO
from jaxtrain.models.description import ADAPTER_B as OUT_OF
from jaxtrain.models.description import ModelDescription
from jaxtrain.models.layered import layer_key
from jaxtrain.nn.communicator import Adapter, Communicator
from jaxtrain.nn.param import named_key
from jaxtrain.operations.block import adaptable


@dataclass(frozen=True)
class Adapters:
    """targets: the matrices that have an adapter, named as leaves of the model."""

    rank: int
    scale: float
    targets: tuple[str, ...]


def add_adapters(
    model: nnx.Module, adapters: Adapters, description: ModelDescription, key: jax.Array
) -> None:
    """Adds to modules of `model` the parameters A, drawn from N(0, 1 / in), and B, zero, and their
    scale. They are stacked and sharded as their matrix is; `rank` has no logical axis and is never
    split. key: the model's."""
    for path, name in targets_in(adapters, description):
        *way, last = (path + name).split(".")
        module: Any = model
        for part in way:
            module = module[int(part)] if part.isdigit() else getattr(module, part)
        weight = getattr(module, last)
        *stack, rows, columns = weight[...].shape
        *stacked, into, out = weight.get_metadata()["axes"]
        layered = STACKING_AXES[0] in stacked
        shape = (*stack[layered:], rows, adapters.rank)  # experts have one each

        def drawn(layer: Index, name: str = name, shape: tuple[int, ...] = shape) -> jax.Array:
            own = named_key(named_key(layer_key(key, layer), "adapters"), name)
            return jax.random.normal(named_key(own, "a"), shape, jnp.float32) * shape[-2] ** -0.5

        numbers = description.layers_at(path)
        a = jax.vmap(drawn)(jnp.asarray(numbers)) if layered else drawn(numbers[0])
        setattr(module, last + INTO, nnx.Param(a, axes=(*stacked, into, None)))
        b = jnp.zeros((*stack, adapters.rank, columns), jnp.float32)
        setattr(module, last + OUT_OF, nnx.Param(b, axes=(*stacked, None, out)))
        module.lora_scale = adapters.scale


def targets_in(adapters: Adapters, description: ModelDescription) -> list[tuple[str, str]]:
    """Returns (path of the block, name in it) of each target."""
    return [
        (path, weight.leaf)
        for path, block in description.blocks.items()
        for weight in adaptable(block)
        if path + weight.leaf in adapters.targets
    ]


def column(
    comm: Communicator, module: Any, names: tuple[str, ...], x: jax.Array
) -> list[jax.Array]:
    """x [tokens share, in] times the module's matrices `names`, split by column."""
    adapted = [name for name in names if hasattr(module, name + INTO)]
    weights = [getattr(module, name)[...] for name in names]
    ys = comm.column(x, *weights, *(getattr(module, name + INTO)[...] for name in adapted))
    out = dict(zip(names, ys, strict=False))
    for name, z in zip(adapted, ys[len(names) :], strict=True):
        change = comm.multiply(z * module.lora_scale, getattr(module, name + OUT_OF)[...])
        out[name] = out[name] + change
    return list(out.values())


def row(comm: Communicator, module: Any, name: str, x: jax.Array) -> jax.Array:
    """x [tokens, in's part] times the module's matrix `name`, split by row: [tokens share, out]."""
    weight = getattr(module, name)[...]
    if not hasattr(module, name + INTO):
        return comm.row(x, weight)
    a, b = getattr(module, name + INTO)[...], getattr(module, name + OUT_OF)[...]
    return comm.row(x, weight, Adapter(a, b, module.lora_scale))


def replicated(comm: Communicator, module: Any, name: str, x: jax.Array) -> jax.Array:
    """x [tokens share, in] times the module's matrix `name`, which is replicated: [tokens share,
    out]."""
    y = comm.multiply(x, getattr(module, name)[...])
    if not hasattr(module, name + INTO):
        return y
    z = comm.multiply(x, getattr(module, name + INTO)[...]) * module.lora_scale
    return y + comm.multiply(z, getattr(module, name + OUT_OF)[...])


def matrix(module: Any, name: str) -> jax.Array:
    """The module's matrix `name`, with its adapter's product added."""
    weight = getattr(module, name)[...]
    if not hasattr(module, name + INTO):
        return weight
    change = getattr(module, name + INTO)[...] @ getattr(module, name + OUT_OF)[...]
    return weight + change * module.lora_scale


def adapter(module: Any, name: str) -> tuple[jax.Array, jax.Array] | None:
    """A and B of the module's matrix `name`; None without an adapter."""
    if not hasattr(module, name + INTO):
        return None
    return getattr(module, name + INTO)[...], getattr(module, name + OUT_OF)[...]


def merge_adapters(params: Mapping[str, jax.Array], scale: float) -> dict[str, jax.Array]:
    """Returns the parameters of one layer or stacked over layers, with w + scale A B for each
    matrix that has an adapter; adapters stay."""
    out = dict(params)
    for name in params:
        if name.endswith(INTO):
            weight = name.removesuffix(INTO)
            change = (params[name] @ params[weight + OUT_OF]) * scale
            out[weight] = params[weight] + change.astype(params[weight].dtype)
    return out


def is_adapter(name: str) -> bool:
    """True if a leaf of that name is an adapter's."""
    return name.endswith((INTO, OUT_OF))


def adapter_places(description: ModelDescription) -> dict[str, int]:
    """Names of the matrices that can have an adapter -> the smaller side of each, which an
    adapter's rank must stay below."""
    return {
        path + weight.leaf: min(weight.rows, weight.columns)
        for path, block in description.blocks.items()
        for weight in adaptable(block)
    }
