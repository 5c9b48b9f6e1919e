"""Tasks of lm-evaluation-harness where it is not installed, and what needs it not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import jaxtrain
from jaxtrain import cli
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


def test_processes_score_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    digests: list[str] = []
    monkeypatch.setattr(session_tasks, "all_gather_text", lambda text: [text, *digests])
    session_tasks.refuse_other_texts([[1, 2], [3]])
    digests.append("other")
    with pytest.raises(ValueError, match="processes have different texts of the same tasks"):
        session_tasks.refuse_other_texts([[1, 2], [3]])
    seen: list[str] = []
    monkeypatch.setattr(session_tasks, "all_gather_text", lambda text: seen.append(text) or [text])
    for texts in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [(1, 2), (3,)]):
        session_tasks.refuse_other_texts(texts)
    assert len({*seen}) == 3 and seen[0] == seen[3]


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
