"""Requests that any process may make of all: each is done by all after the same step.

The protocol is that of JAX's preemption sync point, for more than SIGTERM: a request is a key in
the coordination service; a thread of each process that sees it tells which step its process is at
while it holds that process there, and all act one step after the furthest. The thread answers for a
process that waits for its devices, so nobody has to reach a step for the others to agree.
"""

from __future__ import annotations

import itertools
import json
import threading
from contextlib import suppress
from typing import Any

import jax

from jaxtrain.cluster.agreement import coordination, gather_under

EVERY_S = 0.1
"""How often a process looks for a request of another."""

AGREE_S = 10.0
"""How long a process is held while the others tell their steps."""

_starts = itertools.count()


class Requests:
    """Of a run on one process: what is asked is done after the step it is at. key: of this start
    of this run, the same on all processes."""

    key = ""

    def __init__(self) -> None:
        self._asked: set[str] = set()

    def ask(self, what: str) -> None:
        """From any thread, and from a signal handler: it takes no lock."""
        self._asked.add(what)

    def due(self, step: int) -> frozenset[str]:
        """What all processes do now, after `step`. Called after every step, by all."""
        found = set()
        for what in tuple(self._asked):  # one by one: a signal may ask between two statements
            self._asked.discard(what)
            found.add(what)
        return frozenset(found)

    def close(self) -> None:
        """After the last step; nothing is agreed on any more."""


class AgreedRequests(Requests):
    """Of a run on several processes. start: steps that are done before the first `due`. Made by all
    processes in the same order."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.key = str(next(_starts))
        self._key, self._step, self._round = f"jaxtrain/requests/{self.key}", start, 0
        self._agreed: dict[int, frozenset[str]] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="requests", daemon=True)
        self._thread.start()

    def due(self, step: int) -> frozenset[str]:
        with self._lock:
            self._step = step
            past = [at for at in self._agreed if at <= step]
            return frozenset().union(*(self._agreed.pop(at) for at in past))

    def close(self) -> None:
        self._closed.set()
        self._thread.join(AGREE_S)

    def _watch(self) -> None:
        client = coordination()
        while not self._closed.wait(EVERY_S):
            try:
                self._look(client)
            except Exception:  # some are gone, or not there yet: asked again, and nobody held
                self._closed.wait(AGREE_S / 4)

    def _look(self, client: Any) -> None:
        """Make known what is asked here, and agree on what is asked anywhere."""
        here = f"{self._key}/{self._round}"
        self._asked -= self._asked & self._pending()
        if wanted := set(self._asked):
            with suppress(Exception):  # another was first; its request is met before this one
                client.key_value_set(f"{here}/asked", json.dumps(sorted(wanted)))
        try:
            asked = frozenset(json.loads(client.key_value_try_get(f"{here}/asked")))
        except Exception:  # nobody asked
            return
        with self._lock:
            self._round += 1
            self._asked |= asked  # until it is agreed on
            steps = gather_under(f"{here}/steps", str(self._step), within_s=AGREE_S)
            at = max(map(int, steps)) + 1
            self._agreed[at] = self._agreed.get(at, frozenset()) | asked
            self._asked -= asked

    def _pending(self) -> set[str]:
        """Agreed on, and not done yet: not asked for again."""
        with self._lock:
            return set().union(*self._agreed.values())


def requests_of(start: int) -> Requests:
    """Those of a run that begins after `start` steps."""
    return Requests() if jax.process_count() == 1 else AgreedRequests(start)
