"""Leaves that travel together: one collective per dtype and set of mesh axes.

A block has six to nine matrices; one all-gather of them all costs one latency, and the contract
counts one collective. The price is a copy of the bytes on either side, which fuses with the cast;
where collectives are permutes of ours, large leaves do without (`travelling_together`).
So travel the parameters of a block, and the small leaves on their way to ZeRO-1/2 owners and back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.collectives.algorithm import Algorithm
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.named import all_gather, sum_scatter
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.tiles import stack_tiles
from jaxtrain.mesh.sharding import Dims
from jaxtrain.overlap.spans import bundle_count

Arrays = dict[str, jax.Array]
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
    """What lies between two splits of each leaf, (fewer ways, more ways), where every dim's first
    is the beginning of its second. A leaf whose dims differ in several places goes one of them a
    round, the first dim first."""
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
    """The leaves of which a device's part has up to `small_leaf` elements; each other one alone."""
    small = {name: way for name, way in split.items() if parts[name] <= small_leaf}
    return [small, *({name: way} for name, way in split.items() if name not in small)]


def travelling_together(by: Algorithm, split: LeafSplits, arrays: Arrays) -> list[LeafSplits]:
    """Which leaves travel in one bundle: by `Lax` all of a dtype and a set of axes; by permutes of
    ours all but the largest, which need no copies then. Not each alone: products are few, and so
    are permutes that hide behind one."""
    if isinstance(by, Lax):
        return [split]
    found = []
    for group, names in _groups(arrays, split).items():
        ways = jax.lax.axis_size(group.axes)
        alone = bundle_count(ways, doubling=isinstance(by, Recursive)) - 1
        by_size = sorted(names, key=lambda name: (-arrays[name].size, name))
        found += [{name: split[name]} for name in by_size[:alone]]
        if rest := by_size[alone:]:
            found.append({name: split[name] for name in rest})
    return found


def gather_bundle(arrays: Arrays, split: LeafSplits, by: Algorithm) -> Arrays:
    """Every leaf of `split` gathered along its dim; the others are as they were. One all-gather for
    all leaves of a dtype and a set of mesh axes."""
    out = dict(arrays)
    for group, names in _groups(arrays, split).items():
        if len(names) == 1:
            (name,) = names
            out[name] = all_gather(arrays[name], group.axes, split[name][0], by)
            continue
        flat = jnp.concatenate([arrays[name].reshape(1, -1) for name in names], axis=1)
        flat = all_gather(flat, group.axes, 0, by)
        start = 0
        for name in names:
            shape, dim = arrays[name].shape, split[name][0]
            part = flat[:, start : start + arrays[name].size].reshape(len(flat), *shape)
            whole = (*shape[:dim], len(flat) * shape[dim], *shape[dim + 1 :])
            out[name] = jnp.moveaxis(part, 0, dim).reshape(whole)
            start += arrays[name].size
    return out


def scatter_bundle(
    arrays: Arrays, split: LeafSplits, by: Algorithm, reduction: str = "weight gradients"
) -> Arrays:
    """Adjoint of `gather_bundle`: leaves summed over their axes, each device keeping its tile, by
    the reduction of that name."""
    out = dict(arrays)
    for group, names in _groups(arrays, split).items():
        if len(names) == 1:
            (name,) = names
            dim = split[name][0]
            out[name] = sum_scatter(reduction, arrays[name], group.axes, dim, by)
            continue
        ways = jax.lax.axis_size(group.axes)
        tiles, shapes = [], []
        for name in names:
            array, dim = arrays[name], split[name][0]
            tile = stack_tiles(array, dim, ways)
            shapes.append(tile.shape[1:])
            tiles.append(tile.reshape(ways, array.size // ways))
        flat = jnp.concatenate(tiles, axis=1)
        flat = sum_scatter(reduction, flat, group.axes, 0, by)[0]
        start = 0
        for name, shape, tile in zip(names, shapes, tiles, strict=True):
            out[name] = flat[start : start + tile.shape[1]].reshape(shape)
            start += tile.shape[1]
    return out
