"""A drill of a run over machines that leave and return, with agents that all run on this machine.

The last machine is lost; the run goes on without it, and with it once it has returned; then that
machine computes wrongly, and the run ends without it. Its losses equal those of an undisturbed run
within the certificate's bound, as they come from other meshes.
"""

from __future__ import annotations

import secrets
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.certificate.certify import BOUNDS
from jaxtrain.cluster.exit_codes import DONE
from jaxtrain.drills.happened import SOON, Happened, environment, named, resumed_s
from jaxtrain.experiment import load_experiment
from jaxtrain.fault_tolerance.faults import Fault
from jaxtrain.fault_tolerance.ledger import Entry, read_entries
from jaxtrain.fault_tolerance.supervisor import FAILURES, Supervisor, own_command
from jaxtrain.files.json_lines import read_lines
from jaxtrain.machines.agents import Agents
from jaxtrain.machines.channel import KEY
from jaxtrain.machines.elastic import elastic
from jaxtrain.machines.layouts import read_layouts
from jaxtrain.machines.roster import Roster
from jaxtrain.mesh.mesh import load_mesh
from jaxtrain.notices import Tell
from jaxtrain.telemetry.metrics import read_metrics

REJOIN_S, BACK_S = 3.0, 5.0
"""Seconds that a run waits for a lost machine, and seconds until its agent restarts: by then the
run has gone on without it."""

RUN = "machines"


def faults_of_machines(step: int, machines: int) -> tuple[Fault, Fault]:
    """The last machine is lost after `step` steps, and computes wrongly once it is back."""
    last = machines - 1
    return Fault("lose", step, "step", last), Fault("wrong", step + 1, "step", last)


def drill_machines(
    folder: Path,
    command: Sequence[str],
    shared: Sequence[Fault],
    step: int,
    machines: int,
    tell: Tell,
) -> tuple[list[Happened], list[str]]:
    """Returns the reports of the faults, and violations of the run as a whole.

    folder: of the drill, with the undisturbed run. command: its `train`, without a run directory.
    shared: faults of the undisturbed run. step: steps before the machine is lost.
    """
    run, last = folder / RUN, machines - 1
    lose, wrong = faults_of_machines(step, machines)
    spec = load_mesh(folder / "mesh.toml")
    plans = elastic(load_experiment(folder / "drilled.py"), spec, machines)
    layouts, files = read_layouts(plans.as_json(), spec, folder), folder / f"{RUN} files"
    files.mkdir()
    key = secrets.token_hex()
    agents = Agents(("127.0.0.1", 0), key.encode(), tell)
    roster = Roster(agents, layouts, 60, tell, REJOIN_S)
    command = [*command, "--run-dir", str(run)]
    faults = [*shared, lose, wrong]
    supervisor = Supervisor(command, roster, tell, run, files, restarts=SOON, faults=faults)
    with _kept(agents, key, machines, files):
        code = supervisor.run()
        agents.close(code)
    violations = [] if code == DONE else [f"the run over machines ended with exit code {code}"]
    fewer = layouts[last].machines
    if len(roster.hosts) != fewer:
        violations.append(f"it ended on {len(roster.hosts)} machines, where {fewer} computed well")
    starts = [entry for entry in read_entries(run) if "waiting" not in entry.seconds]
    if len(starts) != 4:
        return [], [*violations, f"the run over machines had {len(starts)} starts, not 4"]
    failures = read_lines(run / FAILURES)
    violations += [f"the run over machines: {text}" for text in _apart(folder / "undisturbed", run)]
    lost = _lost(lose, failures[0], files, starts[0], starts[1])
    back = resumed_s(starts[1].ended, starts[2])
    again = Happened("its machine is back", None, "all left together", 0, back, ())
    left_out = _lost(wrong, failures[1], files, starts[2], starts[3])
    return [lost, again, left_out], violations


def _lost(
    fault: Fault, failure: dict[str, Any], files: Path, start: Entry, following: Entry
) -> Happened:
    """Report of a fault after which the run went on without the machine of its process."""
    kind = {"lose": "lost"}.get(fault.kind, fault.kind)
    when = failure["time"]
    as_expected = (failure["kind"], failure["process"]) == (kind, fault.process)
    violations = () if as_expected else (f"it was process {fault.process}, {kind}",)
    noticed = when - (files / str(fault)).stat().st_mtime
    steps = max(0, start.done - following.first)
    resumed = resumed_s(when, following)
    return Happened(str(fault), noticed, named(failure), steps, resumed, violations)


def _apart(undisturbed: Path, run: Path) -> list[str]:
    """Violation at the first loss of two runs that differs by more than two meshes may."""
    expected, actual = (
        {line["step"]: line for line in read_metrics(p)} for p in (undisturbed, run)
    )
    if expected.keys() != actual.keys():
        return [f"{len(actual)} steps in metrics.jsonl, not {len(expected)}"]
    for step, line in expected.items():
        for name in ("loss", "eval_loss"):
            a, b = (np.float64(metrics.get(name) or 0.0) for metrics in (line, actual[step]))
            if not np.isclose(a, b, rtol=BOUNDS["float32"], atol=0, equal_nan=True):
                return [f"{name} of step {step} is {b!r}, not {a!r}"]
    return []


@contextmanager
def _kept(agents: Agents, key: str, machines: int, files: Path) -> Iterator[None]:
    """Runs an agent for each machine, restarted a while after its end."""
    host, port = agents.address
    environ, over = {**environment(files.parent), KEY: key}, threading.Event()

    def keep(number: int) -> None:
        command = own_command("agent", f"{host}:{port}", "--name", f"machine {number}")
        while not over.is_set():
            subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=False)
            over.wait(BACK_S)

    threads = [threading.Thread(target=keep, args=(number,)) for number in range(machines)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        agents.close(DONE)
        for thread in threads:
            thread.join()
