"""`jaxtrain train`: trains, and stops on a signal."""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jaxtrain.cli.shared import (
    Interrupted,
    RunFailed,
    add_branch,
    add_mesh,
    mesh_of,
    numbered_directory,
    print_failure,
    print_refusal,
    run_dir_of,
    say,
    set_simulation_flags,
    settle_streams,
)
from jaxtrain.cluster.exit_codes import DONE, FAILED, INTERRUPTED, PREEMPTED, REFUSED
from jaxtrain.cluster.join import ProcessPlace, join, place_of, process_count, process_number
from jaxtrain.cluster.phases import Phases
from jaxtrain.cluster.sampler import SAMPLE_FILE, STARTED_BY, SUPERVISOR, Sampler, end_with_parent
from jaxtrain.fault_tolerance.faults import FAULTS, Injector
from jaxtrain.fault_tolerance.ledger import OpenEntry, unwritten
from jaxtrain.files.stores import is_address
from jaxtrain.run.callback import Callback, Run
from jaxtrain.violations import raise_violations, refuses

if TYPE_CHECKING:  # it imports JAX
    from jaxtrain.run.result import Result

TOGETHER_S = 0.25
"""Signals within this time count as one: a terminal, its shell and a launcher may each send one."""


def add_options(train: argparse.ArgumentParser) -> None:
    train.add_argument("experiment", help="a Python file with a function experiment()")
    add_mesh(train)
    text = "where the run is kept: a path, or an address s3:// or gs://; default runs/EXPERIMENT"
    train.add_argument("--run-dir", help=text)
    train.add_argument("--name", help="of the run directory in runs/, instead of EXPERIMENT")
    text = "begin anew: a run that is in the directory is kept beside it; to resume, leave it out"
    train.add_argument("--fresh", action="store_true", help=text)
    text = (
        "as --fresh, but go on with a run that was begun with the same TEXT: for jobs that repeat"
    )
    train.add_argument("--fresh-once", metavar="TEXT", help=text)
    text = (
        "keep each start as a run of its own, in the first of RUN-1, RUN-2, ... that is not there"
    )
    train.add_argument("--numbered", action="store_true", help=text)
    text = "begin as a branch of another run: with the whole state of that step, default its newest"
    add_branch(train, text)
    train.add_argument("--steps", type=int, help="stop after so many steps in all")
    train.add_argument("--simulate", action="store_true", help="run the mesh on fake CPU devices")
    text = "HOST:PORT where process 0 of several listens; default as the launcher says"
    train.add_argument("--coordinator", help=text)
    train.add_argument("--processes", type=int, help="how many processes there are")
    train.add_argument("--process", type=int, help="which of them this one is, from 0")


def train_command(options: argparse.Namespace) -> int:
    spec = mesh_of(options)
    place = place_of(options.coordinator, options.processes, options.process)
    processes = process_count(place, os.environ)
    if options.numbered:
        _refuse_numbered(options, processes)
    if spec.simulated:
        set_simulation_flags(options, spec, processes)
    number = process_number(place, os.environ)
    run_dir = run_dir_of(options)
    phases = Phases()
    with ExitStack() as stack:
        if options.numbered:
            run_dir = stack.enter_context(numbered_directory(run_dir))
            say(f"run directory {run_dir}")
        # Child processes do not inherit these.
        path, faults = os.environ.pop(SAMPLE_FILE, None), os.environ.pop(FAULTS, None)
        if supervisor := os.environ.pop(SUPERVISOR, None):
            if number == 0:  # which locks the run directory
                os.environ[STARTED_BY] = supervisor
            end_with_parent(int(supervisor))
        if path:
            faulthandler.register(signal.SIGUSR1)
            sampler = Sampler(Path(path), phases)
            if not options.own_process:  # else it runs until the process ends
                stack.callback(sampler.close)
        ledger = KeepLedger(run_dir, phases, writes=not path and number == 0)
        stack.callback(ledger.keep)
        stop = stack.enter_context(Stop().listening(to_the_end=options.own_process))
        callbacks: list[Callback] = []
        if faults:
            injector = Injector(faults, number, run_dir)
            phases.listen(injector)
            callbacks.append(injector)
        leave_at_once = LeaveAtOnce(phases, ledger)
        return _train(options, spec, place, run_dir, phases, stop, callbacks, leave_at_once)


def _refuse_numbered(options: argparse.Namespace, processes: int) -> None:
    """Raises ValueError where several starts or processes would each take another directory."""
    fresh = options.fresh or options.fresh_once is not None
    refused = {
        "begins in a new directory, and --fresh in one that is there; give one": fresh,
        f"would give each of {processes} processes another directory; use --name": processes > 1,
        "numbers directories of this machine, and not addresses; leave it out": is_address(
            options.run_dir
        ),
    }
    raise_violations(f"--numbered {why}" for why, is_so in refused.items() if is_so)


def _train(
    options: argparse.Namespace,
    spec: Any,
    place: ProcessPlace | None,
    run_dir: Path,
    phases: Phases,
    stop: Stop,
    callbacks: list[Callback],
    leave_at_once: LeaveAtOnce,
) -> int:
    with phases.within("join"):
        several = join(place)
    from jaxtrain.run.loop import train

    leave = [leave_at_once] if several and options.own_process else []
    result = None
    try:
        result = train(
            options.experiment,
            spec,
            run_dir=options.run_dir if is_address(options.run_dir) else run_dir,
            steps=options.steps,
            settings=options.settings,
            callbacks=[stop, *callbacks, *leave],
            phases=phases,
            fresh=options.fresh if options.fresh_once is None else options.fresh_once,
            from_run=options.from_run,
        )
    except KeyboardInterrupt:
        options.interrupted = True
    except BaseException as error:
        for callback in leave:
            callback.leave(error)
        # Its exit code would mean a state of the run: done, refused, or saved.
        left = isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError)
        unread = isinstance(error, BrokenPipeError) and phases.now.first < 0
        if left or (isinstance(error, Exception) and not unread and not _refused(error, phases)):
            raise RunFailed from error
        raise
    stop.over = True  # the remaining work takes no time
    anew = "fresh" if options.fresh else "numbered" if options.numbered else ""
    code, text = _outcome(result, run_dir, anew=anew, text=options.fresh_once)
    if code == DONE:
        phases.enter("exit")  # a process that ends with 0 before has left early
    if process_number(place, os.environ) == 0:
        say(text)
    return code


def _outcome(
    result: Result | None, run_dir: Path, *, anew: str, text: str | None = None
) -> tuple[int, str]:
    """Returns the exit code, and a text. result: None if the run was interrupted. anew: the flag by
    which it began anew, "" for none: the same command does not go on then, and the exit code does
    not say so. text: that of --fresh-once, by which the same command goes on."""
    from jaxtrain.files.pointer import shown

    if result is not None and not result.stopped:
        place = shown(run_dir)
        return DONE, f"done: {result.steps} steps, loss {result.loss:.4f}, run directory {place}"
    if result is not None and result.saved is None:
        left = "nothing is saved: there are no checkpoints"
        return INTERRUPTED, f"stopped at step {result.steps}; {left}"
    from jaxtrain.run.directory import left_in

    saved, left = None if result is None else result.saved, ""
    try:
        saved, left = left_in(run_dir, anew=anew, text=text)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        left = f"what is saved in {run_dir} cannot be seen: {reason}"
    goes_on = saved is not None and (text is not None or not anew)
    return PREEMPTED if goes_on else INTERRUPTED, f"stopped; {left}"


class KeepLedger:
    """Adds the seconds of this start, by phase, to the run's ledger, if this process `writes` it.
    Under a supervisor, the supervisor does."""

    def __init__(self, run_dir: Path, phases: Phases, *, writes: bool) -> None:
        self._phases, self._entry = phases, OpenEntry(run_dir) if writes else None
        if self._entry is not None:
            phases.listen(self._entry.keep)

    def keep(self) -> None:
        """Closes the entry when the start ends. A refused run has no entry."""
        now = self._phases.now
        if self._entry is not None and now.first >= 0:
            self._entry.close(now)
            for line in unwritten():
                print(f"jaxtrain: {line}", file=sys.stderr)


class LeaveAtOnce(Callback):
    """Ends a failed process, one of several, without waiting for the others: they may wait for it,
    and it for them."""

    def __init__(self, phases: Phases, ledger: KeepLedger) -> None:
        self._phases, self._ledger = phases, ledger

    def end(self, run: Run) -> None:
        if (error := sys.exception()) is not None:
            self.leave(error)

    def leave(self, error: BaseException) -> NoReturn:
        """Ends the process with the error's exit code and message. An error after the first step is
        not a refusal: JAX raises ValueError for a lost peer."""
        code = FAILED
        if isinstance(error, KeyboardInterrupt):
            code = INTERRUPTED
        elif _refused(error, self._phases):
            code = REFUSED
            print_refusal(error)
        else:
            print_failure(error)
        self._ledger.keep()
        settle_streams()
        os._exit(code)


def _refused(error: BaseException, phases: Phases) -> bool:
    """True for a refusal of input, which comes before the first step."""
    return phases.now.first < 0 and refuses(error)


class Stop(Callback):
    """Handles signals. The first stops the run after its present step; a later one stops it at
    once, by a KeyboardInterrupt. Either way the run saves first."""

    def __init__(self) -> None:
        self.requested = self.over = False
        self._latest = 0.0
        self._run: Run | None = None
        self._interrupt: type[KeyboardInterrupt] = KeyboardInterrupt

    def begin(self, run: Run) -> None:
        self._run = run
        if self.requested:
            run.stop()

    @contextmanager
    def listening(self, *, to_the_end: bool = False) -> Iterator[Stop]:
        """Handles Ctrl-C, a scheduler's SIGTERM and a terminal that closes, within the block.
        to_the_end: ignore later signals until the process ends, so that they do not change its exit
        code; a signal to stop at once that is dropped is sent again."""
        if to_the_end:
            self._interrupt = Interrupted
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            signals.append(signal.SIGHUP)
        previous = {number: signal.signal(number, self.take) for number in signals}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, signal.SIG_IGN if to_the_end else handler)

    def take(self, number: int, frame: Any) -> None:
        since, self._latest = time.monotonic() - self._latest, time.monotonic()
        if self.over or (self.requested and since < TOGETHER_S):
            return
        if self.requested:
            raise self._interrupt
        self.requested = True
        if self._run is not None:
            self._run.stop()
        # Not by print: the signal may interrupt one. The terminal may be gone, too.
        with suppress(OSError):
            os.write(2, b"\nstopping after this step; once more to save without it\n")
