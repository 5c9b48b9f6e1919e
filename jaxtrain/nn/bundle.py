"""The parameters of a block travel together: one collective per dtype and set of mesh axes.

A block has six to nine matrices; one all-gather of them all costs one latency, and the contract
counts one collective. The price is a copy of the bytes on either side, which fuses with the cast.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.collectives.algorithm import Algorithm
from jaxtrain.collectives.named import all_gather, sum_scatter

Arrays = dict[str, jax.Array]
Split = dict[str, tuple[int, tuple[str, ...]]]
"""name -> (dim, mesh axes) that the leaf is split over at rest and whole over in use."""


class _Group(NamedTuple):
    axes: tuple[str, ...]
    dtype: str


def _groups(arrays: Arrays, split: Split) -> dict[_Group, list[str]]:
    groups: dict[_Group, list[str]] = defaultdict(list)
    for name in split:
        groups[_Group(split[name][1], str(arrays[name].dtype))].append(name)
    return groups


def gather_bundle(arrays: Arrays, split: Split, by: Algorithm) -> Arrays:
    """Every leaf of `split` whole again; the others pass. One all-gather a group."""
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
            part = flat[:, start : start + arrays[name].size].reshape(-1, *shape)
            whole = (*shape[:dim], -1, *shape[dim + 1 :])
            out[name] = jnp.moveaxis(part, 0, dim).reshape(whole)
            start += arrays[name].size
    return out


def scatter_bundle(arrays: Arrays, split: Split, by: Algorithm) -> Arrays:
    """Adjoint of `gather_bundle`: leaves summed over their axes, each device keeping its tile."""
    out = dict(arrays)
    for group, names in _groups(arrays, split).items():
        if len(names) == 1:
            (name,) = names
            dim = split[name][0]
            out[name] = sum_scatter("weight gradients", arrays[name], group.axes, dim, by)
            continue
        ways = jax.lax.axis_size(group.axes)
        tiles, shapes = [], []
        for name in names:
            array, dim = arrays[name], split[name][0]
            tile = array.reshape(*array.shape[:dim], ways, -1, *array.shape[dim + 1 :])
            tile = jnp.moveaxis(tile, dim, 0)
            shapes.append(tile.shape[1:])
            tiles.append(tile.reshape(ways, -1))
        flat = jnp.concatenate(tiles, axis=1)
        flat = sum_scatter("weight gradients", flat, group.axes, 0, by)[0]
        start = 0
        for name, shape, tile in zip(names, shapes, tiles, strict=True):
            out[name] = flat[start : start + tile.shape[1]].reshape(shape)
            start += tile.shape[1]
    return out
