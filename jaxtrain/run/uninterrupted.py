"""Calls that a KeyboardInterrupt does not cut short."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Uninterrupted:
    """Runs calls one after the other in a thread of its own.

    A KeyboardInterrupt is raised in the main thread. It ends the wait for a call, never the call:
    an import or a save is not left half done.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="uninterrupted")

    def __call__(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Returns what `act(*arguments)` returns. An interrupted call still runs to its end."""
        return self._pool.submit(act, *arguments).result()

    def to_the_end(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Runs the call after all earlier ones, and waits for it through any number of
        interrupts."""
        done: Future[Any] | None = None
        while True:
            try:
                done = done or self._pool.submit(act, *arguments)
                return done.result()
            except KeyboardInterrupt:
                continue

    def close(self) -> None:
        self._pool.shutdown()
