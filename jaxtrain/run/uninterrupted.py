"""Calls that a KeyboardInterrupt does not cut short."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Uninterrupted:
    """Runs calls one after the other in a thread of its own.

    A KeyboardInterrupt strikes in the main thread, and so ends the wait for a call and never the
    call: an import is not left half done, nor a save.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="uninterrupted")

    def __call__(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """What `act(*arguments)` returns or raises. Interrupted, it goes on behind the caller."""
        return self._pool.submit(act, *arguments).result()

    def to_the_end(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """As a call, after all that an interrupt left on its way; waits however often it is
        interrupted meanwhile."""
        done: Future[Any] | None = None
        while True:
            try:
                done = done or self._pool.submit(act, *arguments)
                return done.result()
            except KeyboardInterrupt:
                continue

    def close(self) -> None:
        self._pool.shutdown()
