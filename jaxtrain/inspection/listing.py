"""Lists the runs of a folder: how far each is, and in what it differs from the one before it."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.checkpoint.run_config import (
    ABSENT,
    NAME,
    FieldDifference,
    config_differences,
    read_config,
)
from jaxtrain.checkpoint.storage import committed_steps
from jaxtrain.cluster.run_lock import is_held
from jaxtrain.experiment import completed
from jaxtrain.experiment.stored import by_object
from jaxtrain.files.pointer import CHECKPOINTS, POINTER
from jaxtrain.files.stores import local_path
from jaxtrain.reprs import aligned
from jaxtrain.session.lineage import recorded_in
from jaxtrain.telemetry.metrics import METRICS_FILE, newest_metrics
from jaxtrain.weights.loading import is_run

DEPTH = 3
"""Folders below the one that is listed in which runs are looked for."""
SHOWN = 3
"""Differences of a run that its line shows."""


class ListedRun(NamedTuple):
    """A run directory.

    state: "running", "done", "stopped" or "unreadable". step: of the newest metrics or save, 0
      without any; steps: of the whole run, None if unknown. loss, eval_loss: the newest, None if
      there is none. changed: when its metrics were last written, in seconds since 1970.
    branch: RUN@STEP that it began from, None if it is no branch. differs: (field, its value) where
      its experiment is not that of the run it began from, or of the previous run. problem: why it
      cannot be read.
    """

    path: Path
    state: str
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    changed: float = 0.0
    differs: tuple[tuple[str, Any], ...] = ()
    branch: str | None = None
    problem: str = ""


@dataclass(frozen=True)
class RunList:
    """runs: the oldest first, by when they last went on."""

    runs: tuple[ListedRun, ...]

    def __iter__(self) -> Iterator[ListedRun]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def __str__(self) -> str:
        if not self.runs:
            return "there is no run here"
        header = ["run", "state", "step", "loss", "eval_loss", "last step", "differs by"]
        return "\n".join(aligned([header, *map(_cells, self.runs)]))

    __repr__ = __str__

    def as_json(self) -> dict[str, Any]:
        """JSON for scripts; its keys are stable. A loss that is not finite is null."""
        return {
            "runs": [
                run._asdict()
                | {"path": str(run.path), "differs": dict(run.differs)}
                | {name: _finite(getattr(run, name)) for name in ("loss", "eval_loss")}
                for run in self.runs
            ]
        }


def runs(folder: str | Path = "runs") -> RunList:
    """Returns the runs in a folder and in its sub-folders, down to three levels. Links are not
    followed, and no code of theirs is imported. Raises ValueError if there is no such folder."""
    path = local_path("folder", folder)
    if not path.is_dir():
        problem = f"{path} is no folder" if path.exists() else f"there is no folder {path}"
        raise ValueError(f"{problem}; give the one that holds your run directories")
    listed: list[ListedRun] = []
    previous: dict[str, Any] | None = None
    read_runs = [read for run in _directories(path) if (read := _read(run)) is not None]
    for entry, config in sorted(read_runs, key=lambda run: (run[0].changed, run[0].path)):
        if config is not None and previous is not None and entry.branch is None:
            differences = by_object(config_differences(previous, config))
            differs = tuple((d.path, _now(d)) for d in differences)
            entry = entry._replace(differs=differs)
        previous = config or previous
        listed.append(entry)
    return RunList(tuple(listed))


def _directories(folder: Path) -> Iterator[Path]:
    """Yields the run directories at or below a folder."""
    for directory, below, files in os.walk(folder):
        path = Path(directory)
        if NAME in files:
            yield path
            below.clear()
        elif len(path.relative_to(folder).parts) >= DEPTH:
            below.clear()


def _read(run: Path) -> tuple[ListedRun, dict[str, Any] | None] | None:
    """Returns a run without its differences, and its config in today's form, None if that cannot be
    read; None if the run has just gone, or it is a folder of weights."""
    metrics = run / METRICS_FILE
    try:
        changed = (metrics if os.path.lexists(metrics) else run / NAME).lstat().st_mtime
    except OSError:
        return None
    try:
        last, newest = newest_metrics(run, ("loss", "eval_loss"))
        config = read_config(run)
        if config is not None and not is_run(run):
            return None
        stored = None if config is None else config.get("experiment")
        if not isinstance(stored, dict):
            raise ValueError(f"{run / NAME} holds no experiment")
        began = recorded_in(config)
    except (OSError, ValueError) as error:
        return ListedRun(run, "unreadable", changed=changed, problem=str(error)), None
    steps = stored.get("steps")
    step = max([last or 0, *_saved_here(run)[-1:]])
    state = "running" if is_held(run) else "done" if step == steps else "stopped"
    numbers = (newest.get("loss"), newest.get("eval_loss"))
    whole = steps if isinstance(steps, int) else None
    entry = ListedRun(run, state, step, whole, *numbers, changed)
    if began is not None:
        differs = tuple((path, values[1]) for path, values in began["differs"].items())
        entry = entry._replace(branch=f"{began['run']}@{began['step']}", differs=differs)
    return entry, completed({"experiment": stored})


def _saved_here(run: Path) -> list[int]:
    """Returns the steps saved on this machine: a list of runs waits for no store."""
    return [] if (run / POINTER).exists() else committed_steps(run / CHECKPOINTS)


def _cells(run: ListedRun) -> list[str]:
    """Returns a run as the cells of a table."""
    if run.problem:
        return [str(run.path), run.state, "", "", "", _time(run), run.problem]
    step = f"{run.step}" if run.steps is None else f"{run.step}/{run.steps}"
    numbers = ["" if n is None else f"{n:.4f}" for n in (run.loss, run.eval_loss)]
    shown = [f"from {_below_here(run.branch)}"] if run.branch else []
    shown += [f"{field}={json.dumps(value)}" for field, value in run.differs[:SHOWN]]
    more = len(run.differs) - SHOWN
    shown += [f"and {more} more"] if more > 0 else []
    return [str(run.path), run.state, step, *numbers, _time(run), ", ".join(shown)]


def _below_here(path: str) -> str:
    """Returns a path as it is seen from the working directory, if it is below that."""
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _now(difference: FieldDifference) -> Any:
    """Returns the newer value of a difference; "(absent)" for a field that it does not have."""
    return "(absent)" if difference.now is ABSENT else difference.now


def _time(run: ListedRun) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(run.changed))
