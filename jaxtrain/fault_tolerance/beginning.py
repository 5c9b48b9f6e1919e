"""Which run in a directory is a launch's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Beginning:
    """How a launch begins its run. text: of `train --fresh-once`; None to resume what is there.
    again: the same command, given again, would begin anew."""

    text: str | None = None
    again: bool = False

    def owns(self, run_dir: Path) -> bool:
        """True if the run in a directory, if there is one, is this launch's. Raises OSError or
        ValueError where what is there does not say."""
        if self.text is None:
            return True
        from jaxtrain.checkpoint.run_config import BEGUN_BY, read_config

        return (read_config(run_dir) or {}).get(BEGUN_BY) == self.text
