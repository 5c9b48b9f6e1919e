"""Leaves that travel together: one collective per dtype and set of mesh axes.

A block has six to nine matrices. One all-gather of them all costs one latency, and the contract
counts one collective. The price is a copy of the bytes on either side, which fuses with the cast.
Where permutes of ours are the collective, large leaves travel alone (`travelling_together`). The
parameters of a block are bundled, and the small leaves on their way to ZeRO-1/2 owners and back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.arrays import Arrays
from jaxtrain.collectives.algorithm import Algorithm
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.named import all_gather, sum_scatter
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.tiles import stack_tiles
from jaxtrain.mesh.axes import Dims
from jaxtrain.overlap.spans import bundle_count

LeafSplits = dict[str, tuple[int, tuple[str, ...]]]
"""name -> (dim, mesh axes) over which the leaf is to be gathered, or scattered."""


class _Group(NamedTuple):
    axes: tuple[str, ...]
    dtype: str


def _groups(arrays: Arrays, split: LeafSplits) -> dict[_Group, list[str]]:
    groups: dict[_Group, list[str]] = defaultdict(list)
    for name in split:
        groups[_Group(split[name][1], str(arrays[name].dtype))].append(name)
    return groups


def rounds(splits: Mapping[str, tuple[Dims, Dims]]) -> list[LeafSplits]:
    """Returns the collectives between two splits of each leaf, (fewer ways, more ways), where every
    dim's first split is a prefix of its second. A leaf that differs in several dims takes one round
    for each, the first dim first."""
    out: list[LeafSplits] = []
    for name, (fewer, more) in splits.items():
        pairs = enumerate(zip(fewer, more, strict=True))
        ways = [(dim, b[len(a) :]) for dim, (a, b) in pairs if a != b]
        for turn, way in enumerate(ways):
            if turn == len(out):
                out.append({})
            out[turn][name] = way
    return out


def bundles(split: LeafSplits, parts: Mapping[str, int], small_leaf: int) -> list[LeafSplits]:
    """One bundle of the leaves of up to `small_leaf` elements a device; each larger leaf alone."""
    small = {name: way for name, way in split.items() if parts[name] <= small_leaf}
    return [small, *({name: way} for name, way in split.items() if name not in small)]


def travelling_together(choice: Algorithm, split: LeafSplits, arrays: Arrays) -> list[LeafSplits]:
    """Divides `split` into bundles. `Lax` takes all leaves of a dtype and a set of axes together.
    With permutes of ours the largest leaves travel alone, without copies. The others share one
    bundle, since few products are there to hide permutes."""
    if isinstance(choice, Lax):
        return [split]
    result = []
    for group, names in _groups(arrays, split).items():
        ways = jax.lax.axis_size(group.axes)
        alone = bundle_count(ways, doubling=isinstance(choice, Recursive)) - 1
        by_size = sorted(names, key=lambda name: (-arrays[name].size, name))
        result += [{name: split[name]} for name in by_size[:alone]]
        if small := by_size[alone:]:
            result.append({name: split[name] for name in small})
    return result


def gather_bundle(arrays: Arrays, split: LeafSplits, algorithm: Algorithm) -> Arrays:
    """Gathers every leaf of `split` along its split dim; other leaves stay unchanged. Leaves with
    the same dtype and mesh axes share one all-gather."""
    out = dict(arrays)
    for group, names in _groups(arrays, split).items():
        if len(names) == 1:
            (name,) = names
            out[name] = all_gather(arrays[name], group.axes, split[name][0], algorithm)
            continue
        flat = jnp.concatenate([arrays[name].reshape(1, -1) for name in names], axis=1)
        flat = all_gather(flat, group.axes, 0, algorithm)
        start = 0
        for name in names:
            shape, dim = arrays[name].shape, split[name][0]
            part = flat[:, start : start + arrays[name].size].reshape(len(flat), *shape)
            gathered_shape = (*shape[:dim], len(flat) * shape[dim], *shape[dim + 1 :])
            out[name] = jnp.moveaxis(part, 0, dim).reshape(gathered_shape)
            start += arrays[name].size
    return out


def scatter_bundle(
    arrays: Arrays, split: LeafSplits, algorithm: Algorithm, reduction: str = "weight gradients"
) -> Arrays:
    """Adjoint of `gather_bundle`: sums leaves over their axes, each device keeping its tile.
    `reduction` is the registered name of the sum."""
    out = dict(arrays)
    for group, names in _groups(arrays, split).items():
        if len(names) == 1:
            (name,) = names
            dim = split[name][0]
            out[name] = sum_scatter(reduction, arrays[name], group.axes, dim, algorithm)
            continue
        ways = jax.lax.axis_size(group.axes)
        tiles, shapes = [], []
        for name in names:
            array, dim = arrays[name], split[name][0]
            tile = stack_tiles(array, dim, ways)
            shapes.append(tile.shape[1:])
            tiles.append(tile.reshape(ways, array.size // ways))
        flat = jnp.concatenate(tiles, axis=1)
        flat = sum_scatter(reduction, flat, group.axes, 0, algorithm)[0]
        start = 0
        for name, shape, tile in zip(names, shapes, tiles, strict=True):
            out[name] = flat[start : start + tile.shape[1]].reshape(shape)
            start += tile.shape[1]
    return out
