"""Joins a process to the others of its run, before JAX starts."""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtrain.violations import raise_violations

LATE_S = 120
"""Seconds after which JAX gives up a silent process: later than the supervisor does."""

DETECTED = {
    "SLURM": ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID"),
    "Open MPI": ("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "Kubernetes": ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"),
    "Cloud TPU": ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"),
}
"""Launcher -> variables by which JAX finds the coordinator; the last one is the process number."""

COUNTED = {"SLURM": "SLURM_NTASKS", "Open MPI": "OMPI_COMM_WORLD_SIZE"}
"""Launcher -> the variable with the number of processes."""


@dataclass(frozen=True)
class ProcessPlace:
    """Position of a process among the others.

    coordinator: HOST:PORT at which process 0 listens. processes: their number. process: the number
    of this one, from 0. Raises ValueError with every violation.
    """

    coordinator: str
    processes: int
    process: int

    def __post_init__(self) -> None:
        violations = []
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            violations.append(
                f"coordinator={self.coordinator!r}; use HOST:PORT, such as node0:8476"
            )
        if self.processes < 1:
            violations.append(f"processes={self.processes}; use 1 or more")
        elif not 0 <= self.process < self.processes:
            last = self.processes - 1
            violations.append(
                f"process={self.process} of processes={self.processes}; use 0 to {last}"
            )
        raise_violations(violations)


def place_of(
    coordinator: str | None, processes: int | None, process: int | None
) -> ProcessPlace | None:
    """The place from the flags; None if none is set. Raises ValueError if only some are set."""
    flags = {"coordinator": coordinator, "processes": processes, "process": process}
    missing = [f"--{name}" for name, value in flags.items() if value is None]
    if len(missing) == len(flags):
        return None
    if missing:
        raise ValueError(
            f"a process of several needs --coordinator, --processes and --process; add "
            f"{' and '.join(missing)}, or give none to be one alone, or as the launcher says"
        )
    return ProcessPlace(str(coordinator), int(processes or 0), int(process or 0))


def launcher(environ: Mapping[str, str]) -> str | None:
    """The launcher that started this process among several; None if there is none or it started one
    process only."""
    for name, variables in DETECTED.items():
        if all(variable in environ for variable in variables):
            return name if environ.get(COUNTED.get(name, ""), "") != "1" else None
    return None


def free_port() -> int:
    """A port of this machine on which nothing listens now."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        return sock.getsockname()[1]


def process_count(place: ProcessPlace | None, environ: Mapping[str, str]) -> int:
    """Number of processes, from `place` or the launcher. Raises ValueError for a launcher that does
    not state it before joining."""
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


def process_number(place: ProcessPlace | None, environ: Mapping[str, str]) -> int:
    """Number of this process, from 0: from `place` or the launcher; 0 if it is the only one."""
    if place is not None:
        return place.process
    name = launcher(environ)
    return 0 if name is None else int(environ[DETECTED[name][-1]])


BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
"""Variable that JAX reads: where process 0 listens."""

TLS_FILES = ("JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE")
"""Variables that JAX reads: this process's certificate, its private key, and the certificates that
others' are verified by, as files in PEM."""


def uses_tls(environ: Mapping[str, str]) -> bool:
    """True if JAX's coordination service and its clients authenticate each other. Raises ValueError
    for files of which some are not named or cannot be read: the service would be open."""
    given = {name: environ[name] for name in TLS_FILES if environ.get(name)}
    if not given:
        return False
    raise_violations(
        [
            *(f"{name} is not set, and {', '.join(given)} is; set all three"
              for name in TLS_FILES if name not in given),
            *(f"{name}={path} cannot be read; name a file in PEM"
              for name, path in given.items() if not os.access(path, os.R_OK)),
        ]
    )  # fmt: skip
    return True


def _refuse_without_tls(initialize: Callable[..., Any]) -> None:
    """Raises ValueError for a JAX that would take no notice of the files, and be open."""
    if "mtls_cert_file" not in inspect.signature(initialize).parameters:
        raise ValueError(
            f"{TLS_FILES[0]} is set, and this JAX has no mutual TLS; use JAX 0.12 or newer, or"
            " unset it on a network of your own"
        )


def _listens_at(place: ProcessPlace) -> str | None:
    """The address at which process 0 listens: of processes that meet at this machine's own address
    that one; None for JAX's choice, which is the user's or every address."""
    host = place.coordinator.rpartition(":")[0]
    is_local = host in ("127.0.0.1", "localhost")
    return place.coordinator if is_local and not os.environ.get(BIND_ADDRESS) else None


def join(place: ProcessPlace | None) -> bool:
    """Joins the processes of `place`, or of the launcher that JAX detects if that is None. Returns
    True if there are others. Call it before JAX looks for devices. Raises ValueError for TLS files
    that would not be used."""
    import jax

    if launcher(os.environ) is None if place is None else place.processes == 1:
        return False
    if uses_tls(os.environ):
        _refuse_without_tls(jax.distributed.initialize)
    # We handle signals: the first one, on any process, stops all after the same step.
    jax.config.update("jax_enable_preemption_service", False)
    if place is None:
        jax.distributed.initialize(heartbeat_timeout_seconds=LATE_S)
        return True
    jax.distributed.initialize(
        place.coordinator,
        num_processes=place.processes,
        process_id=place.process,
        coordinator_bind_address=_listens_at(place),
        heartbeat_timeout_seconds=LATE_S,
        cluster_detection_method="deactivate",
    )
    return True
