"""What cannot be fine-tuned is told before anything is compiled or written, with the way out."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxtrain
from jaxtrain import FineTuning, FromHuggingFace, FromRun, LoRA
from jaxtrain.huggingface import write_folder
from jaxtrain.models.build import abstract_model
from jaxtrain.session.session import open_session
from jaxtrain.weights.loading import _template, load

MESH = jaxtrain.mesh_from_axes(data=1)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: FineTuning(trainable=()), r"trainable=\(\) names nothing"),
        (lambda: FineTuning(trainable="head"), "trainable='head' is a str; use a tuple of texts"),
        (lambda: FineTuning(trainable=(3,)), "trainable has 3; a pattern is a text"),
        (lambda: FineTuning(start="folder"), "use a jaxtrain.FromHuggingFace or a jaxtrain.FromR"),
        (lambda: FineTuning(lora=8), "lora=8 is a int; use a jaxtrain.LoRA or None"),
        (lambda: FromHuggingFace(3), "folder=3 is a int"),
        (lambda: FromRun("run", step=0), "step=0 must be a whole number of 1 or more"),
        (lambda: FromRun("run", leaves=()), r"leaves=\(\) names nothing"),
        (lambda: LoRA(0, alpha=-1.0), "rank=0 must be .*; alpha=-1.0 must be"),
        (lambda: LoRA(2, 4.0, targets=("",)), "targets has ''; a pattern is a text"),
    ],
)
def test_a_wrong_field_is_refused_as_it_is_made(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


FROZEN = [
    (dict(trainable=("period.*.attn.*",)), {}, r"'period.\*.attn.\*' names none of the leaves; "),
    (dict(trainable=("hed", "norm*")), {}, "'hed' names none of the leaves; near it are .*head"),
    (
        dict(lora=LoRA(2, 1.0, ("embedding",))),
        {},
        "'embedding' names none of the matrices tha",
    ),
    (dict(lora=LoRA(8, 1.0)), {}, "rank=8 is not below the smaller side of .*query, 8; use rank=4"),
    (dict(trainable=("head", "norm*")), dict(stage=2), "only head, norm.scale, behind the pipeli"),
]


@pytest.mark.parametrize(("fields", "axes", "told"), FROZEN)
def test_a_choice_that_trains_nothing_is_refused(
    fields: Any, axes: dict[str, int], told: str, decoder: jaxtrain.Experiment
) -> None:
    """By check as by train, with everything else that is wrong."""
    model = replace(decoder.model, layers=2, tied=False)
    wrong = replace(decoder, model=model, fine_tuning=FineTuning(**fields), clip_norm=-1.0)
    mesh = jaxtrain.mesh_from_axes(**(axes or {"data": 1}))
    with pytest.raises(ValueError, match=told) as caught:
        jaxtrain.check(wrong, mesh)
    assert "clip_norm=-1.0" in str(caught.value)
    with pytest.raises(ValueError, match=told):
        jaxtrain.train(wrong, mesh)


def test_adapters_and_folders_are_for_built_in_models(own: jaxtrain.Experiment) -> None:
    for tuning, told in (
        (
            FineTuning(lora=LoRA(2, 1.0)),
            "fine_tuning.lora puts adapters beside matrices that a model names",
        ),
        (FineTuning(FromHuggingFace("folder")), "a folder holds the weights of a DecoderConfig"),
    ):
        with pytest.raises(ValueError, match=told):
            jaxtrain.check(replace(own, fine_tuning=tuning), MESH)


def test_leaves_of_a_model_of_ones_own_are_frozen_by_name(
    own: jaxtrain.Experiment, opened: Any, stepped: Any
) -> None:
    session = opened(replace(own, fine_tuning=FineTuning(trainable=("inward",))), data=2)
    before = {k: v.copy() for k, v in session.state.params.items()}
    stepped(session)
    after = session.state.params
    assert (after["outward"] == before["outward"]).all()
    assert (after["inward"] != before["inward"]).any()


@pytest.fixture
def folder(decoder: jaxtrain.Experiment, tmp_path: Path) -> Path:
    """The decoder's parameters, all zero but for norms, as a folder."""
    params = {
        k: jax.numpy.zeros(spec.shape, device=spec.sharding)
        for k, spec in _template(abstract_model(decoder.model), MESH).items()
    }
    write_folder(tmp_path / "folder", decoder.model, params)
    return tmp_path / "folder"


def begun(experiment: jaxtrain.Experiment, start: Any) -> None:
    """As check and as a run's start see it."""
    given = replace(experiment, fine_tuning=FineTuning(start))
    with pytest.raises(ValueError) as one:
        jaxtrain.check(given, MESH)
    with pytest.raises(ValueError) as other:
        open_session(given, MESH, cache_dir=Path("unused"))
    assert str(one.value) == str(other.value)
    raise one.value


def test_a_folder_that_does_not_fit_is_refused(
    decoder: jaxtrain.Experiment, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"nowhere.config.json is not a model that can be read"):
        begun(decoder, FromHuggingFace(tmp_path / "nowhere"))
    other = replace(decoder, model=replace(decoder.model, layers=2, embed=12))
    with pytest.raises(ValueError) as caught:
        begun(other, FromHuggingFace(folder))
    for part in (
        "model.embed_tokens.weight is [16, 8], and [16, 12] in this model",
        "model.layers.1.mlp.up_proj.weight [16, 12] is missing",
    ):
        assert part in str(caught.value)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor"):
        begun(decoder, FromHuggingFace(folder))


def test_a_run_that_does_not_fit_is_refused(decoder: jaxtrain.Experiment, tmp_path: Path) -> None:
    """Every leaf that is missing, extra or of another shape; unless leaves are asked for."""
    saved = replace(decoder, steps=2, checkpoints=jaxtrain.SavePolicy(every=1000))
    options = dict(cache_dir=tmp_path / "cache", stream=io.StringIO())
    jaxtrain.train(saved, MESH, run_dir=tmp_path / "run", steps=1, **options)

    with pytest.raises(ValueError, match=r"nowhere.checkpoints has no committed checkpoint; give"):
        begun(decoder, FromRun(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"no such step is committed; .* restore one of \[1\]"):
        begun(decoder, FromRun(tmp_path / "run", step=5))
    with pytest.raises(ValueError, match="averaged: the run keeps no averaged weights"):
        begun(decoder, FromRun(tmp_path / "run", averaged=True))

    block = replace(decoder.model.period[0], norm=jaxtrain.nn.LayerNorm())
    mlp = jaxtrain.MlpConfig(hidden=32, gated=False)
    model = replace(decoder.model, period=(replace(block, mlp=mlp),), tied=False)
    other = replace(decoder, model=model)
    with pytest.raises(ValueError) as caught:
        begun(other, FromRun(tmp_path / "run"))
    for part in (
        "in 10 places",
        "model: block.norm is a LayerNorm, there a RMSNorm",
        "head: not there, expected float32[16,8]",
        "period.0.attention_norm.bias: not there, expected float32[1,8]",
        "period.0.mlp.up: float32[1,8,16] there, expected float32[1,8,32]",
        "period.0.mlp.gate: float32[1,8,16] there, not in this model",
        "take some of them with leaves=",
    ):
        assert part in str(caught.value), part
    chosen = FineTuning(FromRun(tmp_path / "run", leaves=("*.attention.*", "embedding")))
    jaxtrain.check(replace(other, fine_tuning=chosen), MESH)
    with pytest.raises(ValueError, match=r"leaves: 'hed' names none of the leaves; near it are"):
        begun(other, FromRun(tmp_path / "run", leaves=("hed", "embedding")))
    with pytest.raises(ValueError, match=r"in 1 places:\n  head: not there"):
        begun(other, FromRun(tmp_path / "run", leaves=("head", "embedding")))


def test_adapters_are_taken_as_they_were_or_not_at_all(
    decoder: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """At the scale they were trained with; a matrix is not taken without its own."""
    lora = LoRA(2, alpha=4.0)
    policy = jaxtrain.SavePolicy(every=1000)
    saved = replace(decoder, steps=2, fine_tuning=FineTuning(lora=lora), checkpoints=policy)
    options = dict(cache_dir=tmp_path / "cache", stream=io.StringIO())
    jaxtrain.train(saved, MESH, run_dir=tmp_path / "run", steps=1, **options)

    def check(start: FromRun, lora: LoRA | None) -> None:
        jaxtrain.check(replace(decoder, fine_tuning=FineTuning(start, lora=lora)), MESH)

    for leaves in (None, ("*",)):
        check(FromRun(tmp_path / "run", leaves=leaves), lora)
        with pytest.raises(ValueError, match="alpha / rank is 16, there 2; use alpha=4"):
            check(FromRun(tmp_path / "run", leaves=leaves), LoRA(2, alpha=32.0))
        with pytest.raises(ValueError, match=r"attention\.query: has an adapter there, which"):
            check(FromRun(tmp_path / "run", leaves=leaves), None)
    check(FromRun(tmp_path / "run", leaves=("*.key", "embedding")), LoRA(2, alpha=32.0))
    for alpha, scale_differs in ((8.0, False), (4.0, True)):  # of another rank: shapes differ too
        with pytest.raises(ValueError, match="_lora_a") as told:
            check(FromRun(tmp_path / "run"), LoRA(4, alpha=alpha))
        assert ("alpha / rank is 1, there 2" in str(told.value)) is scale_differs


def test_a_run_of_another_function_of_equal_shapes_is_refused(
    decoder: jaxtrain.Experiment, tmp_path: Path
) -> None:
    options = dict(cache_dir=tmp_path / "cache", stream=io.StringIO())
    saved = replace(decoder, steps=2, checkpoints=jaxtrain.SavePolicy(every=1000))
    jaxtrain.train(saved, MESH, run_dir=tmp_path / "run", steps=1, **options)
    block = decoder.model.period[0]
    block = replace(
        block, mlp=replace(block.mlp, activation=jaxtrain.transformer.gelu_tanh), dropout=0.1
    )
    other = replace(decoder, model=replace(decoder.model, period=(block,)))
    with pytest.raises(ValueError, match=r"in 1 places:.*\n.*activation is gelu_tanh, there silu"):
        begun(other, FromRun(tmp_path / "run"))
    taken = FineTuning(FromRun(tmp_path / "run", leaves=("*",)))
    jaxtrain.check(replace(other, fine_tuning=taken), MESH)


def test_what_is_no_model_is_not_generated_from(
    own: jaxtrain.Experiment, folder: Path, tmp_path: Path
) -> None:
    saved = replace(own, steps=2, checkpoints=jaxtrain.SavePolicy(every=1000))
    options = dict(cache_dir=tmp_path / "cache", stream=io.StringIO())
    jaxtrain.train(saved, MESH, run_dir=tmp_path / "own", steps=1, **options)
    with pytest.raises(ValueError, match="its model does not describe itself"):
        jaxtrain.generate_text(tmp_path / "own", "a")
    with pytest.raises(ValueError, match="folder has no tokenizer"):
        jaxtrain.generate_text(folder, "a")
    with pytest.raises(ValueError, match="no run directory; a folder of weights has no steps"):
        load(folder, step=3)
    with pytest.raises(ValueError, match="has no checkpoints; give a run directory"):
        jaxtrain.export(folder, tmp_path / "out")
    missing = tmp_path / "no"
    for run in (load, partial(jaxtrain.export, out="out")):
        with pytest.raises(ValueError, match=r"there is no directory .*no; give a run directory"):
            run(missing)
    text = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "version": "1.0"}
    (folder / "tokenizer.json").write_text(json.dumps({**text, "added_tokens": []}))
    with pytest.raises(ValueError, match=r"neither eos_token in tokenizer_config\.json nor eos_t"):
        jaxtrain.generate_text(folder, "a")
