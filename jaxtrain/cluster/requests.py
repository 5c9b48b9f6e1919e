"""Requests of any process to all: all carry one out after the same step.

The protocol is that of JAX's preemption sync point, for more than SIGTERM. A request is a key in
the coordination service. A thread of each process that sees it reports the step of its process
while it holds that process there, and all act one step after the furthest. The thread answers even
if its process waits for devices, so no process has to reach a step for the others to agree.
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
"""Seconds between looks for requests of other processes."""

AGREE_S = 10.0
"""Most seconds that a process is held while the others report their steps."""

_starts = itertools.count()


class Requests:
    """Requests in a run with one process: carried out after the current step. key: of this start of
    this run, the same on all processes."""

    key = ""

    def __init__(self) -> None:
        self._asked: set[str] = set()

    def ask(self, request: str) -> None:
        """Adds a request, from any thread or a signal handler: it takes no lock."""
        self._asked.add(request)

    def due(self, step: int) -> frozenset[str]:
        """Requests that all processes carry out now, after `step`. All call it after every step."""
        requests = set()
        for request in tuple(self._asked):  # one by one: a signal may ask between two statements
            self._asked.discard(request)
            requests.add(request)
        return frozenset(requests)

    def close(self) -> None:
        """Called after the last step; nothing is agreed on any more."""


class AgreedRequests(Requests):
    """Requests in a run with several processes. start: steps done before the first `due`. All
    processes create it in the same order."""

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
            due_steps = [due_step for due_step in self._agreed if due_step <= step]
            return frozenset().union(*(self._agreed.pop(due_step) for due_step in due_steps))

    def close(self) -> None:
        self._closed.set()
        self._thread.join(AGREE_S)

    def _watch(self) -> None:
        client = coordination()
        while not self._closed.wait(EVERY_S):
            try:
                self._look(client)
            except Exception:  # some are gone or not there yet: retry, hold nobody
                self._closed.wait(AGREE_S / 4)

    def _look(self, client: Any) -> None:
        """Publishes own requests, and agrees on those of any process."""
        round_key = f"{self._key}/{self._round}"
        self._asked -= self._asked & self._pending()
        if own := set(self._asked):
            with suppress(Exception):  # another was first; its request comes first
                client.key_value_set(f"{round_key}/asked", json.dumps(sorted(own)))
        try:
            requested = frozenset(json.loads(client.key_value_try_get(f"{round_key}/asked")))
        except Exception:  # there is no request
            return
        with self._lock:
            self._round += 1
            self._asked |= requested  # until it is agreed on
            steps = gather_under(f"{round_key}/steps", str(self._step), within_s=AGREE_S)
            act_step = max(map(int, steps)) + 1
            self._agreed[act_step] = self._agreed.get(act_step, frozenset()) | requested
            self._asked -= requested

    def _pending(self) -> set[str]:
        """Requests agreed on but not yet carried out; they are not published again."""
        with self._lock:
            return set().union(*self._agreed.values())


def requests_of(start: int) -> Requests:
    """The `Requests` of a run that begins after `start` steps."""
    return Requests() if jax.process_count() == 1 else AgreedRequests(start)
