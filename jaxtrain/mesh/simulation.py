"""Fake CPU devices: the environment that JAX needs before it starts."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxtrain.mesh.mesh import DEVICE_COUNT_FLAG, MeshSpec

MOST_SIMULATED_DEVICES = 2048
"""XLA:CPU creates more devices in one process but refuses to run a computation over them."""

_HUGE_PAGES = "glibc.malloc.hugetlb=1"


def simulation_flags(
    spec: MeshSpec, environ: Mapping[str, str], processes: int = 1
) -> dict[str, str]:
    """Returns the environment that runs `spec` on fake CPU devices, shared equally by `processes`.

    JAX reads JAX_PLATFORMS when it is imported and XLA_FLAGS when it first looks for devices. A
    device count that is already in XLA_FLAGS is kept if it is large enough. GLIBC_TUNABLES is read
    when a process starts, and changes speed only: XLA:CPU takes a program's temporaries from malloc
    at every step, as fresh pages, and huge pages are 512 times fewer (experiments/LOG.md).

    Raises ValueError if processes do not divide the devices, if one process cannot simulate its
    part, and if XLA_FLAGS has a smaller device count.
    """
    devices, remainder = divmod(spec.devices, processes)
    if remainder:
        raise ValueError(
            f"{spec.where} has {spec.devices} devices, which {processes} processes cannot have as "
            f"many of each; use a number of processes that divides {spec.devices}"
        )
    if devices > MOST_SIMULATED_DEVICES:
        raise ValueError(
            f"{spec.where} has {spec.devices} devices, and one CPU process can simulate "
            f"{MOST_SIMULATED_DEVICES}; use fewer devices"
        )
    flags = environ.get("XLA_FLAGS", "")
    counts = re.findall(rf"{DEVICE_COUNT_FLAG}=(\d+)", flags)
    if counts and int(counts[-1]) < devices:
        raise ValueError(
            f"{spec.where} needs {devices} devices, but XLA_FLAGS has "
            f"{DEVICE_COUNT_FLAG}={counts[-1]}; set it to {devices} or more, or remove it"
        )
    if not counts:
        flags = f"{flags} {DEVICE_COUNT_FLAG}={devices}".strip()
    tunables = environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        tunables = f"{tunables}:{_HUGE_PAGES}".strip(":")
    return {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": tunables}
