"""Back to a save from before a spike of the loss, and past the batches that came with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.checkpoint.storage import DamagedCheckpoint
from jaxtrain.experiment import Experiment, LossSpikes
from jaxtrain.run.restore import restore_state
from jaxtrain.run.saves.saving import Saving
from jaxtrain.run.saves.watch import LossWatch
from jaxtrain.run.session import Session
from jaxtrain.step.state import TrainState
from jaxtrain.violations import raise_violations


class Spike(NamedTuple):
    """begins: its first high loss; seen: the step whose loss made it one, counted from 1."""

    begins: int
    seen: int


def refuse_without_saves(experiment: Experiment, run: Path | None) -> None:
    """Raises ValueError where spikes are to be acted on and there will be no save from before
    one. Where saves are counted in minutes nobody knows."""
    spikes, policy = experiment.execution.health.spikes, experiment.checkpoints
    if spikes is None:
        return
    goes_back, found = "a run goes back to its saves", []
    if run is None:
        found.append(f"{goes_back}; give a run_dir, or spikes=None")
    if policy is None:
        found.append(f"{goes_back}; give checkpoints=SavePolicy(...), or spikes=None")
    elif policy.keeping.every is None:
        apart, kept = policy.every if isinstance(policy.every, int) else None, policy.keeping.latest
        fewest = 1 + max(1, -(-spikes.back // apart) if apart else 1)
        if kept < fewest:
            found.append(
                f"{goes_back}, of which {kept} are kept, {apart or policy.every} apart, and none "
                f"need be {spikes.back} steps old; use keep={fewest}, or a smaller back"
            )
    raise_violations(found, "execution.health.spikes")


def good_step(saved: Sequence[int], begins: int, back: int) -> int | None:
    """The newest of the saved steps that is so many steps before the one a spike begins with; the
    oldest from before it, where none is as old; None where none is from before it."""
    before = sorted(step for step in saved if step < begins)
    return max([step for step in before if step < begins - back] or before[:1], default=None)


class Rollbacks:
    """Acts on the spikes of a run, whose losses it is shown one by one. Every process has the same
    losses, and so does the same. tell: takes what the user should read.

    With `Health.replay` the batches of a spike are taken once more before they are skipped. What
    comes out otherwise then was no fault of theirs.
    """

    def __init__(
        self, policy: LossSpikes, saving: Saving, session: Session, tell: Callable[[str], None]
    ) -> None:
        self._policy, self._saving, self._session, self._tell = policy, saving, session, tell
        self._twice = session.experiment.execution.health.replay is not None
        self._recent = deque[tuple[int, float]](maxlen=policy.window + policy.patience)
        self._first_time: dict[int, float] = {}
        """Losses of the steps that are taken once more."""

    @property
    def _watch(self) -> LossWatch:
        assert self._saving.watch is not None, "there is a policy"
        return self._saving.watch

    @property
    def due(self) -> Spike | None:
        """What is to be acted on now."""
        since, seen = self._watch.since, self._watch.seen
        return None if since is None or seen is None else Spike(since, seen)

    @property
    def suspect(self) -> bool:
        """Whether the latest losses were high: what is saved now would not be gone back to."""
        return self._watch.since is not None

    def see(self, step: int, values: Mapping[str, Any]) -> None:
        """The metrics of the step that comes next. They are those of all processes. One that learnt
        from no token has no loss, and says nothing of the others."""
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
        """Act on the spike that is due; gives the step that the run is at then, None where nothing
        can be done and the run goes on as it is. Raises CheckpointError."""
        spike = self.due
        assert spike is not None, "a spike is due"
        known, acted = spike.begins <= self._watch.taken_twice, self._watch.acted
        said = f"SPIKE the loss jumped at step {spike.begins}, and was still up at {spike.seen}"
        step = self._step_for(spike) if known or acted < self._policy.most else None
        restored = None if step is None else self._restored(step, spike)
        if restored is None:
            spent = not known and acted >= self._policy.most
            none = (
                "no save is from before it" if step is None else "no save from before it is whole"
            )
            why = f"{acted} were acted on" if spent else none
            self._tell(f"{said}: {why}, and the run goes on")
            self._watch.begin_again()
            return None
        step, state = restored
        skips = self._session.loader.skips
        again = self._twice and not known
        if again:
            self._first_time = {s: loss for s, loss in self._recent if s > step}
            what = f"to take steps {step + 1} to {spike.seen} once more"
        else:
            skips = skips.back_to(step, spike.seen, self._policy.skip_more)
            self._first_time = {}
            what = f"and on without the next {skips.found[-1][1]} batches, as "
            what += f"Health(skip_batches={skips.pairs}) has it"
        self._saving.watch = self._saving.watch_at(step)
        self._watch.acted = acted + (not known)
        self._watch.taken_twice = spike.seen if again else 0
        self._recent.clear()
        self._session.go_back(state, step, skips)
        self._tell(f"{said}: back to step {step}, {what}")
        return step

    def _step_for(self, spike: Spike) -> int | None:
        """The step to go back to; 0, where nothing was saved yet."""
        if saved := self._saving.whole_steps():
            return good_step(saved, spike.begins, self._policy.back)
        return None if self._session.start or self._saving.manager.damaged else 0

    def _restored(self, step: int, spike: Spike) -> tuple[int, TrainState] | None:
        """The state after `step` steps, or of another save from before the spike where that one is
        damaged; what is newer is removed once it is read. None where all are: the state is what it
        was then, and nothing is removed. Raises CheckpointError."""
        session, saves = self._session, self._saving.manager
        with session.phases.within("restore"):
            put_back = _taken_off(session.state)  # not two of them on the devices
            wanted: int | None = step
            while wanted is not None:
                try:
                    state = self._state_after(wanted)
                except DamagedCheckpoint as error:  # on every process
                    self._tell(f"DAMAGED {error}")
                    whole = saves.durable.whole_steps()
                    wanted = good_step(whole, spike.begins, self._policy.back)
                else:
                    saves.go_back_to(wanted)
                    return wanted, state
            session.state = put_back()
        return None

    def _state_after(self, step: int) -> TrainState:
        """Raises DamagedCheckpoint."""
        session = self._session
        if step == 0:
            return session.beginning_state()
        return restore_state(session.at_rest, self._saving.manager.durable, step)


def _taken_off(state: TrainState) -> Callable[[], TrainState]:
    """Takes a state off its devices; what it gives puts it back."""
    leaves, tree = jax.tree.flatten(state)
    held = []
    for leaf in leaves:
        shards = {str(shard.index): shard for shard in leaf.addressable_shards}  # copies once
        parts = {where: np.array(shard.data) for where, shard in shards.items()}
        held.append((leaf.shape, leaf.sharding, parts))
    for leaf in leaves:
        leaf.delete()

    def put_back() -> TrainState:
        return jax.tree.unflatten(
            tree,
            [
                jax.make_array_from_callback(
                    shape, sharding, lambda index, of=parts: of[str(index)]
                )
                for shape, sharding, parts in held
            ],
        )

    return put_back


def rollbacks_of(
    session: Session, saving: Saving | None, tell: Callable[[str], None]
) -> Rollbacks | None:
    """Those of a run; None where nothing is done about spikes."""
    policy = session.experiment.execution.health.spikes
    return None if policy is None or saving is None else Rollbacks(policy, saving, session, tell)
