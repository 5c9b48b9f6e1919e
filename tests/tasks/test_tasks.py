"""Tasks of lm-evaluation-harness where it is not installed, and what needs it not."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest
from service import play

import jaxtrain
from jaxtrain import cli
from jaxtrain.cluster.agreement import FailedTogether, all_gather_text
from jaxtrain.data import ByteTokenizer
from jaxtrain.inspection import evaluate_tasks, harness_model
from jaxtrain.session import tasks as session_tasks
from jaxtrain.tasks import Tasks
from jaxtrain.tasks import running as module
from jaxtrain.tasks.running import metrics_of


def test_metrics_are_named_by_task_and_filter() -> None:
    results = {
        "a": {"alias": "a", "name": "a", "sample_len": 3, "acc,none": 0.5, "acc_stderr,none": 0.1},
        "b": {"exact_match,strict": np.int64(1), "f1,none": np.float32(0.5), "f1_stderr,none": "N"},
    }
    expected = {"acc/a": 0.5, "acc_stderr/a": 0.1, "exact_match/b/strict": 1.0, "f1/b": 0.5}
    assert metrics_of(results) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"names": "hellaswag"}, r"names='hellaswag' must be names of tasks, such as \(\"hel"),
        ({"names": ()}, r"names=\(\) must be names"),
        ({"names": ("a", 3)}, "names has 3; give names"),
        ({"names": ("a",), "limit": 0}, "limit=0"),
        ({"names": ("a",), "examples": -1}, "examples=-1"),
    ],
)
def test_what_is_no_list_of_tasks_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tasks(**fields)
    assert Tasks(["a", "b"]) == Tasks(("a", "b"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tasks='all' is a str; use"):
        jaxtrain.Evaluation(tasks="all")  # type: ignore[arg-type]


def test_without_the_harness_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    for call in (lambda: evaluate_tasks("nowhere", ["a"]), lambda: harness_model("nowhere")):
        with pytest.raises(ValueError, match=r"not installed: pip install 'jaxtrain\[eval\]'"):
            call()


def test_a_run_without_the_harness_is_refused_before_it_compiles(
    monkeypatch, decoder, opened
) -> None:
    """And tasks of data that is no text."""
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    tasks = jaxtrain.Evaluation(tasks=Tasks(("a",)))
    with pytest.raises(ValueError, match=r"evaluation\.tasks are texts, and BigramChain has no"):
        opened(replace(decoder, evaluation=tasks)).evaluate.open()
    with pytest.raises(ValueError, match=r"evaluation\.tasks are texts, and BigramChain has no"):
        jaxtrain.check(replace(decoder, evaluation=tasks), "cpu_1")
    text = jaxtrain.TextData(jaxtrain.TextFiles(__file__, held_out=0.0), ByteTokenizer(), seq=8)
    with pytest.raises(ValueError, match=r"evaluation\.tasks: tasks are those of lm-eval"):
        jaxtrain.check(replace(decoder, evaluation=tasks, data=text), "cpu_1")


class Scripted:
    """Tasks whose metrics score these texts in turn; an exception is raised in its place."""

    def __init__(self, *turns: Any) -> None:
        self.turns = turns

    def metrics(self, scorer: Any) -> dict[str, float]:
        for turn in self.turns:
            if isinstance(turn, Exception):
                raise turn
            scorer(turn)
        return {"acc/a": float(len(self.turns))}


def evaluated_on(processes: list[Scripted], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What an evaluation gives or raises on each process; all meet once more after it."""
    model = SimpleNamespace(HarnessModel=lambda vocabulary, seq, scorer: scorer)
    monkeypatch.setitem(sys.modules, "jaxtrain.tasks.language_model", cast(Any, model))

    def act(index: int) -> dict[str, float]:
        tasks = object.__new__(session_tasks.EvaluatedTasks)
        vars(tasks).update(_tasks=processes[index], _vocabulary=None, _seq=8)
        vars(tasks)["_scorer"] = lambda params, model_state, texts: texts
        try:
            return tasks({}, {})
        finally:
            assert all_gather_text("next", within_s=5) == ["next"] * len(processes)

    return play(monkeypatch, len(processes), act)


TEXTS = [[1, 2], [3]]


def test_processes_score_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    same = [Scripted(TEXTS, [[1, 2, 3]]), Scripted([(1, 2), (3,)], [[1, 2, 3]])]
    assert evaluated_on(same, monkeypatch) == [{"acc/a": 2.0}] * 2
    for other in (Scripted([[1], [2, 3]]), Scripted([[1, 2, 3]]), Scripted(), Scripted(TEXTS, [])):
        errors = evaluated_on([Scripted(TEXTS), other], monkeypatch)
        assert [type(error) for error in errors] == [ValueError] * 2
        assert "processes have different texts of the same tasks" in str(errors[0])


def test_a_metric_that_goes_on_after_a_failure_meets_no_other(monkeypatch) -> None:
    class Stubborn(Scripted):
        def metrics(self, scorer: Any) -> dict[str, float]:
            for turn in self.turns:
                with suppress(ValueError):
                    scorer(turn)
            return {}

    errors = evaluated_on([Stubborn(TEXTS, TEXTS), Scripted([[1]])], monkeypatch)
    assert [type(error) for error in errors] == [ValueError] * 2


def test_errors_of_collectives_keep_their_type(monkeypatch) -> None:
    """They name what would fit where memory is short, and differ between processes."""
    each = [Scripted(TEXTS, jax.errors.JaxRuntimeError(f"device {n}")) for n in range(2)]
    errors = evaluated_on(each, monkeypatch)
    assert [(type(e), str(e)) for e in errors] == [
        (jax.errors.JaxRuntimeError, f"device {n}") for n in range(2)
    ]


@pytest.mark.parametrize("before", [(), (TEXTS,), (TEXTS, [[4, 5]])])
@pytest.mark.parametrize("error", [KeyError("x"), ValueError("no number")])
def test_what_fails_on_one_process_fails_on_all(
    error: Exception, before: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a text is scored, between texts, and in a metric of them all."""
    whole = Scripted(TEXTS, [[4, 5]])
    errors = evaluated_on([whole, Scripted(*before, error), whole], monkeypatch)
    kind = ValueError if isinstance(error, ValueError) else FailedTogether
    text = "no number" if isinstance(error, ValueError) else "KeyError: 'x'"
    # The turns of others are texts, and no failures, where it fails.
    assert [(type(e), str(e)) for e in errors] == [(kind, f"process 1: {text}")] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "a", "--split", "train", "--batches", "1"], "--split, --batches is an"),
        (["--limit", "3"], "--limit is an option of tasks: name some by --tasks"),
        (["--examples", "0", "--task-folder", "x"], "--task-folder, --examples is an option of"),
    ],
)
def test_options_of_tasks_and_of_losses_do_not_mix(options, message, capsys) -> None:
    assert cli.main(["evaluate", "nowhere", "--mesh", "cpu_1", *options]) == 2
    assert message in capsys.readouterr().err
