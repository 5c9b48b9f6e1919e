"""`jaxtrain runs` and what results print: what one reads of runs without opening them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxtrain
from jaxtrain import cli
from jaxtrain.checkpoint.run_config import FieldDifference, write_config
from jaxtrain.cluster.run_lock import sole_run
from jaxtrain.experiment import config_of
from jaxtrain.experiment.stored import by_object
from jaxtrain.run.history import History, MetricsTable


@pytest.fixture
def made(own, tmp_path, monkeypatch):
    """(name, hour, lines of metrics, saved step, fields) -> a run directory of that time."""
    monkeypatch.chdir(tmp_path)

    def make(name, hour, lines=(), saved=None, **fields) -> Path:
        run = tmp_path / "runs" / name
        write_config(run, {"experiment": config_of(replace(own, **fields))})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run / "metrics.jsonl").write_text(text)
        os.utime(run / "metrics.jsonl", (hour * 3600, hour * 3600))
        if saved is not None:
            (run / "checkpoints" / str(saved)).mkdir(parents=True)
        return run

    return make


def line(step, loss, **more):
    return {"step": step, "loss": loss, **more}


def test_runs_are_listed_the_oldest_first(made) -> None:
    faster = jaxtrain.SGD(0.25, momentum=0.0, weight_decay=0.0)
    made("b", 2, [line(10, 1.5), line(20, 1.25, eval_loss=1.3)], saved=20, seed=7)
    made("a", 1, [line(5, 2.0), line(10, None)], saved=15)
    made("deep/er/c", 3, optimizer=faster, seed=7)
    listed = jaxtrain.runs()
    a, b, c = listed
    assert listed.runs == (a, b, c) and len(listed) == 3
    assert [str(run.path) for run in (a, b, c)] == ["runs/a", "runs/b", "runs/deep/er/c"]
    assert (a.step, a.steps, a.loss, a.eval_loss) == (15, 20, 2.0, None)
    assert (b.step, b.loss, b.eval_loss, b.changed) == (20, 1.25, 1.3, 7200.0)
    assert (c.step, c.loss) == (0, None)
    assert [run.state for run in (a, b, c)] == ["stopped", "done", "stopped"]
    assert [run.differs for run in (a, b)] == [(), (("seed", 7),)]
    assert c.differs == (("optimizer.learning_rate", 0.25),)


def test_runs_of_older_versions_differ_by_no_more_than_their_experiments(made) -> None:
    """Names that have moved since, and fields that there were not, are no differences."""
    kernel = jaxtrain.Execution(attention=jaxtrain.attention.Blockwise(64, 128))
    for name, hour, seed in (("a", 1, 0), ("b", 2, 7), ("c", 3, 7)):
        path = made(name, hour, seed=seed, execution=kernel) / "config.json"
        if name != "c":
            old = json.loads(path.read_text())
            del old["experiment"]["ema_decay"]
            text = json.dumps(old)
            assert text.count("jaxtrain.attention.blockwise:") == 1
            path.write_text(text.replace("jaxtrain.attention.blockwise:", "jaxtrain.nn.blockwise:"))
    assert [run.differs for run in jaxtrain.runs().runs] == [(), (("seed", 7),), ()]


def test_an_object_in_place_of_another_is_one_difference(made) -> None:
    made("a", 1, optimizer=jaxtrain.AdamW(1e-3), checkpoints=None)
    made("b", 2, optimizer=jaxtrain.SGD(0.1), checkpoints=jaxtrain.SavePolicy(every=7))
    saves = jaxtrain.SavePolicy(every=jaxtrain.checkpoint.Minutes(7))
    made("c", 3, optimizer=jaxtrain.SGD(0.1), checkpoints=saves)
    made("d", 4, optimizer=jaxtrain.SGD(0.1, momentum=0.5), checkpoints=None)
    differs = [dict(run.differs) for run in jaxtrain.runs().runs]
    assert differs[1] == {"optimizer": "SGD", "checkpoints": "SavePolicy"}
    assert differs[2] == {"checkpoints.every": "Minutes"}
    assert differs[3] == {"optimizer.momentum": 0.5, "checkpoints": None}


def test_of_classes_with_one_name_the_modules_are_told() -> None:
    same = FieldDifference("experiment.data.class", "mine:Rows", "copy:Rows")
    (difference,) = by_object([same])
    assert difference == FieldDifference("data", "mine:Rows", "copy:Rows")
    (difference,) = by_object([same._replace(now="copy:Lines")])
    assert difference == FieldDifference("data", "Rows", "Lines")


def test_a_folder_of_weights_is_no_run(made, tmp_path: Path) -> None:
    made("a", 1)
    weights = tmp_path / "runs" / "exported"
    weights.mkdir()
    (weights / "config.json").write_text('{"model_type": "llama"}')
    assert [run.path.name for run in jaxtrain.runs().runs] == ["a"]


def test_a_run_that_goes_on_is_told(made) -> None:
    with sole_run(made("a", 1)):
        assert jaxtrain.runs().runs[0].state == "running"
    assert jaxtrain.runs().runs[0].state == "stopped"


def test_a_run_of_a_stranger_is_listed_and_left_alone(made, tmp_path: Path) -> None:
    """A damaged one says why; one that names a foreign module is not imported; links stay links."""
    (made("damaged", 1) / "config.json").write_text("{")
    stranger = made("stranger", 2)
    config = {"experiment": {"class": "stranger_listed:X", "steps": [3]}}
    (stranger / "config.json").write_text(json.dumps(config))
    outside = made("a", 3).rename(tmp_path / "elsewhere")
    (tmp_path / "runs" / "linked").symlink_to(outside)
    linked = made("link", 4) / "config.json"
    linked.unlink()
    linked.symlink_to(outside / "config.json")
    (made("dangling", 5) / "config.json").unlink()
    (tmp_path / "runs" / "dangling" / "config.json").symlink_to("nowhere")
    (made("number", 6) / "config.json").write_text('{"experiment": 5}')
    made("words", 7, [{"step": 1, "loss": "abc"}, {"step": 2, "loss": [1]}, "text", {}])
    damaged, foreign, link, dangling, number, words = jaxtrain.runs("runs").runs
    assert dangling.state == number.state == "unreadable" and "holds no exp" in number.problem
    assert (words.step, words.loss) == (2, None)
    assert str(jaxtrain.runs("runs")).count("\n") == 6
    assert damaged.state == link.state == "unreadable"
    assert "config.json cannot be read" in damaged.problem and "link" in link.problem
    assert foreign.state == "stopped" and "stranger_listed" not in sys.modules
    assert "(absent)" not in dict(foreign.differs).values(), "there is no readable run before it"


def test_runs_are_looked_for_three_levels_down_and_not_within_runs(made, tmp_path: Path) -> None:
    """One that has no metrics yet is dated by its config; one that goes meanwhile is left out."""
    within = made("a/checkpoints/b", 1)
    (made("a", 2) / "metrics.jsonl").unlink()
    os.utime(tmp_path / "runs" / "a" / "config.json", (7200, 7200))
    made("x/y/z", 3)
    made("x/y/w/deep", 4)
    a, z = jaxtrain.runs().runs
    assert (a.path, a.changed) == (Path("runs/a"), 7200.0) and z.path == Path("runs/x/y/z")
    assert within.exists()


def test_of_equal_times_the_path_decides(made) -> None:
    for name in ("b", "a", "c"):
        made(name, 1)
    assert [run.path.name for run in jaxtrain.runs().runs] == ["a", "b", "c"]


def test_a_loss_that_is_not_finite_is_null_for_scripts(made) -> None:
    made("a", 1, [{"step": 1, "loss": None, "loss_nonfinite": "nan"}])
    assert "nan" in str(jaxtrain.runs())
    assert (
        json.loads(json.dumps(jaxtrain.runs().as_json(), allow_nan=False))["runs"][0]["loss"]
        is None
    )


def test_the_command_prints_a_table(made, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no folder runs; give the one that holds"):
        jaxtrain.runs()
    assert cli.main(["runs"]) == cli.REFUSED
    Path("runs").mkdir()
    assert cli.main(["runs"]) == 0 and capsys.readouterr().out == "there is no run here\n"
    Path("file").touch()
    with pytest.raises(ValueError, match="file is no folder"):
        jaxtrain.runs("file")
    made("first", 1, [line(10, 1.5)])
    fields = dict(seed=1, batch=16, ema_decay=0.5, clip_norm=1.0)
    made("second", 2, [line(20, 1.25, eval_loss=1.0)], **fields)
    (Path("runs") / "third").mkdir()
    assert cli.main(["runs"]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "run",
        "state",
        "step",
        "loss",
        "eval_loss",
        "last",
        "step",
        "differs",
        "by",
    ]
    assert first.split()[:4] == ["runs/first", "stopped", "10/20", "1.5000"]
    assert second.split()[:5] == ["runs/second", "done", "20/20", "1.2500", "1.0000"]
    assert second.endswith("batch=16, clip_norm=1.0, ema_decay=0.5, and 1 more")
    assert cli.main(["runs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["runs"]
    assert found[1]["differs"] == fields and found[0]["step"] == 10
    assert found[1]["path"] == "runs/second"


def test_a_field_that_a_run_lacks_is_told(made) -> None:
    made("a", 1)
    config = json.loads((made("b", 2) / "config.json").read_text())
    config["experiment"] = {"class": "stranger_listed:X", "steps": 20}
    Path("runs/b/config.json").write_text(json.dumps(config))
    differs = dict(jaxtrain.runs().runs[1].differs)
    assert differs["class"] == "stranger_listed:X" and differs["batch"] == "(absent)"


TABLE = """\
step  loss  eval_loss  tokens_per_s
   1     2                1.235e+04
   2   1.9                1.235e+04
   3   1.8                1.235e+04
 ...   ...        ...           ...
   8                      1.235e+04
   9   1.2                1.235e+04
  10   1.1       1.25     1.235e+04"""


def test_a_history_prints_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History()
    for step in range(1, 11):
        loss = None if step == 8 else 2.1 - step / 10
        history.add({"step": step, "loss": loss, "tokens_per_s": 12345.678, "other": "<b>"})
    history.add_evaluation(9, {"eval_loss": 9.0})  # not the newest: it has no line to join
    history.add_evaluation(10, {"eval_loss": 1.25})
    assert repr(history.lines) == TABLE and history.lines[-1]["eval_loss"] == 1.25
    assert repr(history.lines[:7]).count("\n") == 7, "all of a short one"
    assert isinstance(history.lines[0], dict)
    assert repr(MetricsTable()) == "no metrics yet"
    shown = history.lines._repr_html_()
    assert shown.count("<tr>") == 8 and "<td>1.25</td>" in shown and "<b>" not in shown

    class Frame:
        def __init__(self, rows):
            self.rows = rows

        def set_index(self, name):
            return name, self.rows

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=Frame))
    assert history.lines.to_pandas() == ("step", list(history.lines))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        history.lines.to_pandas()


def test_results_and_reports_print_in_a_few_lines(own, tmp_path: Path) -> None:
    """And a history has the held-out loss of the steps that were evaluated."""
    experiment = replace(own, evaluation=jaxtrain.Evaluation(every=2, batches=1), steps=4)
    run = tmp_path / "run"
    result = jaxtrain.train(experiment, "cpu_1", run_dir=run, steps=3)
    done, history, evaluation, where = repr(result).splitlines()
    assert done == f"done: 3 of 4 steps, loss {result.loss:.4f}"
    assert history == "history: 3 lines, of steps 1 to 3"
    assert evaluation == f"evaluation: eval_loss {result.evaluation['eval_loss']:.4f}"
    assert where == f"run_dir: {run}"
    assert [n["step"] for n in result.history if "eval_loss" in n] == [2, 3]
    assert result.history[-1]["eval_loss"] == result.evaluation["eval_loss"]
    shown = repr(replace(result, stopped=True, saved=3, sample="a" * 80)).splitlines()
    assert shown[0].startswith("stopped after 3 of 4 steps")
    assert shown[-2:] == ["saved: step 3", f"sample: {'a' * 72 + '...'!r}"]
    report = jaxtrain.check(experiment, "cpu_1")
    assert repr(report) == report.summary()
    assert str(report) == f"{report.table()}\n{report.summary()}"
    (listed,) = jaxtrain.runs(tmp_path).runs
    assert (listed.state, listed.step, listed.steps) == ("stopped", 3, 4)
    assert listed.loss == pytest.approx(result.loss)
