"""How a mesh would split what a model does: what of it does not split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from jaxtrain.mesh.sharding import IN_USE_SPLIT, ShardingRules, ways
from jaxtrain.models.description import (
    AttentionCall,
    Block,
    ExpertCall,
    ModelDescription,
    operations,
)
from jaxtrain.remedies import Clash, Near, multiples_near, options, smaller_axis

Call = TypeVar("Call", AttentionCall, ExpertCall)


def unsplit(
    model: ModelDescription, rules: ShardingRules, sizes: Mapping[str, int], *, explicit: bool
) -> list[str]:
    """What does not split over its mesh axes, each with its remedy: whole heads, experts."""
    found = []
    beside = rules.of(("embed",), sizes)
    where = "prefix and suffix, split over stage too: "
    for call in _calls((*model.before.values(), *model.after.values()), AttentionCall):
        found += _unsplit_heads(call, _in_use(beside, sizes), sizes, where)
    if _calls(model.blocks.values(), ExpertCall):
        found += _unsplit_experts(rules, sizes)
    split = _in_use(rules, sizes)
    for call in _calls(model.period, AttentionCall):
        found += _unsplit_heads(call, split, sizes)
    if split["heads"] != split["kv_heads"]:
        found.append(
            f"the activations table splits heads over {split['heads']} and kv_heads over "
            f"{split['kv_heads']}: a query head would meet another group's keys; split both alike"
        )
    elif explicit and len(set(split.values())) > 1:
        found.append(
            f"the explicit mode splits heads, kv_heads, mlp and vocab over the same mesh axes; the "
            f"activations table has {split}; use the tensor() preset, or execution.mode='gspmd'"
        )
    return list(dict.fromkeys(found))


def _calls(blocks: Iterable[Block], kind: type[Call]) -> list[Call]:
    """The operations of a kind in some blocks, each once."""
    every = (each for block in blocks for each in operations(block))
    return list(dict.fromkeys(each for each in every if isinstance(each, kind)))


def _unsplit_experts(rules: ShardingRules, sizes: Mapping[str, int]) -> list[str]:
    """What of the activations table a mixture of experts cannot follow: each device sorts its own
    tokens to all experts, and has a slice of each one's hidden units."""
    table = {
        name: {axis for axis in axes if sizes.get(axis, 1) > 1}
        for name, axes in dict(rules.activations).items()
    }
    found = []
    if axes := table.get("experts"):
        found.append(
            f"the activations table splits experts over {', '.join(sorted(axes))}: in use they are "
            "whole; split their hidden units (mlp), or split experts in the params table"
        )
    for name in ("batch", "seq"):
        if shared := table.get(name, set()) & table.get("mlp", set()):
            found.append(
                f"the activations table splits both {name} and mlp over {', '.join(sorted(shared))}"
                ": hidden units of different tokens would be summed; split mlp over other axes"
            )
    return found


def _in_use(rules: ShardingRules, sizes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """The mesh axes of more than one device that split each logical axis in use."""
    lookup = dict(rules.activations)
    return {
        name: tuple(a for a in lookup.get(name, ()) if sizes.get(a, 1) > 1) for name in IN_USE_SPLIT
    }


def _unsplit_heads(
    call: AttentionCall,
    split: Mapping[str, tuple[str, ...]],
    sizes: Mapping[str, int],
    where: str = "",
) -> list[str]:
    violations: list[str] = []
    for name, count in (("heads", call.heads), ("kv_heads", call.kv_heads)):
        n = ways(split[name], sizes)
        if count % n:
            axes = split[name]
            fewer = smaller_axis(count, [sizes[a] for a in axes])
            near = options(multiples_near(count, n))
            heads, keys = Near("heads", call.heads, n), Near("kv_heads", call.kv_heads, n)
            size = Near("head_dim", call.head_dim)
            together = (heads, size) if name == "heads" else (keys, heads)
            violations.append(
                Clash(
                    f"{where}{name}={count} does not split over "
                    f"{' x '.join(f'{a}={sizes[a]}' for a in axes)}",
                    f"use {name}={near}{''.join(f', or {axes[-1]}={k}' for k in fewer)}",
                    sizes={name: count},
                    ways=[(Near(name, count, n),), *((Near(a, sizes[a], 0),) for a in axes[::-1])],
                    joint=[together, (heads, keys), (heads, keys, size)],
                )
            )
    return violations
