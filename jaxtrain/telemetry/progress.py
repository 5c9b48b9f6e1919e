"""Progress of a run: a bar on a terminal, plain lines everywhere else (files, CI, notebooks)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast


def duration(seconds: float) -> str:
    """Two units at most: `45s`, `1m20s`, `2h05m`, `3d04h`."""
    rounded = max(0, round(seconds))
    if rounded < 60:
        return f"{rounded}s"
    minutes = rounded // 60
    if minutes < 60:
        return f"{minutes}m{rounded % 60:02d}s"
    hours = minutes // 60
    return f"{hours}h{minutes % 60:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24:02d}h"


def compact(number: float) -> str:
    """At most three digits and a letter: `950`, `8.1k`, `81k`, `1.2M`."""
    for letter in ("", "k", "M", "G"):
        if abs(number) < 999.5 or letter == "G":
            break
        number /= 1000
    return f"{number:.1f}{letter}" if letter and abs(number) < 9.95 else f"{number:.0f}{letter}"


# Metric, its name on the line, its format: those that are there are shown, in this order.
_SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", lambda value: f"{value:.3f}"),
    ("tokens_per_s", "tok/s", compact),
    ("examples_per_s", "examples/s", compact),
    ("mfu_full", "mfu", lambda value: f"{value:.2f}"),
)


class _Lasting:
    """A stream that may go away, such as a closed terminal or a pipe whose reader ended. Output
    that cannot be written is dropped: the run goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class Lines:
    """Writes lines to a stream, each with the time of day. wall: seconds since 1970."""

    def __init__(self, stream: Any, wall: Callable[[], float] = time.time) -> None:
        self._stream, self._wall = _Lasting(stream), wall

    def stamp(self) -> str:
        """The local time, `18:20:03`."""
        return time.strftime("%H:%M:%S", time.localtime(self._wall()))

    def write(self, text: str) -> None:
        """Writes a line, or several: the first has the time."""
        self._stream.write(f"{self.stamp()} {text.rstrip()}\n")
        self._stream.flush()


class Progress:
    """Shows `step 120/600 loss 3.412 tok/s 81k mfu 0.43 eta 1m20s` for a run of `total` steps; on a
    line of its own behind the time of day.

    `start` steps were done before this run (resumed). On a terminal it is one live line with a bar,
    drawn at most ten times a second; elsewhere a line for the first step, for every `every`-th and
    for the last. `mfu` is `mfu_full`. The ETA is the mean step time since the first update, so the
    compilation before it is left out. A line says `skipped 3` (in all) when that has risen since
    the line before, the bar from the first one on. `close` restores the terminal, and so does
    leaving a `with`.
    """

    def __init__(
        self,
        total: int,
        start: int = 0,
        stream: TextIO | None = None,
        every: int = 10,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be at least 1: a line every so many steps")
        self._total, self._start, self._every, self._clock = total, start, every, clock
        self._stream = _Lasting(sys.stdout if stream is None else stream)
        self._lines = Lines(self._stream, wall)
        self._first: tuple[int, float] | None = None
        self._drawn = float("-inf")
        self._skipped = 0.0
        self._bar: Any = None
        self._terminal = self._stream.isatty()

    def update(self, step: int, values: Mapping[str, Any]) -> None:
        """`step` steps are done in all; `values` are the metrics of the latest one known."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        text = self._text(values, self._eta(step, now))
        if self._terminal and self._bar is None:
            self._open()
        if self._bar is not None:
            self._draw(step, text, now)
        elif step == self._first[0] or step % self._every == 0 or step == self._total:
            self._lines.write(f"step {step}/{self._total} {text}")
            self._skipped = values.get("skipped") or self._skipped

    def message(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        if self._bar is None:
            self._lines.write(text)
        else:
            text = f"{self._lines.stamp()} {text}"
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it stands and give the terminal back. May be called twice."""
        if self._bar is not None:
            self._bar.refresh()
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _eta(self, step: int, now: float) -> str:
        if self._first is None or step <= self._first[0]:
            return ""
        step_s = (now - self._first[1]) / (step - self._first[0])
        return f"eta {duration(step_s * (self._total - step))}"

    def _text(self, values: Mapping[str, Any], eta: str) -> str:
        shown = [
            f"{label} {show(float(values[name]))}"
            for name, label, show in _SHOWN
            if values.get(name) is not None
        ]
        if "loss" in values and values["loss"] is None:
            shown.insert(0, "no token learnt from")
        skipped = values.get("skipped") or 0.0
        if skipped > self._skipped:
            shown.append(f"skipped {skipped:.0f}")
        return " ".join([*shown, eta]).rstrip()

    def _draw(self, step: int, text: str, now: float) -> None:
        if now - self._drawn < 0.1 and step < self._total:
            return
        self._drawn = now
        self._bar.update(self._bar.task_ids[0], completed=step, text=text, refresh=True)

    def _open(self) -> None:
        # Imported with the first step behind us: it would only delay that one.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        console = Console(file=cast(TextIO, self._stream))
        if console.is_dumb_terminal:  # it cannot move the cursor, so a bar would draw nothing
            self._terminal = False
            return
        text = TextColumn("{task.fields[text]}")
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), text)
        self._bar = Bar(*columns, console=console, auto_refresh=False)
        self._bar.start()
        self._bar.add_task("", total=self._total, completed=self._start, text="")


@contextmanager
def progress_bar(description: str = "tokenising") -> Iterator[Callable[[int, int], None]]:
    """A terminal bar of bytes with time left; called with (bytes done, bytes in all)."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(description), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
