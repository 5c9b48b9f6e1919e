"""Orbax handler that writes a step as our chunks and manifest, under Orbax's commit.

Orbax makes the step's directory, runs this in its threads on every process, waits for all, and
renames the directory: that is the commit. Imported when the first save begins, since Orbax takes
more than a second to import.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxtrain.checkpoint.storage import describe, remove_unfinished
from jaxtrain.cluster.agreement import share_failure
from jaxtrain.files.store import AnyPath, from_orbax, is_local, names_in, put, remove_file
from jaxtrain.state_format.leaves import LeafRecord
from jaxtrain.state_format.manifest import (
    FAILED,
    ITEM,
    NAME,
    read_manifest,
    take_parts,
    write_manifest,
    write_part,
)
from jaxtrain.state_format.pack import NOTHING, Earlier, Sharing, write_chunks
from jaxtrain.state_format.parts import OwnedParts


class ChunkHandler(ocp.AsyncCheckpointHandler):
    """Writes a `ChunkSave`. Steps are read by `reader`, without Orbax."""

    def __init__(self) -> None:
        self._saving: ChunkSave | None = None

    async def async_save(
        self, directory: os.PathLike[str], args: ChunkSave
    ) -> list[ocp.future.Future]:
        self._saving = args
        work = self._write(directory, args)
        return [ocp.future.CommitFutureAwaitingContractedSignals(work, name="chunks")]

    async def _write(self, directory: os.PathLike[str], args: ChunkSave) -> None:
        # If one process fails all do: in Orbax, the others would wait for it. They hear of it from
        # the coordination service, which needs no room on a full disk.
        share_failure(lambda: _write_own(from_orbax(directory), args), under=args.key)

    def finalize(self, directory: os.PathLike[str]) -> None:
        """Writes the manifest, or the reason for its absence into the file `FAILED`. Runs on
        process 0 when all have written."""
        saving, self._saving = self._saving, None
        assert saving is not None, "Orbax finalizes what it began to save"
        place = from_orbax(directory)
        try:
            chunks = take_parts(place, jax.process_count())
            write_manifest(place, saving.step, saving.records, saving.metadata, chunks)
        except Exception as error:
            if jax.process_count() == 1:
                raise
            # Without its manifest a step has failed, whether or not there is room for the reason.
            with suppress(OSError):
                for name in names_in(place):
                    if name == NAME or name.endswith(".pack"):
                        remove_file(place / name)
                put(place / FAILED, f"process 0: {describe(error)}".encode())

    def save(self, directory: os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("steps are saved asynchronously, by CheckpointManager.save")

    def restore(self, directory: os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("steps are read by CheckpointManager.restore")


@ocp.args.register_with_handler(ChunkHandler, for_save=True)
@dataclass
class ChunkSave(ocp.args.CheckpointArgs):
    """Argument of a save. source, apart: directories of committed steps, as in `pack.Sharing`.
    key: of all processes, as `fresh_key` returns it."""

    step: int
    records: dict[str, LeafRecord]
    metadata: dict[str, Any]
    source: AnyPath | None
    apart: AnyPath | None
    parts: OwnedParts = field(repr=False)
    key: str = ""


@ocp.args.register_with_handler(ChunkHandler, for_restore=True)
@dataclass
class ChunkRestore(ocp.args.CheckpointArgs):
    """Placeholder that Orbax requires; nothing is restored through it."""


def open_orbax(directory: AnyPath) -> ocp.CheckpointManager:
    """Returns Orbax's manager of a directory, set to remove no committed step. What a killed run
    left half written is removed."""
    if not is_local(directory) and jax.process_index() == 0:
        remove_unfinished(directory)
    logging.getLogger("absl").addFilter(_not_from_orbax)
    modes = ocp.options.AtomicityMode
    mode = modes.AUTO if is_local(directory) else modes.COMMIT_FILE
    options = ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(None),  # all
        # Of what a killed run left half written; in a store of all that is not committed.
        cleanup_tmp_directories=is_local(directory),
        atomicity_options=ocp.options.AtomicityOptions(mode=mode),
        # Made behind the step, a directory that cannot be made leaves threads waiting for it.
        async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
    )
    return ocp.CheckpointManager(directory, options=options)


def composite(saving: ChunkSave) -> ocp.args.Composite:
    """Returns the argument of the `save` of Orbax's manager."""
    return ocp.args.Composite(**{ITEM: saving})


def _write_own(place: AnyPath, args: ChunkSave) -> None:
    """Writes the chunks of this process."""
    process = jax.process_index()
    parts = args.parts.take()  # its copy of the state is freed with this frame
    sharing = Sharing(_earlier(args.source), _earlier(args.apart))
    write_part(place, process, write_chunks(place, f"{args.step}.{process}.pack", parts, sharing))


def _not_from_orbax(record: logging.LogRecord) -> bool:
    """Logging filter: False for Orbax's traces of errors, which a save here raises in one line."""
    return not (record.exc_info and "orbax" in record.pathname)


def _earlier(step: AnyPath | None) -> Earlier:
    if step is None:
        return NOTHING
    try:
        return read_manifest(step).earlier()
    except (OSError, ValueError):  # damaged since, or no answer: everything is written
        return NOTHING
