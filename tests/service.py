"""JAX's coordination service for threads that play processes of one run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxtrain.cluster import agreement, pace, requests

PlainThread = threading.Thread


class Service:
    """Keys and barriers, with the errors of JAX's client."""

    def __init__(self, processes: int) -> None:
        self.processes, self.keys = processes, dict[str, str]()
        self._met: dict[str, int] = {}
        self._failed: set[str] = set()
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self._changed:
            if key in self.keys and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.keys[key] = value

    def key_value_try_get(self, key: str) -> str:
        with self._changed:
            if key not in self.keys:
                raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
            return self.keys[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self._changed:
            return [(k, v) for k, v in self.keys.items() if k.startswith(f"{key}/")]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            for found in [k for k in self.keys if k == key or k.startswith(f"{key}/")]:
                del self.keys[found]

    def wait_at_barrier(self, key: str, timeout_in_ms: int) -> None:
        with self._changed:
            self._met[key] = self._met.get(key, 0) + 1
            self._changed.notify_all()
            done = lambda: self._met[key] == self.processes  # noqa: E731
            if key in self._failed or not self._changed.wait_for(done, timeout_in_ms / 1000):
                self._failed.add(key)  # for those that come later too, as the service has it
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier timed out")


def play(
    monkeypatch: pytest.MonkeyPatch, processes: int, act: Callable[[int], Any], *, absent: int = 0
) -> list[Any]:
    """What `act(process)` gives or raises on each process; the last `absent` of them do nothing.
    Threads that `act` starts must be named `requests`, of which each process has one."""
    service, here = Service(processes), threading.local()
    monkeypatch.setattr(Service, "latest", service, raising=False)
    found: list[Any] = [None] * processes
    starts = {index: iter(range(10**6)) for index in range(processes)}

    class Rounds:
        def __next__(self) -> int:
            return next(starts[here.index])

    class Inheriting(PlainThread):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self._index = here.index

        def run(self) -> None:
            here.index = self._index
            super().run()

    monkeypatch.setattr(agreement, "coordination", lambda: service)
    for module in (requests, pace):
        monkeypatch.setattr(module, "coordination", lambda: service)
    monkeypatch.setattr(agreement, "_rounds", Rounds())
    monkeypatch.setattr(requests, "_starts", iter([0] * processes))
    monkeypatch.setattr(requests.threading, "Thread", Inheriting)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(jax, "process_index", lambda: here.index)

    def one(index: int) -> None:
        here.index = index
        try:
            found[index] = act(index)
        except Exception as error:
            found[index] = error

    threads = [PlainThread(target=one, args=(index,)) for index in range(processes - absent)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return found
