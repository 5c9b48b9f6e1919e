"""Lines that a long operation says while it runs: that a corpus is tokenised, how far it is, that a
program compiles. The caller chooses where they go; without one they go nowhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Tell = Callable[[str], None]
EVERY_S = 10.0
"""Seconds between two lines about one operation."""

_tell: ContextVar[Tell | None] = ContextVar("tell", default=None)


@contextmanager
def told_to(tell: Tell) -> Iterator[None]:
    """Calls `tell` with each notice of the block."""
    token = _tell.set(tell)
    try:
        yield
    finally:
        _tell.reset(token)


def notice(text: str) -> None:
    """Says `text`."""
    if (tell := _tell.get()) is not None:
        tell(text)


def size(count: float) -> str:
    """Bytes in a unit that suits them: `950 B`, `8.1 kB`, `1.2 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" or count >= 9.95 else f"{count:.1f} {unit}"


class Share:
    """Says how much of an operation is done, at most every EVERY_S. Called with (done, total)."""

    def __init__(self, operation: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._operation, self._clock, self._said = operation, clock, clock()

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if now - self._said >= EVERY_S and done < total:
            self._said = now
            notice(f"{self._operation}: {done / total:.0%}")
