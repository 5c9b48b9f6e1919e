"""A run's directory: locked by one run, with a record of the experiment that made it."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from os.path import lexists
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint.run_config import (
    BEGUN_BY,
    BRANCH,
    NAME,
    anew_in,
    compare_config,
    read_config,
    refuse_other_experiment,
    stored_experiment,
)
from jaxtrain.checkpoint.storage import committed_steps, steps_aside
from jaxtrain.cluster.agreement import all_gather_text, from_first, share_failure
from jaxtrain.cluster.run_lock import NAME as LOCK
from jaxtrain.cluster.run_lock import refuse_held, sole_run
from jaxtrain.cluster.sampler import SUPERVISOR
from jaxtrain.experiment import (
    Experiment,
    FromHuggingFace,
    FromRun,
    completed,
    config_of,
    resumable,
)
from jaxtrain.experiment.stored import refuse_unreadable
from jaxtrain.files.pointer import POINTER, StoreFailed, checkpoints_in, place_of, shown
from jaxtrain.files.store import AnyPath, is_local
from jaxtrain.files.stored_run import RunCopy, directory_here, opened_for_training
from jaxtrain.files.stores import is_address
from jaxtrain.notices import notice
from jaxtrain.scoring.reference import keep_references
from jaxtrain.session.branch import Branch
from jaxtrain.session.session import Session
from jaxtrain.telemetry.events import refuse_without_tensorboard
from jaxtrain.telemetry.metrics import refuse_unusable
from jaxtrain.weights.loading import is_run, record_run
from jaxtrain.weights.start_digest import ENTRY as START
from jaxtrain.weights.start_digest import START_PATHS, start_digest, start_problem


def opened_run(stack: ExitStack, run_dir: str | Path | None) -> Path | None:
    """Returns the directory of a run on this machine, as `opened_for_training` until the stack
    closes. Raises on all processes if that fails on one, as `share_failure`."""
    if run_dir is None:
        return None

    def look() -> tuple[Path, str]:
        directory = directory_here(run_dir)
        return directory, place_of(directory) if (directory / POINTER).exists() else ""

    directory, stored = share_failure(look)
    places = all_gather_text(stored)
    if not is_address(run_dir) and len({*places}) > 1:
        raise ValueError(
            f"{run_dir} is a run in {max(places)} on some hosts and not on others; give that "
            "address as --run-dir on all"
        )
    if is_address(run_dir) or stored:
        # Before any process changes a file there.
        share_failure(lambda: refuse_held(directory) if jax.process_index() == 0 else "")
    return share_failure(lambda: stack.enter_context(opened_for_training(run_dir)))


def begins_anew(run: Path | None, fresh: bool | str) -> tuple[bool, dict[str, str]]:
    """Returns whether a run begins anew, and what its config.json has of its beginning, the same on
    all processes. fresh: as for `train`. Raises ValueError for an empty text, and for a text where
    nobody can say whether the run there began with it."""
    if not isinstance(fresh, bool | str) or fresh == "":
        raise ValueError(
            f"fresh={fresh!r}; use True, False, or a text of one character or more, which repeated "
            "starts share"
        )
    look = partial(_beginning_for, fresh)
    recorded = {} if run is None or fresh is True else from_first(partial(look, run))
    if isinstance(fresh, str):
        anew = recorded.get(BEGUN_BY) != fresh
        return anew, {BEGUN_BY: fresh} if anew else recorded
    return fresh, recorded


def _beginning_for(fresh: bool | str, run: Path) -> dict[str, str]:
    """Returns what is recorded in a run's directory of its beginning."""
    try:
        return stored_beginning(run)
    except ValueError as error:
        if not isinstance(fresh, str):  # the run that goes on is refused for that
            return {}
        raise ValueError(
            f"{error}: nobody can say whether this run began with fresh={fresh!r} (--fresh-once), "
            "to resume it, or is another, to move it"
        ) from error


def stored_beginning(run: Path) -> dict[str, str]:
    """Returns the entries of a run's config.json that say how it began. Raises ValueError as
    `read_config`."""
    config = read_config(run) or {}
    return {k: v for k in (BEGUN_BY, START) if isinstance(v := config.get(k), str)}


def config_of_run(
    experiment: Experiment, branch: Branch | None, beginning: Mapping[str, str]
) -> dict[str, Any]:
    """Returns what a run's config.json records. beginning: as `begins_anew` returns it."""
    began: dict[str, Any] = {**beginning}
    if branch is not None:
        began[BRANCH] = from_first(lambda: branch.record(experiment))
        starts = experiment.start is not None
        if starts and branch.recorded is None:  # with the weights of the other run's beginning
            began |= from_first(lambda: _start_of(branch.run))
    return {"experiment": config_of(experiment), **began}


def _start_of(run: Path) -> dict[str, str]:
    return {k: v for k, v in stored_beginning(run).items() if k == START}


def with_start(config: dict[str, Any], begins: object) -> dict[str, Any]:
    """Returns a config.json with the digest of the weights that a run begins with, if it takes any.
    All processes call it."""
    if not config or not isinstance(begins, FromHuggingFace | FromRun):
        return config
    return {**config, START: from_first(lambda: start_digest(begins, fetch=True))}


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
    may_differ = {*resumable(stored, config["experiment"]), f"{BRANCH}.run"} - {*START_PATHS}
    differences = compare_config(run, config, ignore=tuple(may_differ), completed=complete)
    moved = any(difference.path in START_PATHS for difference in differences)
    why = start_problem(config, experiment.start) if moved else ""
    if moved and not why:
        may_differ |= {*START_PATHS}
    refuse_other_experiment(run, config, ignore=tuple(may_differ), completed=complete, why=why)
    if experiment.checkpoints is None:
        _refuse_begin_over(run)
    refuse_unusable(run, tensorboard=experiment.logging.tensorboard, process=process)
    return last


def refuse_unfit_anew(run: Path, config: dict[str, Any], experiment: Experiment) -> None:
    """Raises ValueError, and writes nothing, if what is in the directory cannot be set aside for a
    new run: another run holds it, it is no run, a link, the working directory, or has what the new
    run begins from. Also if the config could not be read back, or TensorBoard is missing."""
    refuse_unreadable(config)
    if jax.process_index() != 0:
        return
    begin = "and --fresh sets a run aside; give another --run-dir"
    if not is_local(checkpoints_in(run)):
        raise ValueError(f"{run} has its steps in {place_of(run)}, {begin}")
    if run.is_symlink():
        raise ValueError(f"{run} is a link to {os.readlink(run)}, {begin}, such as that path")
    if run.exists() and not run.is_dir():
        raise ValueError(f"{run} is a file, {begin}")
    refuse_held(run)
    if run.is_dir() and any(run.iterdir()) and not _has_been_run(run):
        raise ValueError(f"{run} holds files and no run, {begin}")
    if run.exists() and run.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise ValueError(f"{run} holds the working directory, {begin}")
    start = experiment.start
    places = (getattr(start, path.rpartition(".")[2], None) for path in START_PATHS)
    if any(Path(place).resolve().is_relative_to(run.resolve()) for place in places if place):
        raise ValueError(f"{run} has what this run begins from ({start!r}), {begin}")
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
    saved, aside = committed_steps(checkpoints_in(run)), steps_aside(checkpoints_in(run))
    if saved or aside:
        existing = [*(["step " + str(saved[-1])] if saved else []), *aside]
        raise ValueError(
            f"run directory {run} holds {', '.join(existing)} in checkpoints/, and "
            "experiment.checkpoints is None, which restores nothing: the run would begin at step 0 "
            "again and write over the metrics there; give it checkpoints=SavePolicy(...) as before "
            f"to go on, or {anew_in(run)}"
        )


class RunDirectory:
    """Locks the directory, and records what made the run and what its session is to keep. last: the
    run that held it last, by `refuse_unfit`. Raises ValueError if another run holds it, or has held
    it since, or if it cannot be written."""

    def __init__(self, path: Path, config: dict[str, Any], session: Session, last: str) -> None:
        self.path, self._config, self._session = path, config, session
        self._lock = ExitStack()
        self._copy = RunCopy.of(path)
        self._take(last)
        try:
            self._begin_copies()
        except BaseException:
            self._lock.close()
            raise

    def _take(self, last: str | None = None) -> None:
        self._is_locked = self._lock.enter_context(sole_run(self.path, last))
        self._inode = _inode(self.path)

    def _record(self) -> None:
        if self._copy is not None:
            self._copy.point()
        record_run(self.path, self._config, self._session.dataset)
        keep_references(self.path, self._session.reference_files)

    def _begin_copies(self) -> None:
        """Records the run, and makes the first copy if it has one."""
        if self._copy is None:
            self._record()
            return
        address = self._copy.address
        try:
            if problem := self._copy.taken():
                raise ValueError(problem)
            self._record()
            self._copy.make()
        except OSError as error:
            problem = f"{address} cannot be written"
            raise StoreFailed(problem, error, "give another --run-dir") from error
        notice(f"the run is kept in {address}; {self.path} has its files but the steps")

    def taken(self) -> str:
        """Returns why this run cannot go on, if another machine runs it; "" if none does. Raises
        OSError and ValueError where the store cannot be read."""
        return "" if self._copy is None else self._copy.taken()

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

    def copy(self) -> None:
        """Begins a copy into the store, for a run that has one, and says if the last one failed."""
        if self._copy is not None:
            if failure := self._copy.failure():
                notice(f"NOTE the last copy of {self.path} to {self._copy.address}: {failure}")
            self._copy.begin()

    def close(self) -> None:
        """Makes the last copy into the store, for a run that has one, and releases the lock."""
        with self._lock:
            if self._copy is not None:
                try:
                    self._copy.close()
                except (OSError, ValueError) as error:
                    address = self._copy.address
                    notice(f"NOTE {self.path} is not copied whole to {address}: {error}")


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.is_dir() else None


def left_in(run: Path, *, anew: str = "", text: str | None = None) -> tuple[int | None, str]:
    """Returns the newest step saved in a run's directory (None for none), and a sentence with that
    step and how to continue from it. anew: "fresh" or "numbered", by which the run began. text: by
    which it began; a run that is there and did not is another."""
    if text is not None and stored_beginning(run).get(BEGUN_BY) != text:
        return None, f"nothing is saved: the run has not begun in {shown(run)}"
    steps = committed_steps(checkpoints_in(run))
    if not steps:
        return None, f"nothing is saved in {shown(run)}"
    saved = f"step {steps[-1]} is saved in {shown(run)}"
    if not (run / NAME).is_file():
        return steps[-1], f"{saved}, which has lost its {NAME}: put it back to go on"
    if text is not None and not anew:
        return steps[-1], f"{saved}; a start with the same text goes on"
    if text is not None and SUPERVISOR in os.environ:  # the launch says how to go on
        return steps[-1], saved
    if anew == "numbered":
        return steps[-1], f"{saved}; --run-dir {run} in the place of --numbered goes on"
    return steps[-1], f"{saved}; the same command{' without --fresh' * bool(anew)} goes on"


def refuse_fewer_steps(run: AnyPath, done: int | None, last: int) -> None:
    """Raises ValueError if more steps are done than `last`, the step to end with.

    done: the newest undamaged step in the directory, None if there is none.
    """
    if done is not None and done > last:
        raise ValueError(
            f"run directory {run} is at step {done} already, and this run is to end at step "
            f"{last}: nothing would be trained; ask for {done} steps or more to go on from there, "
            f"or {anew_in(run)}"
        )


def last_step(steps: int | None, *, of_experiment: int) -> int:
    """Returns the step that a run of `steps` ends with, None for all of the experiment's. Raises
    ValueError if the experiment has fewer."""
    last = of_experiment if steps is None else steps
    if not 1 <= last <= of_experiment:
        raise ValueError(
            f"steps={last}; a run takes at least 1 step and at most experiment.steps="
            f"{of_experiment}, for which its schedules are made; use steps="
            f"{max(1, min(last, of_experiment))}, or another experiment.steps in a new run"
        )
    return last
