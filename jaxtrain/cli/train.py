"""`jaxtrain train`: trains, and stops when a signal asks for it."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jaxtrain.cli.shared import INTERRUPTED, MESH, PREEMPTED, mesh_of, say, set_simulation_flags
from jaxtrain.run.callback import Callback, Run

TOGETHER_S = 0.25
"""Signals that come so close are one: a terminal, its shell and a launcher may each send theirs."""


def add_options(train: argparse.ArgumentParser) -> None:
    train.add_argument("experiment", help="a Python file with a function experiment()")
    train.add_argument("--mesh", default="cpu_1", help=f"{MESH}; default cpu_1")
    train.add_argument("--run-dir", help="where the run is kept; default runs/EXPERIMENT")
    train.add_argument("--steps", type=int, help="stop after so many steps in all")
    train.add_argument("--simulate", action="store_true", help="run the mesh on fake CPU devices")


def train_command(options: argparse.Namespace) -> int:
    spec = mesh_of(options)
    if spec.simulated:
        set_simulation_flags(options, spec)
    from jaxtrain.run.directory import left_in
    from jaxtrain.run.loop import train

    run_dir = Path(options.run_dir or Path("runs") / Path(options.experiment).stem)
    with Stop().listening(to_the_end=options.own_process) as stop:
        try:
            result = train(
                options.experiment,
                spec,
                run_dir=run_dir,
                steps=options.steps,
                settings=options.settings,
                callbacks=[stop],
            )
        except KeyboardInterrupt:
            options.interrupted, result = True, None
        stop.over = True  # what is left to do takes no time
        if result is not None and not result.stopped:
            say(f"done: {result.steps} steps, loss {result.loss:.4f}, run directory {run_dir}")
            return 0
        if result is not None and result.saved is None:
            say(f"stopped at step {result.steps}; nothing is saved: there are no checkpoints")
            return INTERRUPTED
        saved, left = left_in(run_dir)
        say(f"stopped; {left}")
        return INTERRUPTED if saved is None else PREEMPTED


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
