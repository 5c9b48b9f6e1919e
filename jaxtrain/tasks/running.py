"""Metrics of tasks, by a model that scores texts."""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.files.stores import local_path
from jaxtrain.notices import told_to
from jaxtrain.tasks.tasks import Tasks
from jaxtrain.tokenizers import Vocabulary
from jaxtrain.violations import raise_violations

HARNESS = "lm_eval"
RESAMPLES = 1000
"""Draws for the standard error of a metric without a closed form."""
EXAMPLES_SEED = 1234
"""As the harness has it."""
OUTPUT_TYPES = ("loglikelihood", "loglikelihood_rolling", "multiple_choice")


class OpenTasks:
    """Tasks that are found, with their data. Raises ValueError for unknown tasks, for tasks that
    have the model write text, where their data cannot be read, and without the harness."""

    def __init__(self, tasks: Tasks) -> None:
        refuse_without_harness()
        from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

        folder = None if tasks.folder is None else _folder(tasks.folder)
        self._examples, self._limit = tasks.examples, tasks.limit
        manager = TaskManager(include_path=None if folder is None else str(folder))
        names = _names(tasks.names, manager, folder)
        try:
            loaded = manager.load(names)
        except Exception as error:  # of hubs, files and templates of all kinds
            raise ValueError(f"cannot read the tasks {', '.join(names)}: {error}") from error
        raise_violations(
            f"the task {name} has the model write text ({task.OUTPUT_TYPE}), which is not "
            f"supported; use tasks of {', '.join(OUTPUT_TYPES)}"
            for name, task in sorted(loaded["tasks"].items())
            if task.OUTPUT_TYPE not in OUTPUT_TYPES
        )
        self._texts = ", ".join(names)
        self._loaded = loaded

    def rehearse(self, vocabulary: Vocabulary, seq: int) -> list[str]:
        """Evaluates a model of no probabilities, and returns the names of the metrics. Raises
        ValueError where texts of the tasks cannot be made, or not be scored in rows of `seq`
        ids."""
        from jaxtrain.tasks.language_model import HarnessModel

        def zeros(texts: Sequence[Sequence[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
            lengths = (len(text) - 1 for text in texts)
            return [(np.zeros(n, np.float32), np.zeros(n, bool)) for n in lengths]

        try:
            with told_to(lambda text: None):
                return [*self.metrics(HarnessModel(vocabulary, seq, zeros))]
        except Exception as error:  # of prompts and metrics of all kinds
            raise ValueError(f"the tasks {self._texts} cannot be evaluated: {error}") from error

    def metrics(self, model: object) -> dict[str, float]:
        """Returns metrics by name/task. model: a `HarnessModel`."""
        import lm_eval  # type: ignore[import-not-found]

        with _in_this_process(), _quiet():
            for task in self._loaded["tasks"].values():
                self._set_examples(task)
            results = lm_eval.evaluate(
                lm=model,
                task_dict=self._loaded,
                limit=self._limit,
                bootstrap_iters=RESAMPLES,
                log_samples=False,
            )
        return metrics_of(results["results"])

    def _set_examples(self, task: Any) -> None:
        """Sets the number of examples, but of a task that says it has none; they are drawn anew,
        the same each time."""
        own = task.get_config("num_fewshot")
        if own != 0:
            number = self._examples if self._examples is not None else own or 0
            task.set_config(key="num_fewshot", value=number)
        task.set_fewshot_seed(seed=EXAMPLES_SEED)


def metrics_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Returns metrics by name/task, from what the harness gives: by task, `name,filter`."""
    values = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            name, _, chosen = key.partition(",")
            if chosen and isinstance(value, Real):
                suffix = "" if chosen == "none" else f"/{chosen}"
                values[f"{name}/{task}{suffix}"] = float(value)
    return values


def refuse_without_harness() -> None:
    """Raises ValueError where the harness is not installed."""
    if importlib.util.find_spec(HARNESS) is None:
        raise ValueError(
            "tasks are those of lm-evaluation-harness, which is not installed: pip install "
            "'jaxtrain[eval]', or pip install lm_eval"
        )


def _folder(path: str) -> Path:
    folder = local_path("folder", path)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; name the folder that has the task files")
    return folder


def _names(patterns: Sequence[str], manager: Any, folder: Path | None) -> list[str]:
    """Returns the names of the tasks that match. Raises ValueError for what none does."""
    names, violations = dict[str, None](), []
    for pattern in patterns:
        matching = manager.match_tasks([pattern])
        names |= dict.fromkeys(matching)
        if not matching:
            near = difflib.get_close_matches(pattern, manager.all_tasks, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "`lm_eval ls tasks` lists them"
            more = "the folder of your own is not given" if folder is None else f"{folder} has none"
            violations.append(f"there is no task {pattern!r} ({more}): {hint}")
    raise_violations(violations)
    return [*names]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the harness from drawing bars and telling of each task among the lines of a run."""
    import tqdm  # type: ignore[import-not-found]

    logger, bars = logging.getLogger(HARNESS), vars(tqdm)["tqdm"]
    level, made = logger.level, bars.__init__

    def undrawn(bar: Any, *arguments: Any, **options: Any) -> None:
        made(bar, *arguments, **{**options, "disable": True})

    bars.__init__ = undrawn
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        bars.__init__ = made
        logger.setLevel(level)


@contextmanager
def _in_this_process() -> Iterator[None]:
    """Keeps the harness from forking this process, whose threads are JAX's, for standard errors."""
    name = "DISABLE_MULTIPROC"
    previous = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous
