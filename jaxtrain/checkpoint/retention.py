"""Removal of committed steps that a policy does not keep, and the disk space that saves need."""

from __future__ import annotations

from collections.abc import Collection

from jaxtrain.checkpoint.policy import EVALUATED_BATCHES, Keep
from jaxtrain.checkpoint.storage import (
    CheckpointError,
    FailedStorage,
    answering,
    committed_steps,
    describe,
    discard_steps,
    freed_bytes,
    newest,
    whole_manifest,
)
from jaxtrain.files.store import AnyPath


class Retention:
    """Removes steps by a policy. Orbax does not: it removes a step's files one by one, and a kill
    in between would leave half a step."""

    def __init__(self, keep: Keep, directory: AnyPath) -> None:
        self.keep, self.directory = keep, directory
        self.metrics: dict[int, dict[str, float]] = {}
        """By step: of those saved in this start, and those that were read."""

    def sharing(self, step: int, trusted: Collection[int]) -> tuple[AnyPath | None, AnyPath | None]:
        """Returns two steps for a save of `step`, as paths or None: (source, apart).

        source: the save may share its files, if it is one of `trusted`. apart: is kept too, and the
        save must not depend on its files. So an unchanged array of several kept steps has at least
        two copies on the disk, and no damage to one file affects both. If a single step is kept
        there is one copy.
        """
        steps = committed_steps(self.directory)
        apart = newest(sorted(self._steps_to_keep([*steps, step]) - {step}))
        source = newest([s for s in steps if s != apart])
        return self._path(source if source in trusted else None), self._path(apart)

    def bytes_needed(self, state_bytes: int) -> int:
        """Returns the most bytes that saves of a state may need on the disk beyond those of
        existing steps, without the steps kept by `Keep.every`, which grow with the run.

        Assumes that all arrays change: one copy for each kept step, and one for the step being
        written. Existing steps free their space as they are removed.
        """
        best, every, steps = self.keep.best, self.keep.every, committed_steps(self.directory)
        most = self.keep.latest + 1
        if best is not None:
            ratings = [m for s in steps if best.metric in (m := self._metrics_of(s))]
            most += best.n * max(1, len({m.get(EVALUATED_BATCHES) for m in ratings}))
        going = [s for s in steps if every is None or s % every]
        return max(state_bytes, most * state_bytes - freed_bytes(self.directory, going))

    def drop_old(self, step: int) -> None:
        """Removes the steps that are not kept after `step`. Raises CheckpointError."""
        with answering(self.directory, step):
            steps = committed_steps(self.directory)
        needed = self._steps_to_keep(steps)
        unwanted = [s for s in steps if s not in needed]
        try:
            discard_steps(self.directory, unwanted)
        except OSError as error:
            raise FailedStorage(
                f"is saved, but older steps could not be removed: {describe(error)}",
                step=step,
                directory=self.directory,
                remedy=f"remove {', '.join(map(str, unwanted))} there",
            ) from error

    def _steps_to_keep(self, steps: list[int]) -> set[int]:
        if self.keep.best is None:
            return self.keep.select({s: {} for s in steps})
        return self.keep.select({s: self._metrics_of(s) for s in steps})

    def _path(self, step: int | None) -> AnyPath | None:
        return None if step is None else self.directory / str(step)

    def _metrics_of(self, step: int) -> dict[str, float]:
        if step not in self.metrics:
            try:
                metadata = whole_manifest(self.directory, step).metadata
            except FailedStorage:
                raise
            except CheckpointError:
                metadata = {}
            self.metrics[step] = metadata.get("metrics", {})
        return self.metrics[step]
