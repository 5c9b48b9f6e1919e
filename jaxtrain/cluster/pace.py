"""Which of several processes the others wait for.

All take their steps together, so a slow one does not show in the time of a step. It shows in what
a process does of its own, between waiting for rows and waiting for devices: the slow one does much,
and the others wait for it. A chip that is slow by itself does not show here.
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
"""How often a process tells its pace, and of how many steps at least."""

SLOWER, SHARE = 3.0, 0.25
"""A process is slow that does so many times as much of its own as others do, and so large a share
of a step's time."""


APART_S = 0.05
"""Seconds between two times that the numbers of each process are given, for every process: those of
a thousand are a line of 30 KB every 50 s."""


class Seconds(NamedTuple):
    """Of a step of one process, in the mean. own: what it did of its own; data: it waited for rows.
    What is left of step it waited for devices, its own and, in sums, those of others. typical: of
    its own in the median, which one long pause does not move."""

    own: float
    step: float
    data: float = 0.0
    typical: float = 0.0


class Slow(NamedTuple):
    """process: the one. own_s, others_s: what it, and the median of the others, do of their own in
    a typical step; step_s: what a step takes, in the mean."""

    process: int
    own_s: float
    others_s: float
    step_s: float

    def __str__(self) -> str:
        return (
            f"process {self.process} is slow: it does {self.own_s:.3f} s of its own in a step of "
            f"{self.step_s:.3f} s, the others {self.others_s:.3f} s, and wait for it"
        )


def of_a_step(told: list[Seconds]) -> Seconds:
    """Of one step of those of a process."""
    own, step, data, _ = zip(*told, strict=True)
    mean, middle = statistics.fmean, statistics.median(own)
    return Seconds(mean(own), mean(step), mean(data), middle)


def slowest(paces: dict[int, Seconds]) -> Slow | None:
    """The process that the others wait for, if one is. paces: process -> seconds of a step."""
    if len(paces) < 2:
        return None
    process = max(paces, key=lambda p: paces[p].typical)
    own, step_s = paces[process].typical, paces[process].step
    others = statistics.median(each.typical for p, each in paces.items() if p != process)
    slow = own > SLOWER * others and own - others > SHARE * step_s
    return Slow(process, own, others, step_s) if slow else None


class Pace:
    """Of this process; on the first one of all. key: of this start of this run alone."""

    def __init__(self, key: str) -> None:
        self._key, self._lock = f"jaxtrain/pace/{key}", threading.Lock()
        self._told: list[Seconds] = []
        self._data_s = 0.0
        self.paces: dict[int, Seconds] = {}
        self._given: tuple[float, dict[int, Seconds]] = (-math.inf, {})
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if jax.process_count() > 1:
            self._thread = threading.Thread(target=self._exchange, name="pace", daemon=True)
            self._thread.start()

    def add(self, own_s: float, step_s: float, data_s: float) -> None:
        """Of one step: what this process did of its own, and how long it took in all. data_s: how
        long this start has waited for rows, of all steps."""
        if self._thread is not None:
            with self._lock:
                self._told.append(Seconds(own_s, step_s, data_s - self._data_s))
                self._data_s = data_s

    def slow(self) -> Slow | None:
        """The process that the others wait for now, if one is; known to the first process."""
        return slowest(self.paces)

    def metrics(self) -> dict[str, float]:
        """The process that does the most of its own, and how many seconds of a step that and the
        least of the others' are; {} where one runs alone, or nobody has told yet."""
        if len(paces := self.paces) < 2:
            return {}
        most = max(paces, key=lambda p: paces[p].own)
        least = min(each.own for each in paces.values())
        return {"slowest_process": most, "slowest_own_s": paces[most].own, "least_own_s": least}

    def of_each(self) -> dict[str, list[float]]:
        """Seconds of a step of every process, in their order: process_step_s, process_own_s,
        process_data_s (it waited for rows) and process_wait_s (it waited for devices); {} until all
        have told, where nothing has changed, and too soon after the last time."""
        (at, before), paces, now = self._given, self.paces, time.monotonic()
        if len(paces) < 2 or len(paces) < jax.process_count() or paces == before:
            return {}
        if now - at < APART_S * len(paces):
            return {}
        self._given = now, paces
        each = [paces[process] for process in sorted(paces)]
        columns = {
            "step": [s.step for s in each],
            "own": [s.own for s in each],
            "data": [s.data for s in each],
            "wait": [max(0.0, s.step - s.own - s.data) for s in each],
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
            with suppress(Exception):  # the service is gone: others see that
                with self._lock:
                    told, ripe = self._told, len(self._told) >= STEPS
                    if ripe:
                        self._told = []
                if ripe:
                    where = f"{self._key}/{jax.process_index()}"
                    client.key_value_set(where, json.dumps(of_a_step(told)), allow_overwrite=True)
                if first:
                    found = dict(client.key_value_dir_get(self._key))
                    self.paces = {
                        int(name.rpartition("/")[2]): Seconds(*json.loads(text))
                        for name, text in found.items()
                    }
