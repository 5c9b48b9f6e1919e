"""Pauses of this process: it was stopped, or held with its virtual machine."""

from __future__ import annotations

import time

PAUSE_S = 2.0
"""A look that comes this many seconds late means that this process was paused."""


class Pauses:
    """Finds the times for which this process was suspended. It calls `look` at least every
    `interval_s` seconds, or waits by `sleep`: a longer gap is a pause. Other processes may have
    been suspended with it, so their silence during a pause does not mean that they failed."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s, self._looked_at = interval_s, time.monotonic()
        self._pauses: list[tuple[float, float]] = []
        """(end, seconds) of each pause."""

    def look(self) -> float:
        """Returns for how many seconds this process was paused since the last look. A look that is
        up to PAUSE_S late is no pause, and returns 0."""
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
        """Sleeps for `interval_s`. Records a pause of this process that falls into the sleep; time
        before the call counts as no pause."""
        self.resume()
        time.sleep(self._interval_s)
        self.look()

    def moved(self, when: float) -> float:
        """Returns a time of the monotonic clock, moved later by the pauses after it, to the end of
        each at most: the time since then is without them."""
        for end, seconds in self._pauses:
            when = min(when + seconds, end) if when < end else when
        return when
