"""Runs that begin with adapters of `peft`, and adapters of runs."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny_adapters import RANK, adapters_of
from tiny_families import LLAMA, MODELS, random_params, template

import jaxtrain
from jaxtrain import FineTuning, FromHuggingFace, FromRun, LoRA, Pipeline, cli, mesh_from_axes
from jaxtrain.huggingface import huggingface_lora, write_folder
from jaxtrain.huggingface.peft_write import write_adapters
from jaxtrain.moe import Balance
from jaxtrain.weights.loading import load
from jaxtrain.weights.start import read_stored as really_read

TARGETS = ("period.0.attention.query", "period.0.mlp.down")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_folder(tmp_path / "base", LLAMA, random_params(LLAMA, template(LLAMA)))
    return tmp_path / "base"


def of(tuning: FineTuning) -> jaxtrain.Experiment:
    return jaxtrain.Experiment(
        model=LLAMA,
        data=jaxtrain.data.BigramChain(vocab=11, seq=8),
        optimizer=jaxtrain.AdamW(1e-2),
        steps=2,
        batch=8,
        microbatches=2,
        fine_tuning=tuning,
        checkpoints=jaxtrain.SavePolicy(every=100),
    )


def test_a_run_hands_its_adapters_on_and_takes_them_up(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command; what goes on from the folder goes on as from the run, to the bit."""
    lora, told = LoRA(RANK, 6.0, TARGETS), io.StringIO()
    first = of(FineTuning(FromHuggingFace(base), lora=lora))
    mesh = mesh_from_axes(data=2, fsdp=2)
    jaxtrain.train(first, mesh, run_dir=tmp_path / "run", stream=told)
    out = tmp_path / "lora"
    half = ["--dtype", "float16", "--out", str(tmp_path / "half")]
    assert cli.main(["export", str(tmp_path / "run"), "--adapters", *half]) == 0
    found = load_file(tmp_path / "half" / WEIGHTS)
    assert {str(array.dtype) for array in found.values()} == {"float16"}
    assert cli.main(["export", str(tmp_path / "run"), "--adapters", "--out", str(out)]) == 0
    assert json.loads((out / CONFIG).read_text())["base_model_name_or_path"] == str(base)
    assert huggingface_lora(out, LLAMA) == lora
    capsys.readouterr()
    losses = []
    for start in (FromRun(tmp_path / "run"), FromHuggingFace(base, adapters=out)):
        again = of(FineTuning(start, lora=lora))
        run = tmp_path / type(start).__name__
        went = jaxtrain.train(again, mesh, run_dir=run, stream=told)
        losses.append([line["loss"] for line in went.history])
    assert losses[0] == losses[1]
    with pytest.raises(ValueError, match=r"the run began with FromRun.*, and with no folder that"):
        jaxtrain.export(tmp_path / "FromRun", tmp_path / "none", adapters=True)
    jaxtrain.export(tmp_path / "FromHuggingFace", tmp_path / "more", adapters=True)
    merged = load(tmp_path / "run").params
    assert merged.keys().isdisjoint(adapters_of(LLAMA, TARGETS))
    line = told.getvalue().splitlines()
    assert any(f"from {base} with {out}, " in text for text in line)


UNFIT = {
    "none": (None, "has adapters, and fine_tuning.lora=None trains none"),
    "rank": (LoRA(4, 8.0, TARGETS), "lora: rank=4, there 3; use"),
    "scale": (LoRA(RANK, 5.0, TARGETS), "alpha / rank is 1.66667, there 2"),
    "more": (LoRA(RANK, 6.0, (*TARGETS, "*.mlp.up")), "targets choose period.0.mlp.up too"),
    "less": (LoRA(RANK, 6.0, TARGETS[:1]), "targets do not choose period.0.mlp.down"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_other_adapters_than_are_trained_are_refused_with_those_that_are(
    name: str, base: Path, tmp_path: Path
) -> None:
    """By `check` too; and what is named is then taken."""
    out = tmp_path / "lora"
    write_adapters(out, LLAMA, adapters_of(LLAMA, TARGETS), alpha=6.0)
    lora, told = UNFIT[name]
    start = FromHuggingFace(base, adapters=out)
    mesh = mesh_from_axes(data=2)
    with pytest.raises(ValueError, match=told) as refused:
        jaxtrain.check(of(FineTuning(start, lora=lora)), mesh)
    named = "LoRA(" + str(refused.value).partition("which is LoRA(")[2]
    assert named == repr(LoRA(RANK, 6.0, TARGETS))
    jaxtrain.check(of(FineTuning(start, lora=LoRA(RANK, 6.0, TARGETS))), mesh)


def test_layers_of_adapters_come_to_their_stages(tmp_path: Path) -> None:
    """In an interleaved pipeline layers rest in another order than they have."""
    model = replace(LLAMA, layers=4)
    write_folder(tmp_path / "base", model, random_params(model, template(model)))
    write_adapters(tmp_path / "lora", model, adapters_of(model, TARGETS), alpha=0.3)
    start = FromHuggingFace(tmp_path / "base", adapters=tmp_path / "lora")
    tuned = FineTuning(start, lora=huggingface_lora(tmp_path / "lora", model))
    experiment = replace(of(tuned), model=model, checkpoints=None)
    losses = []
    for axes in ({"data": 2}, {"stage": 2}):
        pipeline = Pipeline("interleaved", chunks=2) if "stage" in axes else None
        execution = replace(experiment.execution, pipeline=pipeline or Pipeline())
        went = jaxtrain.train(
            replace(experiment, execution=execution), mesh_from_axes(**axes), stream=io.StringIO()
        )
        losses.append([line["loss"] for line in went.history])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_the_step_that_is_named_is_written(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the base model's folder as it is found from anywhere."""
    monkeypatch.chdir(tmp_path)
    tuned = of(FineTuning(FromHuggingFace(base.name), lora=LoRA(RANK, 6.0, TARGETS)))
    saved = replace(tuned, checkpoints=jaxtrain.SavePolicy(every=1))
    run = tmp_path / "run"
    jaxtrain.train(saved, mesh_from_axes(data=1), run_dir=run, stream=io.StringIO())
    found = []
    for step in (1, 2, None):
        jaxtrain.export(run, tmp_path / str(step), step=step, adapters=True)
        found.append(load_file(tmp_path / str(step) / WEIGHTS))
    told = json.loads((tmp_path / "1" / CONFIG).read_text())["base_model_name_or_path"]
    assert told == str(base)
    assert all((found[1][k] == found[2][k]).all() for k in found[1])
    assert any((found[0][k] != found[2][k]).any() for k in found[0])


ROUTED = MODELS["dots 1"][1]
MOVED = replace(ROUTED.period[-1], mlp=replace(ROUTED.period[-1].mlp, balance=Balance(bias_rate=1)))
FIRST = LoRA(2, 6.0, ("*.attention.query",))
MORE: dict[str, tuple[Any, str]] = {
    "all of it": (
        lambda start: FineTuning(start),
        "run trained no adapters .*; export its",
    ),
    "norms too": (
        lambda start: FineTuning(start, ("*norm*",), FIRST),
        r"for fine_tuning.trainable=\('\*norm\*',\) was trained too; export the weights with",
    ),
    "from nothing": (
        lambda start: FineTuning(None, lora=FIRST),
        "for the run began with None, and with no folder that `peft` could load; export the",
    ),
    "biases too": (
        lambda start: FineTuning(start, lora=FIRST),
        "for Balance.bias_rate=.... moved biases of routers too; export the weights with",
    ),
}


@pytest.mark.parametrize("name", MORE)
def test_adapters_that_alone_are_not_what_was_trained_are_not_written(
    name: str, tmp_path: Path
) -> None:
    model = replace(ROUTED, period=(MOVED,)) if name == "biases too" else LLAMA
    write_folder(tmp_path / "base", model, random_params(model, template(model)))
    make, told = MORE[name]
    experiment = replace(of(make(FromHuggingFace(tmp_path / "base"))), model=model, steps=1)
    mesh, run = mesh_from_axes(data=1), tmp_path / "run"
    jaxtrain.train(experiment, mesh, run_dir=run, stream=io.StringIO())
    with pytest.raises(ValueError, match=told):
        jaxtrain.export(run, tmp_path / "out", adapters=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_cannot_be_written_is_refused_before_a_weight_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of what can be, adapters alone are read."""
    model, run = MODELS[name][1], tmp_path / "run"
    write_folder(tmp_path / "base", model, random_params(model, template(model)))
    tuned = FineTuning(FromHuggingFace(tmp_path / "base"), lora=LoRA(RANK, 6.0, TARGETS[:1]))
    once = replace(of(tuned), model=model, steps=1)
    jaxtrain.train(once, mesh_from_axes(data=1), run_dir=run, stream=io.StringIO())
    asked: list[str] = []

    def read_stored(stored: Any, template: Any, *rest: Any) -> Any:
        asked.extend(stored.names)
        return really_read(stored, template, *rest)

    monkeypatch.setattr("jaxtrain.weights.loading.read_stored", read_stored)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a").touch()
    for out, dtype, told in (
        (tmp_path / "there", None, "there"),
        (tmp_path / "out", "int8", "dtype is int8; give one of float32, bfloat16, float16"),
        *([(tmp_path / "out", None, "query shares .*c_attn")] if name == "gpt2" else []),
    ):
        with pytest.raises(ValueError, match=told):
            jaxtrain.export(run, out, dtype=dtype, adapters=True)
    assert not asked
    if name == "llama":
        jaxtrain.export(run, tmp_path / "out", adapters=True)
        assert sorted(asked) == [f"{TARGETS[0]}_lora_{part}" for part in "ab"]
