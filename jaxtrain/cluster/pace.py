"""Finds the process that the others wait for.

All processes take their steps together, so a slow one does not show in step times. It shows in a
process's own work, the time in which it waits neither for rows nor for devices: the slow one has
much of it, and the others wait. A chip that is slow by itself does not show here.
"""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from contextlib import suppress
from typing import NamedTuple

import jax

from jaxtrain.cluster.agreement import coordination

EVERY_S = 0.5
STEPS = 5
"""Seconds between reports of a process, and least steps in a report."""

SLOWER, SHARE = 3.0, 0.25
"""A process is slow if its own work is over `SLOWER` times that of the others, and exceeds it by
more than `SHARE` of a step."""

APART_S = 0.05
"""Seconds between two lists of all processes, for each process: a thousand give a line of 30 KB
every 50 s."""


class Seconds(NamedTuple):
    """Mean seconds of a step of one process. own: its own work; data: waiting for rows; the
    remaining time of `step` is waiting for devices. typical: median of its own work, which one long
    pause does not move."""

    own: float
    step: float
    data: float = 0.0
    typical: float = 0.0


class Slow(NamedTuple):
    """A slow process. own_s, others_s: own work in a typical step, of this process and in the
    median of the others; step_s: mean seconds of a step."""

    process: int
    own_s: float
    others_s: float
    step_s: float

    def __str__(self) -> str:
        return (
            f"process {self.process} is slow: it does {self.own_s:.3f} s of its own in a step of "
            f"{self.step_s:.3f} s, the others {self.others_s:.3f} s, and wait for it"
        )


def mean_step(steps: list[Seconds]) -> Seconds:
    """Means over the steps of one process."""
    own, step, data, _ = zip(*steps, strict=True)
    mean, middle = statistics.fmean, statistics.median(own)
    return Seconds(mean(own), mean(step), mean(data), middle)


def slowest(paces: dict[int, Seconds]) -> Slow | None:
    """The process that the others wait for, or None. paces: process -> seconds of a step."""
    if len(paces) < 2:
        return None
    process = max(paces, key=lambda p: paces[p].typical)
    own, step_s = paces[process].typical, paces[process].step
    others_s = statistics.median(pace.typical for p, pace in paces.items() if p != process)
    slow = own > SLOWER * others_s and own - others_s > SHARE * step_s
    return Slow(process, own, others_s, step_s) if slow else None


class Pace:
    """Step times of this process; on the first process, of all. key: unique to this start."""

    def __init__(self, key: str) -> None:
        self._key, self._lock = f"jaxtrain/pace/{key}", threading.Lock()
        self._steps: list[Seconds] = []
        self._data_s = 0.0
        self.paces: dict[int, Seconds] = {}
        self._listed: tuple[float, dict[int, Seconds]] = (-math.inf, {})
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if jax.process_count() > 1:
            self._thread = threading.Thread(target=self._exchange, name="pace", daemon=True)
            self._thread.start()

    def add(self, own_s: float, step_s: float, data_s: float) -> None:
        """Adds one step: own work, and all of its time. data_s: seconds that this start has waited
        for rows, over all steps."""
        if self._thread is not None:
            with self._lock:
                self._steps.append(Seconds(own_s, step_s, data_s - self._data_s))
                self._data_s = data_s

    def slow(self) -> Slow | None:
        """The process that the others wait for now, or None; known to the first process."""
        return slowest(self.paces)

    def metrics(self) -> dict[str, float]:
        """The process with the most own work, its seconds of a step, and the least of all; {} for a
        single process, or before any report."""
        if len(paces := self.paces) < 2:
            return {}
        most = max(paces, key=lambda p: paces[p].own)
        least = min(pace.own for pace in paces.values())
        return {"slowest_process": most, "slowest_own_s": paces[most].own, "least_own_s": least}

    def of_each(self) -> dict[str, list[float]]:
        """Seconds of a step of every process, in their order: process_step_s, process_own_s,
        process_data_s (waiting for rows) and process_wait_s (waiting for devices); {} until all
        have reported, if nothing changed, and too soon after the last list."""
        (listed_at, previous), paces, now = self._listed, self.paces, time.monotonic()
        if len(paces) < 2 or len(paces) < jax.process_count() or paces == previous:
            return {}
        if now - listed_at < APART_S * len(paces):
            return {}
        self._listed = now, paces
        ordered = [paces[process] for process in sorted(paces)]
        columns = {
            "step": [s.step for s in ordered],
            "own": [s.own for s in ordered],
            "data": [s.data for s in ordered],
            "wait": [max(0.0, s.step - s.own - s.data) for s in ordered],
        }
        return {
            f"process_{name}_s": [float(f"{seconds:.4g}") for seconds in column]
            for name, column in columns.items()
        }

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _exchange(self) -> None:
        client, first = coordination(), jax.process_index() == 0
        while not self._closed.wait(EVERY_S):
            with suppress(Exception):  # the service is gone, which is handled elsewhere
                with self._lock:
                    steps, ripe = self._steps, len(self._steps) >= STEPS
                    if ripe:
                        self._steps = []
                if ripe:
                    key = f"{self._key}/{jax.process_index()}"
                    client.key_value_set(key, json.dumps(mean_step(steps)), allow_overwrite=True)
                if first:
                    entries = dict(client.key_value_dir_get(self._key))
                    self.paces = {
                        int(name.rpartition("/")[2]): Seconds(*json.loads(text))
                        for name, text in entries.items()
                    }
