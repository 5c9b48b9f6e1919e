"""Leaves of a layer, some of them in 8 bits, on their way into a shard_map: how they lie, how wide
they are there, and what of them has a gradient that comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxtrain.collectives.vary import MeshAxes, vary
from jaxtrain.mesh.sharding import Dims, partition_spec
from jaxtrain.nn.quantized.products import QuantizedWeight


def each(function: Callable[..., Any], leaves: Any, *beside: Any) -> Any:
    """`function` of each leaf, one in 8 bits as a whole, and of what lies in its place beside."""
    return jax.tree.map(function, leaves, *beside, is_leaf=_in_8_bits)


def _in_8_bits(weight: object) -> bool:
    return isinstance(weight, QuantizedWeight)


def moved(weight: Any) -> Any:
    """What of a weight has a gradient: of one in 8 bits neither its numbers nor their scale."""
    return (weight.stand_in, weight.scales) if _in_8_bits(weight) else weight


def with_moved(weight: Any, by: Any) -> Any:
    return replace(weight, stand_in=by[0], scales=by[1]) if _in_8_bits(weight) else by


def cotangent(weight: Any, found: Any) -> Any:
    whole = with_moved(weight, found)
    return replace(whole, value=None, seen=None) if _in_8_bits(weight) else whole


def widened(dtype: DTypeLike, weight: Any) -> Any:
    """A weight whose gradient is at least as wide as `dtype`."""
    if not _in_8_bits(weight):
        return weight.astype(jnp.promote_types(weight.dtype, dtype))
    if weight.stand_in is None:
        return weight
    return replace(weight, stand_in=widened(dtype, weight.stand_in))


def specs(weight: Any, split: Dims) -> Any:
    """Where the parts of a weight lie whose dims are split so; of one in 8 bits each expert's scale
    with its numbers, and the leaves of delayed scales whole, as they rest."""
    spec = partition_spec(split)
    if not _in_8_bits(weight):
        return spec
    of_each = partition_spec(split[:1])
    made = jax.tree.map(lambda _: partition_spec(()), weight)
    return replace(
        made,
        value=replace(made.value, numbers=spec, scale=of_each),
        stand_in=None if weight.stand_in is None else spec,
        seen=None if weight.seen is None else of_each,
    )


def on_device(axes: MeshAxes, experts: MeshAxes, weight: Any, dtype: DTypeLike) -> Any:
    """A device's part of a weight in a shard_map over `axes`, of which `experts` split experts."""
    weight = jax.tree.map(lambda x: vary(x, axes), weight)
    if not _in_8_bits(weight):
        return weight.astype(dtype)
    assert weight.ways is not None, "matrices of experts without ways"
    maxima = tuple(axis for axis in axes if axis not in experts)
    made = replace(weight, ways=replace(weight.ways, maxima=maxima))
    return made if made.stand_in is None else replace(made, stand_in=made.stand_in.astype(dtype))
