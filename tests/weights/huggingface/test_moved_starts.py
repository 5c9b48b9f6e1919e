"""Weights that a run begins with are the same wherever they lie."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_adapters import RANK
from tiny_families import LLAMA, random_params, template

import jaxtrain
from jaxtrain import FineTuning, FromHuggingFace, FromRun, LoRA
from jaxtrain.checkpoint.run_config import read_config
from jaxtrain.files.opened import open_folder
from jaxtrain.huggingface import write_folder
from jaxtrain.huggingface.folder import Folder
from jaxtrain.weights.start_digest import ENTRY, start_digest, start_problem

TARGETS = ("period.0.attention.query", "period.0.mlp.down")
FILE = "model.safetensors"


def of(start: FromHuggingFace | FromRun | None, **more: Any) -> jaxtrain.Experiment:
    """Four steps, each second one saved."""
    return jaxtrain.Experiment(
        model=LLAMA,
        data=jaxtrain.data.BigramChain(vocab=11, seq=8),
        optimizer=jaxtrain.AdamW(1e-2),
        steps=4,
        batch=8,
        evaluation=None,
        fine_tuning=None if start is None else FineTuning(start, **more),
        checkpoints=jaxtrain.SavePolicy(every=2),
        logging=jaxtrain.Logging(tensorboard=False),
    )


def trained(experiment: jaxtrain.Experiment, run: Path | None, **more: Any) -> jaxtrain.Result:
    return jaxtrain.train(experiment, "cpu_1", run_dir=run, stream=io.StringIO(), **more)


def losses(*results: jaxtrain.Result) -> list[float]:
    return [line["loss"] for result in results for line in result.history]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_folder(tmp_path / "base", LLAMA, random_params(LLAMA, template(LLAMA)))
    return tmp_path / "base"


def changed(folder: Path, name: str, place: tuple[int, ...]) -> None:
    """Changes a number of a tensor in a folder."""
    tensors = load_file(folder / FILE)
    tensors[name][place] += 1
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


def test_a_folder_that_was_moved_is_the_same_and_another_is_not(base: Path, tmp_path: Path) -> None:
    whole = losses(trained(of(FromHuggingFace(base)), None))
    first = trained(of(FromHuggingFace(base)), tmp_path / "run", steps=2, fresh="a")
    moved = of(FromHuggingFace(base.rename(tmp_path / "moved")))
    other = shutil.copytree(tmp_path / "moved", tmp_path / "other")
    changed(other, "model.norm.weight", (0,))
    refused = "holds another experiment: experiment.fine_tuning.start.folder was .*"
    refused += r"\(its weights are not those that the run began with\); set it back"
    with pytest.raises(ValueError, match=refused):
        trained(of(FromHuggingFace(other)), tmp_path / "run")
    absent = r"start\.folder was .*\(its weights cannot be read: .*nowhere.*\); set it back"
    with pytest.raises(ValueError, match=absent):
        trained(of(FromHuggingFace(tmp_path / "nowhere")), tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"holds another experiment: experiment\.seed was [^(]*; se"
    ):
        trained(replace(of(FromHuggingFace(tmp_path / "moved")), seed=1), tmp_path / "run")
    with pytest.raises(ValueError, match=r"start\.folder was .*; experiment\.seed was"):
        trained(replace(of(FromHuggingFace(other)), seed=1), tmp_path / "run")
    again = trained(moved, tmp_path / "run", fresh="a")
    assert again.session.start == 2 and losses(first, again) == whole
    fields = read_config(tmp_path / "run")["experiment"]["fine_tuning"]["start"]  # type: ignore[index]
    assert fields["folder"] == str(tmp_path / "moved")


def test_a_run_without_a_save_begins_again_with_a_moved_folder(base: Path, tmp_path: Path) -> None:
    """And a run of an older version, of which nobody knows the weights, takes the same path."""
    unsaved = replace(of(FromHuggingFace(base)), checkpoints=None)
    whole = losses(trained(unsaved, tmp_path / "run"))
    moved = replace(
        unsaved, fine_tuning=FineTuning(FromHuggingFace(base.rename(base.parent / "b")))
    )
    assert losses(trained(moved, tmp_path / "run")) == whole
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    del config[ENTRY]
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    unknown = r"start\.folder was .*\(the run does not record which weights it began with\); set"
    with pytest.raises(ValueError, match=unknown):
        trained(unsaved, tmp_path / "run")
    trained(moved, tmp_path / "run")
    assert read_config(tmp_path / "run")[ENTRY] == config_entry(moved)  # type: ignore[index]


def config_entry(experiment: jaxtrain.Experiment) -> str:
    assert experiment.fine_tuning is not None and experiment.fine_tuning.start is not None
    return start_digest(experiment.fine_tuning.start)


def test_adapters_and_runs_that_were_moved_are_the_same(base: Path, tmp_path: Path) -> None:
    lora = LoRA(RANK, 6.0, TARGETS)
    source = tmp_path / "source"
    trained(of(FromHuggingFace(base), lora=lora), source, steps=2)
    jaxtrain.export(source, tmp_path / "lora", adapters=True)
    starts = {
        "adapters": FromHuggingFace(base, adapters=tmp_path / "lora"),
        "run": FromRun(source, step=2),
    }
    for name, start in starts.items():
        trained(of(start, lora=lora), tmp_path / name, steps=2)
    (tmp_path / "lora").rename(tmp_path / "lora.2")
    source = source.rename(tmp_path / "source.2")
    elsewhere = {
        "adapters": FromHuggingFace(base, adapters=tmp_path / "lora.2"),
        "run": FromRun(source, step=2),
    }
    other = shutil.copytree(base, tmp_path / "other")
    changed(other, "model.norm.weight", (0,))
    with pytest.raises(ValueError, match=r"start\.adapters was .*start\.folder was"):
        start = FromHuggingFace(other, adapters=tmp_path / "lora.2")
        trained(of(start, lora=lora), tmp_path / "adapters", steps=3)
    for name, start in elsewhere.items():
        assert trained(of(start, lora=lora), tmp_path / name, steps=3).session.start == 2
    trained(of(FromHuggingFace(base), lora=lora), source)
    others = {
        "adapters": (FromHuggingFace(base), "adapters was"),
        "run": (FromRun(source, step=4), r"start\.step was 2, now 4"),
    }
    for name, (start, text) in others.items():
        with pytest.raises(ValueError, match=text):
            trained(of(start, lora=lora), tmp_path / name)


def test_a_branch_of_a_run_whose_folder_was_moved(base: Path, tmp_path: Path) -> None:
    trained(of(FromHuggingFace(base)), tmp_path / "run")
    moved = replace(of(FromHuggingFace(base.rename(tmp_path / "moved"))), steps=6)
    other = shutil.copytree(tmp_path / "moved", tmp_path / "other")
    changed(other, "lm_head.weight", (5, 0))
    with pytest.raises(ValueError, match=r"fine_tuning\.start=.* would not be used"):
        more = dict(from_run=tmp_path / "run")
        trained(replace(of(FromHuggingFace(other)), steps=6), tmp_path / "branch", **more)
    branch = trained(moved, tmp_path / "branch", **more)
    assert [line["step"] for line in branch.history] == [5, 6]
    averaged = replace(of(None), ema_decay=0.5)
    trained(averaged, tmp_path / "source", steps=2)
    starts = [FromRun(tmp_path / "source", averaged=a) for a in (False, True)]
    trained(of(starts[0]), tmp_path / "second")
    with pytest.raises(ValueError, match=r"fine_tuning\.start=.* would not be used"):
        more = dict(from_run=tmp_path / "second")
        trained(replace(of(starts[1]), steps=6), tmp_path / "another", **more)


def test_a_branch_of_a_branch_knows_the_weights_of_the_first_run(
    base: Path, tmp_path: Path
) -> None:
    trained(of(FromHuggingFace(base)), tmp_path / "run")
    longer, more = replace(of(FromHuggingFace(base)), steps=6), dict(from_run=tmp_path / "run")
    trained(longer, tmp_path / "branch", steps=5, **more)
    moved = replace(longer, fine_tuning=FineTuning(FromHuggingFace(base.rename(base.parent / "b"))))
    assert trained(moved, tmp_path / "branch").session.start == 5
    longest, more = replace(moved, steps=8), dict(from_run=tmp_path / "branch")
    assert len(trained(longest, tmp_path / "second", **more).history) == 2
    config = read_config(tmp_path / "second")
    assert config is not None and config[ENTRY] == config_entry(moved)
    random = replace(longest, fine_tuning=None)
    trained(random, tmp_path / "third", from_run=tmp_path / "branch")
    assert ENTRY not in (read_config(tmp_path / "third") or {}), "it begins with none"
    del config[ENTRY]  # as an older version leaves it
    (tmp_path / "second" / "config.json").write_text(json.dumps(config))
    assert trained(longest, tmp_path / "second").session.start == 8


def test_a_run_that_went_on_is_known_by_the_step_that_was_its_newest(
    base: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    trained(of(FromHuggingFace(base)), source, steps=2)
    trained(of(FromRun(source)), tmp_path / "run", steps=2)
    trained(of(FromHuggingFace(base)), source)
    start = FromRun(source.rename(tmp_path / "elsewhere"))
    (pack,) = (start.run_dir / "checkpoints").rglob("4.*.pack")
    pack.write_bytes(b"")  # a step of which nothing is needed
    assert trained(of(start), tmp_path / "run").session.start == 2
    shutil.rmtree(tmp_path / "elsewhere" / "checkpoints" / "2")
    again = FromRun(shutil.move(tmp_path / "elsewhere", tmp_path / "third"))
    with pytest.raises(ValueError, match=r"start\.run_dir was"):
        trained(of(again), tmp_path / "run")


def test_of_a_run_without_a_step_the_newest_are_read_until_one_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4, 5, 6):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    read: list[int | None] = []

    def digest(start: FromRun) -> str:
        read.append(start.step)
        if start.step in (5, 6, None):
            raise ValueError(f"step {start.step} is torn")
        return f"weights {start.step}"

    monkeypatch.setattr("jaxtrain.weights.start_digest.start_digest", digest)
    monkeypatch.setattr("jaxtrain.weights.start_digest.committed_steps", committed)

    def problem(recorded: int, start: FromRun) -> str:
        read.clear()
        return start_problem({ENTRY: f"weights {recorded}"}, start)

    assert problem(4, FromRun(tmp_path)) == "" and read == [6, 5, 4]
    assert "step 6 is torn" in problem(9, FromRun(tmp_path)) and read == [6, 5, 4, 2]
    assert problem(4, FromRun(tmp_path, step=4)) == "" and read == [4]
    assert "not those" in problem(4, FromRun(tmp_path, step=2)) and read == [2]
    assert "step None is torn" in problem(4, FromRun(tmp_path / "empty")) and read == [None]


def committed(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir()) if folder.is_dir() else []


def test_a_digest_names_tensors_and_sees_each_of_them(base: Path, tmp_path: Path) -> None:
    """A model that was trained differs in every tensor, and a tensor in every row."""
    with Folder(open_folder("folder", base)) as files:
        whole, tensors = files.digest(), dict(files.tensors)
    assert len(tensors) > 10
    for name, info in tensors.items():
        for place in ((0,) * len(info.shape), tuple(n - 1 for n in info.shape)):
            other = shutil.copytree(base, tmp_path / "other")
            changed(other, name, place)
            assert start_digest(FromHuggingFace(other)) != whole, (name, place)
            shutil.rmtree(other)
    arrays = load_file(base / FILE)
    other = shutil.copytree(base, tmp_path / "other")
    renamed = {name.replace("layers.1", "layers.7"): array for name, array in arrays.items()}
    save_file(renamed, other / FILE)
    assert start_digest(FromHuggingFace(other)) != whole
    more = {"counts": np.arange(3), "empty": np.zeros((0, 3), np.float32), "one": np.float32(2)}
    save_file({**arrays, **{k: np.asarray(v) for k, v in more.items()}}, other / FILE)
    assert start_digest(FromHuggingFace(other)) != whole
    save_file(arrays, other / FILE)
    assert start_digest(FromHuggingFace(other)) == start_digest(FromHuggingFace(base)) == whole
