"""Saves of a run. A failed save is reported and the run goes on, except for the last save."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxtrain.checkpoint.storage import CheckpointError
from jaxtrain.checkpoint.tiers import Checkpoints
from jaxtrain.experiment import Experiment, config_of, of_another
from jaxtrain.files.pointer import checkpoints_in
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.run.watch import LossWatch
from jaxtrain.session.held_out_sets import OWN
from jaxtrain.session.session import Session

log = logging.getLogger(__name__)
T = TypeVar("T")


def checkpoints_of(run: Path | None, experiment: Experiment, spec: MeshSpec) -> Checkpoints | None:
    """Checkpoints of a run directory, for a run on this mesh; None without saves."""
    policy = experiment.checkpoints
    if run is None or policy is None:
        return None
    hours = spec.facts.mtbf_hours  # of one device; any that fails ends the run
    mtbf_s = None if hours is None else hours * 3600 / spec.devices
    foreign = partial(of_another, config=config_of(experiment), experiment=experiment)
    return Checkpoints(checkpoints_in(run), policy, mtbf_s=mtbf_s, foreign=foreign, run=run)


class Saving:
    """Saves the state of `session` through `manager`; `tell` prints messages for the user."""

    def __init__(self, manager: Checkpoints, session: Session, tell: Callable[[str], None]) -> None:
        self.manager, self.session, self.tell = manager, session, tell
        self._first, self._copies_fail = True, False
        self.watch = self.watch_at(session.start)

    def watch_at(self, step: int) -> LossWatch | None:
        """The loss watch from `step` on, which is 0 or saved; None if spikes are not handled."""
        policy = self.session.experiment.execution.health.spikes
        if policy is None:
            return None
        branch, metadata = self.session.branch, dict[str, Any]()
        if branch is None or step != branch.step:
            metadata = self.manager.manifest(step).metadata if step else {}
        elif branch.has_data(self.session.experiment, self.session.dataset):
            metadata = branch.manifest.metadata  # losses on other data tell nothing
        return LossWatch(policy, metadata.get("spikes"))

    @property
    def rated(self) -> bool:
        """True if saves need the values of an evaluation. If not, saves come before it, so that a
        kill during the evaluation loses nothing."""
        return self.manager.policy.keeping.best is not None

    def begin(self) -> None:
        """Reports the start step and sets newer saves aside. A step that only the local tier has,
        or for a branch another run, is first saved durably: a reboot, or that run, may remove
        it."""
        start, damaged = self.session.start, self.manager.damaged
        gone = self.manager.begin_after(start or None)
        for step, error in sorted(damaged.items(), reverse=True):
            moved = f"; it is kept as {gone[step]}" if step in gone else ""
            self.tell(f"DAMAGED {error}{moved}; going on from step {start}")
        if start and self.manager.from_local(start):
            self.tell(f"step {start} comes from the local tier")
        if start:
            self._attempt(lambda: self._save_unless_saved(start, {}, durable=True))
        self._tell_troubles()

    def whole_steps(self) -> list[int]:
        """Steps of the durable tier that can be restored, ascending. Waits for the save in
        flight."""
        self._attempt(self.manager.wait)
        return self.manager.durable.whole_steps()

    def due(self, done: int) -> str | None:
        """The tier to save to after `done` steps, or None. First reports failed saves in flight."""
        self._attempt(self.manager.poll)
        if self.manager.agrees(done):
            jax.block_until_ready(self.session.state)
        return self.manager.should_save(done)

    def save(self, step: int, metrics: dict[str, float], *, durable: bool) -> bool:
        """Begins to save the state after `step`, unless it is saved. Returns True if the save has
        begun; reports a failure."""
        if durable:
            self._attempt(self.manager.wait)  # what is in flight may be this very step
        return bool(self._attempt(lambda: self._save_unless_saved(step, metrics, durable=durable)))

    def save_last(self, step: int, metrics: dict[str, float]) -> bool:
        """Saves and waits; False if `step` is saved already. Raises CheckpointError if the save
        fails, since no later one can replace it."""
        self._attempt(self.manager.wait)
        try:
            begun = self._save_unless_saved(step, metrics, durable=True)
            self.manager.wait()
            return begun
        finally:
            self._tell_troubles()

    def _save_unless_saved(self, step: int, metrics: dict[str, float], *, durable: bool) -> bool:
        """Returns True if the save has begun: not if `step` is saved durably."""
        if durable and self.manager.is_saved(step):
            return False
        self._save(step, metrics, durable=durable)
        return True

    def _save(self, step: int, metrics: dict[str, float], *, durable: bool) -> None:
        skips, held_out = self.session.loader.skips, self.session.evaluate.digests
        metadata = {
            "step": step,
            "data": self.session.dataset.digest,
            "held_out": held_out.pop(OWN, None),
            "held_out_sets": held_out,
            "metrics": metrics,
            "experiment": config_of(self.session.experiment),
            "skipped": skips.before(step),
            "shift": skips.shift,
            "spikes": None if self.watch is None else self.watch.saved(),
        }
        state, slots = self.session.state, self.session.at_rest.slots
        # A failing allocation takes seconds: do not repeat it.
        spare = 0 if self._copies_fail else self.session.spare_bytes()
        self.manager.save(step, state, metadata, slots, durable=durable, spare_bytes=spare)
        if failure := self.manager.copy_failure:
            self._copies_fail = True
            note = (
                f"NOTE the state could not be copied on its devices ({failure}); step {step} was "
                "copied to the host first, and so are those that follow: the run waits for it"
            )
            # Only the first process's output is read.
            self.tell(note) if jax.process_index() == 0 else log.warning(note)
        if self._first:
            self._first = False
            self.tell(f"the first save held the run up for {self.manager.blocked_s:.3f} s")

    def _attempt(self, act: Callable[[], T]) -> T | None:
        """Returns what `act` returns; None if it fails, which is reported."""
        result = None
        try:
            result = act()
        except CheckpointError as error:
            self.tell(f"NOT SAVED {error}; the run goes on, and its next save tries again")
        self._tell_troubles()
        return result

    def _tell_troubles(self) -> None:
        for trouble in self.manager.take_troubles():
            self.tell(f"NOTE {trouble}; the run goes on")
