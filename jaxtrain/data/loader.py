"""Batches prepared and placed on devices ahead of the step that uses them, in one thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

import numpy as np


class RowSource(Protocol):
    """Rows of a dataset, in the form that a loader's `place` takes."""

    def rows(self, indices: np.ndarray, /) -> Any: ...


class Loader:
    """Gives (step, placed batch) for steps `start`, `start` + 1, ..

    `place` runs in the loader's thread and should start a transfer without waiting for it. At most
    `ahead` batches beyond the one in use are held. An exception in the thread is raised by `next`
    with its own traceback, after the batches before it. `wait_s` is the time spent in `next`: what
    reading costs the training loop.

    A KeyboardInterrupt leaves the loader whole: `next` can be called again, and the step it gives
    says whether a batch was lost with the interrupted call. `close` (or leaving `with`) ends the
    thread.
    """

    def __init__(
        self,
        dataset: RowSource,
        rows_of_step: Callable[[int], np.ndarray],
        place: Callable[[Any], Any],
        *,
        start: int = 0,
        ahead: int = 2,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if ahead < 1:
            raise ValueError(f"ahead={ahead} prepares nothing; use 1 or more")
        self.wait_s = 0.0
        self._dataset = dataset
        self._rows_of_step = rows_of_step
        self._place = place
        self._step = start
        self._ahead = ahead
        self._clock = clock
        self._ready: deque[tuple[int, Any]] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        # A daemon, so that a program that forgets `close` still ends.
        self._thread = threading.Thread(target=self._run, name="jaxtrain-loader", daemon=True)
        self._thread.start()

    def next(self) -> tuple[int, Any]:
        """The next step's batch. Raises what the thread raised; ValueError once closed."""
        began = self._clock()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._error or self._closed)
                if self._ready and not self._closed:
                    self._changed.notify_all()
                    return self._ready.popleft()
                if self._error:
                    raise self._error
                raise ValueError("the loader is closed; make a new one from the step you are at")
        finally:
            self.wait_s += self._clock() - began

    def peek(self, count: int) -> list[tuple[int, Any]]:
        """Returns the next `count` batches, which `next` returns again. Raises as `next` does."""
        waited = self.wait_s
        batches = [self.next() for _ in range(count)]
        with self._changed:
            self._ready.extendleft(reversed(batches))
        self.wait_s = waited
        return batches

    def __next__(self) -> tuple[int, Any]:
        return self.next()

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def close(self) -> None:
        """End the thread and drop what it prepared. Waits for the batch in the making."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while self._wait_for_room():
                rows = self._rows_of_step(self._step)
                placed = self._place(self._dataset.rows(rows))
                with self._changed:
                    self._ready.append((self._step, placed))
                    self._step += 1
                    self._changed.notify_all()
        except BaseException as error:  # the consumer raises it: a thread has nobody to tell
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._ahead)
            return not self._closed
