"""Metrics of a run: `metrics.jsonl`, TensorBoard events, and reading a device one step late.

`metrics.jsonl` is one strict JSON object per logged step, steps strictly increasing. `time` is when
it was written (ISO 8601, UTC). A number that is not finite is written as null, with
"<name>_nonfinite" beside it saying "nan", "inf" or "-inf"; `read_metrics` gives the number back. A
list is of all processes, in their order, and finite; events have none.
"""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.files.appended import AppendedFile
from jaxtrain.files.regular import open_regular, write_all
from jaxtrain.telemetry.events import Events, has_tensorboard, refuse_without_tensorboard

MetricValues = dict[str, Any]
METRICS_FILE = "metrics.jsonl"
_MARK = "_nonfinite"


def scalar(name: str, value: Any) -> Any:
    """A Python number, bool, string or None from `value`, which may be a 0-d array on a device."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    array = np.asarray(value)
    if array.shape != () or array.dtype == object:
        raise ValueError(
            f"metric {name!r} is of type {type(value).__name__}, shape {array.shape}; log scalars, "
            f"one name each (such as {name}_0)"
        )
    # bfloat16 and fp8 are not numpy's own: item() leaves them as they are.
    return float(array) if array.dtype.kind in "fV" else array.item()


def _plain(name: str, value: Any) -> Any:
    """A scalar, or a list of finite ones."""
    if not isinstance(value, list):
        return scalar(name, value)
    items = [scalar(name, item) for item in value]
    if not all(isinstance(item, int | float) and math.isfinite(item) for item in items):
        raise ValueError(f"metric {name!r} is a list of {items}; a list has finite numbers alone")
    return items


def _encode(step: int, values: Mapping[str, Any]) -> str:
    plain: MetricValues = {"step": step}
    for name, value in values.items():
        if name == "step" or name.endswith(_MARK):
            raise ValueError(f"metric {name!r}: the file uses this name itself; call it another")
        number = _plain(name, value)
        finite = not isinstance(number, float) or math.isfinite(number)
        plain[name] = number if finite else None
        if not finite:
            plain[name + _MARK] = str(number)
    return json.dumps(plain, allow_nan=False) + "\n"


def _decode(values: MetricValues) -> MetricValues:
    marked = {name for name in values if name.endswith(_MARK)}
    numbers = {name.removesuffix(_MARK): float(values[name]) for name in marked}
    return {name: numbers.get(name, value) for name, value in values.items() if name not in marked}


def _whole_lines(path: Path, lines: Iterable[bytes]) -> Iterator[MetricValues]:
    """Objects of a metrics file. A broken last line (its writer was killed) is skipped; a broken
    line before it is an error."""
    broken: int | None = None
    for number, line in enumerate(lines, start=1):
        if broken is not None:
            raise ValueError(
                f"{path}:{broken} is not a JSON object with a step; the file was damaged, not cut "
                "short: remove that line, or move the file away"
            )
        try:
            values = json.loads(line)
            values["step"] + 0
        except (ValueError, TypeError, KeyError):
            broken = number
            continue
        yield values


def read_metrics(run_dir: str | Path) -> list[MetricValues]:
    """Returns all logged steps, oldest first; [] if there are none. The file may still grow.

    Raises `ValueError` naming the line when one that is not the last is damaged.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        return []
    with open_regular(path, "rb") as file, io.BufferedReader(file) as lines:
        return [_decode(values) for values in _whole_lines(path, lines)]


def newest_metrics(
    run_dir: str | Path, names: tuple[str, ...], most: int = 10_000
) -> tuple[int | None, dict[str, float]]:
    """Returns the last logged step (None if there is none), and of each of these metrics its newest
    number among the last `most` steps: a long file is not parsed. Damaged lines are passed over.
    Raises OSError or ValueError if the file is no file or cannot be read."""
    path = Path(run_dir) / METRICS_FILE
    newest: dict[str, float] = {}
    last: int | None = None
    if not path.exists():
        return last, newest
    with open_regular(path, "rb") as file:
        lines = file.read().splitlines()
    for line in reversed(lines[-most:]):
        try:
            values = _decode(json.loads(line))
            step = int(values["step"])
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        last = step if last is None else last
        for name in names:
            if isinstance(values.get(name), int | float):
                newest.setdefault(name, values[name])
        if newest.keys() == {*names}:
            break
    return last, newest


def refuse_unusable(run_dir: str | Path, *, tensorboard: bool | None, process: int = 0) -> None:
    """Checks before a run: raises what a `MetricsWriter` would raise, and writes nothing."""
    read_metrics(run_dir)
    if tensorboard and process == 0:
        refuse_without_tensorboard()


def _truncate(path: Path, start: int) -> tuple[int, bool]:
    """Drops steps from `start` on and an incomplete last line. Returns the last step kept, or -1,
    and whether a line was incomplete.

    The file is replaced by a rename: a kill leaves the old or the new one.
    """
    if not path.exists():
        return -1, False
    with open_regular(path, "rb") as file:
        old = file.read()
    texts = old.splitlines()
    whole = list(_whole_lines(path, texts))
    lines = [values for values in whole if values["step"] < start]
    new = "".join(json.dumps(values, allow_nan=False) + "\n" for values in lines).encode()
    if new != old:
        unfinished = path.with_suffix(".tmp")
        with open_regular(unfinished, "wb") as file:
            write_all(file, new)
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    return lines[-1]["step"] if lines else -1, len(whole) < len(texts)


class MetricsWriter:
    """Appends to `run_dir/metrics.jsonl` and `run_dir/events`; only process 0 writes anything.

    `start` is the first step this run will log, `first` that of the whole run. When it opens, lines
    from `start` on (of an
    abandoned continuation) and an incomplete last line are dropped, so no step appears twice.
    `wall` gives the seconds since 1970. `write` hands a line to the operating system before it
    returns. Raises `ValueError` for a damaged file and for steps that do not increase, `OSError`
    for a full disk: the line is then written with the next one that fits.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        start: int = 0,
        tensorboard: bool | None = True,
        process: int = 0,
        first: int = 1,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._wall = wall
        self.lacks = ""
        """Why the file lacks lines of steps before `start`, where that can be seen."""
        self._file: AppendedFile | None = None
        self._events: Events | None = None
        if process != 0:
            return
        folder = Path(run_dir)
        if tensorboard or (tensorboard is None and has_tensorboard()):
            self._events = Events(folder / "events", start)
        folder.mkdir(parents=True, exist_ok=True)
        self._last, cut = _truncate(folder / METRICS_FILE, start)
        if cut:
            self.lacks = f"the last line of {folder / METRICS_FILE} was cut off; it is dropped"
        elif start > first and self._last < 0:
            self.lacks = f"{folder / METRICS_FILE} has no line of the steps before {start}"
        self._file = AppendedFile(folder / METRICS_FILE)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs `values` of `step`, one call per step: its evaluation belongs in it too."""
        if self._file is None:
            return
        if step <= self._last:
            raise ValueError(
                f"step {step} comes after step {self._last}: steps are logged once and in order; "
                "put all metrics of a step into one write"
            )
        written = datetime.fromtimestamp(self._wall(), UTC).isoformat(timespec="seconds")
        line, self._last = _encode(step, {"time": written, **values}).encode(), step
        self._file.append(line)
        if self._events is not None:
            plain = {name: _plain(name, value) for name, value in values.items()}
            self._events.write(step, plain)

    def close(self) -> None:
        """Finishes both files. May be called twice."""
        files = [file for file in (self._file, self._events) if file is not None]
        self._file = self._events = None
        with ExitStack() as stack:
            for file in files:
                stack.callback(file.close)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DelayedMetrics:
    """Metrics read one step late, so the host never waits for a device that has nothing to do.

    `push` is called after a step was dispatched and returns the step before, whose values the
    device has finished or is about to, with the pushed step queued behind. Copies to the host
    start at the push.
    """

    def __init__(self) -> None:
        self._waiting: tuple[int, Mapping[str, Any]] | None = None

    def push(self, step: int, metrics: Mapping[str, Any]) -> tuple[int, MetricValues] | None:
        """Keeps `metrics` of `step`; returns (step, values) of the previous push, None at first."""
        for value in metrics.values():
            if hasattr(value, "copy_to_host_async"):
                value.copy_to_host_async()
        previous, self._waiting = self._waiting, (step, metrics)
        return _values(previous)

    def flush(self) -> tuple[int, MetricValues] | None:
        """Returns the last pushed step, waited for, at the end of a run; None if none is left."""
        previous, self._waiting = self._waiting, None
        return _values(previous)


def _values(waiting: tuple[int, Mapping[str, Any]] | None) -> tuple[int, MetricValues] | None:
    if waiting is None:
        return None
    step, metrics = waiting
    return step, {name: _read(name, value) for name, value in metrics.items()}


def _read(name: str, value: Any) -> Any:
    """Returns a metric as a Python number, or as a list if it is an array of one dim."""
    many = getattr(value, "ndim", 0) == 1
    return _plain(name, np.asarray(value).tolist()) if many else scalar(name, value)
