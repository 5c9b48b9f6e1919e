"""Which committed steps a policy does not keep, their removal, and the room that saves need."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from jaxtrain.checkpoint.policy import EVALUATED_BATCHES, Keep
from jaxtrain.checkpoint.storage import (
    CheckpointError,
    committed_steps,
    describe,
    discard_steps,
    freed_bytes,
    newest,
    whole_manifest,
)


class Retention:
    """Removes steps by a policy. Orbax is not left to it: it removes a step's files one by one, and
    a kill in between would leave half a step."""

    def __init__(self, keep: Keep, directory: Path) -> None:
        self.keep, self.directory = keep, directory
        self.metrics: dict[int, dict[str, float]] = {}
        """By step: of those saved in this start, and those that were looked at."""

    def sharing(self, step: int, trusted: Collection[int]) -> tuple[Path | None, Path | None]:
        """For a save of `step`: the step whose files it may hold too, if it is one of `trusted`,
        and one that is kept beside it and must not depend on the same files, if there is any.

        So of what several kept steps have, there are two copies on the disk at least, and no
        damage to one file is in all of them. Where one step alone is kept there is one copy.
        """
        steps = committed_steps(self.directory)
        apart = newest(sorted(self._steps_to_keep([*steps, step]) - {step}))
        source = newest([s for s in steps if s != apart])
        return self._path(source if source in trusted else None), self._path(apart)

    def bytes_needed(self, state_bytes: int) -> int:
        """The most that saves of a state may need on the disk beyond what steps there take, but for
        those that `Keep.every` adds: these grow with the run.

        As if nothing of the state stood still: as many copies of it as are kept, and one while
        the newest is written; steps that are there give their room back as they go.
        """
        best, every, steps = self.keep.best, self.keep.every, committed_steps(self.directory)
        most = self.keep.latest + 1
        if best is not None:
            ratings = [m for s in steps if best.metric in (m := self._metrics_of(s))]
            most += best.n * max(1, len({m.get(EVALUATED_BATCHES) for m in ratings}))
        going = [s for s in steps if every is None or s % every]
        return max(state_bytes, most * state_bytes - freed_bytes(self.directory, going))

    def drop_old(self, step: int) -> None:
        """Remove what is not kept, now that `step` is committed. Raises CheckpointError."""
        steps = committed_steps(self.directory)
        kept = self._steps_to_keep(steps)
        unwanted = [s for s in steps if s not in kept]
        try:
            discard_steps(self.directory, unwanted)
        except OSError as error:
            raise CheckpointError(
                f"is saved, but older steps could not be removed: {describe(error)}",
                step=step,
                directory=self.directory,
                remedy=f"remove {', '.join(map(str, unwanted))} there",
            ) from error

    def _steps_to_keep(self, steps: list[int]) -> set[int]:
        if self.keep.best is None:
            return self.keep.kept({s: {} for s in steps})
        return self.keep.kept({s: self._metrics_of(s) for s in steps})

    def _path(self, step: int | None) -> Path | None:
        return None if step is None else self.directory / str(step)

    def _metrics_of(self, step: int) -> dict[str, float]:
        if step not in self.metrics:
            try:
                metadata = whole_manifest(self.directory, step).metadata
            except CheckpointError:
                metadata = {}
            self.metrics[step] = metadata.get("metrics", {})
        return self.metrics[step]
