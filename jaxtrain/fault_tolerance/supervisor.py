"""Supervises the processes of a run: starts them together, and again together when one fails."""

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
from jaxtrain.cluster.sampler import ProcessSample
from jaxtrain.fault_tolerance.beginning import Beginning
from jaxtrain.fault_tolerance.culprit import (
    GRACE_S,
    Culprit,
    common_code,
    ended_badly,
    first_to_fail,
    last_words,
)
from jaxtrain.fault_tolerance.deadlines import Deadlines, Late, late
from jaxtrain.fault_tolerance.faults import Fault, faults_variable, missed
from jaxtrain.fault_tolerance.ledger import NAME as LEDGER
from jaxtrain.fault_tolerance.ledger import (
    Entry,
    OpenEntry,
    Records,
    read_ledger,
    unwritten,
)
from jaxtrain.fault_tolerance.restarts import Exhausted, Failure, RestartHistory, Restarts
from jaxtrain.machines.machine import RunningProcess
from jaxtrain.machines.pauses import Pauses
from jaxtrain.machines.roster import POLL_S, Roster
from jaxtrain.notices import Tell

LOOK_S = 0.5
"""Seconds between looks at the processes' reports."""

TOGETHER_S = 1.0
"""Signals within this many seconds count as one."""

FAILURES = "failures.jsonl"
"""File in the run directory: a line of JSON for each failure."""

FRAMES = 12
"""Lines of a stack in a report."""


@dataclass
class Supervisor:
    """Runs a process of `command` on each machine of `roster`, and all again after a failure.

    command: arguments of jaxtrain for one process; flags with its number and the meeting point are
    added. tell: prints lines of the processes and its own. run_dir: for failures and the ledger;
    folder: for markers of faults that happened. faults: to inject, each unless `folder` has its
    marker. beginning: which run in `run_dir` is this launch's.
    """

    command: Sequence[str]
    roster: Roster
    tell: Tell
    run_dir: Path
    folder: Path
    deadlines: Deadlines = field(default_factory=Deadlines)
    restarts: Restarts = field(default_factory=Restarts)
    faults: Sequence[Fault] = ()
    beginning: Beginning = Beginning()  # noqa: RUF009 (frozen)
    workers: list[RunningProcess] = field(default_factory=list)
    stopping: int = 0
    """Stop signals so far."""
    _growing: bool = False
    _passed: int = 0
    _latest: float = -math.inf
    _stood: Now | None = None
    _pauses: Pauses = field(init=False)
    """Of this process in this start."""

    def __post_init__(self) -> None:
        self._records = Records(self.run_dir, self.beginning)

    def run(self) -> int:
        """Runs until all are done, or restarts end; returns the exit code."""
        history, attempt, too_few_code = RestartHistory(self.restarts), 0, EXHAUSTED
        while True:
            if not self._waits(lambda: self.roster.choose(lambda: self.stopping > 0)):
                if problem := self._records.end():
                    self.tell(f"launch: {problem}")
                return self._interrupted() if self.stopping else too_few_code
            attempt += 1
            outcome = self._one_start(first=attempt == 1)
            if outcome == PREEMPTED and self._goes_on():
                too_few_code = PREEMPTED  # all is saved
                continue
            too_few_code = EXHAUSTED
            if outcome == REFUSED:
                return outcome
            if isinstance(outcome, int):
                if outcome == DONE and (text := missed(self.faults, self.folder)):
                    self.tell(f"launch: {text}")
                if outcome == PREEMPTED and self.beginning.again:
                    return self._interrupted()  # by 75 a scheduler would give it again
                self.tell(f"launch: {self._ledger()}")
                return outcome
            if self.stopping:
                if self.stopping == 1:  # else it was ended on purpose
                    self._write_down(outcome, attempt, restarts=False)
                    self.tell(f"launch: {outcome.what}, while it was stopping")
                return self._interrupted()
            decision = history.decide(outcome)
            self._write_down(outcome, attempt, restarts=not isinstance(decision, Exhausted))
            if isinstance(decision, Exhausted):
                self.tell(f"launch: stopped after start {attempt}: {decision.why}")
                self._tell_where_it_stands(goes_on=not decision.deterministic)
                return _code(outcome, decision)
            self.roster.set_aside(outcome.wrong)
            self.tell(f"launch: all processes start again in {decision:g} s")
            if not self._waits(partial(self._wait, decision)):
                return self._interrupted()

    def _goes_on(self) -> bool:
        """True if another start follows processes that saved and left: they did so for a machine
        that comes or goes, and nothing else asked them to stop."""
        growing, self._growing = self._growing, False
        if leaving := self.roster.leaving():
            self.tell(f"launch: machine {', '.join(leaving)} is to go; the run goes on without it")
        return (growing or bool(leaving)) and not self.stopping

    def _one_start(self, *, first: bool) -> int | Failure:
        """Runs all processes once, and adds the start to the ledger unless it is refused. first: a
        refusal is final; in a later start it counts as a failure."""
        entry = OpenEntry(self.run_dir)
        self._growing, self._passed, self._stood = False, 0, None
        try:
            outcome = self._start(first=first) or self._watch(entry, first=first)
        finally:
            for worker in self.workers:
                worker.kill()
            for worker in self.workers:
                worker.join()
        if not self.workers:
            assert not isinstance(outcome, int)
            return outcome
        if outcome != REFUSED:
            now = self._stood or self.workers[0].sample().now
            still = math.inf if isinstance(outcome, int) or outcome.still is None else outcome.still
            if now.first >= 0:
                self._records.write()
                entry.close(now, still)
            else:
                self._records.add(LEDGER, entry.entry(now, still)._asdict())
        return outcome

    def _not_started(self, error: OSError) -> Failure:
        """The failure of the process that this machine could not start."""
        process = min(len(self.workers), len(self.roster.hosts) - 1)
        why = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        text = f"{self._name(process)} could not be started: {why}"
        self.tell(f"launch: {text}")
        return Failure(process, "crashed", text, "start", 0, time.monotonic(), cause=why)

    def _interrupted(self) -> int:
        """Exit code of a run that was stopped before its end."""
        is_saved = self._tell_where_it_stands()
        return PREEMPTED if is_saved and not self.beginning.again else INTERRUPTED

    def _tell_where_it_stands(self, *, goes_on: bool = True) -> bool:
        """Prints save and ledger; True if a save is visible. goes_on: a restart may continue it."""
        from jaxtrain.checkpoint.storage import committed_steps
        from jaxtrain.files.pointer import checkpoints_in

        saved, status = [], "nothing is saved"
        try:
            if self.beginning.owns(self.run_dir):
                saved = committed_steps(checkpoints_in(self.run_dir))
            else:
                status = f"nothing is saved: this run has not begun in {self.run_dir}"
        except (OSError, ValueError) as error:
            status = f"what is saved cannot be seen: {error}"
        if saved:
            command = "the same command" + " without --fresh" * self.beginning.again
            more = f", from which {command} goes on" * goes_on
            status = f"the newest save is {saved[-1]}{more}"
        self.tell(f"launch: {status}; {self._ledger()}")
        return bool(saved)

    def _ledger(self) -> str:
        if problem := self._records.end():
            return problem
        try:
            ledger = str(read_ledger(self.run_dir))
        except ValueError as error:
            ledger = str(error)
        return "; ".join([ledger, *unwritten()])

    def stop(self) -> None:
        """For a signal handler: the first signal asks all processes to save and leave, a second one
        ends them. Signals close together count as one: a terminal, its shell and a wrapper may each
        send one."""
        since, self._latest = time.monotonic() - self._latest, time.monotonic()
        self.stopping += not self.stopping or since > TOGETHER_S

    def _pass_on(self) -> None:
        """Passes stop signals on to the processes."""
        if self.stopping == self._passed:
            return
        self._passed = self.stopping
        if self.stopping > 1:
            self.tell("launch: asked a second time; all processes are ended")
        elif self._growing or self.roster.leaving():
            return  # they were asked; a second signal would end them at once
        for worker in self.workers:
            worker.send(signal.SIGTERM if self.stopping == 1 else signal.SIGKILL)

    def _start(self, *, first: bool) -> Failure | None:
        """Starts all processes; a failure if this machine could not. In the first start, which is
        then refused, it raises OSError instead."""
        hosts, flags = self.roster.hosts, self.roster.layout.flags
        self.workers = []
        try:
            # A cleaner of old files may have removed it.
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.roster.layout.write()
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
        """Watches until all have ended well, or one has failed."""
        looked, self._pauses, culprit = 0.0, Pauses(POLL_S), Culprit()
        while True:
            time.sleep(POLL_S)
            if paused := self._pauses.look():
                self.tell(f"launch: stood still itself for {paused:.1f} s, which blames nobody")
                self.roster.forget_stays()
            self._pass_on()
            codes = [worker.code for worker in self.workers]
            if culprit.is_known(self.workers, self._pauses) or None not in codes:
                code = common_code([w.code for w in self.workers if w.code is not None])
                well = code == INTERRUPTED or not any(map(ended_badly, self.workers))
                return code if code is not None and well else self._ended(first=first)
            now = time.monotonic()
            if now - looked >= LOOK_S:
                looked = now
                latest = [(w, self._awake(w.sample())) for w in self.workers]
                # Exits are read last: an ended process is not silent.
                samples = {w.process: sample for w, sample in latest if w.code is None}
                if blamed := late(samples, now, self.deadlines):
                    return self._stuck(blamed, now)
                if len(samples) == len(self.workers):
                    self._grow(samples.values())
                entry.keep(self.workers[0].sample().now)

    def _awake(self, sample: ProcessSample) -> ProcessSample:
        """The sample, with times before a pause of this process moved by the pause."""
        now = sample.now._replace(since=self._pauses.moved(sample.now.since))
        last = self._pauses.moved(sample.sampled_at) if sample.sampled_at else 0.0
        return sample._replace(now=now, sampled_at=last)

    def _grow(self, samples: Iterable[ProcessSample]) -> None:
        """Makes all processes save and leave, once, if they could restart on more machines."""
        at_work = all(sample.now.phase in ("step", "load", "callback") for sample in samples)
        if not self._growing and not self.stopping and at_work and self.roster.could_grow():
            self._growing = True
            self.tell("launch: there are more machines; all save, and begin again with them")
            self.workers[0].send(signal.SIGTERM)

    def _ended(self, *, first: bool) -> int | Failure:
        """The failure of the process that failed first; or the exit code if it refused its input
        before its first step."""
        bad = last_words(self.workers)
        worker = first_to_fail(bad)
        sample, code = worker.sample(), worker.code or 0
        now, cause, process, kind = sample.now, worker.ending, worker.process, worker.kind
        if code == REFUSED and now.first < 0:
            kind = "refused"
            if first:
                self.tell(f"launch: {self._name(process)} refused it: {worker.last_line}")
                return REFUSED
        if code == DONE:
            kind, cause = "left", f"{cause} before the run was done"
        text, wrong = f"{self._name(process)} ended by {cause} {_at(now, now.failed_in)}", ()
        # All by the same signal: none of them is the cause of another.
        alike = [w for w in bad if w is not worker and w.code == code < 0 and not w.lost_another]
        if alike:
            text += f"; so did {', '.join(f'process {w.process}' for w in alike)}"
        accused = [processes for w in bad if (processes := w.sample().now.wrong) is not None]
        if accused:  # all processes compare the same numbers
            kind, wrong = "wrong", tuple(accused[0])
            process = wrong[0] if wrong else process
            whose = f"process {', '.join(map(str, wrong))}" if wrong else "one of several"
            text += f", for wrong numbers of {whose}"
        if self.stopping < 2:  # else it was ended on purpose
            self.tell(f"launch: {text}")
        if worker.kind == "crashed" and code != DONE and worker.last_line:
            text += f"; its last line: {worker.last_line}"
            cause += f": {worker.last_line}"
        context = (now.failed_in, now.step, time.monotonic(), now.first)
        still = worker.ended_at if kind == "lost" else None
        return Failure(process, kind, text, *context, cause=cause, still=still, wrong=wrong)

    def _stuck(self, blamed: list[Late], noticed_at: float) -> Failure:
        """Reports the processes to blame, each with its stack. noticed_at: when they were found."""
        self._stood = self.workers[0].sample().now  # a process that is resumed for its stacks moves
        for culprit in blamed:
            worker = self.workers[culprit.process]
            state = worker.state()
            quiet = "has said nothing" if culprit.kind == "silent" else "has not moved"
            text = (
                f"{self._name(culprit.process)} {quiet} for {culprit.seconds:.1f} s "
                f"{_at(culprit.sample.now)}{f' ({state})' if state else ''}"
            )
            self.tell(f"launch: {text}; its main thread was at:")
            for line in _main_stack(culprit.sample):
                self.tell(f"    {line}")
            # Makes it print the stacks of all its threads, without Python.
            worker.send(signal.SIGCONT)
            worker.send(signal.SIGUSR1)
        time.sleep(GRACE_S)
        first, now = blamed[0], blamed[0].sample.now
        text = f"{self._name(first.process)} {_at(now)}: {first.kind}"
        context = (now.phase, now.step, time.monotonic(), now.first)
        return Failure(first.process, first.kind, text, *context, still=noticed_at - first.seconds)

    def _name(self, process: int) -> str:
        hosts = self.roster.hosts
        return f"process {process} of {len(hosts)}{hosts[process].where}"

    def _wait(self, seconds: float) -> bool:
        """Waits; returns True if no stop was requested meanwhile."""
        until = time.monotonic() + seconds
        while not self.stopping and time.monotonic() < until:
            time.sleep(POLL_S)
        return not self.stopping

    def _waits(self, act: Callable[[], bool]) -> bool:
        """Returns `act()`, and records its time as waiting between two starts."""
        began, clock = time.time(), time.monotonic()
        result = act()
        if self._records.begun and (waited := time.monotonic() - clock) > POLL_S:
            entry = Entry(began, began + waited, {"waiting": waited})
            self._records.add(LEDGER, entry._asdict())
        return result

    def _write_down(self, failure: Failure, attempt: int, *, restarts: bool) -> None:
        line: dict[str, Any] = {"time": time.time(), "start": attempt, **failure._asdict()}
        del line["at"], line["still"]
        line["restarts"] = restarts
        self._records.add(FAILURES, line)


def _code(failure: Failure, exhausted: Exhausted) -> int:
    if exhausted.deterministic:
        return DETERMINISTIC
    return HUNG if failure.kind in ("hangs", "silent") else EXHAUSTED


def _at(now: Now, phase: str = "") -> str:
    return f"after step {now.step}, in phase {phase or now.phase}"


def _main_stack(sample: ProcessSample) -> list[str]:
    """The innermost frames of the main thread, which comes first."""
    return sample.stacks.split("\n\nthread ")[0].splitlines()[-FRAMES:]


def own_command(*arguments: str) -> list[str]:
    """Command that runs jaxtrain in a process of its own."""
    return [sys.executable, "-P", "-m", "jaxtrain", *arguments]
