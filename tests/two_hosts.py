"""A machine of two hosts, cut along mesh axes as a test asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtrain.mesh.hardware import CHIPS, LINKS
from jaxtrain.mesh.mesh import MeshSpec


def two_hosts(axes: Mapping[str, int], **fields: Any) -> MeshSpec:
    """Eight H100s each, unless the fields say otherwise."""
    usual: dict[str, Any] = dict(
        name="m",
        path="",
        chip=CHIPS["h100_sxm"],
        axes=tuple(axes.items()),
        devices=16,
        devices_per_host=8,
        links=(("host", LINKS["nvlink4"]), ("cluster", LINKS["infiniband_ndr"])),
    )
    return MeshSpec(**(usual | fields))
