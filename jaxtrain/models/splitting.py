"""Violations of a mesh's split of a model: operations that do not split over its axes."""

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
    """Heads and experts that do not split over their mesh axes, each with its remedy."""
    violations = []
    outside = rules.of(("embed",), sizes)
    prefix = "prefix and suffix, split over stage too: "
    for call in _calls((*model.before.values(), *model.after.values()), AttentionCall):
        violations += _unsplit_heads(call, _in_use(outside, sizes), sizes, prefix)
    if _calls(model.blocks.values(), ExpertCall):
        violations += _unsplit_experts(rules, sizes)
    split = _in_use(rules, sizes)
    for call in _calls(model.period, AttentionCall):
        violations += _unsplit_heads(call, split, sizes)
    if split["heads"] != split["kv_heads"]:
        violations.append(
            f"the activations table splits heads over {split['heads']} and kv_heads over "
            f"{split['kv_heads']}: a query head would meet another group's keys; split both alike"
        )
    elif explicit and len(set(split.values())) > 1:
        violations.append(
            f"the explicit mode splits heads, kv_heads, mlp and vocab over the same mesh axes; the "
            f"activations table has {split}; use the tensor() preset, or execution.mode='gspmd'"
        )
    return list(dict.fromkeys(violations))


def _calls(blocks: Iterable[Block], kind: type[Call]) -> list[Call]:
    """The distinct operations of a kind in some blocks."""
    calls = (call for block in blocks for call in operations(block))
    return list(dict.fromkeys(call for call in calls if isinstance(call, kind)))


def _unsplit_experts(rules: ShardingRules, sizes: Mapping[str, int]) -> list[str]:
    """Entries of the activations table that a mixture of experts cannot follow: each device sorts
    its own tokens to all experts, and has a slice of each one's hidden units."""
    table = {
        name: {axis for axis in axes if sizes.get(axis, 1) > 1}
        for name, axes in dict(rules.activations).items()
    }
    violations = []
    if axes := table.get("experts"):
        violations.append(
            f"the activations table splits experts over {', '.join(sorted(axes))}: in use they are "
            "whole; split their hidden units (mlp), or split experts in the params table"
        )
    for name in ("batch", "seq"):
        if shared := table.get(name, set()) & table.get("mlp", set()):
            violations.append(
                f"the activations table splits both {name} and mlp over {', '.join(sorted(shared))}"
                ": hidden units of different tokens would be summed; split mlp over other axes"
            )
    return violations


def _in_use(rules: ShardingRules, sizes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Mesh axes of more than one device that split each logical axis in use."""
    lookup = dict(rules.activations)
    return {
        name: tuple(a for a in lookup.get(name, ()) if sizes.get(a, 1) > 1) for name in IN_USE_SPLIT
    }


def _unsplit_heads(
    call: AttentionCall,
    split: Mapping[str, tuple[str, ...]],
    sizes: Mapping[str, int],
    prefix: str = "",
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
                    f"{prefix}{name}={count} does not split over "
                    f"{' x '.join(f'{a}={sizes[a]}' for a in axes)}",
                    f"use {name}={near}{''.join(f', or {axes[-1]}={k}' for k in fewer)}",
                    sizes={name: count},
                    ways=[(Near(name, count, n),), *((Near(a, sizes[a], 0),) for a in axes[::-1])],
                    joint=[together, (heads, keys), (heads, keys, size)],
                )
            )
    return violations
