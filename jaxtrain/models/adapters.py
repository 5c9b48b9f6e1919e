"""Low-rank adapters beside the matrices of a block (LoRA: Hu et al. 2021).

A matrix w [in, out] with an adapter is used as w + scale A B, which is never formed but for export:
x w + scale (x A) B keeps what bf16 would round away of small changes to w, and needs no matrix of
w's size. Where w is split by column, x is gathered once for w and A; where by row, both products
are parts of one sum. So the collectives are those without adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxtrain.nn.communicator import Communicator
from jaxtrain.nn.param import constant, named_key, normal

INTO, OUT_OF = "_lora_a", "_lora_b"
"""What the names of A [.., in, rank] and B [.., rank, out] end with, after their matrix's."""


@dataclass(frozen=True)
class Adapters:
    """weights: the matrices of a block that have one, by their names in it."""

    rank: int
    scale: float
    weights: tuple[str, ...]


def add_adapters(block: nnx.Module, adapters: Adapters, key: jax.Array) -> None:
    """Gives modules of `block` parameters for A, drawn from N(0, 1 / in), and B, zero, and the
    scale of both. They have their matrix's logical axes, and `rank` has none: it is never split."""
    for name in adapters.weights:
        *path, last = name.split(".")
        module: Any = block
        for part in path:
            module = getattr(module, part)
        weight = getattr(module, last)
        rows, columns = weight[...].shape
        into, out = weight.get_metadata()["axes"]
        shape = (rows, adapters.rank)
        a = normal(named_key(key, name), "a", shape, (into, None), std=rows**-0.5)
        setattr(module, last + INTO, a)
        setattr(module, last + OUT_OF, constant(0.0, (adapters.rank, columns), (None, out)))
        module.lora_scale = adapters.scale


def column(
    comm: Communicator, module: Any, names: tuple[str, ...], x: jax.Array
) -> list[jax.Array]:
    """x [tokens share, in] times the module's matrices of these names, split by column."""
    adapted = [name for name in names if hasattr(module, name + INTO)]
    weights = [getattr(module, name)[...] for name in names]
    ys = comm.column(x, *weights, *(getattr(module, name + INTO)[...] for name in adapted))
    out = dict(zip(names, ys, strict=False))
    for name, z in zip(adapted, ys[len(names) :], strict=True):
        change = comm.multiply(z * module.lora_scale, getattr(module, name + OUT_OF)[...])
        out[name] = out[name] + change
    return list(out.values())


def row(comm: Communicator, module: Any, name: str, x: jax.Array) -> jax.Array:
    """x [tokens, in's part] times the module's matrix of that name, split by row: [tokens share,
    out]."""
    weight = getattr(module, name)[...]
    if not hasattr(module, name + INTO):
        return comm.row(x, weight)
    z = comm.multiply(x, getattr(module, name + INTO)[...]) * module.lora_scale
    return comm.row(x, weight, (z, getattr(module, name + OUT_OF)[...]))


def merged(params: Mapping[str, jax.Array], scale: float) -> dict[str, jax.Array]:
    """The parameters of one layer or stacked over layers, matrices that have an adapter as
    w + scale A B; adapters stay."""
    out = dict(params)
    for name in params:
        if name.endswith(INTO):
            weight = name.removesuffix(INTO)
            change = (params[name] @ params[weight + OUT_OF]) * scale
            out[weight] = params[weight] + change.astype(params[weight].dtype)
    return out


def is_adapter(name: str) -> bool:
    """Whether a leaf of that name is an adapter's."""
    return name.endswith((INTO, OUT_OF))


def adapter_places(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The matrices that can have an adapter, of a model's leaves, and the smaller side of each.
    Those of a mixture of experts have none."""
    inside = {k: s for k, s in shapes.items() if k.startswith(("prefix.", "period.", "suffix."))}
    sides = {k: s[1:] if k.startswith("period.") else s for k, s in inside.items()}
    routed = tuple(k.removesuffix("router") for k in sides if k.endswith(".router"))
    plain = {k: s for k, s in sides.items() if not is_adapter(k) and not k.startswith(routed)}
    return {k: min(s) for k, s in plain.items() if len(s) == 2}
