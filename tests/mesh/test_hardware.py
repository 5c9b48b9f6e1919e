"""The tables of chips and links: consistent in themselves and with what JAX knows of its chips."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.mesh import absent
from jaxtrain.mesh.hardware import CHIPS, LINKS, Chip, Link, chip_of, read_table
from jaxtrain.mesh.memory_pool import memory_fraction, told_fraction
from jaxtrain.mesh.mesh import load_mesh

ROOT = Path(__file__).parents[2]
GPUS = [name for name, chip in CHIPS.items() if chip.platform == "gpu"]
TPUS = {"tpu_v4": "v4", "tpu_v5e": "v5e", "tpu_v5p": "v5p", "tpu_v6e": "v6e", "tpu7x": "7x"}


def test_the_chips_and_links_that_mesh_files_may_name():
    assert set(CHIPS) == {"a100_80g", "h100_sxm", "h200", "b200", *TPUS, "cpu"}
    assert set(LINKS) == {
        *("pcie4", "pcie5", "nvlink3", "nvlink4", "nvlink5", "infiniband_ndr", "roce_400"),
        *("ici_v4", "ici_v5e", "ici_v5p", "ici_v6e", "ici_tpu7x", "dcn", "memory"),
    }
    assert all(row.source for row in [*CHIPS.values(), *LINKS.values()])


@pytest.mark.parametrize("name", TPUS)
def test_a_tpu_agrees_with_the_table_in_jax(name):
    """JAX's table is per TensorCore; a megacore device (v4, v5p) has both cores of its chip."""
    info = pytest.importorskip("jax._src.pallas.mosaic.tpu_info")
    chip, version = CHIPS[name], info.ChipVersion(TPUS[name])
    cores = 2 if version.supports_megacore else 1
    assert chip.devices_per_chip == version.num_physical_tensor_cores_per_chip // cores
    known = info.get_tpu_info_for_chip(version, cores)
    # Google gives 2765 GB/s for v5p; JAX has 2460.
    bandwidth_tolerance = 0.13 if name == "tpu_v5p" else 0.03
    for ours, theirs, tolerance in [
        (chip.bf16_flops, known.bf16_ops_per_second, 0.01),
        (chip.fp8_flops, known.fp8_ops_per_second, 0.01),
        (chip.hbm_gbytes * 1e9, known.hbm_capacity_bytes, 0.01),
        (chip.hbm_bandwidth_gbytes * 1e9, known.mem_bw_bytes_per_second, bandwidth_tolerance),
    ]:
        if ours and theirs:
            assert ours == pytest.approx(cores * theirs, rel=tolerance)
    for kind in chip.device_kinds:
        assert info.chip_version_from_device_kind(kind) is version


@pytest.mark.parametrize("name", [*GPUS, "tpu7x"])
def test_peaks_are_dense(name):
    """A sparse number read as a dense one is off by two: fp8 is twice bf16 where both exist, and
    bf16 over SMs x clock is the dense rate of the tensor cores (FLOP per SM and cycle)."""
    chip = CHIPS[name]
    if chip.fp8_flops is not None:
        assert chip.fp8_flops == pytest.approx(2 * chip.bf16_flops, rel=1e-3)
    # SMs, boost clock in GHz, FMAs per SM and cycle from the architecture white papers
    cores = {"a100_80g": (108, 1.410, 1024), "h100_sxm": (132, 1.830, 2048)}
    cores["h200"] = cores["h100_sxm"]
    if name in cores:
        sms, ghz, fmas = cores[name]
        assert chip.bf16_flops == pytest.approx(2 * fmas * sms * ghz * 1e9, rel=2e-3)


@pytest.mark.parametrize(
    "link, lanes, gbits",
    [
        ("pcie4", 16, 16),
        ("pcie5", 16, 32),
        ("nvlink3", 12 * 4, 50),
        ("nvlink4", 18 * 2, 100),
        ("nvlink5", 18 * 2, 200),
        ("infiniband_ndr", 4, 100),
        ("roce_400", 8, 50),
    ],
)
def test_bandwidth_is_one_direction(link, lanes, gbits):
    """Lanes in one direction times the line rate of a lane; coding takes under 2%."""
    assert LINKS[link].bandwidth_gbytes == pytest.approx(lanes * gbits / 8, rel=0.02)


@pytest.mark.parametrize(
    "link, dims", [("v4", 3), ("v5e", 2), ("v5p", 3), ("v6e", 2), ("tpu7x", 3)]
)
def test_a_torus_has_two_ports_a_dim(link, dims):
    ici = LINKS[f"ici_{link}"]
    assert ici.ports == 2 * dims
    assert 45 <= ici.bandwidth_gbytes / ici.ports <= 100


@pytest.mark.parametrize(
    "device_kind, name",
    [
        ("NVIDIA A100-SXM4-80GB", "a100_80g"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("TPU v4", "tpu_v4"),
        ("TPU v5 lite", "tpu_v5e"),
        ("TPU v5", "tpu_v5p"),
        ("TPU v5p", "tpu_v5p"),
        ("TPU v6 lite", "tpu_v6e"),
        ("TPU7x", "tpu7x"),
        ("cpu", "cpu"),
    ],
)
def test_device_kinds_of_jax(device_kind, name):
    assert chip_of(device_kind) is CHIPS[name]


@pytest.mark.parametrize(
    "device_kind, nearest",
    [("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3"), ("tpu v5", "TPU v5")],
)
def test_an_unknown_device_kind_is_refused(device_kind, nearest):
    with pytest.raises(
        ValueError, match=f"{device_kind}.*nearest known is '{nearest}'.*bf16_flops"
    ):
        chip_of(device_kind)


@pytest.mark.parametrize("name", CHIPS)
def test_peak_flops_by_dtype(name):
    chip = CHIPS[name]
    assert chip.peak_flops("float16") == chip.peak_flops("bfloat16") == chip.bf16_flops
    assert chip.peak_flops("float32") == chip.fp32_flops <= chip.bf16_flops
    if chip.fp8_flops is None:
        with pytest.raises(ValueError, match=r"no matmul peak.*float32, bfloat16, float16"):
            chip.peak_flops("float8_e4m3fn")
    else:
        assert chip.peak_flops("float8_e5m2") == chip.fp8_flops
    with pytest.raises(ValueError, match="int3"):
        chip.peak_flops("int3")


@pytest.mark.parametrize("row", [*CHIPS.values(), *LINKS.values()], ids=lambda row: row.name)
def test_a_row_survives_being_written_as_a_table(row):
    table = {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in dataclasses.fields(row)
        if (value := getattr(row, field.name)) is not None
    }
    problems: list[str] = []
    assert read_table(type(row), table, "x", problems) == row
    assert not problems


@pytest.mark.parametrize(
    "kind, change, problem",
    [
        (Link, {"latency_us": -1}, "x.latency_us = -1 must be a positive number"),
        (Link, {"ports": 1.5}, "x.ports = 1.5 must be a positive integer"),
        (Link, {"ports": True}, "x.ports = True must be a positive integer"),
        (Link, {"latencyus": 1}, "x.latencyus is not known; did you mean 'latency_us'?"),
        (Link, {"source": 3}, "x.source = 3 must be a string"),
        (Chip, {"device_kinds": "H100"}, "x.device_kinds = 'H100' must be a list of strings"),
        (Chip, {"watts": "a lot"}, "x.watts = 'a lot' must be a positive number"),
        (Chip, {"source": None}, "x lacks source"),
    ],
)
def test_a_wrong_table_is_refused(kind, change, problem):
    row = {Chip: CHIPS["h200"], Link: LINKS["dcn"]}[kind]
    table = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(row).items()} | change
    table = {k: v for k, v in table.items() if v is not None}
    problems: list[str] = []
    assert read_table(kind, table, "x", problems) is None
    assert problems == [problem]


def test_a_machine_of_ones_own(tmp_path):
    text = """
        devices = 4
        [chip]
        name = "l40s"
        platform = "gpu"
        device_kinds = ["NVIDIA L40S"]
        bf16_flops = 362e12
        fp32_flops = 91.6e12
        hbm_gbytes = 48
        hbm_bandwidth_gbytes = 864
        source = "datasheet"
        [axes]
        data = 4
        [links.host]
        name = "pcie"
        bandwidth_gbytes = 25
        latency_us = 10
        ports = 1
        source = "measured"
        [facts]
        price_per_hour = 1.5
        preemptible = false
        [compiler_options]
        xla_gpu_graph_level = 0
        xla_gpu_autotune = true
    """
    (tmp_path / "m.toml").write_text(text)
    spec = load_mesh(tmp_path / "m.toml")
    assert (spec.chip.name, spec.chip.hbm_gbytes, spec.chip.watts) == ("l40s", 48, None)
    assert spec.link("host").bandwidth_gbytes == 25
    with pytest.raises(ValueError, match=r"no link for 'wan'.*under .links."):
        spec.link("wan")
    assert (spec.facts.price_per_hour, spec.facts.preemptible) == (1.5, False)
    assert spec.facts.mtbf_hours is None
    assert spec.compiler_options == (("xla_gpu_graph_level", 0), ("xla_gpu_autotune", True))
    assert spec.devices_per_host == 4 and not spec.simulated


REAL = {
    "v5e:4x4": ("tpu_v5e", 1, {"fsdp": 4, "tensor": 4}),
    "v5p:4x4x4": ("tpu_v5p", 1, {"data": 4, "fsdp": 4, "tensor": 4}),
    "v6e:2x4": ("tpu_v6e", 2, {"data": 2, "fsdp": 8}),
    "tpu7x:2x2x1": ("tpu7x", 1, {"fsdp": 4, "tensor": 2}),
}


@pytest.mark.parametrize("name", REAL)
def test_real_topologies(name):
    """The devices that libtpu describes, without a TPU: kinds are known, slices stay whole."""
    pytest.importorskip("libtpu")
    chip, slices, axes = REAL[name]
    code = f"""
import json
from jax.experimental import topologies
from jaxtrain.mesh.mesh import device_order, mesh_from_axes
from jaxtrain.mesh.hardware import chip_of
from dataclasses import replace
many = {{"num_slices": {slices}}} if {slices} > 1 else {{}}
devices = topologies.get_topology_desc(platform="tpu", topology_name={name!r}, **many).devices
chip = chip_of(devices[0].device_kind)
spec = replace(mesh_from_axes(**{axes!r}), chip=chip, simulated=False)
order = device_order(spec, devices)
rows = [getattr(device, "slice_index", 0) for device in order.flat]
print(json.dumps([chip.name, list(order.shape), rows, len({{d.id for d in order.flat}})]))
"""
    silent = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, env={**os.environ, **silent}, capture_output=True)
    assert done.returncode == 0, done.stderr
    found, shape, rows, distinct = json.loads(done.stdout.splitlines()[-1])
    assert found == chip and shape[: len(axes)] == list(axes.values())
    assert rows == sorted(rows) and len(set(rows)) == slices
    assert distinct == math.prod(axes.values())


def test_usable_memory_is_the_pool_of_a_gpu_and_within_what_the_driver_reports():
    """JAX takes three quarters of what CUDA reports, which XLA's own table of GPUs has."""
    for name, chip in CHIPS.items():
        if name in absent._GPUS:
            assert chip.usable_gbytes == pytest.approx(0.75 * absent._GPUS[name].memory / 1e9, 1e-5)
        if chip.usable_gbytes is not None:
            assert 0.7 * chip.hbm_gbytes < chip.usable_gbytes < chip.hbm_gbytes
    assert {name for name, chip in CHIPS.items() if chip.usable_gbytes} >= set(absent._GPUS)


def test_a_mesh_file_may_state_what_is_usable(tmp_path):
    text = (ROOT / "meshes" / "h100_8.toml").read_text()
    assert load_mesh(ROOT / "meshes" / "h100_8.toml").usable_bytes == 0.75 * 84.943e9
    stated = tmp_path / "mesh.toml"
    stated.write_text(text.replace("[facts]", "[facts]\nusable_gbytes = 76.4"))
    assert load_mesh(stated).usable_bytes == 76.4e9
    assert load_mesh(ROOT / "meshes" / "cpu_8.toml").usable_bytes == 16 * 2**30


def test_the_part_of_a_gpu_that_a_program_may_take_is_told():
    whole = load_mesh("h100_8")
    assert memory_fraction(whole) == 0.75
    assert "75% of the memory of a h100_sxm, as JAX" in told_fraction(whole)
    more = 0.92 * 84.943
    assert f"then write usable_gbytes = {more:.1f} under [facts]" in told_fraction(whole)
    facts = dataclasses.replace(whole.facts, usable_gbytes=76.4)
    stated = dataclasses.replace(whole, facts=facts)
    assert memory_fraction(stated) == pytest.approx(76.4 / 84.943, 1e-6)
    assert "start it with XLA_CLIENT_MEM_FRACTION=0.90" in told_fraction(stated)
    for spec in (load_mesh("cpu_8"), load_mesh("v5p_16"), whole.simulate()):
        assert memory_fraction(spec) is None and told_fraction(spec) == ""
