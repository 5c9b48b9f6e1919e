"""Meshes of chips that this machine does not have, to compile for: a compiler needs only facts.

A program compiled on such a mesh cannot run, but shows its memory, collectives and schedule. A
TPU's compiler is in the extra `tpu`, a GPU's in `cuda12` or `cuda13`; each works on a Linux machine
without such a device.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxtrain.mesh.mesh import MeshSpec, make_mesh

if TYPE_CHECKING:
    from jax.sharding import Mesh

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Environment that a process sets before JAX starts. JAX_PLATFORMS keeps a plugin from looking for
its device, and failing (GPUs need it). The last variable lets two processes compile for TPUs at
once. The others silence a library that believes it is on a TPU host."""


@dataclass(frozen=True)
class _Gpu:
    """Facts that XLA's GPU compiler needs (`GpuTargetConfigProto`). Memory in bytes."""

    name: str
    cores: int
    fpus_per_core: int
    shared_per_core: int
    l2: int
    clock_ghz: float
    memory: int
    bandwidth: int

    def target(self, capability: int) -> str:
        """Returns the text proto. CUDA's versions are those of the wheels that jax 0.10 needs."""
        features = "ACCELERATED_FEATURES" if capability >= 9 else "NONE"
        limits = "thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64"
        limits += " block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535"
        return f"""gpu_device_info {{ {limits} threads_per_block_limit: 1024 threads_per_warp: 32
            threads_per_core_limit: 2048 registers_per_core_limit: 65536
            registers_per_block_limit: 65536 shared_memory_per_block: 49152
            shared_memory_per_core: {self.shared_per_core}
            shared_memory_per_block_optin: {self.shared_per_core - 1024}
            core_count: {self.cores} fpus_per_core: {self.fpus_per_core}
            l2_cache_size: {self.l2} clock_rate_ghz: {self.clock_ghz}
            device_memory_size: {self.memory} memory_bandwidth: {self.bandwidth}
            cuda_compute_capability {{ major: {capability} feature_extension: {features} }}
            device_address_bits: 64 name: "{self.name}" driver_version: "13.0.0"
            runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
            dnn_version: "9.10.0" }}
            platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            device_description_str: "{self.name}" """


_HOPPER = dict(cores=132, fpus_per_core=128, shared_per_core=233472, l2=52428800)

_GPUS = {
    "a100_80g": _Gpu(
        "NVIDIA A100-SXM4-80GB", 108, 64, 167936, 41943040, 1.41, 85100068864, 2039040000000
    ),
    "h100_sxm": _Gpu(
        "NVIDIA H100 80GB HBM3",
        **_HOPPER,
        clock_ghz=1.98,
        memory=84942979072,
        bandwidth=3352320000000,
    ),
    "h200": _Gpu(
        "NVIDIA H200", **_HOPPER, clock_ghz=1.98, memory=151397597184, bandwidth=4800000000000
    ),
    "b200": _Gpu("NVIDIA B200", 148, 128, 233472, 132644864, 1.965, 191514411008, 7672320000000),
}
"""By the name of the chip. Source: openxla/xla, xla/backends/gpu/target_config/specs."""

_TPUS = {"tpu_v5e": "v5e", "tpu_v5p": "v5p", "tpu_v6e": "v6e", "tpu7x": "tpu7x"}
"""Name of the chip -> libtpu's name. v4 is left out: libtpu gives it two devices a chip, and a real
machine has one device of both cores."""


def absent_mesh(spec: MeshSpec) -> Mesh:
    """Returns the mesh of `spec` with all seven mesh axes, on devices that can only be compiled
    for.

    Raises ValueError as `absent_devices` does.
    """
    return make_mesh(spec, absent_devices(spec))


def absent_devices(spec: MeshSpec) -> Sequence[Any]:
    """Returns compile-only devices of the machine of `spec`, in the same hosts and slices.

    The process must have started with `ENVIRONMENT`. A mesh must use all of them: libtpu aborts the
    process over a part of a slice. JAX's persistent cache cannot read programs compiled for them,
    and warns: switch it off (jax_enable_compilation_cache).

    Raises ValueError for a chip or a topology that the compiler does not know, and where its plugin
    is missing or cannot start.
    """
    if spec.chip.name in _TPUS:
        return _described(spec, "tpu", **_tpu_slices(spec))
    if spec.chip.name in _GPUS:
        hosts = spec.devices // spec.devices_per_host
        shape = f"1x{hosts}x{spec.devices_per_host}"
        assert spec.chip.capability is not None, "a GPU of the table has one"
        target = _GPUS[spec.chip.name].target(spec.chip.capability)
        return _described(
            spec, "cuda", topology_name=spec.chip.name, topology=shape, target_config=target
        )
    raise ValueError(
        f"{spec.where}: {spec.chip.name} is not a chip that can be compiled for without one; "
        f"those are {', '.join((*_TPUS, *_GPUS))}. A mesh of any chip runs with --simulate"
    )


def _tpu_slices(spec: MeshSpec) -> dict[str, Any]:
    """Options of libtpu for a machine: the torus of one slice, its hosts, the number of slices."""
    if spec.topology is None:
        raise ValueError(
            f'{spec.where} has no topology; add the torus of one slice, as topology = "4x4"'
        )
    sides = [int(side) for side in spec.topology.split("x")]
    slices = spec.devices // (math.prod(sides) * spec.chip.devices_per_chip)
    chips = spec.devices_per_host // spec.chip.devices_per_chip
    bounds = {1: [1, 1, 1], 4: [2, 2, 1], 8: [2, 4, 1]}.get(chips)
    if bounds is None:
        raise ValueError(
            f"{spec.where}: a TPU host has 1, 4 or 8 chips, and devices_per_host = "
            f"{spec.devices_per_host} makes {chips}; use {4 * spec.chip.devices_per_chip}"
        )
    name = f"{_TPUS[spec.chip.name]}:{spec.topology}"
    torus: dict[str, Any] = dict(topology_name=name, chips_per_host_bounds=bounds)
    return torus | ({"num_slices": slices} if slices > 1 else {})


def _described(spec: MeshSpec, platform: str, **topology: Any) -> Sequence[Any]:
    from jax.experimental import topologies

    plugins = ("libtpu",) if platform == "tpu" else ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(importlib.util.find_spec(name) for name in plugins):
        extra = "tpu" if platform == "tpu" else "cuda12"
        raise ValueError(
            f"{spec.where}: no compiler for {spec.chip.name} is installed; "
            f"pip install '.[{extra}]' brings it, with or without such a device"
        )
    try:
        return topologies.get_topology_desc(platform=platform, **topology).devices
    except (RuntimeError, NotImplementedError) as error:
        text = str(error).splitlines()[0]
        if "INVALID_ARGUMENT" in text:
            raise ValueError(
                f"{spec.where}: the compiler knows no {topology['topology_name']}: "
                f"{text.removeprefix('INVALID_ARGUMENT: ')}; use a slice that is sold, as "
                f'topology = "4x4" with devices_per_host = 4'
            ) from error
        variables = " ".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
        raise ValueError(
            f"{spec.where}: the compiler for {spec.chip.name} did not start ({text}); "
            f"set before JAX starts: {variables}"
        ) from error
