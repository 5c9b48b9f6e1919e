"""One process made one of many, before JAX starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from jaxtrain.violations import raise_violations

LATE_S = 120
"""When JAX itself gives up a process that says nothing: after whoever supervises it has."""

DETECTED = {
    "SLURM": ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID"),
    "Open MPI": ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "Kubernetes": ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"),
    "Cloud TPU": ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"),
}
"""Launcher -> variables by which JAX finds the coordinator and, the last of them, the process's
number."""

COUNTED = {"SLURM": "SLURM_NTASKS", "Open MPI": "OMPI_COMM_WORLD_SIZE"}
"""Launcher -> the variable that says how many processes there are."""


@dataclass(frozen=True)
class Place:
    """Where a process stands among others.

    coordinator: HOST:PORT at which process 0 listens. processes: how many there are. process: the
    number of this one, from 0. Raises ValueError with every violation.
    """

    coordinator: str
    processes: int
    process: int

    def __post_init__(self) -> None:
        found = []
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            found.append(f"coordinator={self.coordinator!r}; use HOST:PORT, such as node0:8476")
        if self.processes < 1:
            found.append(f"processes={self.processes}; use 1 or more")
        elif not 0 <= self.process < self.processes:
            last = self.processes - 1
            found.append(f"process={self.process} of processes={self.processes}; use 0 to {last}")
        raise_violations(found)


def place_of(coordinator: str | None, processes: int | None, process: int | None) -> Place | None:
    """The place that flags give, None where they give none. Raises ValueError where they give a
    part of one."""
    given = {"coordinator": coordinator, "processes": processes, "process": process}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise ValueError(
            f"a process of several needs --coordinator, --processes and --process; add "
            f"{' and '.join(missing)}, or give none to be one alone, or as the launcher says"
        )
    return Place(str(coordinator), int(processes or 0), int(process or 0))


def launcher(environ: Mapping[str, str]) -> str | None:
    """The launcher of several processes that started this one, None where there is none or it
    started one alone."""
    for name, variables in DETECTED.items():
        if all(variable in environ for variable in variables):
            return name if environ.get(COUNTED.get(name, ""), "") != "1" else None
    return None


def free_port() -> int:
    """A port of this machine that nobody listens at now."""
    with socket.socket() as found:
        found.bind(("", 0))
        return found.getsockname()[1]


def process_count(place: Place | None, environ: Mapping[str, str]) -> int:
    """How many processes there will be: as `place` says, or the launcher. Raises ValueError for a
    launcher that does not say it before it is joined."""
    if place is not None:
        return place.processes
    name = launcher(environ)
    if name is None:
        return 1
    if name not in COUNTED:
        raise ValueError(
            f"{name} does not say how many processes there are, so the fake devices cannot be "
            "shared out; give --coordinator, --processes and --process"
        )
    return int(environ[COUNTED[name]])


def process_number(place: Place | None, environ: Mapping[str, str]) -> int:
    """Which process this one will be, from 0: as `place` says, or the launcher; 0 of one alone."""
    if place is not None:
        return place.process
    name = launcher(environ)
    return 0 if name is None else int(environ[DETECTED[name][-1]])


def join(place: Place | None) -> bool:
    """Join the other processes: those of `place`, or where it is None of the launcher that JAX
    knows. Whether there are others. JAX must not have looked for its devices yet."""
    import jax

    if launcher(os.environ) is None if place is None else place.processes == 1:
        return False
    # Signals are ours: the first of them, on whatever process, stops all after the same step.
    jax.config.update("jax_enable_preemption_service", False)
    if place is None:
        jax.distributed.initialize(heartbeat_timeout_seconds=LATE_S)
        return True
    jax.distributed.initialize(
        place.coordinator,
        num_processes=place.processes,
        process_id=place.process,
        heartbeat_timeout_seconds=LATE_S,
        cluster_detection_method="deactivate",
    )
    return True
