"""Which links groups of devices communicate over, and how fast."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxtrain.mesh.hardware import CHIPS, LINKS
from jaxtrain.mesh.links import bytes_per_s, flops_per_byte, scope_of
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


def test_copies_are_sites_of_their_own():
    """Where there is a line between sites; else on the same network."""
    axes = dict(replica=2, fsdp=8)
    sites = load_mesh("two_sites")
    links = dict(sites.links)
    here, apart = two_hosts(axes), two_hosts(axes, links=tuple(links.items()))
    assert scope_of(("replica",), here) == "cluster"
    with pytest.raises(ValueError, match=r"replica=2 .* links.wan.* put replica first in \[axes\]"):
        two_hosts(dict(fsdp=8, replica=2), links=tuple(links.items()))
    assert two_hosts(dict(fsdp=8, replica=2)).size("replica") == 2
    for groups in (("replica",), ("replica", "fsdp"), ("fsdp", "replica")):
        assert scope_of(groups, apart) == "wan"
    assert [scope_of((axis,), sites) for axis in dict(sites.axes)] == [
        "wan",
        "cluster",
        "host",
        "host",
    ]
    # A ring along (replica, data) crosses between two sites once for its eight pairs of devices.
    share = 10e9 / 8 / 64
    for along, beside in (
        (("replica",), 1),
        (("replica", "data"), 8),
        (("replica", "data", "fsdp"), 32),
    ):
        assert bytes_per_s(along, sites) == pytest.approx(beside * share, rel=1e-2)
    assert bytes_per_s(("data",), sites) == links["cluster"].bandwidth_gbytes * 1e9
    assert links["wan"].bandwidth_gbytes * 1e9 == pytest.approx(10e9 / 8 / 64, rel=1e-2)


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
