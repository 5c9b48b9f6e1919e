"""The device groups of a collective, from the forms in which XLA prints them."""

from __future__ import annotations

import re

import numpy as np

DeviceGroups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"(?:\[([\d,]+)\])?<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(.*?)\](?:, ?device_ids=\((.*?)\))? ?\{(.*)\}$")
_UNKNOWN = "replica_groups={!r} is in no form known here: list, iota or mesh axes"


def replica_groups(text: str) -> DeviceGroups:
    """Groups of device positions, in the order stated; `()` for `{}`, which means one group of all.

    Three forms: `{{0,1},{2,3}}`; iota `[2,4]<=[4,2]T(1,0)`; mesh axes `mesh['a'=2,'b'=4] {'b'}`
    (jax 0.11), with optional `device_ids` and sub-axes `'b':(1)2`. Raises `ValueError` otherwise.
    """
    if re.fullmatch(r"[{}\d, ]*", text):
        listed = re.findall(r"\{([\d, ]+)\}", text)
        return tuple(tuple(map(int, group.split(","))) for group in listed)
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if "<=" in text:
        return _tuples(_iota(text))
    raise ValueError(_UNKNOWN.format(text))


def connected(pairs: list[tuple[int, int]]) -> DeviceGroups:
    """The groups of devices that the pairs of a collective-permute connect, sorted."""
    group_of: dict[int, frozenset[int]] = {}
    for source, target in pairs:
        alone = frozenset([source]), frozenset([target])
        merged = group_of.get(source, alone[0]) | group_of.get(target, alone[1])
        group_of.update(dict.fromkeys(merged, merged))
    return tuple(sorted(tuple(sorted(group)) for group in set(group_of.values())))


def _tuples(groups: np.ndarray) -> DeviceGroups:
    return tuple(tuple(int(device) for device in group) for group in groups)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _iota(text: str) -> np.ndarray:
    match = _IOTA.fullmatch(text)
    if match is None:
        raise ValueError(_UNKNOWN.format(text))
    dims, shape, order = (_numbers(part or "") for part in match.groups())
    ids = np.arange(np.prod(shape)).reshape(shape)
    ids = ids.transpose(order) if order else ids
    return ids.reshape(dims) if dims else ids.reshape(-1)


def _device_ids(text: str) -> np.ndarray:
    """Device ids of a list `0,2,1,3`, an iota, or its short form `[2,4]T(1,0)`."""
    short = re.fullmatch(r"\[([\d,]+)\](T\([\d,]+\))?", text)
    if short:
        text = f"<=[{short[1]}]{short[2] or ''}"
    return (_iota(text) if "<=" in text else np.array(_numbers(text))).reshape(-1)


def _mesh_groups(text: str) -> DeviceGroups:
    match = _MESH.fullmatch(text)
    if match is None:
        raise ValueError(_UNKNOWN.format(text))
    axes, device_ids, chosen = match.groups()
    names = [part.split("=")[0] for part in axes.split(",")]
    sizes = [int(part.split("=")[1]) for part in axes.split(",")]
    count = int(np.prod(sizes))
    ids = np.arange(count)
    if device_ids:
        ids = _device_ids(device_ids)
    position = np.indices(sizes).reshape(len(sizes), -1)
    # Devices that differ only in the chosen coordinates are one group, in the order chosen.
    inside, outside = np.zeros(count, int), position.copy()
    for part in (part for part in chosen.split(",") if part):
        name, _, sub = part.partition(":")
        axis = names.index(name)
        pre_size, size = _numbers(sub) if sub else (1, sizes[axis])
        step = sizes[axis] // (pre_size * size)
        coordinate = position[axis] // step % size
        inside = inside * size + coordinate
        outside[axis] -= coordinate * step
    key = np.ravel_multi_index(tuple(outside), sizes)
    order = np.lexsort((inside, key))
    return _tuples(ids[order].reshape(len(set(key.tolist())), -1))
