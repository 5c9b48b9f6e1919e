"""Runs that fail: refused before anything is written, or ended with what was reached saved."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import jaxtrain
from jaxtrain.data import BigramChain
from jaxtrain.telemetry.metrics import read_metrics


def trained(folder: Path, experiment: jaxtrain.Experiment) -> jaxtrain.Result:
    return jaxtrain.train(
        replace(experiment, steps=6, checkpoints=jaxtrain.SavePolicy(every=1000)),
        jaxtrain.mesh_from_axes(fsdp=2),
        run_dir=folder / "run",
        cache_dir=folder / "cache",
        stream=io.StringIO(),
    )


class NoHeldOut(BigramChain):
    def open(self, split: str, **options: Any) -> Any:
        if split == "held_out":
            raise ValueError("no held-out text")
        return super().open(split, **options)


class NeverOpened(BigramChain):
    def open(self, split: str, **options: Any) -> Any:
        raise AssertionError("the data was opened before the mesh was looked at")


def test_held_out_data_is_opened_before_anything_is_written(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    data = NoHeldOut(vocab=16, seq=8, successors=2)
    with pytest.raises(ValueError, match="no held-out text"):
        trained(tmp_path, replace(own, data=data, evaluation=jaxtrain.Evaluation(every=2)))
    assert not (tmp_path / "run").exists()


def test_a_second_run_in_the_same_directory_is_refused(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    said: list[str] = []

    def ask() -> bool:
        if not said:
            with pytest.raises(ValueError, match=f"in use by process {os.getpid()}") as refused:
                trained(tmp_path, own)
            said.append(str(refused.value))
        return False

    mesh = jaxtrain.mesh_from_axes(fsdp=2)
    places = {"run_dir": tmp_path / "run", "cache_dir": tmp_path / "cache"}
    jaxtrain.train(own, mesh, steps=2, should_stop=ask, stream=io.StringIO(), **places)
    assert said
    jaxtrain.train(own, mesh, steps=3, stream=io.StringIO(), **places)  # let go at the end


def test_what_the_data_does_not_decide_is_refused_before_it_is_opened(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    data = NeverOpened(vocab=16, seq=8, successors=2)
    with pytest.raises(ValueError, match="batch=9"):
        trained(tmp_path, replace(own, data=data, batch=9))


def test_an_error_at_an_evaluation_loses_no_step(
    own: jaxtrain.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no evaluation")

    monkeypatch.setattr("jaxtrain.train.evaluate.Evaluator.__call__", broken)
    with pytest.raises(RuntimeError, match="no evaluation"):
        trained(tmp_path, replace(own, evaluation=jaxtrain.Evaluation(every=4)))
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["4"]
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_damaged_metrics_file_is_refused_before_anything_is_opened(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\nnot json\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        trained(tmp_path, replace(own, data=NeverOpened(vocab=16, seq=8, successors=2)))
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_run_that_only_skips_ends_with_an_error(own: jaxtrain.Experiment, tmp_path: Path) -> None:
    lost = replace(
        own,
        optimizer=replace(own.optimizer, learning_rate=1e38),
        steps=40,
        checkpoints=jaxtrain.SavePolicy(every=1000),
    )
    stream = io.StringIO()
    with pytest.raises(ValueError, match=r"20 steps in a row, up to step 2\d.*lower learning rate"):
        jaxtrain.train(
            lost, jaxtrain.mesh_from_axes(data=1), run_dir=tmp_path, stream=stream,
            cache_dir=tmp_path,
        )  # fmt: skip
    assert "skipped 20" in stream.getvalue()
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1
