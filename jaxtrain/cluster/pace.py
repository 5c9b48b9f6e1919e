"""Which of several processes the others wait for.

All take their steps together, so a slow one does not show in the time of a step. It shows in what
a process does of its own, between waiting for rows and waiting for devices: the slow one does much,
and the others wait for it. A chip that is slow by itself does not show here.
"""

from __future__ import annotations

import json
import statistics
import threading
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


class Slow(NamedTuple):
    """process: the one. own_s, others_s: what it, and the median of the others, do of their own in
    a step of step_s seconds."""

    process: int
    own_s: float
    others_s: float
    step_s: float

    def __str__(self) -> str:
        return (
            f"process {self.process} is slow: it does {self.own_s:.3f} s of its own in a step of "
            f"{self.step_s:.3f} s, the others {self.others_s:.3f} s, and wait for it"
        )


def slowest(paces: dict[int, tuple[float, float]]) -> Slow | None:
    """The process that the others wait for, if one is. paces: process -> (own seconds, seconds) of
    a step."""
    if len(paces) < 2:
        return None
    process = max(paces, key=lambda p: paces[p][0])
    own, step_s = paces[process]
    others = statistics.median(each for p, (each, _) in paces.items() if p != process)
    slow = own > SLOWER * others and own - others > SHARE * step_s
    return Slow(process, own, others, step_s) if slow else None


class Pace:
    """Of this process; on the first one of all. key: of this start of this run alone."""

    def __init__(self, key: str) -> None:
        self._key, self._lock = f"jaxtrain/pace/{key}", threading.Lock()
        self._told: list[tuple[float, float]] = []
        self.paces: dict[int, tuple[float, float]] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if jax.process_count() > 1:
            self._thread = threading.Thread(target=self._exchange, name="pace", daemon=True)
            self._thread.start()

    def add(self, own_s: float, step_s: float) -> None:
        """Of one step: what this process did of its own, and how long it took in all."""
        if self._thread is not None:
            with self._lock:
                self._told.append((own_s, step_s))

    def slow(self) -> Slow | None:
        """The process that the others wait for now, if one is; known to the first process."""
        return slowest(self.paces)

    def metrics(self) -> dict[str, float]:
        """The process that does the most of its own, and how many seconds of a step that and the
        least of the others' are; {} where one runs alone, or nobody has told yet."""
        if len(paces := self.paces) < 2:
            return {}
        most = max(paces, key=lambda p: paces[p][0])
        least = min(own for own, _ in paces.values())
        return {"slowest_process": most, "slowest_own_s": paces[most][0], "least_own_s": least}

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
                    means = [statistics.fmean(column) for column in zip(*told, strict=True)]
                    where = f"{self._key}/{jax.process_index()}"
                    client.key_value_set(where, json.dumps(means), allow_overwrite=True)
                if first:
                    found = dict(client.key_value_dir_get(self._key))
                    self.paces = {
                        int(name.rpartition("/")[2]): tuple(json.loads(text))
                        for name, text in found.items()
                    }
