"""The saves of a run: those due, those requested, and the last one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax

from jaxtrain.checkpoint.policy import EVALUATED_BATCHES
from jaxtrain.checkpoint.storage import CheckpointError, FailedSave
from jaxtrain.cluster.agreement import FailedTogether, from_first
from jaxtrain.health.checks import HealthChecks
from jaxtrain.run.callback import Running
from jaxtrain.run.directory import RunDirectory
from jaxtrain.run.hooks import Hooks, MetricsFiles
from jaxtrain.run.readings import Readings
from jaxtrain.run.result import Result
from jaxtrain.run.rollback import Rollbacks
from jaxtrain.run.saving import Saving
from jaxtrain.run.uninterrupted import Uninterrupted
from jaxtrain.session.rates import Rates
from jaxtrain.session.session import Session


@dataclass
class Saves:
    """Saves the run's state, as it is after `result.steps` steps, by `saving`; does nothing if that
    is None. The other fields are the objects of the same run."""

    result: Result
    session: Session
    run: Running
    saving: Saving | None
    directory: RunDirectory | None
    health: HealthChecks
    readings: Readings
    rates: Rates
    hooks: Hooks
    files: MetricsFiles
    uninterrupted: Uninterrupted
    rollbacks: Rollbacks | None
    evaluated_at: int | None = None
    """The step that the evaluation in `result` is of."""

    @property
    def rated(self) -> bool:
        """True if saves need the values of an evaluation."""
        return self.saving is not None and self.saving.rated

    def begin(self) -> None:
        """Prepares saving, before the first step."""
        if self.saving is not None:
            self.uninterrupted(self.saving.begin)

    def due(self, done: int) -> str | None:
        """The tier to save to after `done` steps, or None."""
        if self.saving is None:
            return None
        with self.session.phases.within("save"):
            return self.uninterrupted(self.saving.due, done)

    def save(self, *, last: bool, durable: bool = True) -> None:
        """Saves as `_save_now`, not cut short by interrupts, and calls the callbacks. Flushes
        metrics first: a run that goes on from the save cannot recompute them."""
        if self.saving is None:
            return
        with self.session.phases.within("save"):
            begun = self.uninterrupted(self._ready, last, durable)
            if begun:
                self.readings.flush()
                begun = self.uninterrupted(self._save_now, last, durable)
        if begun:
            if durable and self.directory is not None:
                self.directory.copy()
            self.hooks.tell("after_save", self.result.steps)

    def go_back(self) -> int | None:
        """Acts on the due spike. Returns the step that the run goes back to, or None if it stays.
        Raises CheckpointError."""
        assert self.rollbacks is not None
        with self.rates.paused():
            step = self.uninterrupted(self.rollbacks.go_back)
        if step is None:
            return None
        self.result.steps, self.evaluated_at = step, None
        self.run.advance(step)
        self.readings.go_back(step)
        self.health.go_back()
        self.session.phases.go_back(step)
        self.hooks.tell("after_rollback", step)
        return step

    def _ready(self, last: bool, durable: bool = True) -> bool:
        """True if the directory is usable and the state passed its checks."""
        assert self.saving is not None
        jax.block_until_ready(self.session.state)  # the step's time is its own, not the save's
        with self.rates.paused():
            self.health.before_save(self.result.steps)
            if not self._directory_is_whole(last, durable=durable or last):
                self.saving.manager.put_off(self.result.steps, durable=durable)
                return False
        return True

    def _save_now(self, last: bool, durable: bool = True) -> bool:
        """Returns True if a save of this step has begun: not if it exists, or if the loss is high.
        last: the final save; failures raise CheckpointError, or ValueError if the run directory is
        gone and cannot be written again."""
        assert self.saving is not None
        with self.rates.paused():
            step, metrics = self.result.steps, self._evaluation_at(self.result.steps)
            if self.rollbacks and self.rollbacks.suspect and not last:
                self.run.tell(f"step {step} is not saved: its loss is high")
                self.saving.manager.put_off(step, durable=durable)
                return False
            if not last:
                return self.saving.save(step, metrics, durable=durable)
            begun = self.saving.save_last(step, metrics)
        self.result.saved = step
        return begun

    def _directory_is_whole(self, last: bool, *, durable: bool) -> bool:
        """True if the run directory exists and the run can resume from it. Equal on every process,
        as all wait for each other in a save."""
        try:
            taken = from_first(lambda: self._write_again(durable=durable))
        except (OSError, ValueError, FailedTogether) as error:
            if last:
                raise
            self.run.tell(f"NOT SAVED step {self.result.steps}: {error}; the run goes on")
            return False
        if taken:
            assert self.saving is not None
            place: Any = dict(step=self.result.steps, directory=self.saving.manager.directory)
            raise FailedSave(f"not saved: {taken}", remedy="leave this run to the other", **place)
        return True

    def _write_again(self, *, durable: bool) -> str:
        """Restores removed parts of the run directory. Returns why a durable save is not to be made
        there, "" if it is. Raises ValueError and OSError."""
        assert self.saving is not None and self.directory is not None, "process 0 has it"
        taken = ""
        if durable:
            with suppress(OSError):  # a store that does not answer fails the save itself
                taken = self.directory.taken()
        message = self.directory.restore_missing()
        if message is not None:
            self.saving.manager.name_again()
            self.run.tell(f"NOTE {message}")
            self.files.write_again(self.run)
        return taken

    def _evaluation_at(self, step: int) -> dict[str, float]:
        """Evaluation at `step`, for `Best`; {} if it used another number of batches."""
        e = self.session.experiment.evaluation
        usable = e is not None and (step < self.run.planned_last or e.final_batches == e.batches)
        if e is None or not usable or self.evaluated_at != step:
            return {}
        return {**self.result.evaluation, EVALUATED_BATCHES: e.batches or 0}

    def leave(self, word: str) -> None:
        """Saves the state after the last finished step."""
        tell = self.run.tell
        self.hooks.own_alone()  # a user callback may be the cause
        if jax.process_count() > 1:  # a save needs all processes, and the others may go on
            tell(f"{word} on one process of several; {self._newest()}")
            return
        self.session.phases.enter("finish")
        if self.saving is None:
            tell(f"{word}; nothing is saved without checkpoints in a run_dir")
            return
        if not self.session.alive():
            tell(f"{word}: the last step failed; {self._newest()}")
            return
        self.result.steps = int(self.session.state.step)
        self.run.end_at(self.result.steps)
        if self._ready(last=True):
            self.readings.flush()
            self._save_now(last=True)
        tell(f"{word}; saved step {self.result.steps}")
        self.files.write_waiting(self.run)

    def _newest(self) -> str:
        try:
            step = None if self.saving is None else self.saving.manager.latest()
        except (OSError, CheckpointError) as error:
            return f"what is saved cannot be seen: {error}"
        return "nothing is saved" if step is None else f"the newest save is {step}"

    def after_error(self, error: Exception) -> None:
        """Saves as for an interrupt; a second failure, unless it is the same again, becomes a note
        on the first error."""
        try:
            self.leave("failed")
        except Exception as second:
            if str(second) != str(error):
                error.add_note(f"saving what was reached failed too: {second}")
