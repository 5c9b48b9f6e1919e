"""Pauses of this process: it was stopped, or held with its virtual machine."""

from __future__ import annotations

import time

PAUSE_S = 2.0
"""A look that comes this many seconds late means that this process was paused."""


class Pauses:
    """Finds the pauses of a process that calls `look` at least every `interval_s` seconds, or
    `sleep`. Others may have been paused with it, so that their silence then tells nothing."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s, self._looked_at = interval_s, time.monotonic()
        self._pauses: list[tuple[float, float]] = []
        """(end, seconds) of each pause."""

    def look(self) -> float:
        """Returns the seconds of the pause since the last look, 0 if there was none."""
        now = time.monotonic()
        late, self._looked_at = now - self._looked_at - self._interval_s, now
        if late <= PAUSE_S:
            return 0.0
        self._pauses.append((now, late))
        return late

    def resume(self) -> None:
        """Begins a new interval: what this process itself waited for since the last is no pause."""
        self._looked_at = time.monotonic()

    def sleep(self) -> None:
        """Sleeps for `interval_s`. A pause within is found; what came before is no pause."""
        self.resume()
        time.sleep(self._interval_s)
        self.look()

    def moved(self, when: float) -> float:
        """Returns a time of the monotonic clock, moved later by the pauses after it, to the end of
        each at most: the time since then is without them."""
        for end, seconds in self._pauses:
            when = min(when + seconds, end) if when < end else when
        return when
