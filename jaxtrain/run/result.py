"""The result of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from jaxtrain.experiment import Experiment
from jaxtrain.run.history import MetricsTable
from jaxtrain.session.session import Session


@dataclass(repr=False)
class Result:
    """Result of a training run. `history`: the metrics of each step of this start, a list of dicts
    that prints as a table and has `to_pandas()`; long runs keep only some (see `History`), and
    metrics.jsonl has all that was logged. `stopped`: it was
    asked to stop before its last step. `saved`: the step it can continue from, None if nothing was
    saved. `experiment`: as run, with the settings applied. `steps`: done in all. `run_dir`: None
    for a run in memory only. `evaluation`: the last held-out metrics. `sample`: the text generated
    at the end. `session`: state, dataset and compiled step, for `generate` and notebooks."""

    experiment: Experiment
    steps: int
    run_dir: Path | None
    history: MetricsTable = field(default_factory=MetricsTable)
    evaluation: dict[str, float] = field(default_factory=dict)
    sample: str | None = None
    stopped: bool = False
    saved: int | None = None
    session: Session | None = None

    @property
    def loss(self) -> float:
        """The training loss of the newest step that has one; nan where none has."""
        losses = (line["loss"] for line in reversed(self.history))
        return next((loss for loss in losses if loss is not None), float("nan"))

    def __repr__(self) -> str:
        """Returns a few lines: how far the run came, and what there is of it."""
        total = self.experiment.steps
        steps = f"{self.steps} of {total} steps" if self.steps < total else f"{total} steps"
        end = "stopped after" if self.stopped else "done:"
        lines = [f"{end} {steps}, loss {self.loss:.4f}"]
        values = ", ".join(f"{name} {value:.4f}" for name, value in self.evaluation.items())
        if self.history:
            first, last = self.history[0]["step"], self.history[-1]["step"]
            lines.append(f"history: {len(self.history)} lines, of steps {first} to {last}")
        lines += [f"evaluation: {values}"] if values else []
        lines += [f"run_dir: {self.run_dir}"] if self.run_dir is not None else []
        lines += [f"saved: step {self.saved}"] if self.saved is not None else []
        lines += [] if self.sample is None else [f"sample: {shortened(self.sample)!r}"]
        return "\n".join(lines)


def shortened(text: str, most: int = 72) -> str:
    """Returns the beginning of a text."""
    return text if len(text) <= most else f"{text[:most]}..."
