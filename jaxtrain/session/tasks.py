"""Tasks that a run is evaluated on, by its model as it is on the mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import jax
import numpy as np

from jaxtrain.checkpoint.policy import SavePolicy
from jaxtrain.cluster.agreement import share_failure
from jaxtrain.cluster.lockstep import in_step
from jaxtrain.experiment import Experiment
from jaxtrain.scoring.texts import TextRows, TextScorer, TokenScore, assembled_for
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.batches import fields_of
from jaxtrain.tasks.running import OpenTasks
from jaxtrain.tokenizers import Vocabulary
from jaxtrain.validation.experiment import is_of_task


class EvaluatedTasks:
    """Tasks for the model of an experiment on a mesh. vocabulary: of its held-out rows. run: as
    `TextScorer` has it. Raises ValueError where texts of the tasks do not fit rows, for a metric
    that saves are kept by and no task has, and for a model that computes its loss itself. All
    processes make it."""

    def __init__(
        self,
        tasks: OpenTasks | None,
        assembly: Assembly,
        mesh: jax.sharding.Mesh,
        vocabulary: Vocabulary | None,
        run: Callable[..., Any],
    ) -> None:
        assert tasks is not None, "the experiment has tasks"
        assert vocabulary is not None, "data with a `vocabulary` has rows with one"
        self._tasks, self._vocabulary = tasks, vocabulary
        self._seq = assembly.experiment.data.seq
        share_failure(partial(self._rehearse, assembly.experiment.checkpoints))
        rows: Any = TextRows([], self._seq)
        of_texts = assembled_for(assembly, rows, fields_of(rows, rows))
        self._scorer = TextScorer(of_texts, mesh, run)

    def _rehearse(self, policy: SavePolicy | None) -> None:
        metrics = self._tasks.rehearse(self._vocabulary, self._seq)
        best = None if policy is None else policy.keeping.best
        if best is not None and is_of_task(best.metric) and best.metric not in metrics:
            raise ValueError(
                f"checkpoints.keep.best.metric={best.metric!r}; the tasks have {', '.join(metrics)}"
            )

    @property
    def program(self) -> jax.stages.Compiled | None:
        """The program that scores texts; None before the first call."""
        return self._scorer.program

    def __call__(
        self, params: Mapping[str, Any], model_state: Mapping[str, Any]
    ) -> dict[str, float]:
        """Returns the metrics of a model with these parameters. All processes call it. Raises on
        all where prompts or metrics of one fail, as `share_failure`."""
        from jaxtrain.tasks.language_model import HarnessModel

        def metrics(meet: Callable[[str], None]) -> dict[str, float]:
            def score(texts: Sequence[Sequence[int]]) -> list[TokenScore]:
                meet(_digest(texts))
                return self._scorer(params, model_state, texts)

            return self._tasks.metrics(HarnessModel(self._vocabulary, self._seq, score))

        return in_step(
            metrics,
            "evaluation.tasks: processes have different texts of the same tasks; give all of them "
            "the same task files and data",
        )


def tasks_of(experiment: Experiment) -> OpenTasks | None:
    """Returns the tasks of an experiment's evaluations, with their data; None without. Raises
    ValueError as `OpenTasks` does, and for data that is no text."""
    evaluation, data = experiment.evaluation, experiment.data
    if evaluation is None or evaluation.tasks is None:
        return None
    if not hasattr(data, "vocabulary") or not hasattr(data, "seq"):
        raise ValueError(
            f"evaluation.tasks are texts, and {type(data).__name__} has no tokenizer; use "
            "evaluation.tasks=None, or TextData"
        )
    try:
        return OpenTasks(evaluation.tasks)
    except ValueError as error:
        raise ValueError(f"evaluation.tasks: {error}") from error


def absent_tasks(experiment: Experiment) -> list[str]:
    """Returns the refusal of `tasks_of`, [] if it has none."""
    try:
        tasks_of(experiment)
    except ValueError as error:
        return [str(error)]
    return []


def _digest(texts: Sequence[Sequence[int]]) -> str:
    digest = sha256()
    for text in texts:
        digest.update(sha256(np.asarray(text, np.int64).tobytes()).digest())
    return digest.hexdigest()
