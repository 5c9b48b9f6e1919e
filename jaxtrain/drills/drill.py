"""Compares a run with every fault to an undisturbed run."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jaxtrain.certificate.shrink import shrink
from jaxtrain.checkpoint.policy import SavePolicy
from jaxtrain.cluster.exit_codes import DETERMINISTIC, DONE, PREEMPTED
from jaxtrain.drills.apart import IsolatedRun, NotHere, isolated_runs
from jaxtrain.drills.happened import SOON, Happened, environment, named, resumed_s
from jaxtrain.drills.machine_drill import drill_machines
from jaxtrain.drills.namespaces import Network
from jaxtrain.drills.plan import APART, FIRST, SAVES, SPIKES, crashes, kinds, refuse_few, skipped
from jaxtrain.experiment import (
    Evaluation,
    Experiment,
    Health,
    Logging,
    load_experiment,
)
from jaxtrain.fault_tolerance.faults import Fault
from jaxtrain.fault_tolerance.ledger import Ledger, read_entries, read_ledger
from jaxtrain.fault_tolerance.supervisor import (
    FAILURES,
    Supervisor,
    own_command,
)
from jaxtrain.files.json_lines import read_lines
from jaxtrain.files.temporary import temporary_folder
from jaxtrain.machines.layouts import MachineLayout
from jaxtrain.machines.machine import LocalMachines, ProcessSlot, slots_of
from jaxtrain.machines.roster import Roster
from jaxtrain.run.callback import Callback, Run
from jaxtrain.telemetry.metrics import read_metrics

STEP_S = 0.05
"""Least seconds of a step, so that a fault happens in the intended phase."""

NOTICED_S = 15
"""Most seconds until a fault is noticed."""


LASTING = ("full", "readonly", "clean", "pause")
"""Kinds that do not end a process: the run goes on."""

JUDGED = {"stop": "silent", "hang": "hangs", "raise": "crashed", "leave": "left"}
"""Kind of fault -> expected kind of failure, in the fault's phase."""

UNSEEN = ("nan", "spike")
"""Kinds that show only in the numbers of the run."""


class Paced(Callback):
    """A user callback that sleeps after each step, so that faults can hit a process in it."""

    def after_step(self, run: Run, step: int) -> None:
        time.sleep(STEP_S)


def drilled(path: str | Path, processes: int) -> Experiment:
    """The experiment of a file in the form for drills: shrunk as for a certificate, with a save
    every few steps, and checks of copies and steps."""
    shrunk = shrink(load_experiment(path), devices=2 * processes)
    execution = replace(shrunk.execution, health=Health(SAVES, replay=1, spikes=SPIKES))
    return replace(
        shrunk,
        steps=FIRST + APART * (len(kinds(processes)) + 1),
        execution=execution,
        evaluation=Evaluation(every=10**6, batches=1, final_batches=1),
        checkpoints=SavePolicy(every=SAVES, keep=3),
        logging=Logging(every=1, tensorboard=False, callbacks=(Paced,)),
    )


@dataclass(frozen=True)
class Drill:
    """Result of a drill. ledger_off: difference of the ledger and the wall time, as a share of the
    latter. violations: of the run as a whole. skipped: faults that this machine does not allow,
    with reasons."""

    processes: int
    faults: tuple[Happened, ...]
    ledger: Ledger
    ledger_off: float
    violations: tuple[str, ...]
    skipped: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.violations and not any(fault.violations for fault in self.faults)

    def as_json(self) -> dict[str, Any]:
        """The keys that scripts may rely on."""
        return {
            "processes": self.processes,
            "passed": self.passed,
            "lost_steps": sum(fault.lost for fault in self.faults),
            "faults": [fault.__dict__ for fault in self.faults],
            "ledger": {"wall_s": self.ledger.wall_s, **self.ledger.seconds},
            "ledger_off": self.ledger_off,
            "violations": list(self.violations),
            "skipped": list(self.skipped),
        }

    def __str__(self) -> str:
        lines = [f"{'fault':24} {'noticed':>8} {'lost':>5} {'resumed':>8}  named"]
        for fault in self.faults:
            noticed = "-" if fault.noticed_s is None else f"{fault.noticed_s:.1f} s"
            numbers = f"{noticed:>8} {fault.lost:>5} {fault.resumed_s:>6.1f} s"
            lines.append(f"{fault.fault:24} {numbers}  {fault.named}")
            lines += [f"    VIOLATION {text}" for text in fault.violations]
        lines += [f"SKIPPED {text}" for text in self.skipped]
        lines += [f"VIOLATION {text}" for text in self.violations]
        lines.append(f"ledger: {self.ledger}, {self.ledger_off:.2%} off the wall time")
        verdict = "as one that nothing happened to, to the bit" if self.passed else "NOT PASSED"
        return "\n".join(
            [*lines, f"{self.processes} processes, {len(self.faults)} faults: {verdict}"]
        )


def drill(
    path: str | Path,
    *,
    processes: int = 2,
    folder: Path | None = None,
    tell: Callable[[str], None] = print,
) -> Drill:
    """Runs the experiment of a file, shrunk, on `processes` processes of this machine: undisturbed,
    with every fault one after the other, with a repeated crash, and over machines of which one is
    lost, returns and computes wrongly.

    folder: for the runs, None for a temporary one. tell: prints lines of the processes and their
    supervisor. Raises
    ValueError for what cannot be drilled.
    """
    if folder is None:
        with temporary_folder("drill") as own:
            return drill(path, processes=processes, folder=own, tell=tell)
    refuse_few(processes)
    drilled(path, processes)  # raises before anything is started
    (folder / "drilled.py").write_text(
        _EXPERIMENT.format(path=str(Path(path).resolve()), n=processes)
    )
    (folder / "mesh.toml").write_text(_MESH.format(devices=2 * processes, n=processes))
    faults = kinds(processes)
    shared_faults = [fault for fault in faults if fault.kind in UNSEEN]
    skips = tuple(skipped(fault) for fault in faults if fault.kind == "spike")
    violations = []
    code, _ = _launched(folder, "undisturbed", shared_faults, processes, tell, skips)
    if code != DONE:
        violations.append(f"the undisturbed run ended with exit code {code}")
    code, wall_s = _launched(folder, "disturbed", faults, processes, tell)
    if code != DONE:
        violations.append(f"the run with faults ended with exit code {code}")
    code, _ = _launched(folder, "crash", [crashes(processes)], processes, tell)
    if code != DETERMINISTIC or len(_lines(folder / "crash" / FAILURES)) != 2:
        violations.append(f"a crash at the same step, twice, ended with exit code {code}")
    machines, wrong = drill_machines(folder, _train(folder), shared_faults, FIRST, processes, tell)
    violations += wrong
    runs = [_numbers(folder / name) for name in ("undisturbed", "disturbed")]
    violations += _differences("disturbed", *runs)
    visible = [fault for fault in faults if fault.kind not in UNSEEN]
    happened = _happened(folder, visible, processes) + machines
    left_out = []
    for case in isolated_runs(processes):
        try:
            happened += _run_apart(folder, case, processes, tell)
        except NotHere as error:
            left_out.append(f"{', '.join(map(str, case.faults))}: {error}")
    if left := _left_over(folder):
        violations.append(f"processes {left} go on")
    ledger = read_ledger(folder / "disturbed")
    off = abs(ledger.wall_s - wall_s) / wall_s
    if off > 0.01:
        violations.append(f"the ledger is {off:.1%} off the wall time of {wall_s:.1f} s")
    return Drill(processes, tuple(happened), ledger, off, tuple(violations), tuple(left_out))


_EXPERIMENT = """\"\"\"What is drilled.\"\"\"
from jaxtrain.drills.drill import drilled


def experiment():
    return drilled({path!r}, {n})
"""

_MESH = """chip = "cpu"
devices = {devices}

[axes]
data = {n}
fsdp = 2
"""


def _train(folder: Path) -> list[str]:
    return ["train", str(folder / "drilled.py"), "--mesh", str(folder / "mesh.toml")]


def _run_apart(
    folder: Path, case: IsolatedRun, processes: int, tell: Callable[[str], None]
) -> list[Happened]:
    """Reports of its faults; the last one has the violations of the run. Raises NotHere with a
    reason."""
    processes = case.processes or processes
    with case.stands_on(folder / case.run, processes) as network:
        output: list[str] = []

        def hear(text: str) -> None:
            output.append(text)
            tell(text)
            if network and text.startswith("launch: all processes start again"):
                network.mend(case.faults[-1].process)

        arguments = ["--steps", str(case.steps)]
        reference = "undisturbed"
        if case.processes is not None:  # its own, on fewer processes
            reference = f"{case.run} undisturbed"
            _launched(folder, reference, (), processes, tell, arguments=arguments)
        if case.as_command:
            code = _commanded(folder, case, processes, hear)
        else:
            code, _ = _launched(
                folder, case.run, case.faults, processes, hear, arguments=arguments, network=network
            )
        runs = [_numbers(folder / name) for name in (reference, case.run)]
        lines = [run[: case.steps - 1] for run in runs]  # only one evaluates its last step
        violations = _differences(case.run, *lines)
        if code != DONE:
            violations.append(f"the run ended with exit code {code}")
        for expected in case.expected:
            if not any(expected in text for text in output):
                violations.append(f"nothing said {expected!r}")
        *passing, last = _happened(folder, case.faults, processes, case.run)
        return [*passing, replace(last, violations=(*last.violations, *violations))]


def _commanded(folder: Path, case: IsolatedRun, processes: int, tell: Callable[[str], None]) -> int:
    """Exit code of a run by `jaxtrain launch`, in a process and a session of its own: a terminal
    does not notice that it is stopped."""
    files = folder / f"{case.run} files"
    files.mkdir()
    faults = [text for fault in case.faults for text in ("--fault", str(fault))]
    launch = own_command("launch", "--processes", str(processes), *faults, "--")
    train = [*_train(folder), "--steps", str(case.steps), "--run-dir", str(folder / case.run)]
    with subprocess.Popen(
        [*launch, *train], env=environment(folder), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            tell(line.rstrip("\n"))
    if not (folder / case.run / FAILURES).exists():  # its markers were removed with its files
        for fault in case.faults:
            (files / str(fault)).touch()
    return process.returncode


def _differences(name: str, undisturbed: list[str], run: list[str]) -> list[str]:
    """Violation at the first line that differs from the undisturbed run."""
    for line, pair in enumerate(zip_longest(undisturbed, run), 1):
        if pair[0] != pair[1]:
            place = f"in line {line} of metrics.jsonl"
            return [f"losses of the {name} run differ, for the first time {place}"]
    return []


def _launched(
    folder: Path,
    run: str,
    faults: Sequence[Fault],
    processes: int,
    tell: Callable[[str], None],
    skip: tuple[tuple[int, int], ...] = (),
    *,
    arguments: Sequence[str] = (),
    network: Network | None = None,
) -> tuple[int, float]:
    """Exit code and wall time of a run, which is restarted if it was asked to leave. arguments:
    further ones of `train`. network: for its processes."""
    files = folder / f"{run} files"
    files.mkdir()
    train = [*_train(folder), "--set", f"execution.health.skip_batches={skip}", *arguments]
    command, wall_s = [*train, "--run-dir", str(folder / run)], 0.0
    slots = _slots(folder, files, processes, network)
    for _ in range(1 + sum(fault.kind == "terminate" for fault in faults)):
        began = time.monotonic()
        run_dir = folder / run
        roster = Roster(LocalMachines(slots), {processes: MachineLayout(processes)}, 0, tell)
        code = Supervisor(command, roster, tell, run_dir, files, restarts=SOON, faults=faults).run()
        wall_s += time.monotonic() - began
        if code != PREEMPTED:
            break
    return code, wall_s


def _slots(folder: Path, files: Path, processes: int, network: Network | None) -> list[ProcessSlot]:
    """Slots of a run's processes, each in its namespace if there is a network."""
    slots = slots_of(processes, files, own_command(), environment(folder))
    if network is None:
        return slots
    return [
        replace(slot, program=[*network.prefix(n), *slot.program], host=network.addresses[n])
        for n, slot in enumerate(slots)
    ]


def _happened(
    folder: Path, faults: Sequence[Fault], processes: int, name: str = "disturbed"
) -> list[Happened]:
    """Reports of each fault on a run, from its recorded failures and starts."""
    run, reports = folder / name, []
    lasting = [fault for fault in faults if fault.kind in LASTING]
    for fault in lasting:
        wrong = () if (folder / f"{name} files" / str(fault)).exists() else ("it did not happen",)
        reports.append(Happened(str(fault), None, "the run went on", 0, 0.0, wrong))
    faults = [fault for fault in faults if fault not in lasting]
    failures = _lines(run / FAILURES)
    starts = [entry for entry in read_entries(run) if "waiting" not in entry.seconds]
    for fault, start, following in zip(faults, starts, [*starts[1:], None], strict=False):
        marker = folder / f"{name} files" / str(fault)
        failure = failures.pop(0) if failures and fault.kind != "terminate" else None
        if not marker.exists() or following is None:
            reports.append(Happened(str(fault), None, "", 0, 0.0, ("it did not happen",)))
            continue
        lost = max(0, start.done - following.first)
        if failure is None:
            wrong = () if fault.kind == "terminate" else ("nobody noticed",)
            resumed = resumed_s(start.ended, following)
            reports.append(Happened(str(fault), None, "all left together", lost, resumed, wrong))
            continue
        noticed = failure["time"] - marker.stat().st_mtime
        blamed, wrong = _judged(fault, failure, noticed, lost, processes)
        resumed = resumed_s(failure["time"], following)
        reports.append(Happened(str(fault), noticed, blamed, lost, resumed, wrong))
    return reports


def _judged(
    fault: Fault, failure: dict[str, Any], noticed_s: float, lost: int, processes: int
) -> tuple[str, tuple[str, ...]]:
    """Returns the process that a failure names, and violations."""
    violations = []
    name = named(failure)
    if fault.kind in ("flip", "wrong"):
        of_two = [[]] if processes == 2 else []  # of two, the wrong one is unknown
        if failure["kind"] != "wrong" or failure["wrong"] not in [[fault.process], *of_two]:
            violations.append(f"it was wrong numbers of process {fault.process}")
        elif not failure["wrong"]:
            name = name.replace(f"process {failure['process']}", "one of two")
    elif fault.kind == "cut":  # each waits for the other
        if (failure["kind"], failure["phase"]) != ("hangs", "step"):
            violations.append("it was hangs in step")
    elif failure["process"] != fault.process:
        violations.append(f"it was process {fault.process}")
    elif fault.kind in JUDGED:
        expected = (JUDGED[fault.kind], fault.phase)
        if (failure["kind"], failure["phase"]) != expected:
            violations.append(f"it was {' in '.join(expected)}")
    if noticed_s > NOTICED_S:
        violations.append(f"it was noticed after more than {NOTICED_S} s")
    if lost > 3 * SAVES:
        violations.append(f"{lost} steps were lost")
    return name, tuple(violations)


def _numbers(run: Path) -> list[str]:
    """Metrics of a run, step by step, as texts: NaN then equals NaN."""
    names = ("step", "loss", "skipped", "eval_loss")
    return [str({name: line.get(name) for name in names}) for line in read_metrics(run)]


def _lines(path: Path) -> list[dict[str, Any]]:
    return read_lines(path) if path.exists() else []


def _left_over(folder: Path) -> list[int]:
    """Ids of this drill's processes that still run, found by their environment."""
    process_ids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(folder).encode() in path.read_bytes():
                process_ids.append(int(path.parent.name))
        except OSError:  # another user's, or gone meanwhile
            continue
    return process_ids
