"""Leaves of a layer, some in 8 bits, on their way into a shard_map: their specs, their dtypes
there, and the parts that have gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxtrain.collectives.vary import vary
from jaxtrain.mesh.axes import Dims, MeshAxes
from jaxtrain.mesh.sharding import partition_spec
from jaxtrain.quantization.weights import QuantizedWeight


def each(function: Callable[..., Any], leaves: Any, *trees: Any) -> Any:
    """Maps `function` over leaves (a matrix in 8 bits is one leaf) and the leaves of `trees`."""
    return jax.tree.map(function, leaves, *trees, is_leaf=_in_8_bits)


def _in_8_bits(weight: object) -> bool:
    return isinstance(weight, QuantizedWeight)


def moved(weight: Any) -> Any:
    """Differentiable part of a weight. In 8 bits its numbers and their scale have no gradient."""
    return (weight.stand_in, weight.scales) if _in_8_bits(weight) else weight


def with_moved(weight: Any, leaf: Any) -> Any:
    return replace(weight, stand_in=leaf[0], scales=leaf[1]) if _in_8_bits(weight) else leaf


def cotangent(weight: Any, gradient: Any) -> Any:
    result = with_moved(weight, gradient)
    return replace(result, value=None, seen=None) if _in_8_bits(weight) else result


def widened(dtype: DTypeLike, weight: Any) -> Any:
    """Casts a weight so that its gradient is at least as wide as `dtype`."""
    if not _in_8_bits(weight):
        return weight.astype(jnp.promote_types(weight.dtype, dtype))
    if weight.stand_in is None:
        return weight
    return replace(weight, stand_in=widened(dtype, weight.stand_in))


def specs(weight: Any, split: Dims) -> Any:
    """PartitionSpecs of the parts of a weight whose dims are split by `split`. In 8 bits each
    expert's scale is split as its numbers are; leaves of delayed scales are replicated."""
    spec = partition_spec(split)
    if not _in_8_bits(weight):
        return spec
    per_expert = partition_spec(split[:1])
    result = jax.tree.map(lambda _: partition_spec(()), weight)
    return replace(
        result,
        value=replace(result.value, numbers=spec, scale=per_expert),
        stand_in=None if weight.stand_in is None else spec,
        seen=None if weight.seen is None else per_expert,
    )


def on_device(axes: MeshAxes, experts: MeshAxes, weight: Any, dtype: DTypeLike) -> Any:
    """A device's part of a weight in a shard_map over `axes`, of which `experts` split experts."""
    weight = jax.tree.map(lambda x: vary(x, axes), weight)
    if not _in_8_bits(weight):
        return weight.astype(dtype)
    assert weight.ways is not None, "matrices of experts without ways"
    maxima = tuple(axis for axis in axes if axis not in experts)
    part = replace(weight, ways=replace(weight.ways, maxima=maxima))
    return part if part.stand_in is None else replace(part, stand_in=part.stand_in.astype(dtype))
