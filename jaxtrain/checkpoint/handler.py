"""How Orbax's manager writes a step: our chunks and manifest, under its commit.

Orbax makes the step's directory, runs this in its threads on every process, waits for all, and
renames the directory: that is the commit. Imported when the first save begins, since Orbax takes
more than a second to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxtrain.checkpoint.chunks import Part
from jaxtrain.checkpoint.leaves import LeafRecord
from jaxtrain.checkpoint.manifest import read_manifest, take_parts, write_manifest, write_part
from jaxtrain.checkpoint.pack import NOTHING, Earlier, write_chunks
from jaxtrain.checkpoint.policy import Keep


class ChunkHandler(ocp.AsyncCheckpointHandler):
    """Writes a `ChunkSave`. Reading is `reader`'s, without Orbax."""

    def __init__(self) -> None:
        self._saving: ChunkSave | None = None

    async def async_save(self, directory: Any, args: ChunkSave) -> list[ocp.future.Future]:
        self._saving = args
        work = self._write(directory, args)
        return [ocp.future.CommitFutureAwaitingContractedSignals(work, name="chunks")]

    async def _write(self, directory: Any, args: ChunkSave) -> None:
        place, process = Path(directory), jax.process_index()
        parts, args.parts = args.parts, []  # what is held of the state goes with this frame
        earlier = _earlier(args.earlier)
        chunks = write_chunks(place, f"{args.step}.{process}.pack", parts, earlier)
        write_part(place, process, chunks)

    def finalize(self, directory: Any) -> None:
        """On process 0, when all have written."""
        saving, self._saving = self._saving, None
        assert saving is not None, "Orbax finalizes what it began to save"
        place = Path(directory)
        chunks = take_parts(place, jax.process_count())
        write_manifest(place, saving.records, saving.metadata, chunks)

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("steps are saved asynchronously, by CheckpointManager.save")

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("steps are read by CheckpointManager.restore")


@ocp.args.register_with_handler(ChunkHandler, for_save=True)
@dataclass
class ChunkSave(ocp.args.CheckpointArgs):
    """earlier: the directory of a committed step whose chunks need not be written again."""

    step: int
    records: dict[str, LeafRecord]
    metadata: dict[str, Any]
    earlier: Path | None
    parts: list[Part] = field(repr=False)


class Preserve:
    """Orbax asks it which steps to preserve: those that `keep` keeps, by the metrics that were
    given with a save or that its manifest has."""

    def __init__(self, keep: Keep, directory: Path) -> None:
        self.keep, self.directory = keep, directory
        self.metrics: dict[int, dict[str, float]] = {}

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        steps = [info.step for info in checkpoints]
        if self.keep.best is not None:
            for step in (s for s in steps if s not in self.metrics):
                self.metrics[step] = self._metrics(step)
        kept = self.keep.kept({step: self.metrics.get(step, {}) for step in steps})
        return [step in kept for step in steps]

    def _metrics(self, step: int) -> dict[str, float]:
        try:
            return read_manifest(self.directory / str(step)).metadata.get("metrics", {})
        except ValueError:  # damaged
            return {}


@ocp.args.register_with_handler(ChunkHandler, for_restore=True)
@dataclass
class ChunkRestore(ocp.args.CheckpointArgs):
    """Orbax wants to know one; nothing is restored through it."""


def _earlier(step: Path | None) -> Earlier:
    if step is None:
        return NOTHING
    try:
        return read_manifest(step).earlier()
    except ValueError:  # damaged since: everything is written
        return NOTHING
