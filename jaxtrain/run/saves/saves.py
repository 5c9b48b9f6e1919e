"""The saves of a run: as they are due, as they are asked for, and when it leaves."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jaxtrain.checkpoint.policy import EVALUATED_BATCHES
from jaxtrain.cluster.agreement import share_failure
from jaxtrain.run.callback import Running
from jaxtrain.run.directory import RunDirectory
from jaxtrain.run.health import HealthChecks
from jaxtrain.run.hooks import Hooks, MetricsFiles
from jaxtrain.run.rates import Rates
from jaxtrain.run.readings import Readings
from jaxtrain.run.result import Result
from jaxtrain.run.saves.rollback import Rollbacks
from jaxtrain.run.saves.saving import Saving
from jaxtrain.run.session import Session
from jaxtrain.run.uninterrupted import Uninterrupted


@dataclass
class Saves:
    """Saves the state after the steps that `result` has, through `saving`; nothing where that is
    None. The others are those of the same run."""

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
    """The step of which `result` has an evaluation."""

    @property
    def rated(self) -> bool:
        """Whether saves need the values of an evaluation."""
        return self.saving is not None and self.saving.rated

    def begin(self) -> None:
        """Before the first step."""
        if self.saving is not None:
            self.uninterrupted(self.saving.begin)

    def due(self, done: int) -> str | None:
        """Which tier to save to after `done` steps."""
        if self.saving is None:
            return None
        with self.session.phases.within("save"):
            return self.uninterrupted(self.saving.due, done)

    def save(self, *, last: bool, durable: bool = True) -> None:
        """As `_save_now`, in one piece whatever interrupts it, and told to callbacks; the step's
        metrics first, which a run that goes on from the save never has again."""
        if self.saving is None:
            return
        with self.session.phases.within("save"):
            begun = self.uninterrupted(self._ready, last, durable)
            if begun:
                self.readings.flush()
                begun = self.uninterrupted(self._save_now, last, durable)
        if begun:
            self.hooks.tell("after_save", self.result.steps)

    def go_back(self) -> int | None:
        """Act on the spike that is due; the step the run is at then, None for the one it is at.
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
        """Whether there is a directory to save in, and a state worth it."""
        assert self.saving is not None
        jax.block_until_ready(self.session.state)  # the step's time is its own, not the save's
        with self.rates.paused():
            self.health.before_save(self.result.steps)
            if not self._directory_is_whole(last):
                self.saving.manager.put_off(self.result.steps, durable=durable)
                return False
        return True

    def _save_now(self, last: bool, durable: bool = True) -> bool:
        """Whether a save of this step has begun, unless it was there, or its loss is high. last:
        nothing comes after it. Then it raises what is told otherwise: CheckpointError, and
        ValueError where the run directory is gone and cannot be written again."""
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

    def _directory_is_whole(self, last: bool) -> bool:
        """Whether the run directory is there to save in, and can be gone on from: the same on every
        process, for they all wait for each other in a save."""
        try:
            share_failure(self._write_again)
        except (OSError, ValueError) as error:
            if last:
                raise
            self.run.tell(f"NOT SAVED step {self.result.steps}: {error}; the run goes on")
            return False
        return True

    def _write_again(self) -> None:
        """What was removed of the run directory. Raises ValueError and OSError."""
        assert self.saving is not None
        found = self.directory.written_again() if self.directory else None
        if found is not None:
            self.saving.manager.name_again()
            self.run.tell(f"NOTE {found}")
            self.files.write_again(self.run)

    def _evaluation_at(self, step: int) -> dict[str, float]:
        """What an evaluation after `step` found, for `Best`; {} where none was like the others."""
        e = self.session.experiment.evaluation
        alike = e is not None and (step < self.run.whole or e.final_batches == e.batches)
        if e is None or not alike or self.evaluated_at != step:
            return {}
        return {**self.result.evaluation, EVALUATED_BATCHES: e.batches or 0}

    def leave(self, word: str) -> None:
        """Save what is whole: the state after the last finished step."""
        tell = self.run.tell
        self.hooks.own_alone()  # one of the others may be why it ends
        if jax.process_count() > 1:  # a save is of all processes, and the others may go on
            latest = self.saving and self.saving.manager.latest()
            tell(f"{word} on one process of several; the newest save is {latest}")
            return
        self.session.phases.enter("finish")
        if self.saving is None:
            tell(f"{word}; nothing is saved without checkpoints in a run_dir")
            return
        if not self.session.alive():
            latest = self.saving.manager.latest()
            tell(f"{word}: the last step failed; the newest save is {latest}")
            return
        self.result.steps = int(self.session.state.step)
        self.run.end_at(self.result.steps)
        if self._ready(last=True):
            self.readings.flush()
            self._save_now(last=True)
        tell(f"{word}; saved step {self.result.steps}")
        self.files.write_held(self.run)

    def after_error(self, error: Exception) -> None:
        """As for an interrupt; what else fails then is noted on the error that came first."""
        try:
            self.leave("failed")
        except Exception as second:
            error.add_note(f"saving what was reached failed too: {second}")
