"""A branch: a run that begins with the whole state of another run's step, and goes on by its own
experiment."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.manager import CheckpointManager
from jaxtrain.checkpoint.policy import SavePolicy
from jaxtrain.checkpoint.run_config import ABSENT, FieldDifference, anew_in, read_config
from jaxtrain.checkpoint.storage import DamagedCheckpoint
from jaxtrain.data import BatchRamp, first_row
from jaxtrain.experiment import Experiment, FromRun
from jaxtrain.experiment.stored import UntrustedNames, saved_differences, stored_field
from jaxtrain.files.pointer import checkpoints_in
from jaxtrain.files.stored_run import opened_run
from jaxtrain.session.restore import restore_state, state_mismatches
from jaxtrain.session.skips import Skips, skips_from
from jaxtrain.state_format.manifest import Manifest
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.layer_order import AtRest
from jaxtrain.step.state import TrainState
from jaxtrain.weights.start import PARAMS, manifest_of, model_differences
from jaxtrain.weights.start_digest import START_PATHS, start_problem

OF_PLATFORM = {
    "execution.attention": "PlatformKernel",
    "execution.grouped_matmul": "PlatformGroupedMatmul",
}
"""Fields in which None stands for the platform's own: what a save has of them then."""
SHOWN = 3
"""Leaves of the optimizer that a refusal names."""


@dataclass(frozen=True)
class Branch:
    """Where a run begins: after `step` steps of the run at `source`, a path or address. recorded:
    its entry in the run's config.json, None before the first start."""

    source: str
    step: int
    recorded: dict[str, Any] | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"step {self.step} of {self.source}"

    @cached_property
    def run(self) -> Path:
        return opened_run("run", self.source)

    def record(self, experiment: Experiment) -> dict[str, Any]:
        """Returns the entry of config.json: where the run began, the digest of that state, and
        field -> (its value there, its value at the first start) where they differ. Raises as
        `manifest`."""
        if self.recorded is not None:
            return self.recorded
        differs = self.differences(experiment)
        shown = {d.path: [v.value if v is ABSENT else v for v in d[1:]] for d in differs}
        began = {"run": self.source, "step": self.step, "digest": self.manifest.digest}
        return {**began, "differs": shown}

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of the step. Raises as `manifest_of`."""
        return manifest_of(self.run, self.step)[1]

    @cached_property
    def batch(self) -> int | BatchRamp:
        """The rows of a step of the other run. Raises ValueError where it cannot be read."""
        return stored_field(self.run, "batch")

    def differences(self, experiment: Experiment) -> list[FieldDifference]:
        """Returns the fields whose values are not those of the other run."""
        every = saved_differences(self.manifest.metadata, experiment)
        return [d for d in every if d.now is not None or d.stored != OF_PLATFORM.get(d.path)]

    def comparison(self, experiment: Experiment) -> str:
        """Returns one line: what is kept of the other run, and the fields that differ."""
        differs = "; ".join(map(str, self.differences(experiment)))
        return f"branch of {self}: its whole state is kept; what differs: {differs or 'no field'}"

    def keeps_reference(self) -> bool:
        """Returns True if the other run compares pairs of answers with losses that it keeps."""
        tuning = stored_field(self.run, "fine_tuning")
        try:
            of_pairs = getattr(stored_field(self.run, "data"), "of_pairs", False)
        except UntrustedNames:  # rows of one's own bring them
            of_pairs = False
        return of_pairs and tuning is not None and tuning.preferences is not None

    def refuse_unfit(self, assembly: Assembly) -> None:
        """Raises ValueError where the step is another than at the first start, its model is
        another, its state has other leaves, or the experiment begins with other weights: with each
        of them."""
        if self.recorded is not None and self.recorded["digest"] != self.manifest.digest:
            raise ValueError(
                f"{self} is another state than the one that this run began with, which it has not "
                f"saved yet; bring that back, or {anew_in(None)}"
            )
        differences = self.differences(assembly.experiment)
        leaves = state_mismatches(assembly, self.manifest)
        # What differs in its fields is told.
        model = model_differences(FromRun(self.run, self.step), assembly, with_untrusted=False)
        model += [leaf for leaf in leaves if leaf.startswith(PARAMS)]
        problems = [*model, *_shortened([leaf for leaf in leaves if leaf not in model])]
        problems += self._unused_start(assembly.experiment, differences)
        if not problems:
            return
        keeps = "a branch keeps the model and the whole state: set back what changes them"
        weights = f"FineTuning(start=FromRun({str(self.run)!r}, step={self.step}))"
        remedy = keeps if model else f"{keeps}, or take the weights alone, by fine_tuning={weights}"
        raise ValueError(
            f"{self} cannot go on in this experiment ({'; '.join(map(str, differences))}):\n  "
            + "\n  ".join(problems)
            + f"\n{remedy}"
        )

    def _unused_start(
        self, experiment: Experiment, differences: list[FieldDifference]
    ) -> list[str]:
        """Returns a violation for starting parameters that are not those of the other run."""
        start = experiment.start
        places = {path.removeprefix("experiment.") for path in START_PATHS}
        changed = {d.path for d in differences if f"{d.path}.".startswith("fine_tuning.start.")}
        changed |= {d.path for d in differences if d.path == "fine_tuning"}
        if start is None or not changed:
            return []
        if changed <= places and not start_problem(read_config(self.run) or {}, start):
            return []
        return [
            f"fine_tuning.start={start!r} would not be used: a branch has the weights of {self}; "
            "leave it as it was there, or use start=None"
        ]

    def has_data(self, experiment: Experiment, dataset: Any) -> bool:
        """True if a dataset has the rows of the step's, by its digest and their length."""
        metadata = self.manifest.metadata
        changed = {difference.path for difference in self.differences(experiment)}
        same = metadata.get("data") == getattr(dataset, "digest", None)
        return same and "data.seq" not in changed

    def refuse_fewer_steps(self, last: int) -> None:
        """Raises ValueError if a run that ends with the step `last` would train nothing."""
        if self.step >= last:
            raise ValueError(
                f"the branch begins after {self}, and is to end at step {last}: nothing would be "
                f"trained; ask for more than {self.step} steps in the experiment, and by --steps "
                "if that is given, or for an earlier step"
            )

    def skips(self, experiment: Experiment, dataset: Any) -> Skips:
        """Returns the skips that choose the rows of the steps after the branch: with the same data
        the rows that come next in the other run, with other data those from row 0 on. Raises
        ValueError as `skips_from`."""
        metadata, configured = self.manifest.metadata, experiment.execution.health.skip_batches
        saved = metadata.get("skipped", ())
        batch, position = self.step + sum(batches for _, batches in saved), 0
        if self.has_data(experiment, dataset):
            position = first_row(self.batch, batch) + metadata.get("shift", 0)
        shift = position - first_row(experiment.batch, batch)
        return skips_from(self.step, configured, saved)._replace(shift=shift)

    def next_rows(self, experiment: Experiment, dataset: Any) -> str:
        """Returns one line: which rows of the data come next. Raises ValueError as `skips`."""
        skips = self.skips(experiment, dataset)
        row = first_row(experiment.batch, skips.batch(self.step)) + skips.shift
        if not self.has_data(experiment, dataset):
            return f"data: not that of {self}, by its digest; begins at row {row:,}"
        stored = self.manifest.metadata.get("experiment") or {}
        order = ", in the order of another seed" * (stored.get("seed") != experiment.seed)
        return f"data: goes on at row {row:,}, where {self} was{order}"

    def restore(self, at_rest: AtRest) -> TrainState:
        """Returns the state of the step on this mesh. Raises DamagedCheckpoint."""
        saves = CheckpointManager(checkpoints_in(self.run), SavePolicy())
        try:
            return restore_state(at_rest, saves, self.step)
        except DamagedCheckpoint as error:
            details: Any = dict(step=self.step, directory=saves.directory)
            remedy = "begin from another step, by --from RUN@STEP"
            raise DamagedCheckpoint(error.damages, remedy=remedy, **details) from error


def _shortened(leaves: list[str]) -> list[str]:
    """Returns lines about leaves, of which the optimizer's are a few."""
    optimizer = [leaf for leaf in leaves if leaf.startswith("optimizer.")]
    more = len(optimizer) - SHOWN
    others = [leaf for leaf in leaves if leaf not in optimizer]
    return optimizer[:SHOWN] + [f"and {more} more leaves of the optimizer"] * (more > 0) + others
