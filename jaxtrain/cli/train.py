"""`jaxtrain train`: trains, and stops when a signal asks for it."""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jaxtrain.cli.shared import (
    MESH,
    RunFailed,
    mesh_of,
    run_dir_of,
    say,
    set_simulation_flags,
    settle_streams,
)
from jaxtrain.cluster.exit_codes import DONE, FAILED, INTERRUPTED, PREEMPTED, REFUSED
from jaxtrain.cluster.join import Place, join, place_of, process_count, process_number
from jaxtrain.cluster.phases import Phases
from jaxtrain.cluster.sampler import SAMPLE_FILE, SUPERVISOR, Sampler, end_with_parent
from jaxtrain.fault_tolerance.faults import FAULTS, Injector
from jaxtrain.fault_tolerance.ledger import OpenEntry
from jaxtrain.run.callback import Callback, Run

if TYPE_CHECKING:  # it imports JAX
    from jaxtrain.run.result import Result

TOGETHER_S = 0.25
"""Signals that come so close are one: a terminal, its shell and a launcher may each send theirs."""


def add_options(train: argparse.ArgumentParser) -> None:
    train.add_argument("experiment", help="a Python file with a function experiment()")
    train.add_argument("--mesh", default="cpu_1", help=f"{MESH}; default cpu_1")
    train.add_argument("--run-dir", help="where the run is kept; default runs/EXPERIMENT")
    train.add_argument("--steps", type=int, help="stop after so many steps in all")
    train.add_argument("--simulate", action="store_true", help="run the mesh on fake CPU devices")
    text = "HOST:PORT where process 0 of several listens; default as the launcher says"
    train.add_argument("--coordinator", help=text)
    train.add_argument("--processes", type=int, help="how many processes there are")
    train.add_argument("--process", type=int, help="which of them this one is, from 0")


def train_command(options: argparse.Namespace) -> int:
    spec = mesh_of(options)
    place = place_of(options.coordinator, options.processes, options.process)
    if spec.simulated:
        set_simulation_flags(options, spec, process_count(place, os.environ))
    number = process_number(place, os.environ)
    run_dir = run_dir_of(options)
    phases = Phases()
    with ExitStack() as stack:
        # What this process starts has none of these.
        path, given = os.environ.pop(SAMPLE_FILE, None), os.environ.pop(FAULTS, None)
        if supervisor := os.environ.pop(SUPERVISOR, None):
            end_with_parent(int(supervisor))
        if path:
            faulthandler.register(signal.SIGUSR1)
            sampler = Sampler(Path(path), phases)
            if not options.own_process:  # else until the process ends, which waits for the others
                stack.callback(sampler.close)
        ledger = KeepLedger(run_dir, phases, mine=not path and number == 0)
        stack.callback(ledger.keep)
        stop = stack.enter_context(Stop().listening(to_the_end=options.own_process))
        others: list[Callback] = []
        if given:
            injector = Injector(given, number, run_dir)
            phases.listen(injector)
            others.append(injector)
        at_once = LeaveAtOnce(phases, ledger)
        return _train(options, spec, place, run_dir, phases, stop, others, at_once)


def _train(
    options: argparse.Namespace,
    spec: Any,
    place: Place | None,
    run_dir: Path,
    phases: Phases,
    stop: Stop,
    others: list[Callback],
    at_once: LeaveAtOnce,
) -> int:
    with phases.within("join"):
        several = join(place)
    from jaxtrain.run.loop import train

    leave = [at_once] if several and options.own_process else []
    result = None
    try:
        result = train(
            options.experiment,
            spec,
            run_dir=run_dir,
            steps=options.steps,
            settings=options.settings,
            callbacks=[stop, *others, *leave],
            phases=phases,
        )
    except KeyboardInterrupt:
        options.interrupted = True
    except BaseException as error:
        for each in leave:
            each.leave(error)
        # Its exit code would say what the run is: done, refused, or saved.
        left = isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError)
        if left or (isinstance(error, Exception) and phases.now.first >= 0):
            raise RunFailed from error
        raise
    stop.over = True  # what is left to do takes no time
    code, text = _outcome(result, run_dir)
    if process_number(place, os.environ) == 0:
        say(text)
    return code


def _outcome(result: Result | None, run_dir: Path) -> tuple[int, str]:
    """The exit code, and what to say. result: None where it was interrupted."""
    if result is not None and not result.stopped:
        return DONE, f"done: {result.steps} steps, loss {result.loss:.4f}, run directory {run_dir}"
    if result is not None and result.saved is None:
        text = f"stopped at step {result.steps}; nothing is saved: there are no checkpoints"
        return INTERRUPTED, text
    from jaxtrain.run.directory import left_in

    saved, left = left_in(run_dir)
    return INTERRUPTED if saved is None else PREEMPTED, f"stopped; {left}"


class KeepLedger:
    """Where the time of this start went, where it is `mine` to tell: a supervisor would tell it."""

    def __init__(self, run_dir: Path, phases: Phases, *, mine: bool) -> None:
        self._phases, self._entry = phases, OpenEntry(run_dir) if mine else None
        if self._entry is not None:
            phases.listen(self._entry.keep)

    def keep(self) -> None:
        """As the start ends. Of a run that was refused there is nothing to keep."""
        now = self._phases.now
        if self._entry is not None and now.first >= 0:
            self._entry.close(now)


class LeaveAtOnce(Callback):
    """One of several processes that cannot go on ends without a word to the others: whatever it
    waited for on its way out may wait for them, and they for it."""

    def __init__(self, phases: Phases, ledger: KeepLedger) -> None:
        self._phases, self._ledger = phases, ledger

    def end(self, run: Run) -> None:
        if (error := sys.exception()) is not None:
            self.leave(error)

    def leave(self, error: BaseException) -> NoReturn:
        """End the process with what it failed of, as the command would tell it. What is raised once
        steps are taken is no refusal: JAX has a ValueError for a peer that is lost."""
        code = FAILED
        if isinstance(error, KeyboardInterrupt):
            code = INTERRUPTED
        elif type(error) is ValueError and self._phases.now.first < 0:
            code = REFUSED
            print(f"jaxtrain: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        self._ledger.keep()
        settle_streams()
        os._exit(code)


class Stop(Callback):
    """What signals ask of a run: the first to stop after the step it is at, one that comes later to
    stop at once, by a KeyboardInterrupt. Either way the run saves first."""

    def __init__(self) -> None:
        self.asked = self.over = False
        self._latest = 0.0
        self._run: Run | None = None

    def begin(self, run: Run) -> None:
        self._run = run
        if self.asked:
            run.stop()

    @contextmanager
    def listening(self, *, to_the_end: bool = False) -> Iterator[Stop]:
        """Ctrl-C, a scheduler's SIGTERM and a terminal that closes come here. to_the_end: of the
        process, whose exit code a late one must not change: they are ignored then."""
        signals = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            signals.append(signal.SIGHUP)
        before = {number: signal.signal(number, self.take) for number in signals}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if to_the_end else handler)

    def take(self, number: int, frame: Any) -> None:
        since, self._latest = time.monotonic() - self._latest, time.monotonic()
        if self.over or (self.asked and since < TOGETHER_S):
            return
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self._run is not None:
            self._run.stop()
        # Not by print: the signal may strike within one. The terminal may be gone, too.
        with suppress(OSError):
            os.write(2, b"\nstopping after this step; once more to stop at once\n")
