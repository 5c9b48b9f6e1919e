"""Tasks that a run is evaluated on, by its model as it is on the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import jax
import numpy as np

from jaxtrain.cluster.agreement import all_gather_text, share_failure
from jaxtrain.experiment import Experiment
from jaxtrain.scoring.texts import TextRows, TextScorer, TokenScore, assembled_for
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.batches import fields_of
from jaxtrain.tasks.running import OpenTasks
from jaxtrain.tasks.tasks import Tasks


class EvaluatedTasks:
    """Tasks for the model of an experiment on a mesh. vocabulary: of its data. Raises ValueError as
    `OpenTasks` does, for data that is no text, and for a model that computes its loss itself. run:
    as `TextScorer` has it. All processes make it."""

    def __init__(
        self,
        tasks: Tasks,
        assembly: Assembly,
        mesh: jax.sharding.Mesh,
        vocabulary: Any,
        run: Callable[..., Any],
    ) -> None:
        data = assembly.experiment.data
        self._tasks = share_failure(partial(open_tasks, tasks, data, vocabulary))
        rows: Any = TextRows([], data.seq)
        of_texts = assembled_for(assembly, rows, fields_of(rows, rows))
        self._scorer = TextScorer(of_texts, mesh, run)
        self._vocabulary, self._seq = vocabulary, data.seq

    def __call__(
        self, params: Mapping[str, Any], model_state: Mapping[str, Any]
    ) -> dict[str, float]:
        """Returns the metrics of a model with these parameters. All processes call it."""
        from jaxtrain.tasks.language_model import HarnessModel

        def score(texts: Sequence[Sequence[int]]) -> list[TokenScore]:
            refuse_other_texts(texts)
            return self._scorer(params, model_state, texts)

        return self._tasks.metrics(HarnessModel(self._vocabulary, self._seq, score))


def open_tasks(tasks: Tasks, data: Any, vocabulary: Any) -> OpenTasks:
    """Returns tasks whose texts can be scored in rows of the data. Raises ValueError for others,
    and for data that is no text."""
    if vocabulary is None or not hasattr(data, "seq"):
        raise ValueError(_no_text(data))
    opened = OpenTasks(tasks)
    opened.rehearse(vocabulary, data.seq)
    return opened


def absent_tasks(experiment: Experiment) -> list[str]:
    """Returns why an experiment's tasks cannot be evaluated, as far as no tokenizer is needed."""
    evaluation, data = experiment.evaluation, experiment.data
    if evaluation is None or evaluation.tasks is None:
        return []
    if not hasattr(data, "vocabulary"):
        return [_no_text(data)]
    try:
        OpenTasks(evaluation.tasks)
    except ValueError as error:
        return [f"evaluation.tasks: {error}"]
    return []


def _no_text(data: Any) -> str:
    return (
        f"evaluation.tasks are texts, and {type(data).__name__} has no tokenizer; use "
        "evaluation.tasks=None, or TextData"
    )


def refuse_other_texts(texts: Sequence[Sequence[int]]) -> None:
    """Raises ValueError, on all processes, if they are about to score different texts."""
    digest = sha256()
    for text in texts:
        digest.update(sha256(np.asarray(text, np.int64).tobytes()).digest())
    if len({*all_gather_text(digest.hexdigest())}) > 1:
        raise ValueError(
            "evaluation.tasks: processes have different texts of the same tasks; give all of them "
            "the same task files and data"
        )
