"""The saves of a run: one that fails is told and the run goes on, unless nothing comes after it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint.run_config import config_differences
from jaxtrain.checkpoint.storage import CheckpointError
from jaxtrain.checkpoint.tiers import Checkpoints
from jaxtrain.experiment import Experiment, completed, config_of, resumable
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.run.saves.watch import LossWatch
from jaxtrain.run.session import Session

log = logging.getLogger(__name__)


def checkpoints_of(run: Path | None, experiment: Experiment, spec: MeshSpec) -> Checkpoints | None:
    """The checkpoints of a run directory, for a run on that mesh; None without one or the other."""
    policy = experiment.checkpoints
    if run is None or policy is None:
        return None
    hours = spec.facts.mtbf_hours  # of one device; any that fails ends the run
    mtbf_s = None if hours is None else hours * 3600 / spec.devices
    foreign = partial(_foreign, experiment)
    return Checkpoints(run / "checkpoints", policy, mtbf_s=mtbf_s, foreign=foreign)


def _foreign(experiment: Experiment, metadata: dict[str, Any]) -> list[str]:
    """Why a step that was saved with that metadata is none of the experiment's."""
    if metadata.get("experiment") is None:
        return []
    try:
        config = config_of(experiment)
        found = config_differences(
            {"experiment": metadata["experiment"]},
            {"experiment": config},
            ignore=resumable(metadata["experiment"], config),
            completed=partial(completed, experiment=experiment),
        )
    except ValueError as error:
        return [f"its experiment cannot be read: {error}"]
    return [f"it is of another experiment: {'; '.join(map(str, found))}"] if found else []


class Saving:
    """Saves the state of `session` through `manager`; `tell` is given what the user should read."""

    def __init__(self, manager: Checkpoints, session: Session, tell: Callable[[str], None]) -> None:
        self.manager, self.session, self.tell = manager, session, tell
        self._first, self._copies_fail = True, False
        self.watch = self.watch_at(session.start)

    def watch_at(self, step: int) -> LossWatch | None:
        """What watches the losses that follow that step, which is 0 or saved; None for nothing."""
        policy = self.session.experiment.execution.health.spikes
        if policy is None:
            return None
        metadata = self.manager.manifest(step).metadata if step else {}
        return LossWatch(policy, metadata.get("spikes"))

    @property
    def rated(self) -> bool:
        """Whether saves need the values of an evaluation. Without, they come before it: nothing is
        lost if the run is killed while it evaluates."""
        return self.manager.policy.keeping.best is not None

    def begin(self) -> None:
        """Tell where the run goes on from, and leave behind what is newer. A step that only the
        local tier has is saved durably before another is taken: a reboot would lose it."""
        start, damaged = self.session.start, self.manager.damaged
        gone = self.manager.begin_after(start or None)
        for step, error in sorted(damaged.items(), reverse=True):
            kept = f"; it is kept as {gone[step]}" if step in gone else ""
            self.tell(f"DAMAGED {error}{kept}; going on from step {start}")
        if start and self.manager.from_local(start):
            self.tell(f"step {start} comes from the local tier")
            if self.manager.latest() != start:
                self._succeeds(lambda: self._save(start, {}, durable=True))
        self._tell_troubles()

    def whole_steps(self) -> list[int]:
        """The steps of the durable tier that can be gone back to, ascending, once the save in
        flight is there."""
        self._succeeds(self.manager.wait)
        return self.manager.durable.whole_steps()

    def due(self, done: int) -> str | None:
        """Which tier to save to after `done` steps. Tells first what became of saves in flight."""
        self._succeeds(self.manager.poll)
        if self.manager.agrees(done):
            jax.block_until_ready(self.session.state)
        return self.manager.should_save(done)

    def save(self, step: int, metrics: dict[str, float], *, durable: bool) -> bool:
        """Begin to save the state after `step`, unless it is there already; whether it has begun. A
        failure is told."""
        if durable:
            self._succeeds(self.manager.wait)  # what is in flight may be this very step
        if durable and self.manager.latest() == step:
            return False
        return self._succeeds(lambda: self._save(step, metrics, durable=durable))

    def save_last(self, step: int, metrics: dict[str, float]) -> bool:
        """As `save`, and wait until it is there. Raises CheckpointError where it could not be: no
        later save makes up for it."""
        self._succeeds(self.manager.wait)
        try:
            if self.manager.latest() == step:
                return False
            self._save(step, metrics, durable=True)
            self.manager.wait()
            return True
        finally:
            self._tell_troubles()

    def _save(self, step: int, metrics: dict[str, float], *, durable: bool) -> None:
        metadata = {
            "step": step,
            "data": self.session.dataset.digest,
            "metrics": metrics,
            "experiment": config_of(self.session.experiment),
            "skipped": self.session.loader.skips.before(step),
            "spikes": None if self.watch is None else self.watch.saved(),
        }
        state, slots = self.session.state, self.session.at_rest.slots
        # An allocator that finds no memory looks for it for seconds: one failure is enough.
        spare = 0 if self._copies_fail else self.session.spare_bytes()
        self.manager.save(step, state, metadata, slots, durable=durable, spare_bytes=spare)
        if failure := self.manager.copy_failure:
            self._copies_fail = True
            told = (
                f"NOTE the state could not be copied on its devices ({failure}); step {step} was "
                "copied to the host first, and so are those that follow: the run waits for it"
            )
            # What other processes tell nobody reads.
            self.tell(told) if jax.process_index() == 0 else log.warning(told)
        if self._first:
            self._first = False
            self.tell(f"the first save held the run up for {self.manager.blocked_s:.3f} s")

    def _succeeds(self, act: Callable[[], Any]) -> bool:
        """Whether it succeeded; a failure is told."""
        failed = False
        try:
            act()
        except CheckpointError as error:
            failed = True
            self.tell(f"NOT SAVED {error}; the run goes on")
        self._tell_troubles()
        return not failed

    def _tell_troubles(self) -> None:
        for trouble in self.manager.take_troubles():
            self.tell(f"NOTE {trouble}; the run goes on")
