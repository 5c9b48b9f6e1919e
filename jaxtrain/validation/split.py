"""Checks that the operations of a model split over the axes of a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jaxtrain.mesh.axes import TENSOR_PARALLEL
from jaxtrain.mesh.sharding import ShardingRules
from jaxtrain.models.description import ModelDescription
from jaxtrain.operations.block import Block, operations


def unsplit(
    model: ModelDescription, rules: ShardingRules, sizes: Mapping[str, int], *, explicit: bool
) -> list[str]:
    """Returns violations: operations that do not split over their mesh axes, each with a remedy."""
    outside = _in_use(rules.of(("embed",), sizes), sizes)
    blocks = (*model.prefix.values(), *model.suffix.values())
    prefix = "prefix and suffix, split over stage too: "
    violations = _of_blocks(blocks, outside, sizes, prefix)
    table = _in_use(rules, sizes)
    violations += _of_blocks(model.period, table, sizes)
    split = {name: table.get(name, ()) for name in TENSOR_PARALLEL}
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


def _of_blocks(
    blocks: Iterable[Block],
    table: Mapping[str, tuple[str, ...]],
    sizes: Mapping[str, int],
    prefix: str = "",
) -> list[str]:
    distinct = dict.fromkeys(operation for block in blocks for operation in operations(block))
    return [line for operation in distinct for line in operation.unsplit(table, sizes, prefix)]


def _in_use(rules: ShardingRules, sizes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Returns the mesh axes of more than one device that split each logical axis of activations."""
    return {
        name: tuple(axis for axis in axes if sizes.get(axis, 1) > 1)
        for name, axes in dict(rules.activations).items()
    }
