"""Fault injection: each fault of a kind, at a step and in a phase, on one process, once."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.cluster.phases import PHASES, Now
from jaxtrain.fault_tolerance.machine_faults import (
    cut_link,
    empty,
    fill,
    make_readonly,
    make_writable,
    refuse_large,
    refuse_mounting,
    refuse_shared_link,
)
from jaxtrain.files.store import AnyPath
from jaxtrain.run.callback import Callback, Run
from jaxtrain.violations import did_you_mean, raise_violations

FAULTS = "JAXTRAIN_FAULTS"
"""Environment variable with a process's faults; first in it is the folder with markers of faults
that happened."""

KINDS = {
    "kill": "SIGKILL, as the kernel does where memory is short",
    "kill_soon": "SIGKILL a twentieth of a second later: in a save, while its files are written",
    "stop": "SIGSTOP: the process stands still, all threads of it",
    "hang": "the main thread waits for ever, and the others go on",
    "lose": "SIGKILL to the agent of its machine, and with that to the process: both are gone",
    "exit": "the process leaves with code 3",
    "leave": "the process leaves with code 0, as if the run were done",
    "raise": "an OSError, once: in phase load one of the data source, in callback one of your code",
    "crash": "an exception, in every start that comes there",
    "terminate": "SIGTERM, as a scheduler sends it before it takes a machine back",
    "pause": "SIGSTOP to the launch itself, and SIGCONT after 12 seconds",
    "clean": "the files that launch and processes share in a temporary folder are removed",
    "slow": "half a second more, in this and the 30 steps that follow",
    "flip": "a bit of a parameter changes in the memory of the process's first device",
    "wrong": "the next step changes a bit of a parameter there, if it is taken once",
    "nan": "the gradients of the next step are not finite, whenever it is taken",
    "spike": "the parameters turn around before the step that takes batch STEP of the data, "
    "counted from 0, on all processes, whenever it is taken",
    "full": "no byte is free where the run directory is, for this and the 8 steps that follow",
    "readonly": "the run directory is read-only, for this and the 8 steps that follow",
    "cut": "the process's link to the others is down; for networks that a drill makes",
    "corrupt": "a byte of the newest checkpoint is changed, and then SIGKILL",
    "truncate": "a file of the newest checkpoint loses its second half, and then SIGKILL",
    "delete": "a file of the newest checkpoint is removed, and then SIGKILL",
    "foreign": "the newest checkpoint is of another experiment, and then SIGKILL",
}
"""Kind -> description."""

STATE = ("flip", "wrong", "nan", "spike")
"""Kinds that change the state: they happen before a step, in any phase."""

SLOW_S, SLOW_STEPS, SOON_S, FULL_STEPS, PAUSE_S = 0.5, 30, 0.05, 8, 12

DISKS = {"full": (fill, empty), "readonly": (make_readonly, make_writable)}
"""Kind -> what changes a run directory's disk, and what restores it."""


@dataclass(frozen=True)
class Fault:
    """kind: one of KINDS. step: it happens once this many steps are done. phase: one of PHASES;
    process: the affected one. Raises ValueError with every violation."""

    kind: str
    step: int
    phase: str = "step"
    process: int = 0

    def __post_init__(self) -> None:
        violations = []
        if self.kind not in KINDS:
            violations.append(f"{self.kind!r} is no fault{did_you_mean(self.kind, KINDS)}")
        if self.phase not in PHASES:
            violations.append(f"{self.phase!r} is no phase{did_you_mean(self.phase, PHASES)}")
        raise_violations(violations, f"fault {self}")

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}.{self.phase.replace(' ', '_')}:{self.process}"


def read_fault(text: str) -> Fault:
    """Parses `KIND@STEP.PHASE:PROCESS`; without `.PHASE` the phase is "step", and without
    `:PROCESS` the process is 0. Raises ValueError for any other text, and as `Fault`."""
    match = re.fullmatch(r"(\w+)@(\d+)(?:\.(\w+))?(?::(\d+))?", text)
    if match is None:
        raise ValueError(
            f"fault {text!r} is not written as KIND@STEP.PHASE:PROCESS, such as kill@20 or "
            f"stop@12.load:1; kinds are {', '.join(KINDS)}"
        )
    kind, step, phase, process = match.groups()
    return Fault(kind, int(step), (phase or "step").replace("_", " "), int(process or 0))


def faults_variable(faults: Sequence[Fault], folder: Path) -> dict[str, str]:
    """Environment that passes the faults to the processes; {} if there are none."""
    return {FAULTS: json.dumps([str(folder), *map(str, faults)])} if faults else {}


def missed(faults: Sequence[Fault], folder: Path) -> str:
    """Returns a text that names the faults without a marker in `folder`, of a run that is done; ""
    if there are none. Without it, a user would believe that the run had stood them."""
    never = [str(fault) for fault in faults if not (folder / str(fault)).exists()]
    return f"did not happen before the run was done: {', '.join(never)}" if never else ""


class Injector(Callback):
    """Injects the faults of this process; it is called at every phase, and by the run. Raises
    ValueError for faults that would affect more than the run."""

    def __init__(self, variable: str, process: int, run_dir: Path) -> None:
        folder, *texts = json.loads(variable)
        self._folder, self._run_dir = Path(folder), run_dir
        self._slow_until, self._previous_phase = -1, ""
        self._disks: dict[str, int] = {}
        """Kind of `DISKS` -> the step after which the disk is restored."""
        faults = [read_fault(text) for text in texts]
        own = [f for f in faults if f.process == process or f.kind == "spike"]
        self._faults = [f for f in own if f.kind not in STATE]
        self._of_state = [f for f in own if f.kind in STATE]
        kinds = {fault.kind for fault in own}
        violations = refuse_large(run_dir) if "full" in kinds else []
        violations += refuse_mounting() if "readonly" in kinds else []
        violations += refuse_shared_link() if "cut" in kinds else []
        raise_violations(violations)
        for kind in DISKS:  # a process may have ended before it was restored
            if any(f.kind == kind and (self._folder / str(f)).exists() for f in own):
                DISKS[kind][1](run_dir)

    def __call__(self, now: Now) -> None:
        loaded, self._previous_phase = self._previous_phase == "load", now.phase
        if now.phase == "step" and loaded and now.step < self._slow_until:  # once in each
            time.sleep(SLOW_S)
        for kind, until in list(self._disks.items()):
            if now.step > until or now.phase == "finish":
                del self._disks[kind]
                DISKS[kind][1](self._run_dir)
        for fault in self._faults:
            if now.phase == fault.phase and now.step >= fault.step and self._first(fault):
                self._act(fault, now)

    def before_step(self, run: Run, step: int) -> None:
        from jaxtrain.fault_tolerance.state_faults import change_state

        batch = run._session.loader.skips.batch(step - 1)
        for fault in self._of_state:
            again = {"nan": step - 1, "spike": batch}.get(fault.kind)
            due = step > fault.step if again is None else again == fault.step
            if due and (self._first(fault) or again is not None):
                change_state(fault.kind, run._session)

    def _first(self, fault: Fault) -> bool:
        """Marks it as having happened. True if it had not, in this start or an earlier one. Always
        True for a crash."""
        try:
            (self._folder / str(fault)).touch(exist_ok=False)
        except FileExistsError:
            return fault.kind == "crash"
        return True

    def _act(self, fault: Fault, now: Now) -> None:
        acts: dict[str, Callable[[], object]] = {
            "kill": lambda: _signal(signal.SIGKILL),
            "kill_soon": lambda: threading.Timer(SOON_S, _signal, (signal.SIGKILL,)).start(),
            "stop": lambda: _signal(signal.SIGSTOP),
            "lose": lambda: os.kill(os.getppid(), signal.SIGKILL),
            "hang": lambda: threading.Event().wait(),
            "exit": lambda: os._exit(3),
            "leave": lambda: os._exit(0),
            "raise": lambda: _raise(fault),
            "pause": _pause_launch,
            "clean": self._clean,
            "crash": lambda: _crash(fault),
            "terminate": lambda: _signal(signal.SIGTERM),
            "slow": lambda: setattr(self, "_slow_until", now.step + SLOW_STEPS),
            "full": lambda: self._disk("full", now.step + FULL_STEPS),
            "readonly": lambda: self._disk("readonly", now.step + FULL_STEPS),
            "cut": cut_link,
        }
        acts.get(fault.kind, lambda: self._damage(fault.kind))()

    def _disk(self, kind: str, until: int) -> None:
        self._disks[kind] = until
        DISKS[kind][0](self._run_dir)

    def _clean(self) -> None:
        """Removes all but the markers of faults: without one, its fault would happen again."""
        for path in self._folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif "@" not in path.name:
                path.unlink()

    def _damage(self, kind: str) -> None:
        """Damages a file of the newest committed step, and kills the process: a run reads its
        checkpoints only at its start."""
        from jaxtrain.checkpoint.storage import committed_steps
        from jaxtrain.files import store
        from jaxtrain.files.pointer import checkpoints_in
        from jaxtrain.state_format.manifest import ITEM

        checkpoints = checkpoints_in(self._run_dir)
        for step in committed_steps(checkpoints)[-1:]:
            if kind == "foreign":
                _make_foreign(checkpoints / str(step))
                continue
            files = checkpoints / str(step) / ITEM
            packs = [files / name for name in store.names_in(files) if name.endswith(".pack")]
            pack = max(packs, key=lambda path: store.size_of(path) or 0)
            data = pack.read_bytes()
            middle = len(data) // 2
            store.remove_file(pack)  # an earlier step may hold the same file
            if kind == "corrupt":
                store.put(pack, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
            if kind == "truncate":
                store.put(pack, data[:middle])
        _signal(signal.SIGKILL)


def _signal(number: int) -> None:
    os.kill(os.getpid(), number)


def _make_foreign(step: AnyPath) -> None:
    """Changes the experiment in the step's manifest, and nothing else."""
    from jaxtrain.state_format.manifest import read_manifest, write_manifest

    manifest = read_manifest(step)
    experiment = manifest.metadata["experiment"]
    metadata = {**manifest.metadata, "experiment": {**experiment, "seed": experiment["seed"] + 1}}
    chunks = [chunk for chunks in manifest.chunks.values() for chunk in chunks]
    write_manifest(manifest.directory, int(step.name), manifest.leaves, metadata, chunks)


def _pause_launch() -> None:
    """Pauses this process's parent; it resumes even if this process ends."""
    launch = os.getppid()
    awaken = ["sh", "-c", f"sleep {PAUSE_S}; kill -CONT {launch}"]
    subprocess.Popen(awaken, start_new_session=True)
    os.kill(launch, signal.SIGSTOP)


def _raise(fault: Fault) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), f"the fault {fault}")


def _crash(fault: Fault) -> None:
    raise RuntimeError(f"the fault {fault}")
