"""Detects wrong numbers in a run: copies of the state that differ, and steps that give another
result when repeated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.cluster.agreement import all_gather_text, all_gather_union
from jaxtrain.experiment import Health
from jaxtrain.health.digests import (
    Copies,
    DigestRows,
    LeafDifference,
    Shared,
    certain,
    compare,
    compile_digests,
    copies_of,
    covered,
    differing,
    digests_of,
    shared_copies,
    sole,
    summary,
)
from jaxtrain.health.kernel_check import check_kernels, is_checked
from jaxtrain.health.self_check import SelfCheck
from jaxtrain.session.session import Session
from jaxtrain.state_format.leaves import named_leaves
from jaxtrain.step.state import TrainState

MOST_LEAVES = 3
"""Most leaves that an error names; a wrong device often has more."""


class WrongNumbers(RuntimeError):
    """The state is wrong, so it is not saved; the newest checkpoint was compared before it was
    written. `devices`: one or more of them computed or stored it wrongly. `processes`: those that
    certainly have such a device."""

    def __init__(self, message: str, devices: Iterable[int], processes: tuple[int, ...]) -> None:
        self.devices, self.processes = tuple(sorted(set(devices))), processes
        super().__init__(message)


class HealthChecks:
    """Runs the checks that `Health` requests. `tell` prints messages for the user."""

    def __init__(self, health: Health, session: Session, tell: Callable[[str], None]) -> None:
        self._health, self._session, self._tell = health, session, tell
        self._compared = -1

    def begin(self) -> None:
        """Runs the checks of kernels and of first steps before the first step of this start, as far
        as they are requested. Raises ValueError."""
        session, steps = self._session, self._health.self_check
        left = session.experiment.steps - session.start
        if left and is_checked(self._health.kernels, session.assembly):
            with session.phases.within("compile"):
                check_kernels(session.assembly, self._tell, wanted=self._health.kernels)
        if steps is not None and left:
            with session.phases.within("compile"):
                SelfCheck(session, self._copy).run(min(steps, left), self._tell)

    def step(self, step: int, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Takes the step after `step` steps, twice where a replay is due. Raises WrongNumbers."""
        every, session = self._health.replay, self._session
        if every is None or (step + 1) % every:
            return session.step(batch)
        previous = self._copy(session.state)
        metrics = session.step(batch)
        first, second = self._rows_of(session.state), self._rows_of(session.again(previous, batch))
        wrong = sorted(device for device in first if (first[device] != second[device]).any())
        if all_wrong := all_gather_union(wrong):
            raise self._wrong_numbers(
                f"step {step + 1} was taken twice from the same state and batch, and came out "
                f"different on {_named(all_wrong)}: it computes wrongly, or the program is not "
                "deterministic there (on GPUs: --xla_gpu_deterministic_ops)",
                all_wrong,
                sole(all_wrong, _process_of()),
            )
        return metrics

    def after_step(self, done: int) -> None:
        """Compares copies where due. Raises WrongNumbers."""
        every = self._health.replicas
        if every is not None and done % every == 0:
            self.compare(done)

    def before_save(self, done: int) -> None:
        """Compares copies, so that no state with differing copies is saved. Raises WrongNumbers."""
        if self._health.replicas is not None:
            self.compare(done)

    def go_back(self) -> None:
        """Resets the comparison: steps that were compared come again."""
        self._compared = min(self._compared, 0)

    def compare(self, done: int) -> None:
        """Compare the copies of every leaf, of all devices, after `done` steps."""
        if self._compared == done:
            return
        if self._compared < 0 and (share := covered(self._copies)) < 1:
            self._tell(f"NOTE {1 - share:.0%} of the state's bytes have one copy, uncompared")
        own_rows, process = self._rows_of(self._session.state), jax.process_index()
        summaries = [summary(own_rows, s) for s in self._shared if process in s.processes]
        all_summaries = [json.loads(text) for text in all_gather_text(json.dumps(summaries))]
        if unlike := differing(all_summaries, self._shared):
            differences = self._differences(own_rows, unlike)
            devices = (device for difference in differences for device in difference.devices)
            raise self._wrong_numbers(
                _describe(differences, done), devices, certain(differences, _process_of())
            )
        self._compared = done

    def _differences(self, own_rows: DigestRows, unlike: list[Shared]) -> list[LeafDifference]:
        """Differences within `unlike`, by the rows of all devices; only the devices that hold those
        parts send theirs."""
        suspects = {copies for shared in unlike for copies in shared.copies}
        leaves = sorted({copies.leaf for copies in suspects})
        holders = {device for copies in suspects for device in copies.devices}
        sent = {d: row[leaves].tobytes().hex() for d, row in own_rows.items() if d in holders}
        rows: DigestRows = {}
        for text in all_gather_text(json.dumps(sent)):
            for device, digests in json.loads(text).items():
                row = rows[int(device)] = np.zeros(len(self._paths), np.uint32)
                row[leaves] = np.frombuffer(bytes.fromhex(digests), np.uint32)
        return compare(rows, [copies for copies in self._copies if copies in suspects], self._paths)

    def _wrong_numbers(
        self, message: str, devices: Iterable[int], processes: tuple[int, ...]
    ) -> WrongNumbers:
        """The error; a supervisor is informed of it."""
        self._session.phases.accuse(processes)
        return WrongNumbers(message, devices, processes)

    @cached_property
    def _copies(self) -> list[Copies]:
        return copies_of(self._session.assembly.abstract, self._session.shardings)

    @cached_property
    def _shared(self) -> list[Shared]:
        return shared_copies(self._copies, _process_of())

    @cached_property
    def _paths(self) -> list[str]:
        return list(named_leaves(self._session.assembly.abstract))

    @cached_property
    def _rows_of(self) -> Callable[[TrainState], DigestRows]:
        session = self._session
        with session.phases.within("compile"):
            program = compile_digests(session.assembly.abstract, session.shardings, session.mesh)
        session.other_programs.append(program)
        return partial(digests_of, program)

    @cached_property
    def _copy(self) -> Callable[[TrainState], TrainState]:
        with self._session.phases.within("compile"):
            return jax.jit(_copied).lower(self._session.state).compile()


def _copied(state: TrainState) -> TrainState:
    return jax.tree.map(jnp.copy, state)


def _describe(leaves: list[LeafDifference], done: int) -> str:
    lines = []
    for path, devices, by_majority in leaves[:MOST_LEAVES]:
        verdict = "against most others" if by_majority else "one of which is wrong"
        lines.append(f"{path}: {_named(devices)}, {verdict}")
    more = f", and {len(leaves) - MOST_LEAVES} leaves more" if len(leaves) > MOST_LEAVES else ""
    return (
        f"copies of the state differ after step {done}: {'; '.join(lines)}{more}; go on from the "
        "newest checkpoint, whose copies were compared"
    )


def _named(devices: Iterable[int]) -> str:
    """Names of devices, with their processes."""
    process_of = _process_of()
    names = [f"device {n} of process {process_of[n]}" for n in sorted(set(devices))]
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _process_of() -> dict[int, int]:
    return {device.id: device.process_index for device in jax.devices()}
