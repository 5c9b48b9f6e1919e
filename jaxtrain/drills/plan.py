"""The faults of a drill: which ones, on which run, in what order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtrain.drills.apart import isolated_runs
from jaxtrain.drills.machine_drill import faults_of_machines
from jaxtrain.experiment import LossSpikes
from jaxtrain.fault_tolerance.faults import KINDS, Fault
from jaxtrain.violations import raise_violations

SAVES, APART, FIRST = 5, 8, 8
"""Steps between saves, between faults, and before the first fault."""

SPIKES = LossSpikes(above=20, window=24, patience=2, back=1, skip_more=1)
"""Policy for a loss spike; its steps are repeated before the next fault."""


def kinds(processes: int) -> list[Fault]:
    """Each fault once, in order; on the last process, or on the first one, which coordinates. `nan`
    and `spike` change what is learned, so the undisturbed run has them too: it is configured with
    the batches that the spike skips."""
    last = processes - 1
    table = [
        ("kill", "step", last), ("kill", "step", 0), ("exit", "load", last),
        ("stop", "step", last), ("stop", "load", last), ("stop", "save", 0),
        ("stop", "callback", last), ("hang", "load", last), ("hang", "callback", 0),
        ("kill_soon", "save", last), ("corrupt", "step", 0), ("truncate", "step", 0),
        ("delete", "step", 0), ("nan", "step", 0), ("spike", "step", 0), ("flip", "step", last),
        ("wrong", "step", last), ("terminate", "step", last), ("raise", "load", last),
        ("raise", "callback", 0), ("leave", "step", last), ("clean", "step", 0),
        ("foreign", "step", 0),
    ]  # fmt: skip
    return [
        Fault(kind, FIRST + APART * number, phase, process)
        for number, (kind, phase, process) in enumerate(table)
    ]


def skipped(spike: Fault) -> tuple[int, int]:
    """(steps, batches): the step the run returns to after the spike, and batches it skips."""
    begins = spike.step + 1
    good = (begins - SPIKES.back - 1) // SAVES * SAVES
    return good, begins + SPIKES.patience - 1 - good + SPIKES.skip_more


@dataclass(frozen=True)
class Listing:
    """The faults of a drill. runs: name of a run -> its faults, in order."""

    runs: dict[str, tuple[Fault, ...]]

    def as_json(self) -> dict[str, Any]:
        """The keys that scripts may rely on."""
        faults = [
            {"run": run, "fault": str(fault), "what": KINDS[fault.kind]}
            for run, faults in self.runs.items()
            for fault in faults
        ]
        return {"faults": faults}

    def __str__(self) -> str:
        lines = []
        for run, faults in self.runs.items():
            lines.append(f"{run}:")
            lines += [f"  {fault!s:22} {KINDS[fault.kind]}" for fault in faults]
        return "\n".join(lines)


def listed(processes: int) -> Listing:
    """The faults of `drill` on `processes` processes. Raises ValueError for fewer than two."""
    refuse_few(processes)
    crash, machines = crashes(processes), faults_of_machines(FIRST, processes)
    runs = {"disturbed": tuple(kinds(processes)), "crash": (crash,), "machines": machines}
    return Listing(runs | {isolated.run: isolated.faults for isolated in isolated_runs(processes)})


def crashes(processes: int) -> Fault:
    """A fault that is repeated in each start."""
    return Fault("crash", FIRST, "step", processes - 1)


def refuse_few(processes: int) -> None:
    raise_violations([] if processes > 1 else [f"processes={processes}; use 2 or more"])
