"""A run's directory: locked by one run, with a record of the experiment that made it."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint.run_config import (
    CHECKPOINTS,
    NAME,
    refuse_other_experiment,
    stored_experiment,
)
from jaxtrain.checkpoint.storage import committed_steps, steps_aside
from jaxtrain.cluster.run_lock import refuse_held, sole_run
from jaxtrain.experiment import Experiment, completed, resumable
from jaxtrain.experiment.stored import refuse_unreadable
from jaxtrain.telemetry.metrics import refuse_unusable
from jaxtrain.weights.loading import record_run


def refuse_unfit(run: Path, config: dict[str, Any], experiment: Experiment) -> str:
    """Raises ValueError, and writes nothing, if another run holds the directory, another experiment
    made it, its metrics files cannot be continued, or it has steps that this run would not continue
    from; also if the config could not be read back. Returns which run held it last."""
    refuse_unreadable(config)
    process = jax.process_index()
    # Other processes of this run come when it is already locked.
    last = refuse_held(run) if process == 0 else ""
    complete = partial(completed, experiment=experiment)
    stored = stored_experiment(run)
    may_differ = resumable(stored, config["experiment"])
    refuse_other_experiment(run, config, ignore=may_differ, completed=complete)
    if experiment.checkpoints is None:
        _refuse_begin_over(run)
    refuse_unusable(run, tensorboard=experiment.logging.tensorboard, process=process)
    return last


def _refuse_begin_over(run: Path) -> None:
    """Raises ValueError if the directory has saved steps: a run without saves begins at step 0 and
    would overwrite the metrics of those steps."""
    saved, aside = committed_steps(run / CHECKPOINTS), steps_aside(run / CHECKPOINTS)
    if saved or aside:
        existing = [*(["step " + str(saved[-1])] if saved else []), *aside]
        raise ValueError(
            f"run directory {run} holds {', '.join(existing)} in {CHECKPOINTS}/, and "
            "experiment.checkpoints is None, which restores nothing: the run would begin at step 0 "
            "again and write over the metrics there; give it checkpoints=SavePolicy(...) as before "
            "to go on, or another --run-dir to begin again"
        )


class RunDirectory:
    """Locks the directory, and records what made the run. last: the run that held it last, by
    `refuse_unfit`. Raises ValueError if another run holds it, or has held it since, or if it cannot
    be written."""

    def __init__(self, path: Path, config: dict[str, Any], dataset: Any, last: str) -> None:
        self.path, self._config, self._dataset = path, config, dataset
        self._lock = ExitStack()
        self._take(last)
        self._record()

    def _take(self, last: str | None = None) -> None:
        self._is_locked = self._lock.enter_context(sole_run(self.path, last))
        self._inode = _inode(self.path)

    def _record(self) -> None:
        record_run(self.path, self._config, self._dataset)

    def restore_missing(self) -> str | None:
        """Writes the record and the lock again if they were removed. Returns a message that names
        what was missing, or None. Raises ValueError as the class does."""
        # A save in flight may have recreated the path, with another inode.
        gone, locked = _inode(self.path) != self._inode, self._is_locked()
        if locked and (self.path / NAME).is_file():
            return None
        if not locked:
            self._lock.close()
            self._take()
        self._record()
        removed = f"run directory {self.path}" if gone else f"{NAME} or the lock of {self.path}"
        return f"{removed} was removed below the run; it is written again, from here on"

    def close(self) -> None:
        self._lock.close()


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.is_dir() else None


def left_in(run: Path) -> tuple[int | None, str]:
    """Returns the newest step saved in a run's directory (None for none), and a sentence with that
    step and how to continue from it."""
    steps = committed_steps(run / CHECKPOINTS)
    if not steps:
        return None, f"nothing is saved in {run}"
    saved = f"step {steps[-1]} is saved in {run}"
    if not (run / NAME).is_file():
        return steps[-1], f"{saved}, which has lost its {NAME}: put it back to go on"
    return steps[-1], f"{saved}; the same command goes on"


def refuse_fewer_steps(run: Path, done: int | None, last: int) -> None:
    """Raises ValueError if more steps are done than `last`, the step to end with.

    done: the newest undamaged step in the directory, None if there is none.
    """
    if done is not None and done > last:
        raise ValueError(
            f"run directory {run} is at step {done} already, and this run is to end at step "
            f"{last}: nothing would be trained; ask for {done} steps or more to go on from there, "
            f"or give a run of {last} steps another --run-dir"
        )
