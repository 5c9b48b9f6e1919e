"""The result of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtrain.experiment import Experiment
from jaxtrain.session.session import Session


@dataclass
class Result:
    """Result of a training run. `history`: a line of metrics for each step of this start; long runs
    keep only some (see `History`), and metrics.jsonl has all that was logged. `stopped`: it was
    asked to stop before its last step. `saved`: the step it can continue from, None if nothing was
    saved. `experiment`: as run, with the settings applied. `steps`: done in all. `run_dir`: None
    for a run in memory only. `evaluation`: the last held-out metrics. `sample`: the text generated
    at the end. `session`: state, dataset and compiled step, for `generate` and notebooks."""

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
