"""Asynchronous checkpoints with exact resume, on Orbax; no save is dropped silently."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import jax
from jaxtyping import PyTree

from jaxtrain.checkpoint.committed import CommittedSteps
from jaxtrain.checkpoint.policy import SaveClock, SavePolicy
from jaxtrain.checkpoint.retention import Retention
from jaxtrain.checkpoint.storage import (
    CheckpointError,
    FailedSave,
    FailedStorage,
    check_writable,
    describe,
    discard_steps,
    failure_of,
    forget_refused,
    json_text,
    make_and_remove,
    newest,
    refuse_step,
    remove_uncommitted,
    remove_unfinished,
    set_aside,
    unfinished_bytes,
)
from jaxtrain.cluster.agreement import all_gather_union, fresh_key, from_first, share_failure
from jaxtrain.files.store import AnyPath
from jaxtrain.state_format import leaves as leaf_table
from jaxtrain.state_format.manifest import refuse_other_step
from jaxtrain.state_format.parts import owned_parts
from jaxtrain.state_format.slots import AS_THEY_REST, AllSlots

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

MEND = "make room or mend the directory"


class CheckpointManager(CommittedSteps):
    """The checkpoints of one run, in one directory.

    Laws: a save is committed or it does not exist; a restored state equals the saved one to the
    bit, on any mesh, or DamagedCheckpoint lists the damage; every failure is raised, by the call it
    happened in or by the next one.

    `save` copies the state off the devices and returns; digests are taken and bytes reach the disk
    while next steps run (Mohan et al. 2021). Unchanged arrays are not written at every save:
    steps share two copies of them in turn, one where a single step is kept (`Retention.sharing`); a
    step's files have its chunks and nothing else. One save is in flight at a time. With several
    processes all of them make the same calls in the same order, on a directory they share. Not safe
    to use from two threads.

    Orbax is imported by the first `save`: calls before the first step of a fresh run
    (`latest`, `should_save`, `check_space`), and `restore`, stay cheap.

    mtbf_s: mean time between failures of the machines together, for `Minutes` of the policy.
    """

    def __init__(
        self, directory: str | AnyPath, policy: SavePolicy, *, mtbf_s: float | None = None
    ) -> None:
        super().__init__(directory)
        self.policy = policy
        self.clock = SaveClock(policy.every, mtbf_s)
        self.blocked_s = 0.0
        """Seconds that the last `save` took, without waiting for the previous save."""
        self.copy_failure = ""  # of the last `save`, as `OwnedParts` has it
        self._orbax: Any = None
        self._in_flight: int | None = None
        self._began, self._key = 0.0, ""
        self._retention = Retention(policy.keeping, self.directory)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def set_damaged_aside(self) -> dict[int, AnyPath]:
        """Renames the damaged steps, which frees their numbers. Returns their new paths."""
        steps = sorted(self.damaged.keys() & self._steps_of_all(), reverse=True)
        if not steps:
            return {}

        def rename() -> dict[int, AnyPath]:
            if jax.process_index():
                return {}
            return {step: set_aside(self.directory, step) for step in steps}

        with self._translated("could not be set aside", steps[0]):
            return share_failure(rename)

    def should_save(self, step: int) -> bool:
        """True if the policy saves after `step` steps. Called after every step."""
        return self.clock.due(step)

    def check_space(self, template: PyTree) -> None:
        """Raises ValueError, before a run, if the disk is too full for the states that are kept.

        One more than `keep` exist while the newest is written; existing steps count with the space
        that they free (`Retention.bytes_needed`).
        """
        needed = self._retention.bytes_needed(leaf_table.stored_bytes(template))
        check_writable(self.directory, max(0, needed - unfinished_bytes(self.directory)))

    def save(
        self,
        step: int,
        state: PyTree,
        metadata: dict[str, Any],
        slots: AllSlots = AS_THEY_REST,
        *,
        spare_bytes: int = 0,
    ) -> None:
        """Starts saving `state` and `metadata` as `step`; the arrays may be donated right after.

        slots: of leaves whose layers a checkpoint has in another order than the state. spare_bytes:
        memory of each device for a copy, as for `owned_parts`. Waits for the previous save, if that
        is still in flight. `metadata` is small JSON; it is restored as JSON (tuples as
        lists). `metadata["metrics"]` is what `Best` goes by. Where the metadata has a "step", or
        the state an integer leaf `step`, it is this one.

        Raises:
            ValueError: a leaf is not a `jax.Array`, paths collide, the metadata is not JSON, or it
                or the state is of another step.
            CheckpointError: the save before this one, or this one, failed (after a failure the
                next call starts afresh); or `step` is not newer than every committed step.
        """
        self.wait()
        self._began = time.perf_counter()
        try:
            self._save(step, state, metadata, slots, spare_bytes)
        finally:  # on every process, also after an error
            self.clock.saved(step)
            self.blocked_s = time.perf_counter() - self._began

    def _save(
        self, step: int, state: PyTree, metadata: dict[str, Any], slots: AllSlots, spare_bytes: int
    ) -> None:
        records = share_failure(lambda: self._checked(step, state, metadata, slots))
        with self._translated("could not be saved", step, FailedSave):
            last = newest(self.agreed_steps())
        self._refuse_old(step, last)
        with self._translated("could not be saved", step, FailedSave):
            self._retention.metrics[step] = metadata.get("metrics", {})
            # In Orbax, all would wait for a process that fails.
            handler, saving = share_failure(
                lambda: self._ready(step, records, state, metadata, slots, spare_bytes)
            )
            saving.key = self._key = fresh_key(self._key)  # all have waited for the save before
            # It may have failed on one alone. The others' is not closed: they might wait for it.
            if any(all_gather_union([self._orbax is None])):
                self._orbax = handler.open_orbax(self.directory)
            with self._settled_if_interrupted(self._orbax):
                self._in_flight = step
                # Else Orbax asks each process which steps it sees, and does not save on some.
                self._orbax.save(step, args=handler.composite(saving), force=True)

    def _checked(
        self, step: int, state: PyTree, metadata: dict[str, Any], slots: AllSlots
    ) -> dict[str, leaf_table.LeafRecord]:
        """Returns the records of the state's leaves. Raises ValueError."""
        json_text(metadata, name=f"metadata of step {step}")
        refuse_other_step(step, metadata, leaf_table.named_leaves(state))
        return leaf_table.records_of(state, slots)

    def restore(
        self, step: int, template: PyTree, slots: AllSlots = AS_THEY_REST
    ) -> tuple[PyTree, dict[str, Any]]:
        """Returns the state saved as `step`, with the template's shardings, and its metadata.

        `template` is the state's tree with `jax.ShapeDtypeStruct` leaves that carry shardings (or
        arrays that do); its containers may differ from those that were saved, its paths may not.
        slots: of leaves whose layers a checkpoint has in another order than the state.
        Each process reads only chunks of which its devices need a part, and verifies each whole.

        Raises:
            ValueError: the stored leaves are not those of `template`. All that are missing, extra
                or of another shape or dtype are listed, and nothing is read.
            DamagedCheckpoint: what was read, here or by another process, is not as it was written;
                `newest_whole` passes over the step from then on.
            CheckpointError: there is no such committed step.
        """
        self.wait()
        return self.restore_from(self.manifest(step), step, template, slots)

    def discard_after(self, step: int) -> list[int]:
        """Deletes every checkpoint newer than `step`, and returns their numbers.

        For a run that goes on from an older step: its history branches there, and the abandoned
        steps would make `save` refuse the new ones.
        """
        self.wait()

        def discard() -> list[int]:
            abandoned = [other for other in self.steps() if other > step]
            discard_steps(self.directory, abandoned)
            return abandoned

        with self._translated("newer steps could not be discarded", step):
            abandoned = from_first(discard)
            if self._orbax is not None:
                self._orbax.reload()
        return abandoned

    def poll(self) -> None:
        """Checks, after a step, whether the save in flight has failed; returns at once.

        Raises:
            CheckpointError: it failed, and why.
        """
        if self._in_flight is not None and not self._orbax.is_saving_in_progress():
            self._settle()

    def wait(self) -> None:
        """Returns when the save in flight is committed. All processes call it.

        Raises:
            CheckpointError: it was not, on some process, and why.
        """
        try:
            self._settle()
        except CheckpointError as error:
            all_gather_union([error.step, error.problem])
            raise
        if failure := all_gather_union(list[Any]()):
            step, *problems = failure
            raise self._error(FailedSave, f"on another process: {'; '.join(problems)}", step, MEND)

    def _settle(self) -> None:
        """Waits for the save of this process alone. Raises as `wait`."""
        if self._in_flight is None:
            return
        step = self._in_flight
        with self._translated("could not be saved", step, FailedSave):
            self._orbax.wait_until_finished()
            problem = failure_of(self.directory, step)
            if jax.process_index() == 0:
                # All have written this step, so all have asked about the ones before.
                forget_refused(self.directory)
                if problem:
                    refuse_step(self.directory, step)
            if problem:
                raise OSError(problem)
            # The directory alone is believed, as the process sees it that makes and removes steps.
            saved = jax.process_index() > 0 or step in self.steps()
        self._in_flight = None
        self.clock.save_s = time.perf_counter() - self._began
        if not saved:
            remedy = "see whether something else removes files there"
            raise self._error(FailedSave, "the writer ended, and it is not there", step, remedy)
        self._trusted.add(step)
        if jax.process_index() == 0:
            self._retention.drop_old(step)

    def is_saved(self, step: int) -> bool:
        """True if `step` is the newest committed one, as process 0 sees it. Raises FailedSave where
        that cannot be seen."""
        with self._translated("could not be saved", step, FailedSave):
            return newest(self.agreed_steps()) == step

    def close(self) -> None:
        """Waits for the save in flight and releases Orbax's threads. May be called again, and by
        one process alone."""
        self._settle()
        if self._orbax is not None:
            orbax, self._orbax = self._orbax, None
            orbax.close()

    def _ready(
        self,
        step: int,
        records: dict[str, leaf_table.LeafRecord],
        state: PyTree,
        metadata: dict[str, Any],
        slots: AllSlots,
        spare_bytes: int,
    ) -> tuple[Any, Any]:
        """Returns the module that imports Orbax, and what it is to save. Raises errors of any
        type; no other process is waited for."""
        make_and_remove(self.directory)
        if jax.process_index() == 0:  # Orbax fails where a store has some of the step
            remove_uncommitted(self.directory, step)
        # Imported here: it costs more than a second, which a fresh run need not wait for.
        from jaxtrain.checkpoint import handler

        # Bytes that this start has not read may have changed: they are not shared.
        source, apart = self._retention.sharing(step, self._trusted)
        parts = owned_parts(leaf_table.arrays_of(state), slots, spare_bytes)
        self.copy_failure = parts.copy_failure
        return handler, handler.ChunkSave(step, records, metadata, source, apart, parts)

    def _refuse_old(self, step: int, last: int | None) -> None:
        if last is not None and step <= last:
            problem = f"a save is newer than all others, and step {last} is committed"
            remedy = f"resume from step {last}, or call discard_after({step - 1}) first"
            raise self._error(CheckpointError, problem, step, remedy)

    @contextmanager
    def _settled_if_interrupted(self, manager: ocp.CheckpointManager) -> Iterator[None]:
        """After an interrupt, waits until Orbax has ended the save: the step is committed, or it is
        not and may be saved again."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self._orbax, self._in_flight = None, None
            with suppress(Exception):  # the directory shows the result
                manager.close()
            raise

    @contextmanager
    def _translated(self, problem: str, step: int, kind: Any = FailedStorage) -> Iterator[None]:
        """Raises errors of the storage as `kind`, with the error as its cause."""
        try:
            yield
        except Exception as error:
            # Orbax's list of steps may be wrong now; the next call makes a new manager.
            self._orbax, self._in_flight = None, None
            if jax.process_index() == 0:
                remove_unfinished(self.directory)
            raise self._error(kind, f"{problem}: {describe(error)}", step, MEND) from error

    def _error(self, kind: Any, problem: str, step: int, remedy: str) -> CheckpointError:
        return kind(problem, step=step, directory=self.directory, remedy=remedy)
