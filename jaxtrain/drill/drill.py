"""A run that everything happens to, held against one that nothing happens to."""

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
from jaxtrain.drill.apart import Apart, NotHere, apart
from jaxtrain.drill.happened import SOON, Happened, environment, named, resumed_s
from jaxtrain.drill.machine_drill import drill_machines
from jaxtrain.drill.namespaces import Network
from jaxtrain.drill.plan import APART, FIRST, SAVES, SPIKES, crashes, kinds, refuse_few, skipped
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
from jaxtrain.machines.layouts import Layout
from jaxtrain.machines.machine import Here, Slot, slots_of
from jaxtrain.machines.roster import Roster
from jaxtrain.run.callback import Callback, Run
from jaxtrain.telemetry.metrics import read_metrics

STEP_S = 0.05
"""A step takes so long at least, so that a fault strikes where it is meant to."""

NOTICED_S = 15
"""A fault must be noticed within."""


LASTING = ("full", "readonly", "clean", "pause")
"""Kinds that end no process: the run goes on."""

JUDGED = {"stop": "silent", "hang": "hangs", "raise": "crashed", "leave": "left"}
"""Kind of fault -> what the failure must be, in the fault's phase."""

UNSEEN = ("nan", "spike")
"""Kinds that no process ends by: the numbers of the run show what became of them."""


class Paced(Callback):
    """Code of the user's own, in which a process can be stopped."""

    def after_step(self, run: Run, step: int) -> None:
        time.sleep(STEP_S)


def drilled(path: str, processes: int) -> Experiment:
    """The experiment of a file as it is drilled: shrunk as for a certificate, with a save every
    few steps, and copies and steps compared."""
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
    """What a drill has found. ledger_off: how far the ledger is from the wall time, as a share of
    it. violations: of the run as a whole. skipped: faults that this machine does not allow, with
    why."""

    processes: int
    faults: tuple[Happened, ...]
    ledger: Ledger
    ledger_off: float
    violations: tuple[str, ...]
    skipped: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.violations and not any(each.violations for each in self.faults)

    def as_json(self) -> dict[str, Any]:
        """The keys that scripts may rely on."""
        return {
            "processes": self.processes,
            "passed": self.passed,
            "lost_steps": sum(each.lost for each in self.faults),
            "faults": [each.__dict__ for each in self.faults],
            "ledger": {"wall_s": self.ledger.wall_s, **self.ledger.seconds},
            "ledger_off": self.ledger_off,
            "violations": list(self.violations),
            "skipped": list(self.skipped),
        }

    def __str__(self) -> str:
        lines = [f"{'fault':24} {'noticed':>8} {'lost':>5} {'resumed':>8}  named"]
        for each in self.faults:
            noticed = "-" if each.noticed_s is None else f"{each.noticed_s:.1f} s"
            numbers = f"{noticed:>8} {each.lost:>5} {each.resumed_s:>6.1f} s"
            lines.append(f"{each.fault:24} {numbers}  {each.named}")
            lines += [f"    VIOLATION {said}" for said in each.violations]
        lines += [f"SKIPPED {said}" for said in self.skipped]
        lines += [f"VIOLATION {said}" for said in self.violations]
        lines.append(f"ledger: {self.ledger}, {self.ledger_off:.2%} off the wall time")
        verdict = "as one that nothing happened to, to the bit" if self.passed else "NOT PASSED"
        return "\n".join(
            [*lines, f"{self.processes} processes, {len(self.faults)} faults: {verdict}"]
        )


def drill(path: str, *, processes: int, folder: Path, tell: Callable[[str], None]) -> Drill:
    """Run the experiment of a file, shrunk, on so many processes of this machine: undisturbed, with
    every fault one after the other, with a crash that comes again, and over machines of which one
    is lost, comes back and computes wrongly.

    folder: for the runs. tell: takes every line that the processes and their supervisor print.
    Raises ValueError for what cannot be drilled.
    """
    refuse_few(processes)
    drilled(path, processes)  # what is wrong with it is told before anything is started
    (folder / "drilled.py").write_text(
        _EXPERIMENT.format(path=str(Path(path).resolve()), n=processes)
    )
    (folder / "mesh.toml").write_text(_MESH.format(devices=2 * processes, n=processes))
    faults = kinds(processes)
    of_both = [fault for fault in faults if fault.kind in UNSEEN]
    told = tuple(skipped(fault) for fault in faults if fault.kind == "spike")
    violations = []
    code, _ = _launched(folder, "undisturbed", of_both, processes, tell, told)
    if code != DONE:
        violations.append(f"the undisturbed run ended with exit code {code}")
    code, wall_s = _launched(folder, "disturbed", faults, processes, tell)
    if code != DONE:
        violations.append(f"the run with faults ended with exit code {code}")
    code, _ = _launched(folder, "crash", [crashes(processes)], processes, tell)
    if code != DETERMINISTIC or len(_lines(folder / "crash" / FAILURES)) != 2:
        violations.append(f"a crash at the same step, twice, ended with exit code {code}")
    machines, wrong = drill_machines(folder, _train(folder), of_both, FIRST, processes, tell)
    violations += wrong
    runs = [_numbers(folder / name) for name in ("undisturbed", "disturbed")]
    violations += _differences("disturbed", *runs)
    seen = [fault for fault in faults if fault.kind not in UNSEEN]
    happened = _happened(folder, seen, processes) + machines
    left_out = []
    for each in apart(processes):
        try:
            happened += _run_apart(folder, each, processes, tell)
        except NotHere as error:
            left_out.append(f"{', '.join(map(str, each.faults))}: {error}")
    if left := _left_over(folder):
        violations.append(f"processes {left} go on")
    ledger = read_ledger(folder / "disturbed")
    off = abs(ledger.wall_s - wall_s) / wall_s
    if off > 0.01:
        violations.append(f"the ledger is {off:.1%} off the wall time of {wall_s:.1f} s")
    return Drill(processes, tuple(happened), ledger, off, tuple(violations), tuple(left_out))


_EXPERIMENT = """\"\"\"What is drilled.\"\"\"
from jaxtrain.drill.drill import drilled


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
    folder: Path, each: Apart, processes: int, tell: Callable[[str], None]
) -> list[Happened]:
    """What became of its faults; the last of them has what is wrong with the run. Raises NotHere
    with why it cannot be."""
    processes = each.processes or processes
    with each.stands_on(folder / each.run, processes) as network:
        said: list[str] = []

        def hear(text: str) -> None:
            said.append(text)
            tell(text)
            if network and text.startswith("launch: all processes start again"):
                network.mend(each.faults[-1].process)

        arguments = ["--steps", str(each.steps)]
        like = "undisturbed"
        if each.processes is not None:  # of a run on fewer processes
            like = f"{each.run} undisturbed"
            _launched(folder, like, (), processes, tell, arguments=arguments)
        if each.as_command:
            code = _commanded(folder, each, processes, hear)
        else:
            code, _ = _launched(
                folder, each.run, each.faults, processes, hear, arguments=arguments, network=network
            )
        runs = [_numbers(folder / name) for name in (like, each.run)]
        lines = [run[: each.steps - 1] for run in runs]  # the last is evaluated in one alone
        violations = _differences(each.run, *lines)
        if code != DONE:
            violations.append(f"the run ended with exit code {code}")
        for wanted in each.told:
            if not any(wanted in text for text in said):
                violations.append(f"nothing said {wanted!r}")
        *passing, last = _happened(folder, each.faults, processes, each.run)
        return [*passing, replace(last, violations=(*last.violations, *violations))]


def _commanded(folder: Path, each: Apart, processes: int, tell: Callable[[str], None]) -> int:
    """The exit code of a run by `jaxtrain launch`, in a process and a session of its own: no
    terminal hears that it is stopped."""
    files = folder / f"{each.run} files"
    files.mkdir()
    faults = [text for fault in each.faults for text in ("--fault", str(fault))]
    launch = own_command("launch", "--processes", str(processes), *faults, "--")
    train = [*_train(folder), "--steps", str(each.steps), "--run-dir", str(folder / each.run)]
    with subprocess.Popen(
        [*launch, *train], env=environment(folder), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            tell(line.rstrip("\n"))
    if not (folder / each.run / FAILURES).exists():  # what was marked went with its own files
        for fault in each.faults:
            (files / str(fault)).touch()
    return process.returncode


def _differences(name: str, undisturbed: list[str], run: list[str]) -> list[str]:
    """Where the numbers of a run are not those of the undisturbed one."""
    for line, pair in enumerate(zip_longest(undisturbed, run), 1):
        if pair[0] != pair[1]:
            where = f"in line {line} of metrics.jsonl"
            return [f"losses of the {name} run differ, for the first time {where}"]
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
    """The exit code and the wall time of a run, begun again when it was asked to leave. arguments:
    more of them for `train`. network: where its processes meet."""
    files = folder / f"{run} files"
    files.mkdir()
    train = [*_train(folder), "--set", f"execution.health.skip_batches={skip}", *arguments]
    command, wall_s = [*train, "--run-dir", str(folder / run)], 0.0
    slots = _slots(folder, files, processes, network)
    for _ in range(1 + sum(fault.kind == "terminate" for fault in faults)):
        began = time.monotonic()
        run_dir = folder / run
        roster = Roster(Here(slots), {processes: Layout(processes)}, 0, tell)
        code = Supervisor(command, roster, tell, run_dir, files, restarts=SOON, faults=faults).run()
        wall_s += time.monotonic() - began
        if code != PREEMPTED:
            break
    return code, wall_s


def _slots(folder: Path, files: Path, processes: int, network: Network | None) -> list[Slot]:
    """Where the processes of a run are started: each in its namespace, where they have some."""
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
    """What became of each fault on a run, by the failures and starts that were written down."""
    run, found = folder / name, []
    lasting = [fault for fault in faults if fault.kind in LASTING]
    for fault in lasting:
        wrong = () if (folder / f"{name} files" / str(fault)).exists() else ("it did not happen",)
        found.append(Happened(str(fault), None, "the run went on", 0, 0.0, wrong))
    faults = [fault for fault in faults if fault not in lasting]
    failures = _lines(run / FAILURES)
    starts = [entry for entry in read_entries(run) if "waiting" not in entry.seconds]
    for fault, start, following in zip(faults, starts, [*starts[1:], None], strict=False):
        marker = folder / f"{name} files" / str(fault)
        failure = failures.pop(0) if failures and fault.kind != "terminate" else None
        if not marker.exists() or following is None:
            found.append(Happened(str(fault), None, "", 0, 0.0, ("it did not happen",)))
            continue
        lost = max(0, start.done - following.first)
        if failure is None:
            wrong = () if fault.kind == "terminate" else ("nobody noticed",)
            resumed = resumed_s(start.ended, following)
            found.append(Happened(str(fault), None, "all left together", lost, resumed, wrong))
            continue
        noticed = failure["time"] - marker.stat().st_mtime
        who, wrong = _judged(fault, failure, noticed, lost, processes)
        resumed = resumed_s(failure["time"], following)
        found.append(Happened(str(fault), noticed, who, lost, resumed, wrong))
    return found


def _judged(
    fault: Fault, failure: dict[str, Any], noticed_s: float, lost: int, processes: int
) -> tuple[str, tuple[str, ...]]:
    """Whom a failure names, and what is not as it should be."""
    violations = []
    name = named(failure)
    if fault.kind in ("flip", "wrong"):
        of_two = [[]] if processes == 2 else []  # one of two cannot be told
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
        wanted = (JUDGED[fault.kind], fault.phase)
        if (failure["kind"], failure["phase"]) != wanted:
            violations.append(f"it was {' in '.join(wanted)}")
    if noticed_s > NOTICED_S:
        violations.append(f"it was noticed after more than {NOTICED_S} s")
    if lost > 3 * SAVES:
        violations.append(f"{lost} steps were lost")
    return name, tuple(violations)


def _numbers(run: Path) -> list[str]:
    """What a run computed, step by step, as texts: NaN is no other than itself."""
    names = ("step", "loss", "skipped", "eval_loss")
    return [str({name: line.get(name) for name in names}) for line in read_metrics(run)]


def _lines(path: Path) -> list[dict[str, Any]]:
    return read_lines(path) if path.exists() else []


def _left_over(folder: Path) -> list[int]:
    """Processes of this drill that still run, by the environment they were given."""
    found = []
    for each in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(folder).encode() in each.read_bytes():
                found.append(int(each.parent.name))
        except OSError:  # another user's, or gone meanwhile
            continue
    return found
