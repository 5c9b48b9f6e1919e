"""Returns to a save from before a spike of the loss, and skips the batches that caused it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.checkpoint.policy import SavePolicy
from jaxtrain.checkpoint.storage import DamagedCheckpoint
from jaxtrain.experiment import LossSpikes
from jaxtrain.run.saving import Saving
from jaxtrain.run.watch import LossWatch
from jaxtrain.session.restore import restore_state
from jaxtrain.session.session import Session
from jaxtrain.step.state import TrainState
from jaxtrain.violations import raise_violations


class Spike(NamedTuple):
    """begins: the first high loss; seen: the step whose loss made it a spike, counted from 1."""

    begins: int
    seen: int


def refuse_without_saves(
    spikes: LossSpikes | None, policy: SavePolicy | None, run: Path | None
) -> None:
    """Raises ValueError if spikes are handled and no save would be old enough. Intervals in minutes
    cannot be checked."""
    if spikes is None:
        return
    goes_back, violations = "a run goes back to its saves", []
    if run is None:
        violations.append(f"{goes_back}; give a run_dir, or spikes=None")
    if policy is None:
        violations.append(f"{goes_back}; give checkpoints=SavePolicy(...), or spikes=None")
    elif policy.keeping.every is None:
        period = policy.every if isinstance(policy.every, int) else None
        keep = policy.keeping.latest
        fewest = 1 + max(1, -(-spikes.back // period) if period else 1)
        if keep < fewest:
            violations.append(
                f"{goes_back}, of which {keep} are kept, {period or policy.every} apart, and none "
                f"need be {spikes.back} steps old; use keep={fewest}, or a smaller back"
            )
    raise_violations(violations, "execution.health.spikes")


def good_step(saved: Sequence[int], begins: int, back: int) -> int | None:
    """The newest saved step that is more than `back` steps older than `begins`; the oldest one
    before `begins` if none is that old; None if none is before it."""
    earlier = sorted(step for step in saved if step < begins)
    return max([step for step in earlier if step < begins - back] or earlier[:1], default=None)


class Rollbacks:
    """Handles the spikes of a run, from its losses. Every process sees the same losses and so acts
    alike. tell: prints messages for the user.

    With `Health.replay` the batches of a spike are first repeated. They are skipped only if the
    spike comes again: another result means that they did not cause it.
    """

    def __init__(
        self, policy: LossSpikes, saving: Saving, session: Session, tell: Callable[[str], None]
    ) -> None:
        self._policy, self._saving, self._session, self._tell = policy, saving, session, tell
        self._twice = session.experiment.execution.health.replay is not None
        self._recent = deque[tuple[int, float]](maxlen=policy.window + policy.patience)
        self._first_time: dict[int, float] = {}
        """First losses of the steps that are repeated."""

    @property
    def _watch(self) -> LossWatch:
        assert self._saving.watch is not None, "there is a policy"
        return self._saving.watch

    @property
    def due(self) -> Spike | None:
        """The spike to act on now, or None."""
        since, seen = self._watch.since, self._watch.seen
        return None if since is None or seen is None else Spike(since, seen)

    @property
    def suspect(self) -> bool:
        """True if the latest losses were high: a save made now would not be used."""
        return self._watch.since is not None

    def see(self, step: int, values: Mapping[str, Any]) -> None:
        """Takes the metrics of the next step, equal on all processes. A step without trained tokens
        has no loss and is ignored."""
        if values["loss"] is None:
            return
        loss = float(values["loss"])
        first = self._first_time.pop(step, loss)
        if repr(first) != repr(loss):  # not a number is itself
            self._first_time = {}
            self._tell(
                f"NOTE step {step} was taken again, and its loss is {loss}, no longer {first}: a "
                "device computed wrongly (Health(replicas=...) finds which), or the program is not "
                "deterministic; no data is skipped for it"
            )
        self._recent.append((step, loss))
        self._watch.add(step, loss)

    def go_back(self) -> int | None:
        """Acts on the due spike. Returns the step that the run is at then, or None if nothing can
        be done and the run goes on as it is. Raises CheckpointError."""
        spike = self.due
        assert spike is not None, "a spike is due"
        repeated, acted = spike.begins <= self._watch.taken_twice, self._watch.acted
        message = f"SPIKE the loss jumped at step {spike.begins}, and was still up at {spike.seen}"
        step = self._step_for(spike) if repeated or acted < self._policy.most else None
        restored = None if step is None else self._restored(step, spike)
        if restored is None:
            spent = not repeated and acted >= self._policy.most
            no_save = (
                "no save is from before it" if step is None else "no save from before it is whole"
            )
            reason = f"{acted} were acted on" if spent else no_save
            self._tell(f"{message}: {reason}, and the run goes on")
            self._watch.begin_again()
            return None
        step, state = restored
        skips = self._session.loader.skips
        again = self._twice and not repeated
        if again:
            self._first_time = {s: loss for s, loss in self._recent if s > step}
            action = f"to take steps {step + 1} to {spike.seen} once more"
        else:
            skips = skips.back_to(step, spike.seen, self._policy.skip_more)
            self._first_time = {}
            action = f"and on without the next {skips.detected[-1][1]} batches, as "
            action += f"Health(skip_batches={skips.pairs}) has it"
        self._saving.watch = self._saving.watch_at(step)
        self._watch.acted = acted + (not repeated)
        self._watch.taken_twice = spike.seen if again else 0
        self._recent.clear()
        self._session.go_back(state, step, skips)
        self._tell(f"{message}: back to step {step}, {action}")
        return step

    def _step_for(self, spike: Spike) -> int | None:
        """The step to go back to; 0 if nothing was saved yet."""
        if saved := self._saving.whole_steps():
            return good_step(saved, spike.begins, self._policy.back)
        return None if self._session.start or self._saving.manager.damaged else 0

    def _restored(self, step: int, spike: Spike) -> tuple[int, TrainState] | None:
        """Returns (step, state) of the save at `step`, or of an older one if it is damaged; newer
        saves are then removed. None if all are damaged: the state stays, and nothing is removed.
        Raises CheckpointError."""
        session, saves = self._session, self._saving.manager
        with session.phases.within("restore"):
            put_back = _taken_off(session.state)  # the devices cannot hold two states
            candidate: int | None = step
            while candidate is not None:
                try:
                    state = self._state_after(candidate)
                except DamagedCheckpoint as error:  # on every process
                    self._tell(f"DAMAGED {error}")
                    remaining = saves.durable.whole_steps()
                    candidate = good_step(remaining, spike.begins, self._policy.back)
                else:
                    saves.go_back_to(candidate)
                    return candidate, state
            session.state = put_back()
        return None

    def _state_after(self, step: int) -> TrainState:
        """Raises DamagedCheckpoint."""
        session = self._session
        if step == 0:
            return session.beginning_state()
        return restore_state(session.at_rest, self._saving.manager.durable, step)


def _taken_off(state: TrainState) -> Callable[[], TrainState]:
    """Moves a state to the host. Returns a function that puts it back."""
    leaves, tree = jax.tree.flatten(state)
    host_leaves = []
    for leaf in leaves:
        shards = {str(shard.index): shard for shard in leaf.addressable_shards}  # copies once
        parts = {index: np.array(shard.data) for index, shard in shards.items()}
        host_leaves.append((leaf.shape, leaf.sharding, parts))
    for leaf in leaves:
        leaf.delete()

    def put_back() -> TrainState:
        return jax.tree.unflatten(
            tree,
            [
                jax.make_array_from_callback(
                    shape, sharding, lambda index, shards_of=parts: shards_of[str(index)]
                )
                for shape, sharding, parts in host_leaves
            ],
        )

    return put_back


def rollbacks_of(
    session: Session, saving: Saving | None, tell: Callable[[str], None]
) -> Rollbacks | None:
    """The `Rollbacks` of a run; None if spikes are not handled."""
    policy = session.experiment.execution.health.spikes
    return None if policy is None or saving is None else Rollbacks(policy, saving, session, tell)
