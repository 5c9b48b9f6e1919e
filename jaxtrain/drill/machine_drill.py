"""A run over machines that go and come back, drilled: agents of them, here all on this one.

The last machine is lost; the run goes on without it, and with it when it is there again; then it
computes wrongly, and the run ends without it. Its losses are those of an undisturbed run within the
certificate's bound: they are of other meshes.
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
from jaxtrain.drill.happened import SOON, Happened, environment, named, resumed_s
from jaxtrain.experiment import load_experiment
from jaxtrain.fault_tolerance.faults import Fault
from jaxtrain.fault_tolerance.ledger import Entry, read_entries
from jaxtrain.fault_tolerance.supervisor import FAILURES, Supervisor, own_command
from jaxtrain.files.json_lines import read_lines
from jaxtrain.machines.agents import Agents
from jaxtrain.machines.channel import KEY
from jaxtrain.machines.elastic import standings
from jaxtrain.machines.layouts import read_layouts
from jaxtrain.machines.roster import Roster
from jaxtrain.machines.workers import Tell
from jaxtrain.mesh.mesh import load_mesh
from jaxtrain.telemetry.metrics import read_metrics

REJOIN_S, BACK_S = 3.0, 5.0
"""How long a lost machine is waited for; and when its agent is started again: the run has gone on
without it by then."""

RUN = "machines"


def faults_of_machines(at: int, machines: int) -> tuple[Fault, Fault]:
    """The last machine is lost after so many steps, and when it is back computes wrongly."""
    last = machines - 1
    return Fault("lose", at, "step", last), Fault("wrong", at + 1, "step", last)


def drill_machines(
    folder: Path, command: Sequence[str], also: Sequence[Fault], at: int, machines: int, tell: Tell
) -> tuple[list[Happened], list[str]]:
    """What became of the faults, and what of the run as a whole is not as it should be.

    folder: of the drill, where the undisturbed run is. command: `train` of it, without a run
    directory. also: faults of the undisturbed run. at: steps before the machine is lost.
    """
    run, last = folder / RUN, machines - 1
    lose, wrong = faults_of_machines(at, machines)
    spec = load_mesh(folder / "mesh.toml")
    found = standings(load_experiment(folder / "drilled.py"), spec, machines)
    layouts, files = read_layouts(found.as_json(), spec, folder), folder / f"{RUN} files"
    files.mkdir()
    key = secrets.token_hex()
    agents = Agents(("127.0.0.1", 0), key.encode(), tell)
    roster = Roster(agents, layouts, 60, tell, REJOIN_S)
    command = [*command, "--run-dir", str(run)]
    faults = [*also, lose, wrong]
    made = Supervisor(command, roster, tell, run, files, restarts=SOON, faults=faults)
    with _kept(agents, key, machines, files):
        code = made.run()
        agents.close(code)
    violations = [] if code == DONE else [f"the run over machines ended with exit code {code}"]
    fewer = layouts[last].machines
    if len(roster.hosts) != fewer:
        violations.append(f"it ended on {len(roster.hosts)} machines, where {fewer} computed well")
    starts = [entry for entry in read_entries(run) if "waiting" not in entry.seconds]
    if len(starts) != 4:
        return [], [*violations, f"the run over machines had {len(starts)} starts, not 4"]
    failures = read_lines(run / FAILURES)
    violations += [f"the run over machines: {each}" for each in _apart(folder / "undisturbed", run)]
    lost = _lost(lose, failures[0], files, starts[0], starts[1])
    back = resumed_s(starts[1].ended, starts[2])
    again = Happened("its machine is back", None, "all left together", 0, back, ())
    left_out = _lost(wrong, failures[1], files, starts[2], starts[3])
    return [lost, again, left_out], violations


def _lost(
    fault: Fault, failure: dict[str, Any], files: Path, start: Entry, following: Entry
) -> Happened:
    """A fault for which the run went on without the machine of its process."""
    kind = {"lose": "lost"}.get(fault.kind, fault.kind)
    when = failure["time"]
    as_wanted = (failure["kind"], failure["process"]) == (kind, fault.process)
    violations = () if as_wanted else (f"it was process {fault.process}, {kind}",)
    noticed = when - (files / str(fault)).stat().st_mtime
    steps = max(0, start.done - following.first)
    resumed = resumed_s(when, following)
    return Happened(str(fault), noticed, named(failure), steps, resumed, violations)


def _apart(undisturbed: Path, run: Path) -> list[str]:
    """Where the losses of two runs are further apart than those of two meshes may be."""
    known, found = ({line["step"]: line for line in read_metrics(p)} for p in (undisturbed, run))
    if known.keys() != found.keys():
        return [f"{len(found)} steps in metrics.jsonl, not {len(known)}"]
    for step, line in known.items():
        for name in ("loss", "eval_loss"):
            a, b = (np.float64(each.get(name) or 0.0) for each in (line, found[step]))
            if not np.isclose(a, b, rtol=BOUNDS["float32"], atol=0, equal_nan=True):
                return [f"{name} of step {step} is {b!r}, not {a!r}"]
    return []


@contextmanager
def _kept(agents: Agents, key: str, machines: int, files: Path) -> Iterator[None]:
    """An agent for each machine, started again a while after its end."""
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
