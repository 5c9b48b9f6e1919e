"""The committed steps of a run: which are whole, and their state on this mesh."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
from jaxtyping import PyTree

from jaxtrain.checkpoint.storage import (
    CheckpointError,
    DamagedCheckpoint,
    FailedStorage,
    answering,
    committed_steps,
    newest,
    refuse_to_begin_again,
    whole_manifest,
)
from jaxtrain.cluster.agreement import all_gather_union, from_first, share_failure
from jaxtrain.files.store import AnyPath, any_path
from jaxtrain.state_format import leaves as leaf_table
from jaxtrain.state_format.manifest import Foreign, Manifest
from jaxtrain.state_format.reader import Damaged, ReadChunk, read_arrays, verify_chunks
from jaxtrain.state_format.slots import AS_THEY_REST, AllSlots


def read_for_all(
    manifest: Manifest,
    specs: dict[str, jax.ShapeDtypeStruct],
    directory: AnyPath,
    step: int,
    slots: AllSlots = AS_THEY_REST,
    read: ReadChunk | None = None,
) -> tuple[dict[str, jax.Array], list[str]]:
    """Returns the arrays of `specs` as `read_arrays`, or none and the damages that this process
    found. Raises FailedStorage on all processes where a store does not answer one of them. All of
    them call it."""

    def read_here() -> tuple[dict[str, jax.Array], list[str]]:
        try:
            with answering(directory, step):
                return read_arrays(manifest, specs, read, slots), []
        except Damaged as error:
            return {}, error.damages

    return share_failure(read_here)


class CommittedSteps:
    """The committed steps in one directory, for reading. All processes make the same calls in the
    same order."""

    def __init__(self, directory: str | AnyPath) -> None:
        self.directory = any_path("directory", directory)  # Orbax refuses a relative one
        self.foreign: Foreign = lambda metadata: []
        """Returns reasons to skip a step with this metadata, as damaged steps are skipped."""
        self.damaged: dict[int, DamagedCheckpoint] = {}
        """Steps that were found damaged here and passed over."""
        self._trusted: set[int] = set()  # steps that this start has written, or read whole

    def steps(self) -> list[int]:
        """The committed steps, ascending. Raises OSError, FailedStorage for a store."""
        with answering(self.directory, 0):
            return committed_steps(self.directory)

    def agreed_steps(self) -> list[int]:
        """Returns the committed steps as process 0 sees them, which makes and removes them: a file
        system may show others to some process for a while. All processes call it."""
        return from_first(self.steps)

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
        return set(all_gather_union(share_failure(self.steps)))

    def _whole_for_all(self, step: int) -> bool:
        self._note(step, share_failure(lambda: self._damages(step)))
        return step not in self.damaged

    def _damages(self, step: int, *, chunks: bool = False) -> list[str]:
        """Returns the damages that this process sees in a step. chunks: reads them all."""
        try:
            manifest = whole_manifest(self.directory, step)
        except DamagedCheckpoint as error:
            return error.damages
        except FailedStorage:
            raise
        except CheckpointError as error:
            return [str(error)]
        with answering(self.directory, step):
            return verify_chunks(manifest) if chunks else self.foreign(manifest.metadata)

    def _note(self, step: int, damages: list[str]) -> None:
        """Adds the step to `damaged` of every process if one has found damages."""
        if lines := all_gather_union(damages):
            details = {"remedy": "this step is passed over", "directory": self.directory}
            self.damaged[step] = DamagedCheckpoint(lines, step=step, **details)

    def verify_step(self, step: int) -> None:
        """Reads all chunks of a step that was restored from elsewhere, and adds it to `damaged` if
        one is not as it was written."""
        self._note(step, from_first(lambda: self._damages(step, chunks=True)))
        if step not in self.damaged:
            self._trusted.add(step)

    def restore_from(
        self,
        manifest: Manifest,
        step: int,
        template: PyTree,
        slots: AllSlots = AS_THEY_REST,
        read: ReadChunk | None = None,
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
        specs = leaf_table.to_request(named)
        arrays, damages = read_for_all(manifest, specs, self.directory, step, slots, read)
        self._note(step, damages)
        if step in self.damaged:
            raise self.damaged[step]
        if read is None:
            self._trusted.add(step)
        placed = leaf_table.from_store(named, arrays, manifest.leaves)
        return jax.tree.unflatten(jax.tree.structure(template), placed), manifest.metadata

    def manifest(self, step: int) -> Manifest:
        """Returns the manifest of `step`: leaves, metadata, chunks. Raises as `restore`, on all
        processes."""
        return share_failure(lambda: whole_manifest(self.directory, step))
