"""The processes of a run under watch: started together, and together again when one fails."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from jaxtrain.cluster.phases import Now
from jaxtrain.cluster.sampler import Sample
from jaxtrain.fault_tolerance.deadlines import Deadlines, Late, late
from jaxtrain.fault_tolerance.faults import Fault, faults_variable
from jaxtrain.fault_tolerance.ledger import (
    Entry,
    OpenEntry,
    add_entry,
    read_ledger,
    record,
)
from jaxtrain.fault_tolerance.restarts import Exhausted, Failure, RestartHistory, Restarts
from jaxtrain.machines.machine import Running
from jaxtrain.machines.roster import POLL_S, Roster
from jaxtrain.machines.workers import Tell

LOOK_S = 0.5
"""How often exits are looked for, and what processes say of themselves."""

TOGETHER_S = 1.0
"""Signals that come so close are one."""

PAUSE_S = 2.0
"""So much longer between two looks, and this process stood still itself."""

GRACE_S = 0.3
"""After the first exit: others may have ended before it and are seen only now."""

FAILURES = "failures.jsonl"
"""In the run directory: a line of JSON for each failure."""

FRAMES = 12
"""Lines of a stack that a report has."""


@dataclass
class Supervisor:
    """Runs a process of `command` on each machine of `roster` until they are done.

    command: of one process, after that of jaxtrain itself; where the processes meet, and which it
    is, is added as flags. tell: takes every line, of the processes and its own. run_dir: where
    failures and the ledger are written down; folder: where faults that happened are marked. faults:
    on purpose, each once as long as `folder` is the same.
    """

    command: Sequence[str]
    roster: Roster
    tell: Tell
    run_dir: Path
    folder: Path
    deadlines: Deadlines = field(default_factory=Deadlines)
    restarts: Restarts = field(default_factory=Restarts)
    faults: Sequence[Fault] = ()
    workers: list[Running] = field(default_factory=list)
    stopping: int = 0
    """Signals that have asked for an end."""
    _growing: bool = False
    _recorded: bool = False
    """Whether a start is in the ledger: before that it may be another run's."""
    _passed: int = 0
    _latest: float = -math.inf
    _stood: Now | None = None
    _pauses: list[tuple[float, float]] = field(default_factory=list)
    """When this process went on after it stood still, and for how long it had, in this start."""

    def run(self) -> int:
        """Until all are done, or nothing more is tried; gives the exit code."""
        history, attempt, without = RestartHistory(self.restarts), 0, EXHAUSTED
        while True:
            if not self._waits(lambda: self.roster.choose(lambda: self.stopping > 0)):
                return self._interrupted() if self.stopping else without
            attempt += 1
            found = self._one_start(first=attempt == 1)
            if found == PREEMPTED and self._goes_on():
                without = PREEMPTED  # all is saved
                continue
            without = EXHAUSTED
            if found == REFUSED:
                return found
            if isinstance(found, int):
                self.tell(f"launch: {self._ledger()}")
                return found
            if self.stopping:
                if self.stopping == 1:  # else it was ended on purpose
                    self._write_down(found, attempt, restarts=False)
                self.tell(f"launch: {found.what}, while it was stopping")
                return self._interrupted()
            next_one = history.decide(found)
            self._write_down(found, attempt, restarts=not isinstance(next_one, Exhausted))
            if isinstance(next_one, Exhausted):
                self.tell(f"launch: stopped after start {attempt}: {next_one.why}")
                self._tell_where_it_stands(goes_on=not next_one.deterministic)
                return _code(found, next_one)
            self.roster.set_aside(found.wrong)
            self.tell(f"launch: all processes start again in {next_one:g} s")
            if not self._waits(partial(self._wait, next_one)):
                return self._interrupted()

    def _goes_on(self) -> bool:
        """Whether processes that saved and left are followed by others: they did so for a machine
        that comes or goes, and nobody asked for more."""
        growing, self._growing = self._growing, False
        if leaving := self.roster.leaving():
            self.tell(f"launch: machine {', '.join(leaving)} is to go; the run goes on without it")
        return (growing or bool(leaving)) and not self.stopping

    def _one_start(self, *, first: bool) -> int | Failure:
        """All processes, from their beginning to their end; kept in the ledger, which is another's
        where they are refused. first: what is refused is refused; later it was not before, and may
        not be again."""
        entry = OpenEntry(self.run_dir)
        self._growing, self._passed, self._stood = False, 0, None
        self._pauses.clear()
        try:
            found = self._start(first=first) or self._watch(entry, first=first)
        finally:
            for worker in self.workers:
                worker.kill()
            for worker in self.workers:
                worker.join()
        if not self.workers:
            assert not isinstance(found, int)
            return found
        if found != REFUSED:
            now = self._stood or self.workers[0].sample().now
            still = math.inf if isinstance(found, int) or found.still is None else found.still
            entry.close(now, still)
            self._recorded = True
        return found

    def _not_started(self, error: OSError) -> Failure:
        """The failure of the process that this machine could not start."""
        process = min(len(self.workers), len(self.roster.hosts) - 1)
        why = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        what = f"{self._name(process)} could not be started: {why}"
        self.tell(f"launch: {what}")
        return Failure(process, "crashed", what, "start", 0, time.monotonic(), cause=why)

    def _interrupted(self) -> int:
        """The exit code where a run was ended that would have gone on."""
        return PREEMPTED if self._tell_where_it_stands() else INTERRUPTED

    def _tell_where_it_stands(self, *, goes_on: bool = True) -> bool:
        """Whether anything is saved, as far as can be seen. goes_on: a start may go on from it."""
        from jaxtrain.checkpoint.run_config import CHECKPOINTS
        from jaxtrain.checkpoint.storage import committed_steps

        saved, stands = [], "nothing is saved"
        try:
            saved = committed_steps(self.run_dir / CHECKPOINTS)
        except OSError as error:
            stands = f"what is saved cannot be seen: {error}"
        if saved:
            more = ", from which the same command goes on" * goes_on
            stands = f"the newest save is {saved[-1]}{more}"
        self.tell(f"launch: {stands}; {self._ledger()}")
        return bool(saved)

    def _ledger(self) -> str:
        try:
            return str(read_ledger(self.run_dir))
        except ValueError as error:
            return str(error)

    def stop(self) -> None:
        """A signal of the outside, from its handler: the first asks all processes to save and
        leave, a second one ends them. Those that come close are one: a terminal, its shell and a
        wrapper may each send theirs."""
        since, self._latest = time.monotonic() - self._latest, time.monotonic()
        self.stopping += not self.stopping or since > TOGETHER_S

    def _pass_on(self) -> None:
        """What the outside has asked for, to the processes."""
        if self.stopping == self._passed:
            return
        self._passed = self.stopping
        if self.stopping > 1:
            self.tell("launch: asked a second time; all processes are ended")
        elif self._growing or self.roster.leaving():
            return  # they have been asked, and the second time is to stop at once
        for worker in self.workers:
            worker.send(signal.SIGTERM if self.stopping == 1 else signal.SIGKILL)

    def _start(self, *, first: bool) -> Failure | None:
        """Start all processes; a failure where this machine could not. Raises OSError instead where
        it is the first start, of which that is a refusal."""
        hosts, flags = self.roster.hosts, self.roster.layout.flags
        self.workers = []
        try:
            # Who removes old files may have been there.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            environ = faults_variable(self.faults, self.folder)
            place = ["--coordinator", hosts[0].meeting_point(), "--processes", str(len(hosts))]
            for index, host in enumerate(hosts):
                command = [*self.command, *flags, *place, "--process", str(index)]
                tell = partial(self._tell_of, index)
                self.workers.append(host.start(index, command, environ, tell))
        except OSError as error:
            if first:
                raise
            return self._not_started(error)
        return None

    def _tell_of(self, process: int, line: str) -> None:
        self.tell(f"[{process}] {line}")

    def _watch(self, entry: OpenEntry, *, first: bool) -> int | Failure:
        """Until all have ended well, or one has not."""
        looked, now = 0.0, time.monotonic()
        while True:
            time.sleep(POLL_S)
            self._pass_on()
            codes = [worker.code for worker in self.workers]
            failed = any(map(_ended_badly, self.workers))
            if failed and None in codes:
                time.sleep(GRACE_S)
            if failed or None not in codes:
                code = _together([w.code for w in self.workers if w.code is not None])
                well = code == INTERRUPTED or not any(map(_ended_badly, self.workers))
                return code if code is not None and well else self._ended(first=first)
            now, before = time.monotonic(), now
            self._paused(now - before - POLL_S)
            if now - looked >= LOOK_S:
                looked = now
                said = [(w, self._awake(w.sample())) for w in self.workers]
                # Exits last: who has ended since is not silent.
                samples = {w.process: sample for w, sample in said if w.code is None}
                if found := late(samples, now, self.deadlines):
                    return self._stuck(found, now)
                self._grow(samples.values())
                entry.keep(self.workers[0].sample().now)

    def _paused(self, seconds: float) -> None:
        """Told how much longer than it sleeps it took to look again: where this process stood still
        itself (stopped, or with a virtual machine), others may have stood still with it."""
        if seconds > PAUSE_S:
            self._pauses.append((time.monotonic(), seconds))
            self.tell(f"launch: stood still itself for {seconds:.1f} s, which blames nobody")

    def _awake(self, sample: Sample) -> Sample:
        """As if what it said before this process stood still were as much later."""

        def later(when: float) -> float:
            for until, seconds in self._pauses:
                when = min(when + seconds, until) if when < until else when
            return when

        now = sample.now._replace(since=later(sample.now.since))
        return sample._replace(now=now, at=later(sample.at) if sample.at else 0.0)

    def _grow(self, samples: Iterable[Sample]) -> None:
        """Have all save and leave, once, where they would begin again on more machines."""
        at_work = all(sample.now.phase in ("step", "load", "callback") for sample in samples)
        if not self._growing and not self.stopping and at_work and self.roster.could_grow():
            self._growing = True
            self.tell("launch: there are more machines; all save, and begin again with them")
            self.workers[0].send(signal.SIGTERM)

    def _ended(self, *, first: bool) -> int | Failure:
        """The failure of the process that ended first of those that did not end well; the exit
        code where it refused what it was given, before its first step."""
        bad = [w for w in self.workers if _ended_badly(w)]
        # What ends by the loss of another ends later, and JAX says so where it aborts.
        worker = min(bad, key=lambda w: (w.lost_another, w.kind != "lost", w.ended_at))
        sample, code = worker.sample(), worker.code or 0
        now, how, process, kind = sample.now, worker.ending, worker.process, worker.kind
        if code == REFUSED and now.first < 0:
            kind = "refused"
            if first:
                self.tell(f"launch: {self._name(process)} refused it: {worker.last_line}")
                return REFUSED
        if code == DONE:
            kind, how = "left", f"{how} before the run was done"
        what, wrong = f"{self._name(process)} ended by {how} {_at(now, now.failed_in)}", ()
        # Each by the same signal: none of them is why another ended.
        alike = [w for w in bad if w is not worker and w.code == code < 0 and not w.lost_another]
        if alike:
            what += f"; so did {', '.join(f'process {w.process}' for w in alike)}"
        told = [found for each in bad if (found := each.sample().now.wrong) is not None]
        if told:  # all compare the same numbers
            kind, wrong = "wrong", tuple(told[0])
            process = wrong[0] if wrong else process
            whose = f"process {', '.join(map(str, wrong))}" if wrong else "one of several"
            what += f", for wrong numbers of {whose}"
        self.tell(f"launch: {what}")
        if worker.kind == "crashed" and worker.last_line:
            what += f"; its last line: {worker.last_line}"
            how += f": {worker.last_line}"
        where = (now.failed_in, now.step, time.monotonic(), now.first)
        still = worker.ended_at if kind == "lost" else None
        return Failure(process, kind, what, *where, cause=how, still=still, wrong=wrong)

    def _stuck(self, found: list[Late], looked: float) -> Failure:
        """Tells of the processes to blame, each with its stack. looked: when they were found."""
        self._stood = self.workers[0].sample().now  # one that is let go on for its stacks moves
        for each in found:
            worker = self.workers[each.process]
            state = worker.state()
            quiet = "has said nothing" if each.what == "silent" else "has not moved"
            what = (
                f"{self._name(each.process)} {quiet} for {each.seconds:.1f} s "
                f"{_at(each.sample.now)}{f' ({state})' if state else ''}"
            )
            self.tell(f"launch: {what}; its main thread was at:")
            for line in _main_stack(each.sample):
                self.tell(f"    {line}")
            # It may have more to say: stacks of all its threads, written without Python.
            worker.send(signal.SIGCONT)
            worker.send(signal.SIGUSR1)
        time.sleep(GRACE_S)
        first, now = found[0], found[0].sample.now
        what = f"{self._name(first.process)} {_at(now)}: {first.what}"
        where = (now.phase, now.step, time.monotonic(), now.first)
        return Failure(first.process, first.what, what, *where, still=looked - first.seconds)

    def _name(self, process: int) -> str:
        hosts = self.roster.hosts
        return f"process {process} of {len(hosts)}{hosts[process].where}"

    def _wait(self, seconds: float) -> bool:
        """Whether nobody asked for an end meanwhile."""
        until = time.monotonic() + seconds
        while not self.stopping and time.monotonic() < until:
            time.sleep(POLL_S)
        return not self.stopping

    def _waits(self, act: Callable[[], bool]) -> bool:
        """What `act` gives, its time kept as one in which the run waits, between two starts."""
        began, clock = time.time(), time.monotonic()
        found = act()
        if self._recorded and (waited := time.monotonic() - clock) > POLL_S:
            add_entry(self.run_dir, Entry(began, began + waited, {"waiting": waited}))
        return found

    def _write_down(self, failure: Failure, attempt: int, *, restarts: bool) -> None:
        line: dict[str, Any] = {"time": time.time(), "start": attempt, **failure._asdict()}
        del line["at"], line["still"]
        line["restarts"] = restarts
        record(self.run_dir / FAILURES, line)


def _ended_badly(worker: Running) -> bool:
    """By an exit code; or well, before the run was done."""
    if worker.code == DONE:
        return worker.sample().now.phase != "finish"
    return worker.code not in (None, PREEMPTED)


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


def _at(now: Now, phase: str = "") -> str:
    return f"after step {now.step}, in phase {phase or now.phase}"


def _main_stack(sample: Sample) -> list[str]:
    """The innermost frames of the main thread, which comes first."""
    main = sample.stacks.split("\n\nthread ")[0].splitlines()
    return main[-FRAMES:]


def own_command(*arguments: str) -> list[str]:
    """A command of jaxtrain in a process of its own."""
    return [sys.executable, "-P", "-m", "jaxtrain.cli", *arguments]
