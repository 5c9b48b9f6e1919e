"""Edit and run again: a run that begins anew keeps the one before it."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jaxtrain
from jaxtrain import FineTuning as tuned
from jaxtrain import FromHuggingFace, cli
from jaxtrain.cli.train import _outcome
from jaxtrain.cluster.run_lock import sole_run
from jaxtrain.experiment import config_of
from jaxtrain.run.directory import left_in, refuse_unfit_anew, set_run_aside


class Rows:
    """Rows that a save could not be told to be of."""

    def __init__(self, rows) -> None:
        self.rows, self._length = rows.rows, len(rows)

    def __len__(self) -> int:
        return self._length


@dataclass(frozen=True)
class Undigested:
    corpus: Any

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Rows:
        return Rows(self.corpus.open(split, seed=seed, cache_dir=cache_dir))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "corpus"), name)


EDITED = jaxtrain.SGD(0.25, momentum=0.0, weight_decay=0.0)


@pytest.fixture
def first(own):
    """An experiment that saves every second step."""
    return replace(own, steps=8, checkpoints=jaxtrain.SavePolicy(every=2))


def trained(experiment, run, steps=4, **more):
    return jaxtrain.train(experiment, "cpu_1", run_dir=run, steps=steps, **more)


def files_of(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


def losses(result) -> list[float]:
    return [line["loss"] for line in result.history]


def test_an_edited_experiment_begins_anew_and_the_old_run_goes_on(
    first, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    old = losses(trained(first, run))
    edited = replace(first, optimizer=EDITED)
    with pytest.raises(ValueError, match="set it back, or begin anew by --fresh"):
        trained(edited, run)
    for number in (1, 2):
        again = trained(edited, run, fresh=True)
        assert again.session.start == 0 and len(again.history) == 4
        kept = rf"[\d:]{{8}} the run that was in {run} is kept in {run}\.{number}\n"
        assert re.search(kept, capsys.readouterr().out)
    assert losses(again) == losses(trained(edited, None)) != old
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.1", "run.2"}
    went_on = trained(first, tmp_path / "run.1", steps=6)
    assert went_on.session.start == 4 and went_on.steps == 6
    resumed = trained(edited, run, steps=6)
    assert resumed.session.start == 4
    assert left_in(run)[1].endswith("the same command goes on")
    assert left_in(run, anew="fresh")[1].endswith("the same command without --fresh goes on")
    says = f"--run-dir {run} in the place of --numbered goes on"
    assert left_in(run, anew="numbered")[1].endswith(says)
    stopped: Any = SimpleNamespace(stopped=True, saved=2)
    # A scheduler would begin it again and again.
    codes = [_outcome(stopped, run, anew=anew)[0] for anew in ("", "fresh", "numbered")]
    assert codes == [75, 130, 130]


def test_a_text_begins_a_run_once(first, tmp_path: Path) -> None:
    """Starts with the same text go on with what the first of them began, also one that lay between
    without a text."""
    run, edited = tmp_path / "run", replace(first, optimizer=EDITED)
    trained(first, run)
    began = [
        trained(edited, run, steps, fresh=text).session.start
        for steps, text in ((2, "a"), (4, "a"), (6, False), (8, "a"), (2, "b"))
    ]
    assert began == [0, 2, 4, 6, 0]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.1", "run.2"}
    trained(edited, run, fresh=True)
    assert trained(edited, run, 2, fresh="b").session.start == 0, "that one was set aside"
    for wrong in ("", 1, Path("b")):
        with pytest.raises(ValueError, match="; use True, False, or a text of one character or mo"):
            trained(edited, run, fresh=wrong)
    (run / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"nobody can say whether this run began with fresh='b'"):
        trained(edited, run, 2, fresh="b")
    with pytest.raises(ValueError, match=r"cannot be read: .*; mend it or use a new --run-dir$"):
        trained(edited, run, 2)
    assert len([*tmp_path.iterdir()]) == 5, "it may have"


def test_a_stop_tells_of_the_run_that_began_with_the_text(
    first, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an interrupted start; another's saves are none of its."""
    run = tmp_path / "run"
    trained(first, run)
    none = f"stopped; nothing is saved: the run has not begun in {run}"
    assert _outcome(None, run, anew="", text="a") == (130, none)
    assert _outcome(None, run, anew="fresh", text="a") == (130, none)
    trained(first, run, fresh="a")
    saved = f"stopped; step 4 is saved in {run};"
    again = (75, f"{saved} a start with the same text goes on")
    assert _outcome(None, run, anew="", text="a") == again
    without = f"{saved} the same command without --fresh goes on"
    assert _outcome(None, run, anew="fresh", text="a") == (75, without), "of a scheduler's job"
    monkeypatch.setenv("JAXTRAIN_SUPERVISOR", "1")
    assert _outcome(None, run, anew="fresh", text="a") == (75, saved.removesuffix(";"))
    assert _outcome(None, run, anew="fresh") == (
        130,
        without,
    )
    (run / "config.json").write_text("{")
    stopped: Any = SimpleNamespace(stopped=True, saved=4)
    code, told = _outcome(stopped, run, anew="", text="a")
    assert code == 75 and "cannot be seen: " in told and "config.json cannot be read" in told


def test_a_branch_begins_once_and_goes_on(first, tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    trained(first, base)
    trained(first, run, 2)
    longer = replace(first, steps=10)
    more = dict(fresh="a", from_run=f"{base}@4")
    assert [trained(longer, run, n, **more).session.start for n in (6, 8)] == [4, 6]
    assert {path.name for path in tmp_path.iterdir()} == {"base", "run", "run.1"}


def test_nothing_is_moved_for_what_is_refused(
    first, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    trained(first, run)
    before = files_of(run)
    for bad in (replace(first, microbatches=3), replace(first, steps=0)):
        with pytest.raises(ValueError):
            trained(bad, run, steps=None, fresh=True)
    with sole_run(run), pytest.raises(ValueError, match="run"):
        trained(first, run, fresh=True)
    with sole_run(run), pytest.raises(ValueError, match="is in use by"):
        set_run_aside(run)
    for inside in (run, run / "checkpoints"):
        monkeypatch.chdir(inside)
        with pytest.raises(ValueError, match="holds the working directory"):
            trained(first, run, fresh=True)
    monkeypatch.chdir(tmp_path)
    itself = replace(first, fine_tuning=jaxtrain.FineTuning(jaxtrain.FromRun("run")))
    with pytest.raises(ValueError, match="run has what this run begins from"):
        trained(itself, run, fresh=True)
    inside = FromHuggingFace(run / "weights", adapters=tmp_path / "lora")
    for start in (inside, replace(inside, folder="base", adapters=run / "lora")):
        with pytest.raises(ValueError, match="run has what this run begins from"):
            e = replace(first, fine_tuning=tuned(start))
            refuse_unfit_anew(run, {"experiment": config_of(e)}, e)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="No space left"):
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
        trained(first, run, fresh=True)
    with pytest.raises(ValueError, match="has no digest"):
        trained(replace(first, data=Undigested(first.data)), run, fresh=True)
    after = files_of(run)
    assert after.keys() == before.keys()
    assert all(after[name] == before[name] for name in before if name != ".lock")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_fresh_run_in_a_new_directory_is_any_run(first, tmp_path: Path) -> None:
    again = trained(first, tmp_path / "run", fresh=True)
    assert again.saved == 4 and [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / "run.1").symlink_to("nowhere")  # no free name
    trained(first, tmp_path / "run", fresh=True)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run.1", "run.2"}


def test_what_is_no_run_is_left_where_it_is(first, tmp_path: Path) -> None:
    thesis, link, empty = tmp_path / "docs", tmp_path / "link", tmp_path / "empty"
    thesis.mkdir()
    (thesis / "thesis.tex").touch()
    link.symlink_to(thesis)
    empty.mkdir()
    with pytest.raises(ValueError, match="docs holds files and no run"):
        trained(first, thesis, fresh=True)
    with pytest.raises(ValueError, match=r"link is a link to .*docs"):
        trained(first, link, fresh=True)
    with pytest.raises(ValueError, match=r"thesis\.tex is a file"):
        trained(first, thesis / "thesis.tex", fresh=True)
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="weights holds files and no run"):
        trained(first, weights, fresh=True)
    shutil.rmtree(weights)
    assert trained(first, empty, fresh=True).saved == 4
    assert {path.name for path in tmp_path.iterdir()} == {"docs", "link", "empty"}


def test_a_directory_that_cannot_be_moved_is_named(
    first, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    trained(first, run)

    def fails(path, target):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(ValueError, match=r"cannot be moved to .*run\.1: Permission denied; give"):
        trained(first, run, fresh=True)


EXPERIMENT = """
from jaxtrain import AdamW, AttentionConfig, BlockConfig, DecoderConfig, Experiment, MlpConfig
from jaxtrain.data import BigramChain

def experiment():
    block = BlockConfig(AttentionConfig(heads=2), MlpConfig(hidden=16))
    model = DecoderConfig(vocab=16, embed=8, layers=1, period=(block,), tied=True)
    data = BigramChain(vocab=16, seq=8, successors=2)
    return Experiment(model, data, AdamW(1e-3), steps=2, batch=4, evaluation=None)
"""


def test_the_command_names_a_run_and_begins_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.py").write_text(EXPERIMENT)
    assert cli.main(["train", "small.py", "--name", "fast"]) == 0
    edited = ["train", "small.py", "--name", "fast", "--set", "seed=1"]
    assert cli.main(edited) == cli.REFUSED
    assert "begin anew by --fresh" in capsys.readouterr().err
    assert cli.main([*edited, "--fresh"]) == 0
    assert {path.name for path in Path("runs").iterdir()} == {"fast", "fast.1"}
    for given, says in {
        ("--name", "fast", "--run-dir", "elsewhere"): "give one of them",
        ("--name", "a/b"): "give a path as --run-dir",
        ("--name", ".."): "give a path as --run-dir",
        ("--name", ""): "give a path as --run-dir",
    }.items():
        assert cli.main(["train", "small.py", *given]) == cli.REFUSED
        assert says in capsys.readouterr().err
    launched = ["launch", "--processes", "1", "--", *edited, "--fresh"]
    assert cli.main(launched) == 0
    assert " the run that was in runs/fast is kept in runs/fast.2\n" in capsys.readouterr().out
    assert cli.main([*edited, "--fresh-once", "a"]) == 0
    for _ in range(2):
        assert cli.main([*edited, "--fresh-once", "a", "--steps", "1"]) == cli.REFUSED
        assert "is at step 2 already" in capsys.readouterr().err, "it goes on with that run"
    assert cli.main([*edited, "--fresh", "--fresh-once", "a"]) == 0, "the text says which run"
    assert {path.name for path in Path("runs").iterdir()} == {"fast", *(f"fast.{n}" for n in "123")}


def test_the_command_numbers_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each start has a directory of its own; one that is refused leaves none."""
    monkeypatch.chdir(tmp_path)
    Path("small.py").write_text(EXPERIMENT)
    command = ["train", "small.py", "--numbered"]
    assert cli.main(command) == 0
    assert "run directory runs/small-1" in capsys.readouterr().out.splitlines()[-1]
    assert cli.main([*command, "--set", "batch=-1"]) == cli.REFUSED
    assert cli.main([*command, "--set", "seed=1"]) == 0
    assert cli.main([*command, "--name", "fast"]) == 0
    assert {path.name for path in Path("runs").iterdir()} == {"small-1", "small-2", "fast-1"}
    assert "all 2 steps are done" not in capsys.readouterr().out, "none was resumed"
    of_two = "--mesh cpu_8 --processes 2 --process 0 --coordinator localhost:1"
    for given, says in {
        "--fresh": "in one that is there; give one",
        "--fresh-once=a": "in one that is there; give one",
        of_two: "each of 2 pr",
    }.items():
        assert cli.main([*command, *given.split()]) == cli.REFUSED
        assert says in capsys.readouterr().err
    for nameless in (".", ".."):
        assert cli.main([*command, "--run-dir", nameless]) == cli.REFUSED
        assert "no name to number" in capsys.readouterr().err
    assert cli.main(["launch", "--processes", "1", "--", *command]) == cli.REFUSED
    assert "would take another directory each time" in capsys.readouterr().err
    assert {path.name for path in Path("runs").iterdir()} == {"small-1", "small-2", "fast-1"}
