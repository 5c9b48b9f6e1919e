"""Low-rank adapters beside the matrices of a block (LoRA: Hu et al. 2021).

A matrix w [.., in, out] with an adapter is used as w + scale A B, formed where the block has its
parameters gathered: every product, collective and kernel then is what it is without adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from jaxtrain.nn.param import constant, named_key, normal

if TYPE_CHECKING:
    from jaxtrain.models.decoder import DecoderConfig

INTO, OUT_OF = "_lora_a", "_lora_b"
"""What the names of A [.., in, rank] and B [.., rank, out] end with, after their matrix's."""


@dataclass(frozen=True)
class Adapters:
    """weights: the matrices of a block that have one, by their names in it."""

    rank: int
    scale: float
    weights: tuple[str, ...]


def add_adapters(block: nnx.Module, adapters: Adapters, key: jax.Array) -> None:
    """Gives modules of `block` parameters for A, drawn from N(0, 1 / in), and B, zero. Both have
    their matrix's logical axes, and `rank` has none: it is never split."""
    for name in adapters.weights:
        *path, last = name.split(".")
        module: Any = block
        for part in path:
            module = getattr(module, part)
        weight = getattr(module, last)
        *stack, rows, columns = weight[...].shape
        *lead, into, out = weight.get_metadata()["axes"]
        shape, axes = (*stack, rows, adapters.rank), (*lead, into, None)
        a = normal(named_key(key, name), "a", shape, axes, std=rows**-0.5)
        b = constant(0.0, (*stack, adapters.rank, columns), (*lead, None, out))
        setattr(module, last + INTO, a)
        setattr(module, last + OUT_OF, b)


def adapted(module: nnx.Module, scale: float) -> Any:
    """The module with its matrices as they are used."""
    graph, state = nnx.split(module)
    flat = nnx.to_flat_state(state)
    arrays = {".".join(map(str, path)): variable.get_value() for path, variable in flat}
    used = merged(arrays, scale)
    made = [(path, variable.replace(used[".".join(map(str, path))])) for path, variable in flat]
    return nnx.merge(graph, nnx.from_flat_state(made))


def merged(params: Mapping[str, jax.Array], scale: float) -> dict[str, jax.Array]:
    """The parameters, matrices that have an adapter as w + scale A B; adapters stay."""
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


def with_adapters(
    config: DecoderConfig, targets: tuple[str, ...], rank: int, scale: float
) -> DecoderConfig:
    """The model with adapters beside the matrices `targets`, named as leaves of the model."""
    found: dict[str, Any] = {}
    for part in ("prefix", "period", "suffix"):
        blocks = []
        for i, block in enumerate(getattr(config, part)):
            start = f"{part}.{i}."
            mine = tuple(t.removeprefix(start) for t in targets if t.startswith(start))
            adapters = Adapters(rank, scale, mine) if mine else None
            blocks.append(replace(block, adapters=adapters))
        found[part] = tuple(blocks)
    return replace(config, **found)


def without_adapters(config: DecoderConfig) -> DecoderConfig:
    """The model alone."""
    return with_adapters(config, (), 0, 0.0)


def adapter_places(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The matrices that can have an adapter, of a model's leaves, and the smaller side of each."""
    inside = {k: s for k, s in shapes.items() if k.startswith(("prefix.", "period.", "suffix."))}
    sides = {k: s[1:] if k.startswith("period.") else s for k, s in inside.items()}
    return {k: min(s[-2:]) for k, s in sides.items() if len(s) > 1 and not is_adapter(k)}
