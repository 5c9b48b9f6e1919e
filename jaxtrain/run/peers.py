"""Compares the processes that have met: those of two runs meet at one port without an error."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint.run_config import config_differences
from jaxtrain.cluster.agreement import all_gather_text, stated_processes
from jaxtrain.experiment import Experiment, config_of, resumable
from jaxtrain.files.store import address_of
from jaxtrain.files.stores import is_address
from jaxtrain.mesh.mesh import MeshSpec

HOST, RUN_DIR, EXPERIMENT, KIND = "host", "run directory", "experiment", "kind of run"
SHOWN = 3
"""Fields of experiments that an error names."""
LEAVE_S = 1.0
"""Seconds that process 0 lets the others say the same before it leaves: it holds the coordination
service, and JAX aborts them as that ends."""


def refuse_other_runs(
    experiment: Experiment, spec: MeshSpec, run: str | Path | None, last: int
) -> None:
    """Raises ValueError, on all processes, where one is of another run: it has another number of
    processes, mesh, last step or experiment, no run directory where others have one, or on the same
    host another one. All of them call it, before other collectives."""
    if jax.process_count() == 1:
        return
    fields = _compared_fields(experiment)
    own = {
        "number of processes": stated_processes(),
        "mesh": dict(spec.axes),
        "last step": last,
        EXPERIMENT: sha256(json.dumps(fields).encode()).hexdigest()[:12],
        **_place(run),
        HOST: socket.gethostname(),
    }
    all_runs = [json.loads(text) for text in all_gather_text(json.dumps(own))]
    first_on: dict[str, int] = {}
    for process, run_here in enumerate(all_runs):
        # A shared directory may have another path on another host.
        neighbour = first_on.setdefault(run_here[HOST], process)
        for other, names in ((0, run_here.keys() - {HOST, RUN_DIR}), (neighbour, {RUN_DIR})):
            differing = [n for n in own if n in names and all_runs[other][n] != run_here[n]]
            if differing:
                _refuse(fields, all_runs, other, process, differing)


def _place(run: str | Path | None) -> dict[str, str | None]:
    """Returns where a run is: an address is one on all hosts, a path on each."""
    if run is None:
        return {KIND: "in memory", RUN_DIR: None}
    if not is_address(run):
        return {KIND: "in a directory", RUN_DIR: str(Path(run).resolve())}
    address = address_of("run_dir", str(run))
    return {KIND: f"in {address}", RUN_DIR: address}


def _compared_fields(experiment: Experiment) -> dict[str, Any]:
    """Returns by dotted path the values that no start of a run may change, without texts that have
    a slash: paths are each machine's own. None of an experiment that cannot be stored."""
    with suppress(ValueError):
        config = config_of(experiment)
        leaves = config_differences({}, {EXPERIMENT: config}, ignore=resumable(config))
        return {leaf.path: leaf.now for leaf in leaves if "/" not in str(leaf.now)}
    return {}


def _refuse(
    fields: dict[str, Any],
    all_runs: list[dict[str, Any]],
    first: int,
    second: int,
    differing: list[str],
) -> None:
    """Raises ValueError that names two processes and their values. All processes call it."""
    if EXPERIMENT in differing:
        texts = all_gather_text(json.dumps(fields))
        pair = [json.loads(texts[process]) for process in (first, second)]
        paths = [
            path for path in pair[0] | pair[1] if len({json.dumps(p.get(path)) for p in pair}) > 1
        ]
        for process, values in zip((first, second), pair, strict=True):
            all_runs[process][EXPERIMENT] = " and ".join(
                f"{path.removeprefix(EXPERIMENT + '.')}={values.get(path, 'absent')!r:.60}"
                for path in paths[:SHOWN]
            )
    if jax.process_index() == 0:
        time.sleep(LEAVE_S)
    raise ValueError(
        f"processes of one run have one {' and one '.join(differing)}; "
        f"{_described(first, all_runs[first], differing)}, and "
        f"{_described(second, all_runs[second], differing)}: give each run a port of its own in "
        "--coordinator (with --processes and --process), and the processes of one run the same "
        "command and files"
    )


def _described(process: int, run: dict[str, Any], names: list[str]) -> str:
    values = ", ".join(f"{name} {run[name]}" for name in dict.fromkeys([*names, RUN_DIR]))
    return f"process {process} on {run[HOST]} has {values}"
