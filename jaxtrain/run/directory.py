"""A run's directory: held by one run, with what says which experiment made it."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint.run_config import CHECKPOINTS, NAME, read_config, refuse_other_experiment
from jaxtrain.checkpoint.run_lock import refuse_held, sole_run
from jaxtrain.checkpoint.storage import committed_steps, steps_aside
from jaxtrain.experiment import Experiment, completed, resumable
from jaxtrain.experiment.stored import refuse_unreadable
from jaxtrain.telemetry.metrics import refuse_unusable
from jaxtrain.weights.loading import record_run


def refuse_unfit(run: Path, config: dict[str, Any], experiment: Experiment) -> None:
    """Raises ValueError, and writes nothing, where another run holds the directory, another
    experiment made it, its files of metrics cannot be gone on with, or it holds steps that this run
    would not go on from; and where its config could not be read back."""
    refuse_unreadable(config)
    process = jax.process_index()
    if process == 0:  # the others of this run come when it is already held
        refuse_held(run)
    known = partial(completed, experiment=experiment)
    stored = (read_config(run) or {}).get("experiment")
    may_differ = resumable(stored, config["experiment"])
    refuse_other_experiment(run, config, ignore=may_differ, completed=known)
    if experiment.checkpoints is None:
        _refuse_begin_over(run)
    refuse_unusable(run, tensorboard=experiment.logging.tensorboard, process=process)


def _refuse_begin_over(run: Path) -> None:
    """A run that neither saves nor restores begins at step 0, and its metrics take the place of
    those of the steps that are there."""
    saved, aside = committed_steps(run / CHECKPOINTS), steps_aside(run / CHECKPOINTS)
    if saved or aside:
        there = [*(["step " + str(saved[-1])] if saved else []), *aside]
        raise ValueError(
            f"run directory {run} holds {', '.join(there)} in {CHECKPOINTS}/, and "
            "experiment.checkpoints is None, which restores nothing: the run would begin at step 0 "
            "again and write over the metrics there; give it checkpoints=SavePolicy(...) as before "
            "to go on, or another --run-dir to begin again"
        )


class RunDirectory:
    """Holds the directory from here on, and writes down what made the run. Raises ValueError while
    another run holds it, and where it cannot be written."""

    def __init__(self, path: Path, config: dict[str, Any], dataset: Any) -> None:
        self.path, self._config, self._dataset = path, config, dataset
        self._lock = ExitStack()
        self._take()
        self._record()

    def _take(self) -> None:
        self._held = self._lock.enter_context(sole_run(self.path))
        self._inode = _inode(self.path)

    def _record(self) -> None:
        record_run(self.path, self._config, self._dataset)

    def written_again(self) -> str | None:
        """Of a directory that was removed below the run, or lacks what a start needs: what was
        missing, now that it is there again; None where nothing was. Raises ValueError as above."""
        # A save in flight may have made the path again: another inode.
        gone, held = _inode(self.path) != self._inode, self._held()
        if held and (self.path / NAME).is_file():
            return None
        if not held:
            self._lock.close()
            self._take()
        self._record()
        what = f"run directory {self.path}" if gone else f"{NAME} or the lock of {self.path}"
        return f"{what} was removed below the run; it is written again, from here on"

    def close(self) -> None:
        self._lock.close()


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.is_dir() else None


def left_in(run: Path) -> tuple[int | None, str]:
    """The newest step that is saved in a run's directory, None for none; and that in words, with
    how to go on from it."""
    steps = committed_steps(run / CHECKPOINTS)
    if not steps:
        return None, f"nothing is saved in {run}"
    saved = f"step {steps[-1]} is saved in {run}"
    if not (run / NAME).is_file():
        return steps[-1], f"{saved}, which has lost its {NAME}: put it back to go on"
    return steps[-1], f"{saved}; the same command goes on"


def refuse_fewer_steps(run: Path, done: int | None, asked: int) -> None:
    """Raises ValueError where more steps are done than a run is to take in all.

    done: the newest step in the directory that is whole, None where there is none.
    """
    if done is not None and done > asked:
        raise ValueError(
            f"run directory {run} is at step {done} already, and this run is to end at step "
            f"{asked}: nothing would be trained; ask for {done} steps or more to go on from there, "
            f"or give a run of {asked} steps another --run-dir"
        )
