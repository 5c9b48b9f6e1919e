"""Mesh files: refused with every violation. Device order: the slow network outermost."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain.mesh.axes import MESH_AXES
from jaxtrain.mesh.hardware import CHIPS, LINKS
from jaxtrain.mesh.mesh import (
    MeshSpec,
    device_order,
    format_axes,
    load_mesh,
    make_mesh,
    mesh_from_axes,
)
from jaxtrain.mesh.simulation import simulation_flags

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "meshes").glob("*.toml"))

GOOD = """
chip = "h100_sxm"
devices = 16
devices_per_host = 8
[axes]
data = 2
fsdp = 8
[links]
cluster = "infiniband_ndr"
host = "nvlink4"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "m.toml"
    path.write_text(text)
    return path


# Files


def test_the_promised_meshes_are_there():
    assert {path.stem for path in FILES} >= {
        *("cpu_1", "cpu_8", "h100_1", "h200_1", "h100_8", "h100_64", "h100_1024"),
        *("v5e_16", "v5e_256", "v6e_256", "v5p_512", "two_sites"),
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_mesh_loads(path):
    spec = load_mesh(path)
    assert path.read_text().startswith("# "), "a mesh file begins with what it is"
    assert spec.name == path.stem and spec.where == str(path)
    # A name such as h100_8 says how many devices there are.
    if named := re.fullmatch(r"[a-z0-9]+_(\d+)", path.stem):
        assert spec.devices == int(named[1])
    assert math.prod(spec.shape.values()) == spec.devices
    assert set(spec.shape) == set(MESH_AXES)
    assert spec.simulated == (spec.chip is CHIPS["cpu"])
    speeds = [link.bandwidth_gbytes for _, link in spec.links]
    assert speeds == sorted(speeds, reverse=True), "links are innermost, so fastest, first"
    assert spec.devices == 1 or speeds
    assert load_mesh(spec) is spec


def test_axes_keep_the_order_of_the_file(tmp_path):
    spec = load_mesh(write(tmp_path, GOOD.replace("data = 2\nfsdp = 8", "tensor = 2\nfsdp = -1")))
    assert spec.axes == (("tensor", 2), ("fsdp", 8))
    assert list(spec.shape) == ["tensor", "fsdp", "replica", "data", "stage", "expert", "context"]
    assert [spec.size(axis) for axis in ("tensor", "fsdp", "stage")] == [2, 8, 1]
    assert format_axes(spec.axes) == "tensor=2 x fsdp=8"
    with pytest.raises(ValueError, match="'tensr' is not a mesh axis; did you mean 'tensor'"):
        spec.size("tensr")


TPU = 'chip = "tpu_v5e"\ndevices = 32\ndevices_per_host = 4\ntopology = "4x4"\n[axes]\nfsdp = 32'

VIOLATIONS = [
    (GOOD, "fsdp = 8", "fsdp = 4", "data=2 x fsdp=4 multiply to 8, but the mesh has 16 devices"),
    (GOOD, "fsdp = 8", "fsdp = 8\nexprt = 1", "'exprt' is not a mesh axis; did you mean 'expert'"),
    (GOOD, "fsdp = 8", 'fsdp = "8"', "axes.fsdp = '8' must be a positive integer, or -1"),
    (GOOD, "fsdp = 8", "fsdp = 0", "axes.fsdp = 0 must be a positive integer, or -1"),
    (GOOD, "data = 2", "data = -1\nstage = -1", "only one mesh axis may be -1, but data and stage"),
    (GOOD, "data = 2\nfsdp = 8", "data = 3\nfsdp = -1", "fsdp = -1 has no size: data=3 mult"),
    (GOOD, "devices = 16", "devices = 12", "12 devices do not fill hosts of devices_per_host = 8"),
    (GOOD, "devices = 16", "devices = true", "devices = True must be a positive integer"),
    (GOOD, "devices = 16\n", "", "devices is missing"),
    (GOOD, "h100_sxm", "h100", "chip = 'h100' is not known; did you mean 'h100_sxm'?"),
    (GOOD, "nvlink4", "nvlink", "links.host = 'nvlink' is not known; did you mean 'nvlink"),
    (GOOD, "\nhost = ", "\nhosts = ", "links.hosts is not known; did you mean 'host'"),
    (GOOD, "devices_per_host", "device_per_host", "not known; did you mean 'devices_per_host'"),
    (GOOD, "[links]", '[facts]\nmtbf_hours = "x"\n[links]', "facts.mtbf_hours = 'x' must be a pos"),
    (GOOD, "[links]", "[compiler_options]\na = []\n[links]", "compiler_options.a = \\[\\] must be"),
    (GOOD, "[axes]", 'topology = "4x4"\n[axes]', "topology is for TPUs, and the chip is h100_sxm"),
    (GOOD, '"h100_sxm"', "3", "chip = 3 must be a name or a table"),
    (GOOD, "[axes]\ndata = 2\nfsdp = 8", "axes = 16", "axes = 16 must be a table: .axes."),
    (TPU, "4x4", "4 by 4", "topology = '4 by 4' must be written like \"4x4\""),
    (TPU, "4x4", "4x5", "topology 4x5 is a slice of 20 devices, which does not divide the 32"),
    (GOOD, "[axes]", "[axes", "m.toml is not a TOML file"),
]


@pytest.mark.parametrize("text, old, new, problem", VIOLATIONS, ids=lambda x: x[:25])
def test_a_violation_is_named(tmp_path, text, old, new, problem):
    load_mesh(write(tmp_path, text))
    assert old in text
    with pytest.raises(ValueError, match=problem) as refused:
        load_mesh(write(tmp_path, text.replace(old, new, 1)))
    assert "m.toml" in str(refused.value)


def test_all_violations_are_listed_at_once(tmp_path):
    text = (
        'chip = "h101"\ndevices = 8\ntopolgy = 1\n[axes]\ndata = 3\nfsdq = 4\n[links]\nhost = "ib"'
    )
    with pytest.raises(ValueError, match="5 problems") as refused:
        load_mesh(write(tmp_path, text))
    for part in ("'h101'", "topolgy", "fsdq", "multiply to 12", "links.host"):
        assert part in str(refused.value)


def test_a_missing_file_names_the_nearest():
    with pytest.raises(
        ValueError, match=r"cpu8.toml: No such file.*did you mean '.*meshes/cpu_8.toml'"
    ):
        load_mesh(ROOT / "meshes" / "cpu8.toml")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_mesh_that_comes_with_jaxtrain_goes_by_its_name(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = load_mesh(file.stem)
    assert dataclasses.replace(found, path=str(file)) == load_mesh(file)
    (tmp_path / file.stem).mkdir()
    assert load_mesh(file.stem) == found, "whatever lies in the current folder"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("meshes/h100_8.toml", "No such file.*comes with a mesh of that name: give 'h100_8' alone"),
        ("h100-8", "No such file.*did you mean 'h100_8'"),
        ("laptop", "No such file.*use one of cpu_1, cpu_8, .*v5p_512_stage8"),
        ("own.toml", "own.toml: No such file or directory$"),
    ],
)
def test_outside_a_clone_a_missing_mesh_names_those_there_are(given, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        load_mesh(given)


def test_with_axes_cuts_the_same_machine(tmp_path):
    spec = load_mesh(write(tmp_path, GOOD))
    assert spec.links == (("host", LINKS["nvlink4"]), ("cluster", LINKS["infiniband_ndr"]))
    cut = spec.with_axes({"stage": 4, "tensor": -1})
    assert cut.axes == (("stage", 4), ("tensor", 4))
    assert dataclasses.replace(cut, axes=spec.axes) == spec
    with pytest.raises(ValueError, match=r"m.toml: axes stage=3 multiply to 3, but.* 16 devices"):
        spec.with_axes({"stage": 3})


def test_a_spec_is_checked_however_it_is_made():
    with pytest.raises(ValueError, match="'dta' is not a mesh axis; did you mean 'data'"):
        mesh_from_axes(dta=2)
    spec = mesh_from_axes(data=2)
    with pytest.raises(ValueError, match="mesh axis 'data' is given twice"):
        dataclasses.replace(spec, axes=(("data", 2), ("data", 1)))


# Meshes of devices


@pytest.mark.parametrize(
    "axes", [{}, {"fsdp": 8}, {"data": 2, "fsdp": 4}, {"tensor": 2, "stage": 3}], ids=str
)
def test_a_simulated_mesh_has_every_axis_in_order(axes):
    spec = mesh_from_axes(**axes)
    mesh = make_mesh(spec)
    assert dict(mesh.shape) == spec.shape and mesh.axis_names == tuple(spec.shape)
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert list(mesh.devices.flat) == jax.devices("cpu")[: spec.devices]


def test_the_last_axis_is_the_innermost():
    mesh = make_mesh(mesh_from_axes(data=2, fsdp=4))
    spec = PartitionSpec(("data", "fsdp"))
    placed = jax.device_put(np.arange(8), NamedSharding(mesh, spec))
    rows = [(shard.device.id, int(shard.data[0])) for shard in placed.addressable_shards]
    assert sorted(rows) == [(i, i) for i in range(8)]


def test_simulate_runs_another_machine_here(tmp_path):
    text = GOOD.replace("= 16", "= 8").replace("data = 2\nfsdp = 8", "data = 2\nfsdp = 4")
    spec = load_mesh(write(tmp_path, text)).simulate()
    assert make_mesh(spec).shape["fsdp"] == 4 and spec.chip is CHIPS["h100_sxm"]


def gpus(hosts, per_host, *, kind="NVIDIA H100 80GB HBM3", slices=True):
    """Devices as JAX lists them: by process, not by the ids that XLA's topology gave them."""
    n = hosts * per_host
    for i in range(n):
        host = i // per_host
        yield SimpleNamespace(
            platform="gpu",
            device_kind=kind,
            id=i % per_host * hosts + host,
            process_index=host,
            **({"slice_index": host} if slices else {}),
        )


def tpus(topology, *, slices=1, kind="TPU v5 lite", cores=1):
    for index in range(slices):
        for i, (z, y, x, core) in enumerate(np.ndindex(*topology[::-1], cores)):
            yield SimpleNamespace(
                platform="tpu",
                device_kind=kind,
                id=index * math.prod(topology) * cores + i,
                process_index=index,
                slice_index=index,
                coords=(x, y, z),
                core_on_chip=core,
            )


def spec_of(chip, topology=None, **axes):
    devices = math.prod(axes.values())
    return MeshSpec(
        name="m",
        path="m.toml",
        chip=CHIPS[chip],
        axes=tuple(axes.items()),
        devices=devices,
        devices_per_host=1,
        topology=topology,
    )


HYBRID = [
    ({"data": 4, "fsdp": 8}, "slice_index", list(gpus(4, 8)), "h100_sxm"),
    ({"data": 4, "fsdp": 8}, "process_index", list(gpus(4, 8, slices=False)), "h100_sxm"),
    ({"replica": 2, "data": 2, "tensor": 8}, "slice_index", list(gpus(4, 8)), "h100_sxm"),
    ({"data": 2, "fsdp": 8, "tensor": 2}, "slice_index", list(gpus(4, 8)), "h100_sxm"),
    ({"fsdp": 32}, "slice_index", list(gpus(4, 8)), "h100_sxm"),
    ({"data": 4, "fsdp": 16}, "slice_index", list(tpus((4, 4, 1), slices=4)), "tpu_v5e"),
    ({"fsdp": 16, "tensor": 4}, "slice_index", list(tpus((4, 4, 1), slices=4)), "tpu_v5e"),
]


@pytest.mark.parametrize("axes, key, devices, chip", HYBRID, ids=lambda x: str(x)[:30])
def test_the_slow_network_is_outermost(axes, key, devices, chip):
    """Law: in row-major order over the mesh axes the devices of a slice are contiguous, so a step
    along a mesh axis leaves the slice only when every axis inside it has been used up."""
    order = device_order(spec_of(chip, **axes), devices)
    assert order.shape == (*axes.values(), *[1] * (7 - len(axes)))
    assert {id(d) for d in order.flat} == {id(d) for d in devices}, "every device once"
    groups = [getattr(device, key) for device in order.flat]
    changes = sum(a != b for a, b in pairwise(groups))
    assert changes == len(set(groups)) - 1


def test_one_fast_domain_over_many_hosts_is_not_cut():
    """An NVLink domain of 9 hosts with 8 GPUs: one slice, so any axes will do."""
    devices = list(gpus(9, 8))
    for device in devices:
        device.slice_index = 0
    order = device_order(spec_of("h100_sxm", data=5 + 4, fsdp=8), devices)
    assert [device.id for device in order.flat] == list(range(72)), "XLA numbers by topology"
    assert device_order(spec_of("h100_sxm", tensor=8, data=9), devices).shape[:2] == (8, 9)


@pytest.mark.parametrize(
    "hosts, axes, message",
    [
        (4, {"data": 3, "fsdp": 8}, r"multiply to the 4 groups.*at data=3"),
        (6, {"data": 4, "fsdp": 6}, r"multiply to the 6 groups.*at data=4"),
        (2, {"data": 4, "fsdp": 6}, r"slice_index 0: 11, slice_index 1: 13"),
    ],
)
def test_hosts_that_the_axes_cannot_cut_are_refused(hosts, axes, message):
    devices = list(gpus(hosts, 24 // hosts))
    devices[0].slice_index = 1 if hosts == 2 else 0
    with pytest.raises(ValueError, match=message):
        device_order(spec_of("h100_sxm", **axes), devices)


def hops(order, topology):
    """Torus distance between neighbours along the last mesh axis of size over 1."""
    line = order.reshape(-1, next(n for n in order.shape[::-1] if n > 1))
    coords = np.array([[device.coords for device in row] for row in line])
    apart = np.abs(np.diff(coords, axis=1))
    return np.minimum(apart, np.array(topology) - apart).sum(-1)


@pytest.mark.parametrize(
    "chip, kind, topology, axes",
    [
        ("tpu_v5e", "TPU v5 lite", (4, 4, 1), {"fsdp": 4, "tensor": 4}),
        ("tpu_v5e", "TPU v5 lite", (4, 4, 1), {"fsdp": 16}),
        ("tpu_v5e", "TPU v5 lite", (16, 16, 1), {"fsdp": 64, "tensor": 4}),
        ("tpu_v5p", "TPU v5p", (8, 8, 8), {"fsdp": 64, "tensor": 8}),
        ("tpu_v5p", "TPU v5", (4, 4, 4), {"data": 16, "tensor": 4}),
    ],
    ids=str,
)
def test_tensor_neighbours_are_torus_neighbours(chip, kind, topology, axes):
    devices = list(tpus(topology, kind=kind))
    order = device_order(spec_of(chip, **axes), devices)
    assert {id(d) for d in order.flat} == {id(d) for d in devices}
    assert (hops(order, topology) == 1).all()


def test_both_devices_of_a_tpu7x_chip_are_used():
    devices = list(tpus((4, 4, 4), kind="TPU7x", cores=2))
    order = device_order(spec_of("tpu7x", topology="4x4x4", fsdp=64, tensor=2), devices)
    pairs = order.reshape(64, 2)
    assert len({(d.coords, d.core_on_chip) for d in order.flat}) == 128
    assert all(a.coords == b.coords for a, b in pairs), "the fastest link is inside a chip"


def cpus(n, processes=1):
    return [
        SimpleNamespace(platform="cpu", device_kind="cpu", id=i, process_index=i % processes)
        for i in range(n)
    ]


@pytest.mark.parametrize(
    "spec, devices, message",
    [
        (
            spec_of("h100_sxm", fsdp=8),
            cpus(1),
            "m.toml needs 8 devices of h100_sxm .NVIDIA H100 80GB HBM3.; this machine has "
            "1 cpu device: run with --simulate, or pass --mesh cpu_1",
        ),
        (spec_of("tpu_v5e", fsdp=8), list(gpus(1, 8)), "of tpu_v5e.*machine has 8 gpu devices"),
        (spec_of("h100_sxm", fsdp=8), list(gpus(1, 4)), "needs 8 devices.*machine has 4 gpu"),
        (spec_of("h100_sxm", fsdp=8), [], "this machine has 0 usable devices"),
        (mesh_from_axes(fsdp=8), cpus(4), "needs 8 cpu devices.*fixed when JAX starts.*count=8"),
        (
            spec_of("h100_sxm", fsdp=8),
            list(gpus(1, 8, kind="NVIDIA H200")),
            "for h100_sxm.*devices here are 'NVIDIA H200'; set chip",
        ),
        (spec_of("tpu_v5e", fsdp=8), list(tpus((4, 4, 1))), "has 8 devices, but 16 tpu devices"),
        (mesh_from_axes(fsdp=8), cpus(16, processes=2), "8 devices, but 16 cpu devices take part"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_the_wrong_machine_is_refused(spec, devices, message):
    with pytest.raises(ValueError, match=message):
        device_order(spec, devices)


@pytest.mark.parametrize("devices", [cpus(8), list(gpus(1, 8))], ids=["cpu", "gpu"])
def test_one_process_may_leave_devices_idle(devices):
    spec = mesh_from_axes(fsdp=2) if devices[0].platform == "cpu" else spec_of("h100_sxm", fsdp=2)
    assert list(device_order(spec, devices).flat) == devices[:2]


# Simulation

COUNT = "--xla_force_host_platform_device_count"


HUGE = "glibc.malloc.hugetlb=1"


@pytest.mark.parametrize(
    "given, flags, tunables",
    [
        ({}, f"{COUNT}=8", HUGE),
        ({"XLA_FLAGS": "--xla_a=1"}, f"--xla_a=1 {COUNT}=8", HUGE),
        ({"XLA_FLAGS": f"{COUNT}=16", "JAX_PLATFORMS": "cuda"}, f"{COUNT}=16", HUGE),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, f"{COUNT}=8", f"glibc.pthread.rseq=0:{HUGE}"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, f"{COUNT}=8", "glibc.malloc.hugetlb=0"),
    ],
    ids=str,
)
def test_simulation_flags_keep_what_the_user_set(given, flags, tunables):
    before, found = dict(given), simulation_flags(mesh_from_axes(fsdp=8), given)
    assert found == {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": tunables}
    assert given == before


@pytest.mark.parametrize(
    "devices, flags, message",
    [
        (8, f"{COUNT}=4", r"needs 8 devices, but XLA_FLAGS has .*=4; set it to 8"),
        (4096, "", r"4096 devices.* 2048; use fewer"),
    ],
)
def test_simulations_that_cannot_be_are_refused(devices, flags, message):
    simulation_flags(mesh_from_axes(data=2048), {})
    with pytest.raises(ValueError, match=message):
        simulation_flags(mesh_from_axes(data=devices), {"XLA_FLAGS": flags})


def test_the_flags_make_the_devices_in_a_fresh_process():
    """load_mesh and simulation_flags must not start JAX: afterwards it would be too late."""
    code = """
import os
from jaxtrain.mesh.mesh import load_mesh, make_mesh
from jaxtrain.mesh.simulation import simulation_flags
spec = load_mesh("meshes/cpu_8.toml")
os.environ.update(simulation_flags(spec, os.environ))
import jax
print(len(jax.devices('cpu')), make_mesh(spec).shape["fsdp"])
"""
    environ = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["8 8"], done.stderr
