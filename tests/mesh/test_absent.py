"""Meshes of chips that are not here, and options asked of their compilers."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.mesh import absent
from jaxtrain.mesh.absent import ENVIRONMENT, absent_devices, absent_mesh
from jaxtrain.mesh.compiler_options import option_violations
from jaxtrain.mesh.hardware import CHIPS
from jaxtrain.mesh.mesh import MeshSpec, load_mesh

V5E, H100 = "meshes/v5e_16.toml", "meshes/h100_64.toml"
MESHES = ("v5e_16", "v5e_256", "v6e_256", "v5p_512", "h100_8", "h100_64", "h100_1024", "two_sites")

# A program for an absent chip can be written to JAX's cache of programs, but not read back.
NO_CACHE = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry")


def installed(platform: str) -> bool:
    names = {"tpu": ("libtpu",), "gpu": ("jax_cuda12_plugin", "jax_cuda13_plugin")}[platform]
    return any(importlib.util.find_spec(name) for name in names)


def compiler_of(spec: MeshSpec, monkeypatch) -> None:
    """Skip where the compiler is not installed; else the environment it needs."""
    platform = spec.chip.platform
    if not installed(platform):
        extra = "tpu" if platform == "tpu" else "cuda12"
        pytest.skip(f"compiles for an absent {spec.chip.name}: pip install '.[{extra}]'")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def slice_of(chip: str, topology: str | None, devices: int, per_host: int = 4) -> MeshSpec:
    spec = load_mesh(V5E)
    return replace(
        spec,
        chip=CHIPS[chip],
        topology=topology,
        devices=devices,
        devices_per_host=per_host,
        axes=(("fsdp", devices),),
    )


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_file_of_accelerators_can_be_compiled_for(monkeypatch, name: str) -> None:
    spec = load_mesh(f"meshes/{name}.toml")
    compiler_of(spec, monkeypatch)
    mesh = absent_mesh(spec)
    assert dict(mesh.shape) == spec.shape
    devices = list(mesh.devices.flat)
    assert len(set(devices)) == spec.devices
    assert {d.device_kind for d in devices} <= set(spec.chip.device_kinds)
    assert len({d.process_index for d in devices}) == spec.devices // spec.devices_per_host
    if spec.topology:
        sides = [int(side) for side in spec.topology.split("x")]
        assert {tuple(d.coords[: len(sides)]) for d in devices} == set(np.ndindex(*sides))


@pytest.mark.parametrize(
    ("chip", "topology", "slices", "per_host"),
    [("tpu_v5e", "1x1", 1, 1), ("tpu_v5e", "2x4", 1, 8), ("tpu_v6e", "4x4", 1, 4),
     ("tpu_v5e", "4x4", 2, 4), ("tpu_v5p", "2x2x4", 1, 4), ("tpu7x", "2x2x1", 1, 8)],
)  # fmt: skip
def test_slices_in_their_forms(monkeypatch, chip, topology, slices, per_host) -> None:
    chips = math.prod(map(int, topology.split("x")))
    devices = slices * chips * CHIPS[chip].devices_per_chip
    spec = slice_of(chip, topology, devices, per_host)
    compiler_of(spec, monkeypatch)
    found = absent_mesh(spec).devices.flatten()
    assert len(found) == devices
    assert len({d.process_index for d in found}) == devices // per_host
    assert len({getattr(d, "slice_index", 0) for d in found}) == slices


# What is asked of a compiler, when none is asked: (mesh, what the error says).
UNKNOWN = [
    (load_mesh("meshes/cpu_8.toml"), r"cpu_8.*cpu is not a chip .* tpu_v5e.*h100_sxm.*--simulate"),
    (slice_of("tpu_v4", "2x2x4", 16), r"tpu_v4 is not a chip"),
    (slice_of("tpu_v5e", None, 16), r'no topology; .* as topology = "4x4"'),
    (slice_of("tpu_v5e", "4x4", 16, 16), r"1, 4 or 8 chips, .* = 16 makes 16; use 4"),
]


@pytest.mark.parametrize(("spec", "message"), UNKNOWN)
def test_what_cannot_be_described_is_told(spec: MeshSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        absent_devices(spec)


def test_a_topology_that_is_not_sold_is_told(monkeypatch) -> None:
    spec = slice_of("tpu_v5e", "3x4", 12)
    compiler_of(spec, monkeypatch)
    with pytest.raises(ValueError, match=r'knows no v5e:3x4: .*use a slice that is sold.*"4x4"'):
        absent_devices(spec)


@pytest.mark.parametrize(("mesh", "extra"), [(V5E, "tpu"), (H100, "cuda12")])
def test_a_missing_compiler_names_its_extra(monkeypatch, mesh: str, extra: str) -> None:
    monkeypatch.setattr(absent.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"no compiler .* pip install '\.\[{extra}\]'"):
        absent_devices(load_mesh(mesh))


@pytest.mark.parametrize("error", [RuntimeError("ABORTED: lockfile"), NotImplementedError("cuda")])
def test_a_compiler_that_does_not_start_names_the_environment(monkeypatch, error) -> None:
    def fail(**asked):
        raise error

    monkeypatch.setattr(absent.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", fail)
    with pytest.raises(ValueError) as told:
        absent_devices(load_mesh(V5E))
    assert str(error) in str(told.value)
    assert all(f"{name}={value}" in str(told.value) for name, value in ENVIRONMENT.items())


# Options


def test_options_that_a_compiler_takes_are_no_violation() -> None:
    cpu = jax.devices("cpu")[0]
    assert option_violations({}, cpu) == []
    good = {"xla_cpu_enable_fast_math": False, "xla_backend_optimization_level": 1}
    assert option_violations(good, cpu) == []


BAD = [
    ("xla_bogus", True, "xla_bogus is unknown to the compiler of this cpu; correct its spelling"),
    (
        "xla_cpu_enable_fast_math",
        3,
        "xla_cpu_enable_fast_math = 3 is refused by the compiler of this cpu: ",
    ),
    ("xla_gpu_autotune_level", 0, "xla_gpu_autotune_level does nothing on cpu; remove it"),
]


def test_every_bad_option_is_told_at_once() -> None:
    options = {name: value for name, value, _ in BAD}
    found = "\n".join(sorted(option_violations(options, jax.devices("cpu")[0])))
    assert len(found.splitlines()) == len(BAD)
    for _, _, message in BAD:
        assert f"compiler_options.{message}" in found


FILES = [path for path in Path("meshes").glob("*.toml") if load_mesh(path).chip.platform != "cpu"]
TAKEN = {"tpu": ("xla_tpu_scoped_vmem_limit_kib", 65536), "gpu": ("xla_gpu_autotune_level", 0)}


@NO_CACHE
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_options_of_mesh_files_are_taken_by_their_compilers(monkeypatch, path: Path) -> None:
    spec = load_mesh(path)
    compiler_of(spec, monkeypatch)
    device = absent_devices(spec)[0]
    known = dict([*spec.compiler_options, TAKEN[spec.chip.platform]])
    assert option_violations(known, device) == []
    name = f"xla_{spec.chip.platform}_nothing"
    assert f"compiler_options.{name} is unknown" in "".join(option_violations({name: 1}, device))


def test_a_simulated_mesh_has_no_options_of_the_chip() -> None:
    """Its programs are the CPU's compiler's, which refuses them."""
    options = (("xla_tpu_scoped_vmem_limit_kib", 65536),)
    spec = replace(load_mesh(V5E), compiler_options=options)
    assert spec.simulate().compiler_options == ()
    own = replace(load_mesh("meshes/cpu_8.toml"), compiler_options=(("xla_cpu_x", 1),))
    assert own.simulate().compiler_options == own.compiler_options
