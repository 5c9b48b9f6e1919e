"""Against the harness's own model of `transformers`: the same weights have the same metrics.

Needs the extra `parity`: pip install '.[parity]'.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness_tasks import TOKENIZER, train_words, words_experiment, write_tasks

import jaxtrain
from jaxtrain import cli
from jaxtrain.checkpoint import Best, Keep
from jaxtrain.data import TokenizerFile
from jaxtrain.inspection import evaluate_tasks, harness_model
from jaxtrain.tasks import Tasks
from jaxtrain.tasks.running import metrics_of
from tests.chats import write_folder

why = "compares with lm_eval; pip install '.[parity]'"
lm_eval: Any = pytest.importorskip("lm_eval", reason=why)
language_model: Any = importlib.import_module("jaxtrain.tasks.language_model")
pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's libraries

TASKS = ["animals", "last_words", "whole_texts"]


@pytest.fixture(scope="module", autouse=True)
def offline() -> Any:
    """Nothing is asked of a hub."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.setenv(name, "1")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks") / "files")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_words(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def metrics(run: Path, folder: Path) -> dict[str, float]:
    return evaluate_tasks(run, TASKS, folder=folder)


def test_parity_of_metrics(run: Path, folder: Path, metrics: Any, tmp_path: Path) -> None:
    """Texts longer than a row, trailing spaces, and whole texts in windows among them."""
    jaxtrain.export(run, tmp_path / "out")
    # Their cache mistakes "a b" + " c" and "a" + " b c" of two tasks for each other.
    fields = dict(pretrained=str(tmp_path / "out"), dtype="float32", max_length=48)
    fields |= dict(logits_cache=False)
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args=fields,
        device="cpu",
        tasks=TASKS,
        task_manager=lm_eval.tasks.TaskManager(include_path=str(folder)),
        bootstrap_iters=0,
    )
    expected = metrics_of(results["results"])
    assert {*expected} == {
        *("acc/animals", "acc_norm/animals", "acc/last_words", "perplexity/last_words"),
        *("bits_per_byte/whole_texts", "word_perplexity/whole_texts"),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)
    assert 0 < metrics["acc/last_words"] < 1 and metrics["acc_stderr/last_words"] > 0


def scores(model: Any, pairs: Any) -> list[tuple[float, bool]]:
    """Log-probabilities of continuations after contexts, and whether each is the likeliest."""
    from lm_eval.api.instance import Instance

    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i)
        for i, pair in enumerate(pairs)
    ]
    return model.loglikelihood(requests)


PAIRS = [("a dog says", " woof"), ("a cat says ", "meow"), ("", "the mat"), ("x" * 90, " cat")]


@pytest.mark.parametrize("add_bos", [None, True])
def test_parity_of_each_request(
    run: Path, add_bos: bool | None, tmp_path: Path, monkeypatch, caplog
):
    """Log-probabilities, and what is likeliest, not only what metrics make of them; of a tokenizer
    that puts bos before a document too."""
    from lm_eval.models.huggingface import HFLM

    if add_bos:
        tokenizer = TokenizerFile(
            str(write_folder(tmp_path / "bos", "mistral").parent), add_bos=True
        )
        run = train_words(tmp_path, tokenizer, vocab=400)
    jaxtrain.export(run, tmp_path / "out")
    options: Any = dict(device="cpu", dtype="float32", max_length=48, add_bos_token=add_bos)
    theirs: Any = HFLM(pretrained=str(tmp_path / "out"), **options)
    ours = harness_model(run)
    results = scores(ours, PAIRS)
    assert "of 4 texts 1 are longer than a row of seq = 48" in caplog.text
    expected = scores(theirs, PAIRS)
    np.testing.assert_allclose([a for a, _ in results], [a for a, _ in expected], rtol=1e-4)
    assert [b for _, b in results] == [b for _, b in expected]
    assert add_bos or {b for _, b in results} == {True, False}
    monkeypatch.setattr(language_model, "AT_ONCE", 1)
    one_by_one = scores(ours, [*PAIRS, PAIRS[0]])
    np.testing.assert_allclose([a for a, _ in one_by_one[:4]], [a for a, _ in results], rtol=1e-5)
    assert one_by_one[4] == one_by_one[0]


def test_parity_of_what_has_no_score(run: Path) -> None:
    """The harness's own models fail an assertion. A context that is but a space has no ids: what
    follows is as if there was none."""
    model = harness_model(run)
    with pytest.raises(ValueError, match=r"continuation '' of 'a dog' has 0 ids, and a row of"):
        scores(model, [("a dog", "")])
    with pytest.raises(ValueError, match=r"'z{40}' of 'a' has 1\d\d ids, .* 1 to 48: leave the ta"):
        scores(model, [("a", "z" * 120)])
    (spaced,), (bare,) = (scores(model, [pair]) for pair in ((" ", "the"), ("", " the")))
    assert spaced == bare
    with pytest.raises(ValueError, match="writes no text"):
        model.generate_until([])


def test_parity_of_averaged_weights(tmp_path: Path, folder: Path) -> None:
    """And of a run that several devices trained, in parts of a batch."""
    run = train_words(tmp_path, ema_decay=0.9, microbatches=2)
    jaxtrain.export(run, tmp_path / "out")
    averaged = harness_model(tmp_path / "run")
    from lm_eval.models.huggingface import HFLM

    theirs: Any = HFLM(pretrained=str(tmp_path / "out"), device="cpu", dtype="float32")
    expected = [a for a, _ in scores(theirs, PAIRS[:3])]
    np.testing.assert_allclose([a for a, _ in scores(averaged, PAIRS[:3])], expected, rtol=1e-4)
    last = harness_model(run, averaged=False, microbatches=1)
    assert not np.allclose([a for a, _ in scores(last, PAIRS[:3])], expected)


@pytest.mark.parametrize("together", [False, True])
def test_parity_of_tasks_during_training(together, folder, tmp_path, capfd, monkeypatch) -> None:
    """The last metrics are those of the saved run; averages are evaluated where there are any. No
    bars are drawn among a run's lines. Texts see themselves alone where documents do not too."""
    tasks = Tasks(("animals", "last_words"), folder=str(folder), limit=2)
    evaluation = jaxtrain.Evaluation(every=10, tasks=tasks)
    words = words_experiment(tmp_path)
    data = replace(words.data, isolate_documents=not together)
    monkeypatch.setenv("LOCAL_RANK", "1")
    np.random.seed(7)
    drawn = np.random.rand()
    np.random.seed(7)
    run = train_words(tmp_path, evaluation=evaluation, ema_decay=0.9, data=data)
    assert "it/s" not in "".join(capfd.readouterr())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = {line["step"]: line for line in lines if "acc/animals" in line}
    assert np.random.rand() == drawn, "seeds are the process's own"
    assert [*evaluated] == [10, 20] and "eval_loss" in evaluated[10]
    expected = evaluate_tasks(run, tasks.names, folder=folder, limit=2)
    for name, value in expected.items():
        np.testing.assert_allclose(evaluated[20][name], value, rtol=1e-5, err_msg=name)
    assert evaluated[10]["perplexity/last_words"] != evaluated[20]["perplexity/last_words"]
    unknown = replace(evaluation, tasks=Tasks(("animals", "none_such")))
    with pytest.raises(ValueError, match=r"there is no task 'animals'.*; .* no task 'none_such'"):
        train_words(tmp_path / "refused", evaluation=unknown)
    assert not (tmp_path / "refused" / "run" / "checkpoints").exists()
    with pytest.raises(ValueError, match=r"evaluation\.tasks: .*; there is no task 'none_such'"):
        words = words_experiment(tmp_path, evaluation=unknown)
        jaxtrain.check(words, "cpu_1")
    long = jaxtrain.TextData(words_experiment(tmp_path).data.source, TOKENIZER, seq=4)
    with pytest.raises(ValueError, match=r"cannot be evaluated: the continuation .* 1 to 4: leave"):
        train_words(tmp_path / "long", evaluation=evaluation, data=long)
    assert not (tmp_path / "long" / "run" / "checkpoints").exists()


def test_parity_of_meshes(run: Path, folder: Path, metrics: Any) -> None:
    mesh = jaxtrain.mesh_from_axes(data=2, tensor=2)
    on_mesh = evaluate_tasks(run, TASKS, folder=folder, mesh=mesh)
    assert {*on_mesh} == {*metrics}
    for name, value in on_mesh.items():
        np.testing.assert_allclose(value, metrics[name], rtol=1e-4, err_msg=name)


def test_parity_of_the_command(run: Path, folder: Path, metrics: Any, capsys: Any) -> None:
    options = ["--mesh", "cpu_1", "--task-folder", str(folder), "--json"]
    assert cli.main(["evaluate", str(run), "--tasks", *TASKS, *options]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == pytest.approx(metrics)
    one = [*options, "--limit", "1", "--examples", "0"]
    assert cli.main(["evaluate", str(run), "--tasks", "animals", *one]) == 0
    limited = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert limited["acc/animals"] in (0.0, 1.0)


def test_parity_of_saves_that_are_kept_by_a_task(folder: Path, tmp_path: Path) -> None:
    tasks = Tasks(("last_words",), folder=str(folder))
    best = Best("perplexity/last_words")
    saves = jaxtrain.SavePolicy(every=5, keep=Keep(latest=1, best=best))
    evaluation = jaxtrain.Evaluation(every=5, batches=None, tasks=tasks)
    run = train_words(tmp_path, evaluation=evaluation, checkpoints=saves)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_step = {n["step"]: n[best.metric] for n in lines if best.metric in n}
    kept = {int(path.name) for path in (run / "checkpoints").glob("[0-9]*")}
    assert [*by_step] == [5, 10, 15, 20] and kept == {20, min(by_step, key=by_step.__getitem__)}
    other = replace(saves, keep=Keep(best=Best("f1/last_words")))
    with pytest.raises(ValueError, match=r"metric='f1/last_words'; the tasks have perplexity/last"):
        train_words(tmp_path / "other", evaluation=evaluation, checkpoints=other)
    none = jaxtrain.Evaluation()
    with pytest.raises(ValueError, match="'f1/last_words'; an evaluation has eval_loss or bits_p"):
        jaxtrain.check(words_experiment(tmp_path, evaluation=none, checkpoints=other), "cpu_1")
    loss = replace(saves, keep=Keep(best=Best("f1")))
    with pytest.raises(ValueError, match=r"'f1'; an evaluation has .* or a task's, such as acc/"):
        jaxtrain.check(words_experiment(tmp_path, evaluation=evaluation, checkpoints=loss), "cpu_1")


def test_parity_of_groups_patterns_and_examples(run: Path, folder: Path, monkeypatch) -> None:
    """Standard errors are drawn in this process: a fork of it would have no threads of JAX."""
    monkeypatch.setattr(multiprocessing, "Pool", None)
    (folder / "both.yaml").write_text(
        json.dumps({"group": "both", "task": ["animals", "last_words"]})
    )
    grouped = evaluate_tasks(run, ["both", "whole_*"], folder=folder)
    matching = evaluate_tasks(run, ["*nimals", "last_words", "whole_texts"], folder=folder)
    assert {**grouped, **matching} == grouped and "perplexity_stderr/last_words" in matching
    shown = evaluate_tasks(run, ["animals"], folder=folder, examples=2)
    model = harness_model(run)
    results = lm_eval.simple_evaluate(
        model=model,
        tasks=["animals"],
        num_fewshot=2,
        task_manager=lm_eval.tasks.TaskManager(include_path=str(folder)),
        bootstrap_iters=0,
    )
    prompts = [sample["arguments"][0][0] for sample in results["samples"]["animals"]]
    assert [prompt.count("\n\n") for prompt in prompts] == [2, 2, 2]  # of questions in a row
    expected = metrics_of(results["results"])
    assert {name: shown[name] for name in expected} == expected


def test_parity_of_what_is_refused(run: Path, folder: Path, tmp_path: Path) -> None:
    """All of it, before a model is read; a wrong run before data is."""
    with pytest.raises(ValueError, match=r"no task 'animal' \(.* has none\): did you mean animals"):
        evaluate_tasks(run, ["animal"], folder=folder)
    with pytest.raises(ValueError, match=r"there is no task 'animals' \(the folder of your own is"):
        evaluate_tasks(run, ["animals"])
    with pytest.raises(ValueError, match=r"the task answers has the model write text \(generate_u"):
        evaluate_tasks(run, ["animals", "answers"], folder=folder)
    with pytest.raises(ValueError, match=r"animals\.yaml is no folder; name the folder that has"):
        evaluate_tasks(run, ["animals"], folder=folder / "animals.yaml")
    with pytest.raises(ValueError, match="missing"):
        evaluate_tasks(tmp_path / "missing", ["no_such_task"])
    (folder / "answers.jsonl").rename(folder / "elsewhere")
    with pytest.raises(ValueError, match="cannot read the tasks answers: "):
        evaluate_tasks(run, ["answers"], folder=folder)
