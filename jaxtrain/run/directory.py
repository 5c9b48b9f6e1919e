"""A run's directory: locked by one run, with a record of the experiment that made it."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from os.path import lexists
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint.run_config import (
    ANEW,
    CHECKPOINTS,
    NAME,
    refuse_other_experiment,
    stored_experiment,
)
from jaxtrain.checkpoint.storage import committed_steps, steps_aside
from jaxtrain.cluster.agreement import from_first
from jaxtrain.cluster.run_lock import NAME as LOCK
from jaxtrain.cluster.run_lock import refuse_held, sole_run
from jaxtrain.experiment import Experiment, FromRun, completed, config_of, resumable
from jaxtrain.experiment.stored import refuse_unreadable
from jaxtrain.scoring.reference import keep_references
from jaxtrain.session.branch import Branch
from jaxtrain.session.lineage import NAME as BRANCH
from jaxtrain.session.session import Session
from jaxtrain.telemetry.events import refuse_without_tensorboard
from jaxtrain.telemetry.metrics import refuse_unusable
from jaxtrain.weights.loading import is_run, record_run


def config_of_run(experiment: Experiment, branch: Branch | None) -> dict[str, Any]:
    """Returns what a run's config.json records."""
    began = {}
    if branch is not None:
        began = {BRANCH: from_first(lambda: branch.record(experiment))}
    return {"experiment": config_of(experiment), **began}


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


def refuse_unfit_anew(run: Path, config: dict[str, Any], experiment: Experiment) -> None:
    """Raises ValueError, and writes nothing, if what is in the directory cannot be set aside for a
    new run: another run holds it, it is no run, a link, the working directory, or what the new run
    begins from. Also if the config could not be read back, or TensorBoard is missing."""
    refuse_unreadable(config)
    if jax.process_index() != 0:
        return
    begin = "and --fresh sets a run aside; give another --run-dir"
    if run.is_symlink():
        raise ValueError(f"{run} is a link to {os.readlink(run)}, {begin}, such as that path")
    if run.exists() and not run.is_dir():
        raise ValueError(f"{run} is a file, {begin}")
    refuse_held(run)
    if run.is_dir() and any(run.iterdir()) and not _has_been_run(run):
        raise ValueError(f"{run} holds files and no run, {begin}")
    if run.exists() and run.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise ValueError(f"{run} holds the working directory, {begin}")
    start = experiment.fine_tuning and experiment.fine_tuning.start
    if isinstance(start, FromRun) and Path(start.run_dir).resolve() == run.resolve():
        raise ValueError(f"{run} is the run that this one begins from ({start!r}), {begin}")
    if experiment.logging.tensorboard:
        refuse_without_tensorboard()


def _has_been_run(path: Path) -> bool:
    """Returns True if a directory has been a run's, also if its record is damaged."""
    return lexists(path / LOCK) or (lexists(path / NAME) and is_run(path))


def set_run_aside(run: Path) -> Path | None:
    """Renames a run directory to the first free one of RUN.1, RUN.2 ... beside it, and returns that
    path; None if there is no run. Raises ValueError while another run holds it."""
    if not _has_been_run(run):
        return None
    numbers = itertools.count(1)
    aside = next(path for n in numbers if not lexists(path := run.with_name(f"{run.name}.{n}")))
    try:
        with sole_run(run) as is_locked:
            if not is_locked():
                raise ValueError(f"run directory {run} was moved by another start just now")
            run.rename(aside)
    except OSError as error:
        raise ValueError(
            f"run directory {run} cannot be moved to {aside}: {error.strerror}; give another "
            "--run-dir"
        ) from error
    return aside


@contextmanager
def staged(run: Path) -> Iterator[Path]:
    """Yields a path beside a run directory, for checks of what a new run there would write; the
    first process removes it afterwards."""
    path = run.with_name(f".{run.name}.fresh")
    try:
        yield path
    finally:
        if jax.process_index() == 0:
            shutil.rmtree(path, ignore_errors=True)


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
            f"to go on, or {ANEW}"
        )


class RunDirectory:
    """Locks the directory, and records what made the run and what its session is to keep. last: the
    run that held it last, by `refuse_unfit`. Raises ValueError if another run holds it, or has held
    it since, or if it cannot be written."""

    def __init__(self, path: Path, config: dict[str, Any], session: Session, last: str) -> None:
        self.path, self._config, self._session = path, config, session
        self._lock = ExitStack()
        self._take(last)
        self._record()

    def _take(self, last: str | None = None) -> None:
        self._is_locked = self._lock.enter_context(sole_run(self.path, last))
        self._inode = _inode(self.path)

    def _record(self) -> None:
        record_run(self.path, self._config, self._session.dataset)
        keep_references(self.path, self._session.reference_files)

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


def left_in(run: Path, *, anew: str = "") -> tuple[int | None, str]:
    """Returns the newest step saved in a run's directory (None for none), and a sentence with that
    step and how to continue from it. anew: "fresh" or "numbered", by which the run began."""
    steps = committed_steps(run / CHECKPOINTS)
    if not steps:
        return None, f"nothing is saved in {run}"
    saved = f"step {steps[-1]} is saved in {run}"
    if not (run / NAME).is_file():
        return steps[-1], f"{saved}, which has lost its {NAME}: put it back to go on"
    if anew == "numbered":
        return steps[-1], f"{saved}; --run-dir {run} in the place of --numbered goes on"
    return steps[-1], f"{saved}; the same command{' without --fresh' * bool(anew)} goes on"


def refuse_fewer_steps(run: Path, done: int | None, last: int) -> None:
    """Raises ValueError if more steps are done than `last`, the step to end with.

    done: the newest undamaged step in the directory, None if there is none.
    """
    if done is not None and done > last:
        raise ValueError(
            f"run directory {run} is at step {done} already, and this run is to end at step "
            f"{last}: nothing would be trained; ask for {done} steps or more to go on from there, "
            f"or {ANEW}"
        )
