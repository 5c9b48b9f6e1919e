"""Which committed steps a policy does not keep, and their removal."""

from __future__ import annotations

from pathlib import Path

from jaxtrain.checkpoint.policy import Keep
from jaxtrain.checkpoint.storage import (
    CheckpointError,
    committed_steps,
    describe,
    discard_steps,
    whole_manifest,
)


class Retention:
    """Removes steps by a policy. Orbax is not left to it: it removes a step's files one by one, and
    a kill in between would leave half a step."""

    def __init__(self, keep: Keep, directory: Path) -> None:
        self.keep, self.directory = keep, directory
        self.metrics: dict[int, dict[str, float]] = {}
        """By step: of those saved in this start, and those that were looked at."""

    def drop_old(self, step: int) -> None:
        """Remove what is not kept, now that `step` is committed. Raises CheckpointError."""
        steps = committed_steps(self.directory)
        if self.keep.best is not None:
            for other in (s for s in steps if s not in self.metrics):
                self.metrics[other] = self._stored(other)
        kept = self.keep.kept({s: self.metrics.get(s, {}) for s in steps})
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

    def _stored(self, step: int) -> dict[str, float]:
        try:
            return whole_manifest(self.directory, step).metadata.get("metrics", {})
        except CheckpointError:
            return {}
