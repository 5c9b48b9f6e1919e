"""The losses in the first model, which a loss of pairs compares with, for the rows of a run."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxtrain.checkpoint.run_config import REFERENCE
from jaxtrain.checkpoint.tiers import Checkpoints
from jaxtrain.cluster.agreement import from_first
from jaxtrain.experiment import FromRun, Start
from jaxtrain.scoring.reference import ReferenceFile, ReferenceSource, set_references
from jaxtrain.session.branch import Branch
from jaxtrain.session.evaluate import Evaluator
from jaxtrain.session.first_state import first_model
from jaxtrain.step.layer_order import AtRest
from jaxtrain.step.state import TrainState


def give_references(
    at_rest: AtRest,
    dataset: Any,
    evaluate: Evaluator,
    checkpoints: Checkpoints | None,
    begins: Start | Branch | None,
    state: TrainState,
    start: int,
) -> list[ReferenceFile]:
    """Gives training and held-out rows the losses in the first model, for a loss of pairs. That of
    a branch is that of the run that it is of, if it has one, else what the branch begins with. A
    run that has taken no step computes them: what it keeps may be of other weights."""
    if at_rest.assembly.experiment.objective is None:
        return []
    is_branch = isinstance(begins, Branch)
    run = None if checkpoints is None else checkpoints.run
    if isinstance(begins, Branch):
        run = begins.run if from_first(begins.keeps_reference) else None
    is_first = start == 0 or (is_branch and run is None)
    folder = None if is_first or run is None else run / REFERENCE
    first = partial(first_model, at_rest, state if is_first else None)
    held_out = {f"held-out {name}".rstrip(): rows for name, rows in evaluate.splits.items()}
    step = begins.step if isinstance(begins, FromRun) else None
    source = ReferenceSource(folder, not is_branch, first, step)
    return set_references(at_rest.assembly, at_rest.mesh, {"training": dataset, **held_out}, source)
