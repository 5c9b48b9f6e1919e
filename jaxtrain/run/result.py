"""What a run gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtrain.experiment import Experiment
from jaxtrain.run.session import Session


@dataclass
class Result:
    """What a run gives back. `history`: a line of metrics for each step that this start took, of
    long runs every so many (see `History`); all that was logged is in metrics.jsonl. `stopped`: it
    was asked to stop before its last step. `saved`: the step it can go on from, None when nothing
    was saved. `experiment`: as it was run, with the settings applied. `steps`: that are done in
    all. `run_dir`: where it is kept, None for memory alone. `evaluation`: the last held-out
    metrics. `sample`: the text drawn at the end. `session`: the state, the dataset and the compiled
    step, for `generate` and notebooks."""

    experiment: Experiment
    steps: int
    run_dir: Path | None
    history: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, float] = field(default_factory=dict)
    sample: str | None = None
    stopped: bool = False
    saved: int | None = None
    session: Session | None = field(default=None, repr=False)

    @property
    def loss(self) -> float:
        """The training loss of the newest step that has one; nan where none has."""
        losses = (line["loss"] for line in reversed(self.history))
        return next((loss for loss in losses if loss is not None), float("nan"))
