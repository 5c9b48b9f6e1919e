"""Asynchronous checkpoints with exact resume, on Orbax; no save is dropped silently."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jaxtyping import PyTree

from jaxtrain.checkpoint.policy import SaveClock, SavePolicy
from jaxtrain.checkpoint.retention import Retention
from jaxtrain.checkpoint.storage import (
    CheckpointError,
    DamagedCheckpoint,
    FailedSave,
    check_writable,
    committed_steps,
    describe,
    discard_steps,
    failure_of,
    forget_refused,
    json_text,
    make_and_remove,
    newest,
    refuse_step,
    refuse_to_begin_again,
    remove_unfinished,
    set_aside,
    unfinished_bytes,
    whole_manifest,
)
from jaxtrain.cluster.agreement import all_gather_union, share_oserror
from jaxtrain.files.stores import local_path
from jaxtrain.state_format import leaves as leaf_table
from jaxtrain.state_format.manifest import Foreign, Manifest, refuse_other_step
from jaxtrain.state_format.parts import owned_parts
from jaxtrain.state_format.reader import Damaged, Read, read_arrays, verify_chunks
from jaxtrain.state_format.slots import AS_THEY_REST, AllSlots

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

MEND = "make room or mend the directory"


class CheckpointManager:
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

    def __init__(self, directory: Path, policy: SavePolicy, *, mtbf_s: float | None = None) -> None:
        # Orbax refuses a relative one.
        self.directory = local_path("directory", directory).absolute()
        self.policy = policy
        self.foreign: Foreign = lambda metadata: []
        """Returns reasons to skip a step with this metadata, as damaged steps are skipped."""
        self.clock = SaveClock(policy.every, mtbf_s)
        self.damaged: dict[int, DamagedCheckpoint] = {}
        """Steps that were found damaged here and passed over."""
        self.blocked_s = 0.0
        """Seconds that the last `save` took, without waiting for the previous save."""
        self.copy_failure = ""  # of the last `save`, as `OwnedParts` has it
        self._orbax: Any = None
        self._in_flight: int | None = None
        self._began = 0.0
        self._retention = Retention(policy.keeping, self.directory)
        self._trusted: set[int] = set()  # steps that this start has written, or read whole

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return committed_steps(self.directory)

    def latest(self) -> int | None:
        """The newest committed step; one that is still being written does not count."""
        return newest(self.steps())

    def newest_whole(self, elsewhere: Collection[int] = ()) -> int | None:
        """Returns the newest step that is not known to be damaged and whose files are complete for
        every process, or that is complete `elsewhere`; None where no run has saved. Damaged steps
        are skipped and recorded in `damaged`.

        Raises DamagedCheckpoint where there are steps, or were, and each is damaged: a run must not
        start from the beginning silently where another has been.
        """
        for step in sorted({*self._steps_of_all(), *elsewhere} - self.damaged.keys())[::-1]:
            if step in elsewhere or self._whole_for_all(step):
                return step
        refuse_to_begin_again(self.directory, self.damaged)
        return None

    def whole_steps(self) -> list[int]:
        """Returns all steps that `newest_whole` accepts, ascending."""
        steps = sorted(self._steps_of_all() - self.damaged.keys())
        return [step for step in steps if self._whole_for_all(step)]

    def _steps_of_all(self) -> set[int]:
        """Steps that any process sees: a file system may show one to some of them only."""
        return set(all_gather_union(self.steps()))

    def _whole_for_all(self, step: int) -> bool:
        damages: list[str] = []
        try:
            damages = self.foreign(whole_manifest(self.directory, step).metadata)
        except DamagedCheckpoint as error:
            damages = error.damages
        except CheckpointError as error:
            damages = [str(error)]
        self._note(step, damages)
        return step not in self.damaged

    def _note(self, step: int, damages: list[str]) -> None:
        """Adds the step to `damaged` of every process if one has found damages."""
        if lines := all_gather_union(damages):
            details = {"remedy": "this step is passed over", "directory": self.directory}
            self.damaged[step] = DamagedCheckpoint(lines, step=step, **details)

    def verify_step(self, step: int) -> None:
        """Reads all chunks of a step that was restored from elsewhere, and adds it to `damaged` if
        one is not as it was written."""
        damages: list[str] = []
        if jax.process_index() == 0:
            try:
                damages = verify_chunks(whole_manifest(self.directory, step))
            except DamagedCheckpoint as error:
                damages = error.damages
        self._note(step, damages)
        if step not in self.damaged:
            self._trusted.add(step)

    def set_damaged_aside(self) -> dict[int, Path]:
        """Renames the damaged steps, which frees their numbers. Returns their new paths."""
        steps = sorted(self.damaged.keys() & self._steps_of_all(), reverse=True)
        if not steps:
            return {}

        def rename() -> dict[int, Path]:
            if jax.process_index():
                return {}
            return {step: set_aside(self.directory, step) for step in steps}

        with self._translated("could not be set aside", steps[0]):
            return share_oserror(rename)

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

        slots: of leaves that are stored in another order than at rest. spare_bytes: memory of
        each device for a copy, as for `owned_parts`. Waits for the previous save, if
        that is still in flight. `metadata` is small JSON; it is restored as JSON (tuples as
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
        records = leaf_table.records_of(state, slots)
        json_text(metadata, name=f"metadata of step {step}")
        refuse_other_step(step, metadata, leaf_table.named_leaves(state))
        self._refuse_old(step)
        with self._translated("could not be saved", step, FailedSave):
            # In Orbax a process that cannot write the step's directory makes the others wait.
            share_oserror(lambda: make_and_remove(self.directory))
            # Before Orbax is asked: it refuses a step with False, not with an error.
            handler = self._open()
            self._retention.metrics[step] = metadata.get("metrics", {})
            parts = owned_parts(leaf_table.arrays_of(state), slots, spare_bytes)
            self.copy_failure = parts.copy_failure
            # Bytes that this start has not read may have changed: they are not shared.
            source, apart = self._retention.sharing(step, self._trusted)
            saving = handler.ChunkSave(step, records, metadata, source, apart, parts)
            with self._settled_if_interrupted(self._orbax):
                self._in_flight = step
                started = self._orbax.save(step, args=handler.composite(saving))
        if not started:
            self._in_flight = None
            remedy = "remove step directories there that no run of ours wrote"
            raise self._error(FailedSave, "Orbax did not start to save it", step, remedy)

    def restore(
        self, step: int, template: PyTree, slots: AllSlots = AS_THEY_REST
    ) -> tuple[PyTree, dict[str, Any]]:
        """Returns the state saved as `step`, with the template's shardings, and its metadata.

        `template` is the state's tree with `jax.ShapeDtypeStruct` leaves that carry shardings (or
        arrays that do); its containers may differ from those that were saved, its paths may not.
        slots: of leaves that are stored in another order than at rest.
        Each process reads only chunks of which its devices need a part, and verifies each whole.

        Raises:
            ValueError: the stored leaves are not those of `template`. All that are missing, extra
                or of another shape or dtype are listed, and nothing is read.
            DamagedCheckpoint: what was read, here or by another process, is not as it was written;
                `newest_whole` passes over the step from then on.
            CheckpointError: there is no such committed step.
        """
        self.wait()
        return self.restore_from(whole_manifest(self.directory, step), step, template, slots)

    def restore_from(
        self,
        manifest: Manifest,
        step: int,
        template: PyTree,
        slots: AllSlots = AS_THEY_REST,
        read: Read | None = None,
    ) -> tuple[PyTree, dict[str, Any]]:
        """Does `restore` by a manifest of the step and a function that reads its chunks (None: from
        this tier)."""
        named = leaf_table.named_leaves(template)
        if problems := leaf_table.mismatches(named, manifest.leaves, slots):
            raise ValueError(
                f"checkpoint step {step} in {self.directory} does not fit the state asked for in "
                f"{len(problems)} places:\n  " + "\n  ".join(problems) + "\nresume with the "
                "experiment that saved it, or start a new run with another --run-dir"
            )
        damages: list[str] = []
        arrays: dict[str, jax.Array] = {}
        try:
            arrays = read_arrays(manifest, leaf_table.to_request(named), read, slots)
        except Damaged as error:
            damages = error.damages
        self._note(step, damages)
        if step in self.damaged:
            raise self.damaged[step]
        if read is None:
            self._trusted.add(step)
        placed = leaf_table.from_store(named, arrays, manifest.leaves)
        return jax.tree.unflatten(jax.tree.structure(template), placed), manifest.metadata

    def manifest(self, step: int) -> Manifest:
        """Returns the manifest of `step`: leaves, metadata, chunks. Raises as `restore`."""
        return whole_manifest(self.directory, step)

    def discard_after(self, step: int) -> list[int]:
        """Deletes every checkpoint newer than `step`, and returns their numbers.

        For a run that goes on from an older step: its history branches there, and the abandoned
        steps would make `save` refuse the new ones.
        """
        self.wait()
        abandoned = [other for other in self.steps() if other > step]

        def discard() -> None:
            if jax.process_index() == 0 and self.directory.is_dir():
                discard_steps(self.directory, abandoned)

        with self._translated("newer steps could not be discarded", step):
            share_oserror(discard)
            if self._orbax is not None:
                self._orbax.reload()
        return abandoned

    def poll(self) -> None:
        """Checks, after a step, whether the save in flight has failed; returns at once.

        Raises:
            CheckpointError: it failed, and why.
        """
        if self._in_flight is not None and not self._orbax.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Return when the save in flight is committed.

        Raises:
            CheckpointError: it was not, and why.
        """
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
        self._in_flight = None
        self.clock.save_s = time.perf_counter() - self._began
        if step not in self.steps():  # believe the directory only
            remedy = "see whether something else removes files there"
            raise self._error(FailedSave, "the writer ended, and it is not there", step, remedy)
        self._trusted.add(step)
        if jax.process_index() == 0:
            self._retention.drop_old(step)

    def close(self) -> None:
        """Wait for the save in flight and release Orbax's threads. May be called again."""
        self.wait()
        if self._orbax is not None:
            orbax, self._orbax = self._orbax, None
            orbax.close()

    def _open(self) -> Any:
        """Returns the module that imports Orbax; makes Orbax's manager at the first use."""
        # Imported here: it costs more than a second, which a fresh run need not wait for.
        from jaxtrain.checkpoint import handler

        if self._orbax is None:
            self._orbax = handler.open_orbax(self.directory)
        return handler

    def _refuse_old(self, step: int) -> None:
        last = self.latest()
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
    def _translated(self, problem: str, step: int, kind: Any = CheckpointError) -> Iterator[None]:
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
