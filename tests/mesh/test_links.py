"""Which links groups of devices communicate over, and how fast."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxtrain.mesh.hardware import CHIPS, LINKS
from jaxtrain.mesh.links import flops_per_byte, scope_of
from jaxtrain.mesh.mesh import load_mesh
from tests.two_hosts import two_hosts

SCOPES = [
    (dict(data=2, fsdp=8), ("fsdp",), "host"),
    (dict(data=2, fsdp=8), ("data",), "cluster"),
    (dict(data=2, fsdp=8), ("data", "fsdp"), "cluster"),
    (dict(data=2, fsdp=4, tensor=2), ("tensor",), "host"),
    (dict(data=2, fsdp=4, tensor=2), ("fsdp",), "host"),
    (dict(fsdp=16), ("fsdp",), "cluster"),
]


@pytest.mark.parametrize(("axes", "along", "expected"), SCOPES, ids=str)
def test_groups_cross_the_slowest_link_between_their_devices(axes, along, expected):
    assert scope_of(along, two_hosts(axes)) == expected


def test_a_slice_is_one_network_and_several_are_not():
    two = two_hosts(
        dict(data=2, fsdp=16),
        chip=CHIPS["tpu_v5e"],
        devices=32,
        devices_per_host=4,
        topology="4x4",
        links=(("slice", LINKS["ici_v5e"]), ("cluster", LINKS["dcn"])),
    )
    assert [scope_of((axis,), two) for axis in ("fsdp", "data")] == ["slice", "cluster"]


def test_a_byte_over_one_port_is_as_long_as_so_many_flops():
    """Of a switch all the bandwidth goes to one neighbour; of a torus of three dims a sixth."""
    hosts = two_hosts(dict(data=2, fsdp=8))
    nvlink, infiniband, torus = (
        LINKS[name].bandwidth_gbytes * 1e9 for name in ("nvlink4", "infiniband_ndr", "ici_v5p")
    )
    assert flops_per_byte(("fsdp",), hosts, 1e15) * nvlink == pytest.approx(1e15)
    assert flops_per_byte(("data", "fsdp"), hosts, 1e15) * infiniband == pytest.approx(1e15)
    v5p = load_mesh("v5p_16")
    assert flops_per_byte(("fsdp",), v5p, 459e12) * torus == pytest.approx(6 * 459e12)
    for unknown in (replace(hosts, links=()), replace(v5p, simulated=True)):
        assert flops_per_byte(("fsdp",), unknown, 1e15) == 0
    assert flops_per_byte((), hosts, 1e15) == 0
