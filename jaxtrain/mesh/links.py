"""Links between groups of devices, and their speed."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxtrain.mesh.axes import ROWS
from jaxtrain.mesh.mesh import SCOPES, MeshSpec


def scope_of(axes: Sequence[str], spec: MeshSpec) -> str:
    """Returns the scope of the slowest link that groups along mesh axes cross. Devices are numbered
    in the order of the mesh axes, the last axis fastest; sites are the copies of `replica`."""
    for link in (ROWS[axis].link for axis in axes):
        if link is not None and link in dict(spec.links):
            return link
    names = [axis for axis, _ in spec.axes]
    outermost = min((names.index(axis) for axis in axes), default=len(names))
    span = math.prod(size for _, size in spec.axes[outermost:])
    slice_ = math.prod(map(int, spec.topology.split("x"))) if spec.topology else None
    if slice_ is not None:
        slice_ *= spec.chip.devices_per_chip
    reach = {"host": spec.devices_per_host, "slice": slice_, "cluster": None, "wan": None}
    scopes = [scope for scope in SCOPES if scope in dict(spec.links)]
    for scope in scopes:
        within = reach[scope]
        if within is None or span <= within:
            return scope
    return scopes[-1]


def bytes_per_s(axes: Sequence[str], spec: MeshSpec) -> float:
    """Bytes that a device sends in a second along mesh axes, if all devices send at once.

    Of a link between sites it has its share, and that of the devices beside it in a group, since a
    ring along several axes crosses between two sites once for all of them.
    """
    scope = scope_of(axes, spec)
    beside = [spec.size(axis) for axis in axes if ROWS[axis].link != scope]
    crossed_once = math.prod(beside) if len(beside) < len(axes) else 1
    return spec.link(scope).bandwidth_gbytes * 1e9 * crossed_once


def flops_per_byte(axes: Sequence[str], spec: MeshSpec, flops: float) -> float:
    """FLOPs that a device computes, at `flops` a second, while it sends one byte to a neighbour
    along mesh axes (over one port of a torus, or a switch). 0 if the links are unknown, and for
    simulated devices, whose links are this machine's memory."""
    if spec.simulated or not spec.links or not axes:
        return 0.0
    link = spec.link(scope_of(axes, spec))
    return flops * link.ports / bytes_per_s(axes, spec)
