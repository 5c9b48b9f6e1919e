"""Whether the numbers of a run are those that were computed: copies that are the same, and steps
that come out the same when they are taken twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.cluster.agreement import all_gather_text, all_gather_union
from jaxtrain.experiment import Health
from jaxtrain.run.session import Session
from jaxtrain.state_format.leaves import named_leaves
from jaxtrain.step.digests import (
    Copies,
    Difference,
    Rows,
    compare,
    compile_digests,
    copies_of,
    covered,
)
from jaxtrain.step.state import TrainState

MOST_LEAVES = 3
"""Named in an error; a wrong device has often more."""


class WrongNumbers(RuntimeError):
    """The state is not what the run computed. It is not saved: the newest checkpoint was compared
    before it was written. `devices`: one or more of them computed or kept it wrongly."""

    def __init__(self, what: str, devices: Iterable[int]) -> None:
        self.devices = tuple(sorted(set(devices)))
        super().__init__(what)


class HealthChecks:
    """Those of a run, as `Health` asks for them. `tell` is given what the user should read."""

    def __init__(self, health: Health, session: Session, tell: Callable[[str], None]) -> None:
        self._health, self._session, self._tell = health, session, tell
        self._compared = -1

    def step(self, step: int, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Take the step after `step`, twice where it is due. Raises WrongNumbers."""
        every, session = self._health.replay, self._session
        if every is None or (step + 1) % every:
            return session.step(batch)
        kept = self._copy(session.state)
        metrics = session.step(batch)
        first, second = self._rows_of(session.state), self._rows_of(session.again(kept, batch))
        wrong = sorted(device for device in first if (first[device] != second[device]).any())
        if told := all_gather_union(wrong):
            raise WrongNumbers(
                f"step {step + 1} was taken twice from the same state and batch, and came out "
                f"different on {_named(told)}: it computes wrongly, or the program is not "
                "deterministic there (on GPUs: --xla_gpu_deterministic_ops)",
                told,
            )
        return metrics

    def after_step(self, done: int) -> None:
        """Compare copies where it is due. Raises WrongNumbers."""
        every = self._health.replicas
        if every is not None and done % every == 0:
            self.compare(done)

    def before_save(self, done: int) -> None:
        """So that no state is saved whose copies differ. Raises WrongNumbers."""
        if self._health.replicas is not None:
            self.compare(done)

    def go_back(self) -> None:
        """Steps that were compared come again."""
        self._compared = min(self._compared, 0)

    def compare(self, done: int) -> None:
        """Compare the copies of every leaf, of all devices, after `done` steps."""
        if self._compared == done:
            return
        if self._compared < 0 and (share := covered(self._copies)) < 1:
            self._tell(f"NOTE {1 - share:.0%} of the state's bytes have one copy, uncompared")
        mine = {
            device: row.tobytes().hex()
            for device, row in self._rows_of(self._session.state).items()
        }
        rows = {
            int(device): np.frombuffer(bytes.fromhex(text), np.uint32)
            for told in all_gather_text(json.dumps(mine))
            for device, text in json.loads(told).items()
        }
        if found := compare(rows, self._copies, self._paths):
            raise WrongNumbers(_told(found, done), (d for each in found for d in each.devices))
        self._compared = done

    @cached_property
    def _copies(self) -> list[Copies]:
        return copies_of(self._session.assembly.abstract, self._session.shardings)

    @cached_property
    def _paths(self) -> list[str]:
        return list(named_leaves(self._session.assembly.abstract))

    @cached_property
    def _rows_of(self) -> Callable[[TrainState], Rows]:
        session = self._session
        with session.phases.within("compile"):
            return compile_digests(session.assembly.abstract, session.shardings, session.mesh)

    @cached_property
    def _copy(self) -> Callable[[TrainState], TrainState]:
        with self._session.phases.within("compile"):
            return jax.jit(_copied).lower(self._session.state).compile()


def _copied(state: TrainState) -> TrainState:
    return jax.tree.map(jnp.copy, state)


def _told(found: list[Difference], done: int) -> str:
    lines = []
    for path, devices, known in found[:MOST_LEAVES]:
        verdict = "against most others" if known else "one of which is wrong"
        lines.append(f"{path}: {_named(devices)}, {verdict}")
    more = f", and {len(found) - MOST_LEAVES} leaves more" if len(found) > MOST_LEAVES else ""
    return (
        f"copies of the state differ after step {done}: {'; '.join(lines)}{more}; go on from the "
        "newest checkpoint, whose copies were compared"
    )


def _named(devices: Iterable[int]) -> str:
    """Devices, and the processes they are of."""
    by_id = {device.id: device for device in jax.devices()}
    names = [f"device {n} of process {by_id[n].process_index}" for n in sorted(set(devices))]
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
