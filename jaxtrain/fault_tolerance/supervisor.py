"""One machine's processes under watch: started together, and together again when one fails."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtrain.cluster.exit_codes import (
    DETERMINISTIC,
    DONE,
    EXHAUSTED,
    HUNG,
    INTERRUPTED,
    PREEMPTED,
    REFUSED,
)
from jaxtrain.cluster.join import free_port
from jaxtrain.cluster.sampler import Sample
from jaxtrain.fault_tolerance.deadlines import Deadlines, Late, late
from jaxtrain.fault_tolerance.faults import Fault, faults_variable
from jaxtrain.fault_tolerance.ledger import Entry, add_entry, add_line, entry_of, read_ledger
from jaxtrain.fault_tolerance.namespaces import Network
from jaxtrain.fault_tolerance.restarts import Exhausted, Failure, RestartHistory, Restarts
from jaxtrain.fault_tolerance.workers import Worker, ending

POLL_S = 0.05
LOOK_S = 0.5
"""How often exits are looked for, and what processes say of themselves."""

GRACE_S = 0.3
"""After the first exit: others may have ended before it and are seen only now."""

FAILURES = "failures.jsonl"
"""In the run directory: a line of JSON for each failure."""

FRAMES = 12
"""Lines of a stack that a report has."""


@dataclass
class Supervisor:
    """Runs `processes` copies of `command` until they are done.

    command: of one process; where the processes meet, and which it is, is added as flags. tell:
    takes every line, of the processes and its own. run_dir: where failures and the ledger are
    written down; folder: for files that processes and supervisor share. faults: on purpose, each
    once as long as `folder` is the same.
    """

    command: Sequence[str]
    processes: int
    tell: Callable[[str], None]
    run_dir: Path
    folder: Path
    deadlines: Deadlines = field(default_factory=Deadlines)
    restarts: Restarts = field(default_factory=Restarts)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    faults: Sequence[Fault] = ()
    network: Network | None = None
    workers: list[Worker] = field(default_factory=list)
    stopping: int = 0
    """Signals that have asked for an end."""

    def run(self) -> int:
        """Until all are done, or nothing more is tried; gives the exit code."""
        history, attempt = RestartHistory(self.restarts), 0
        while True:
            attempt += 1
            found = self._one_start()
            if isinstance(found, int):
                self.tell(f"launch: {self._ledger()}")
                return found
            if self.stopping:
                self.tell(f"launch: {found.what}, while it was stopping")
                return self._interrupted()
            next_one = history.decide(found)
            self._write_down(found, attempt, next_one)
            if isinstance(next_one, Exhausted):
                self.tell(f"launch: stopped after start {attempt}: {next_one.why}")
                return _code(found, next_one)
            self.tell(f"launch: all processes start again in {next_one:g} s")
            if not self._wait(next_one):
                return self._interrupted()

    def _one_start(self) -> int | Failure:
        """All processes, from their beginning to their end; kept in the ledger."""
        began, clock = time.time(), time.monotonic()
        try:
            self._start()
            found = self._watch()
        finally:
            self._kill()
        sample, at = self.workers[0].sample(), time.monotonic()
        entry = entry_of(sample.now, at, began=began, ended=began + at - clock)
        add_entry(self.run_dir, entry)
        return found

    def _interrupted(self) -> int:
        """The exit code where a run was ended that would have gone on."""
        from jaxtrain.checkpoint.run_config import CHECKPOINTS
        from jaxtrain.checkpoint.storage import committed_steps

        saved = committed_steps(self.run_dir / CHECKPOINTS)
        self.tell(f"launch: the newest save is {saved[-1] if saved else None}; {self._ledger()}")
        return PREEMPTED if saved else INTERRUPTED

    def _ledger(self) -> str:
        try:
            return str(read_ledger(self.run_dir))
        except ValueError as error:
            return str(error)

    def stop(self, number: int) -> None:
        """A signal of the outside: the first asks all processes to save and leave, a second one
        ends them."""
        self.stopping += 1
        for worker in self.workers:
            worker.send(signal.SIGTERM if self.stopping == 1 else signal.SIGKILL)

    def _start(self) -> None:
        host = self.network.addresses[0] if self.network else "127.0.0.1"
        coordinator = f"{host}:{free_port()}"
        where = ["--coordinator", coordinator, "--processes", str(self.processes)]
        self.workers, environ = [], {**self.environ, **faults_variable(self.faults, self.folder)}
        for index in range(self.processes):
            prefix = self.network.prefix(index) if self.network else []
            command = [*prefix, *self.command, *where, "--process", str(index)]
            worker = Worker(index, command, environ, self.folder / f"{index}.sample")
            self.workers.append(worker)
            worker.read(self.tell)
        if self.stopping:  # a signal came while they were started
            for worker in self.workers:
                worker.send(signal.SIGTERM)

    def _watch(self) -> int | Failure:
        """Until all have ended well, or one has not."""
        looked = 0.0
        while True:
            time.sleep(POLL_S)
            codes = [worker.code for worker in self.workers]
            failed = any(code not in (None, DONE, PREEMPTED) for code in codes)
            if failed and None in codes:
                time.sleep(GRACE_S)
            if failed or None not in codes:
                code = _together([w.code for w in self.workers if w.code is not None])
                return self._ended() if code is None else code
            now = time.monotonic()
            if now - looked >= LOOK_S:
                looked = now
                samples = {w.process: w.sample() for w in self.workers if w.code is None}
                if found := late(samples, now, self.deadlines):
                    return self._stuck(found)

    def _ended(self) -> int | Failure:
        """The failure of the process that ended first of those that did not end well; the exit
        code where it refused what it was given."""
        bad = [w for w in self.workers if w.code not in (None, DONE, PREEMPTED)]
        # What ends by the loss of another ends later, and JAX says so where it aborts.
        worker = min(bad, key=lambda w: (w.lost_another, w.ended_at))
        sample, code = worker.sample(), worker.code or 0
        if code == REFUSED:
            return REFUSED
        what = f"process {worker.process} of {self.processes} ended by {ending(code)} {_at(sample)}"
        self.tell(f"launch: {what}")
        if code > 0 and worker.last_line:
            what += f"; its last line: {worker.last_line}"
        kind = "killed" if code == -signal.SIGKILL else "crashed"
        return Failure(
            worker.process, kind, what, sample.now.phase, sample.now.step, time.monotonic()
        )

    def _stuck(self, found: list[Late]) -> Failure:
        """Tells of the processes to blame, each with its stack."""
        for each in found:
            worker = self.workers[each.process]
            state = worker.state()
            quiet = "has said nothing" if each.what == "silent" else "has not moved"
            what = (
                f"process {each.process} of {self.processes} {quiet} for {each.seconds:.1f} s "
                f"{_at(each.sample)}{f' ({state})' if state else ''}"
            )
            self.tell(f"launch: {what}; its main thread was at:")
            for line in _main_stack(each.sample):
                self.tell(f"    {line}")
            # It may have more to say: stacks of all its threads, written without Python.
            worker.send(signal.SIGCONT)
            worker.send(signal.SIGUSR1)
        time.sleep(GRACE_S)
        first, now = found[0], found[0].sample.now
        what = f"process {first.process} {_at(first.sample)}: {first.what}"
        return Failure(first.process, first.what, what, now.phase, now.step, time.monotonic())

    def _kill(self) -> None:
        for worker in self.workers:
            worker.kill()

    def _wait(self, seconds: float) -> bool:
        """Whether nobody asked for an end meanwhile."""
        began, clock = time.time(), time.monotonic()
        while not self.stopping and time.monotonic() < clock + seconds:
            time.sleep(POLL_S)
        waited = time.monotonic() - clock
        add_entry(self.run_dir, Entry(began, began + waited, {"waiting": waited}))
        return not self.stopping

    def _write_down(self, failure: Failure, attempt: int, next_one: float | Exhausted) -> None:
        line: dict[str, Any] = {"time": time.time(), "start": attempt, **failure._asdict()}
        del line["at"]
        line["restarts"] = not isinstance(next_one, Exhausted)
        add_line(self.run_dir / FAILURES, line)


def _together(codes: Sequence[int | None]) -> int | None:
    """The exit code that follows from those of all processes; None for a failure."""
    found = set(codes)
    if found <= {DONE}:
        return DONE
    if found <= {DONE, PREEMPTED}:
        return PREEMPTED
    return INTERRUPTED if found == {INTERRUPTED} else None


def _code(failure: Failure, exhausted: Exhausted) -> int:
    if exhausted.deterministic:
        return DETERMINISTIC
    return HUNG if failure.kind in ("hangs", "silent") else EXHAUSTED


def _at(sample: Sample) -> str:
    return f"after step {sample.now.step}, in phase {sample.now.phase}"


def _main_stack(sample: Sample) -> list[str]:
    """The innermost frames of the main thread, which comes first."""
    main = sample.stacks.split("\n\nthread ")[0].splitlines()
    return main[-FRAMES:]


def own_command(*arguments: str) -> list[str]:
    """A command of jaxtrain in a process of its own."""
    return [sys.executable, "-P", "-m", "jaxtrain.cli", *arguments]
