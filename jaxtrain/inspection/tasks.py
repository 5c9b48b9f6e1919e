"""Metrics of tasks of lm-evaluation-harness, by the model of a saved run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain.experiment.reading import Trust
from jaxtrain.experiment.stored import stored_field
from jaxtrain.inspection.opened import directory_of, kept_vocabulary, mesh_spec, row_length
from jaxtrain.inspection.scorer import run_scorer
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.tasks.running import OpenTasks, refuse_without_harness
from jaxtrain.tasks.tasks import Tasks
from jaxtrain.tokenizers import Vocabulary


def evaluate_tasks(
    run: str | Path,
    tasks: Sequence[str],
    *,
    folder: str | Path | None = None,
    limit: int | None = None,
    examples: int | None = None,
    mesh: MeshSpec | str | Path | None = None,
    averaged: bool | None = None,
    microbatches: int | None = None,
    trust: Trust = (),
) -> dict[str, float]:
    """Returns the metrics of tasks of lm-evaluation-harness by a saved run, named as in
    acc/hellaswag, and the standard errors that are known, as in acc_stderr/hellaswag.

    tasks, folder, limit, examples: as in `jaxtrain.tasks.Tasks`. The others as for `harness_model`.
    Raises ValueError for unknown tasks, for tasks that have the model write text, and where data
    cannot be read, before anything is compiled.
    """
    names: Any = tasks
    chosen = Tasks(names, None if folder is None else str(folder), limit, examples)
    refuse_without_harness()
    (vocabulary, seq), spec = _stored_rows(run, trust), mesh_spec(mesh)
    opened = OpenTasks(chosen)
    opened.rehearse(vocabulary, seq)
    more: Any = dict(averaged=averaged, microbatches=microbatches, trust=trust)
    return opened.metrics(_harness_model(run, vocabulary, seq, mesh=spec, **more))


def harness_model(
    run: str | Path,
    *,
    mesh: MeshSpec | str | Path | None = None,
    averaged: bool | None = None,
    microbatches: int | None = None,
    trust: Trust = (),
) -> Any:
    """Returns the model of a saved run as `lm_eval.simple_evaluate(model=...)` takes it, for tasks
    that compare log-probabilities. Several texts share a row, of which each sees itself alone; with
    experts of a capacity each has its own. Of texts longer than the run's `seq` the last ids count.

    run: RUN or RUN@STEP, a run directory and a saved step, its newest if none is given. mesh: None
    for one device. averaged: the averaged weights; None where the run keeps any. microbatches:
    parts of a batch that are on the mesh one after another, None as in the run; a smaller mesh
    needs more. trust: modules of your own that the run may name. Raises ValueError where there is
    no such run or tokenizer, for models that compute their loss themselves, and without the
    harness; and DamagedCheckpoint. For one process.
    """
    refuse_without_harness()
    vocabulary, seq = _stored_rows(run, trust)
    more: Any = dict(averaged=averaged, microbatches=microbatches, trust=trust)
    return _harness_model(run, vocabulary, seq, mesh=mesh, **more)


def _stored_rows(run: str | Path, trust: Trust) -> tuple[Vocabulary, int]:
    """Returns the tokenizer of a run and the length of its rows."""
    path = directory_of(run)[0]
    vocabulary = kept_vocabulary(path, trust)
    return vocabulary, row_length(stored_field(path, "data", trust=trust), path)


def _harness_model(run: str | Path, vocabulary: Vocabulary, seq: int, **options: Any) -> Any:
    from jaxtrain.tasks.language_model import HarnessModel

    return HarnessModel(vocabulary, seq, run_scorer(run, seq, **options))
