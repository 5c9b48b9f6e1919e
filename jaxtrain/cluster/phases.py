"""The phase of a process, and the wall time of each: one phase at any moment."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

PHASES = {
    "start": "imports, and whatever the command does before the others",
    "join": "waiting for the other processes to join",
    "open": "data opened, which may mean to tokenise it",
    "compile": "a step's program compiled, and the state made meanwhile",
    "restore": "a checkpoint read",
    "first step": "the first step of this start, and the second, which waits for it",
    "step": "a step: dispatched, and the one before it waited for",
    "load": "waiting for the rows of the next batch",
    "callback": "code of the user's own",
    "evaluate": "the held-out loss",
    "save": "a save begun: the state copied off the devices",
    "finish": "the last save, and the sample",
    "exit": "the run is done, and the process leaves",
}
"""Phase -> what a process does in it."""

LOST = "lost"
"""Not a phase: seconds of steps that were repeated within a start."""

RECENT = 50
"""Latest steps in the median."""

MOST_WRONG = 32
"""Most processes reported as wrong: the space in a sample."""


class Now(NamedTuple):
    """State of a process. step: done so far; first: steps done before this start, -1 if unknown.
    since: start of the phase, in seconds of the machine's monotonic clock. median_s: of a step, 0
    before there is one. spent: phase -> seconds, until `since`. wrong: processes that certainly
    have wrong numbers, () if one of several has, None if numbers are correct. raised: phase of an
    error that no step has followed; empty for none."""

    phase: str
    step: int
    since: float
    median_s: float = 0.0
    first: int = -1
    spent: Mapping[str, float] = MappingProxyType({})
    wrong: tuple[int, ...] | None = None
    raised: str = ""

    @property
    def failed_in(self) -> str:
        """The phase in which the process failed, before the phases of its exit."""
        return self.raised or self.phase


class Phases:
    """The phases of one start of a run. The time of a phase excludes the phases within it, so the
    times of all phases sum to the wall time since the first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._listeners: list[Callable[[Now], None]] = []
        self._phase, self._since, self._step, self._first = "start", clock(), 0, -1
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._median_s = 0.0
        self._wrong: tuple[int, ...] | None = None
        self._raised = ""
        self._lock = threading.RLock()

    def listen(self, listener: Callable[[Now], None]) -> None:
        """Calls `listener` with `Now`, and again whenever the phase or the step changes, in the
        thread that changes it."""
        self._listeners.append(listener)
        listener(self.now)

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Enters `phase` for the block, then the previous one again. For the main thread, or one
        that it waits for."""
        outer = self._phase
        try:
            self.enter(phase)  # a listener may raise
            yield
        except BaseException:
            self.fail()
            raise
        finally:
            self.enter(outer)

    def fail(self, phase: str = "") -> None:
        """Records an error in `phase`, or in the current one, unless an earlier one is recorded."""
        with self._lock:
            self._raised = self._raised or phase or self._phase

    def enter(self, phase: str) -> str:
        """Starts `phase`; returns the previous one. Raises KeyError for a word not in PHASES."""
        PHASES[phase]
        with self._lock:
            previous, now = self._phase, self._clock()
            self._spent[previous] += now - self._since
            self._phase, self._since = phase, now
        self._tell()
        return previous

    def begin_at(self, step: int) -> None:
        """Sets the number of steps done before this start."""
        self._first = step
        self.advance(step)

    def advance(self, step: int) -> None:
        """`step` steps are done."""
        with self._lock:
            self._step, self._raised = step, ""
        self._tell()

    def measure(self, seconds: float) -> None:
        """Adds the time of a step, callbacks included, to those of the median."""
        with self._lock:
            self._steps.append(seconds)
            self._median_s = statistics.median(self._steps)

    def accuse(self, processes: Sequence[int]) -> None:
        """Reports wrong numbers of `processes`; if empty, of one process that is unknown."""
        with self._lock:
            self._wrong = tuple(processes)[:MOST_WRONG]
        self._tell()

    def go_back(self, step: int) -> None:
        """The steps after `step` come again: their time counts as lost."""
        with self._lock:
            self.enter(self._phase)
            share = min(1.0, (self._step - step) / max(1, self._step - self._first))
            lost = self._spent["step"] * share
            self._spent["step"] -= lost
            self._spent[LOST] += lost
            self._first = min(self._first, step)
        self.advance(step)

    @property
    def now(self) -> Now:
        with self._lock:
            spent = {phase: round(seconds, 4) for phase, seconds in self._spent.items()}
            fields = (self._phase, self._step, self._since, self._median_s, self._first)
            return Now(*fields, spent, self._wrong, self._raised)

    def spent(self) -> dict[str, float]:
        """Phase -> seconds so far, the current one included."""
        with self._lock:
            now = self._clock()
            present = now - self._since
            return {**self._spent, self._phase: self._spent[self._phase] + present}

    def _tell(self) -> None:
        if self._listeners:
            now = self.now
            for listener in self._listeners:
                listener(now)
