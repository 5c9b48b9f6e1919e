"""Fields are refused where they stand, with what to write instead, before anything else happens."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import pytest

import jaxtrain
from jaxtrain.experiment import with_fields


def model(rngs: Any) -> Any:
    raise AssertionError("no model is built here")


def experiment(**changes: Any) -> jaxtrain.Experiment:
    given = jaxtrain.Experiment(
        model=model, data=jaxtrain.TextData(), optimizer=jaxtrain.AdamW(1e-3), steps=10, batch=16
    )
    return replace(given, **changes)


@pytest.mark.parametrize(
    ("make", "fields", "told"),
    [
        (jaxtrain.Evaluation, {"every": 0, "batches": 0}, ["every=0 ", "batches=0 "]),
        (jaxtrain.Evaluation, {"sample": "def "}, ["use sample=jaxtrain.Sample(prompt='def ')"]),
        (jaxtrain.Evaluation, {"batches": 2.5}, ["batches=2.5 must be a whole number of 1"]),
        (
            jaxtrain.Evaluation,
            {"final_batches": 0},
            ["final_batches=0 must be a whole number of 1 or more"],
        ),
        (jaxtrain.Logging, {"every": 0}, ["every=0 must be a whole number of 1 or more"]),
        (
            jaxtrain.Logging,
            {"every": "often", "profile": 3, "tensorboard": 1},
            [
                "every='often' is a str; use a whole number",
                "profile=3 is a int; use a jaxtrain.Steps or None",
                "tensorboard=1 is a int; use True or False or None",
            ],
        ),
        (
            jaxtrain.Sample,
            {"prompt": "", "tokens": -5, "temperature": -1},
            ["prompt=''", "tokens=-5 ", "temperature=-1 "],
        ),
        (jaxtrain.Sample, {"prompt": "a", "temperature": 1e-45}, ["or at least 1e-30"]),
        (jaxtrain.Sample, {"prompt": "a", "temperature": float("nan")}, ["temperature=nan must"]),
        (jaxtrain.Sample, {"prompt": b"a"}, ["prompt=b'a' must be a text"]),
        (jaxtrain.Execution, {"mode": 1}, ["mode=1 is a int; use a text in quotes or None"]),
        (
            jaxtrain.Execution,
            {"reducer": 3},
            ["reducer=3 is a int; use a jaxtrain.collectives.Lax or a "],
        ),
    ],
)
def test_a_wrong_field_is_refused_as_it_is_made(
    make: Any, fields: dict[str, Any], told: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        make(**fields)
    assert all(part in str(caught.value) for part in told), caught.value


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("precision", "bf16", "precision='bf16' is a str; use precision=jaxtrain.bf16"),
        ("precision", "half", "precision='half' is a str; use a jaxtrain.optim.Precision"),
        ("sharding", "fsdp", "sharding='fsdp' is a str; use sharding=jaxtrain.fsdp()"),
        ("sharding", jaxtrain.fsdp, "use sharding=jaxtrain.fsdp()"),
        ("evaluation", 100, "is a int; use evaluation=jaxtrain.Evaluation(every=100)"),
        ("checkpoints", 100, "use checkpoints=jaxtrain.SavePolicy(every=100)"),
        ("logging", None, "logging=None is a NoneType; use a jaxtrain.Logging"),
        ("steps", None, "steps=None is a NoneType; use a whole number"),
        ("steps", 10.0, "steps=10.0 is a float; use a whole number"),
        ("microbatches", True, "microbatches=True is a bool; use a whole number"),
        ("batch", "many", "batch='many' is a str; use a whole number or a jaxtrain.data.BatchRamp"),
        ("clip_norm", "1", "clip_norm='1' is a str; use a number or None"),
        ("seed", 1.5, "seed=1.5 is a float; use a whole number"),
        ("seed", -1, "seed=-1 must lie in [0, 2**32)"),
        ("seed", 2**32, "must lie in [0, 2**32)"),
        ("data", "wikitext", "data='wikitext' has no open; use a value such as jaxtrain.TextData"),
        ("data", jaxtrain.TextData, "has no open; use a value such as jaxtrain.TextData()"),
        ("optimizer", "adamw", "has no build; use a value such as jaxtrain.AdamW"),
    ],
)
def test_a_field_of_another_kind_is_told_with_what_to_write(
    field: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        experiment(**{field: value})


def test_all_fields_of_another_kind_are_told_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        experiment(precision="bf16", steps=None, seed=-1, data=None)
    for part in ("precision='bf16'", "steps=None", "seed=-1", "data=None"):
        assert part in str(caught.value)


def test_what_the_annotations_allow_is_taken() -> None:
    given = experiment(
        batch=jaxtrain.data.BatchRamp(8, 16, 8, 4),
        clip_norm=1,
        evaluation=jaxtrain.Evaluation(
            every=1, batches=None, sample=jaxtrain.Sample("a", tokens=1, temperature=0)
        ),
        checkpoints=None,
        seed=2**32 - 1,
    )
    assert given.clip_norm == 1 and given.checkpoints is None


@pytest.mark.parametrize(
    "path",
    ["steps", "seed", "microbatches", "batch", "data", "data.seq", "data.tokenizer", "model.layers",
     "model.period", "logging", "logging.every", "precision.compute", "evaluation.every"],
)  # fmt: skip
def test_none_stands_only_where_the_annotation_has_it(path: str) -> None:
    block = jaxtrain.BlockConfig(jaxtrain.AttentionConfig(heads=2), jaxtrain.MlpConfig(hidden=8))
    decoder = jaxtrain.DecoderConfig(vocab=257, embed=8, layers=1, period=(block,))
    with pytest.raises(ValueError, match=path.rpartition(".")[2]):
        with_fields(experiment(model=decoder), [f"{path}=None"])


def test_none_is_set_where_the_annotation_has_it() -> None:
    none = ["clip_norm", "evaluation.batches", "checkpoints", "execution.loop"]
    given = with_fields(experiment(), [f"{path}=None" for path in none])
    assert given.clip_norm is None and given.checkpoints is None
    assert given.evaluation is not None and given.evaluation.batches is None


BLOCK = jaxtrain.BlockConfig(jaxtrain.AttentionConfig(heads=2), jaxtrain.MlpConfig(hidden=8))
DECODER = jaxtrain.DecoderConfig(vocab=257, embed=8, layers=1, period=(BLOCK,))
WRITTEN = {
    "precision=bf16": jaxtrain.bf16,
    "sharding=zero1()": jaxtrain.zero1(),
    "sharding=zero1() | tensor()": jaxtrain.zero1() | jaxtrain.tensor(),
    "optimizer=SGD(0.1, momentum=-0.0)": jaxtrain.SGD(0.1, momentum=-0.0),
    "optimizer=AdamW(WarmupCosine(3e-4, warmup=2), b1=0.8)": jaxtrain.AdamW(
        jaxtrain.WarmupCosine(3e-4, warmup=2), b1=0.8
    ),
    "execution.reducer=Ring()": jaxtrain.collectives.Ring(),
    "execution.loop=LayerLoop(remat='dots')": jaxtrain.LayerLoop(remat="dots"),
    "execution.mode=gspmd": "gspmd",
    "checkpoints=SavePolicy(every=Minutes(5))": jaxtrain.SavePolicy(
        every=jaxtrain.checkpoint.Minutes(5)
    ),
    "model.period.0.mlp.activation=gelu_tanh": jaxtrain.transformer.gelu_tanh,
    "model.period[0].mlp.activation=silu": jaxtrain.transformer.silu,
    "precision=jaxtrain.bf16": jaxtrain.bf16,
    "sharding=jaxtrain.fsdp() | jaxtrain.tensor()": jaxtrain.fsdp() | jaxtrain.tensor(),
    "data.source=JsonLines('a.jsonl', held_out=0.5)": jaxtrain.data.JsonLines(
        "a.jsonl", held_out=0.5
    ),
    "data.tokenizer=BpeTokenizer(1024)": jaxtrain.data.BpeTokenizer(1024),
    "precision=Precision(compute=bfloat16)": jaxtrain.optim.Precision(compute=jnp.bfloat16),
    "model.period.0=BlockConfig(AttentionConfig(heads=4), MlpConfig(16))": jaxtrain.BlockConfig(
        jaxtrain.AttentionConfig(heads=4), jaxtrain.MlpConfig(16)
    ),
    "model.period=(BlockConfig(AttentionConfig(4), MlpConfig(16)),)": (
        jaxtrain.BlockConfig(jaxtrain.AttentionConfig(4), jaxtrain.MlpConfig(16)),
    ),
    # A name where a text stands is that text.
    "data.tokenizer.eos=train": "train",
}


@pytest.mark.parametrize("setting", WRITTEN)
def test_a_value_is_written_by_the_public_names(setting: str) -> None:
    data = jaxtrain.TextData(tokenizer=jaxtrain.data.BpeTokenizer())
    found: Any = with_fields(experiment(model=DECODER, data=data), [setting])
    for name in setting.partition("=")[0].replace("[0]", ".0").split("."):
        found = found[int(name)] if name.isdigit() else getattr(found, name)
    assert found == WRITTEN[setting] and type(found) is type(WRITTEN[setting])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("precision=SGD(0.1)", "is a SGD; use a jaxtrain.optim.Precision"),
        ("precision=Precision", "Precision is no value yet; call it, Precision(...)"),
        ("optimizer=SGD(WarmupCosine)", "WarmupCosine is no value yet; call it"),
        ("precision=bf15", "precision is Precision, and 'bf15' is str; did you mean bf16?"),
        ("precision=Bf16", "did you mean bf16?"),
        ("precision='bf16'", "give bf16 without quotes"),
        ("precision=bfloat16", "is Precision, and bfloat16 is a dtype; did you mean bf16?"),
        ("precision='float16'", "did you mean fp16?"),
        ("precision=float32", "did you mean fp32?"),
        ("optimizer=bfloat16", "is AdamW, and bfloat16 is a dtype; set one of its fields"),
        ("precision.compute=bf16", "compute='bf16' must be a floating type"),
        ("sharding=fsdp", "fsdp is no value yet; call it, fsdp(...)"),
        ("sharding=zero1() | tensor", "tensor is no value yet; call it, tensor(...)"),
        ("sharding=zero1() | 3", "only sharding presets combine with |"),
        ("batch=8 | 16", "only sharding presets combine with |"),
        ("optimizer=SGD", "SGD is no value yet; call it, SGD(...)"),
        ("optimizer=SGD(0.1", "it is not a whole expression: '(' was never closed"),
        ("optimizer=adam", "optimizer is AdamW, and 'adam' is str; "),
        ("optimizer=AdamW(0.1, b1=0.1, b1=0.2)", "AdamW: b1 is given twice"),
        ("optimizer=AdamW(*(0.1,))", "name each field, without"),
        ("optimizer=SGD(0.1, decay=train)", "there is no train"),
        ("optimizer=SGD(1" + 400 * "0" + ")", "int too large to convert to float"),
        ("batch=BatchRamp(1, 'a', 2, 3)", "BatchRamp: "),
        ("data.source=3", "source is StdlibSource, and 3 is int"),
        ("data.source=ByteTokenizer()", "experiment.data.source is "),
        ("model.period.0=SGD(1.0)", "experiment.model.period[0] is "),
        ("model.period.0.mlp.activation=fsdp", "fsdp is no value yet"),
        ("model.period.0.mlp.activation=gelu_exac", "did you mean gelu_exact?"),
        ("model.period.\u00b2=3", "is no index of a tuple"),
        ("optimizer=Adamw(3)", "Adamw makes no value of an experiment; did you mean AdamW(...)?"),
        ("optimizer=AdamW(learning_rat=3)", "'learning_rat'; did you mean 'learning_rate'?"),
        ("optimizer=AdamW(-1)", "learning_rate=-1 must be"),
        ("optimizer=AdamW(**{'b1': 0})", "name each field, without"),
        ("optimizer=AdamW(1 + 2)", "1 + 2 is neither a literal nor a value"),
        ("optimizer=train('a.py', 'cpu_1')", "train makes no value of an experiment"),
        ("optimizer=verify('/')", "verify makes no value of an experiment"),
        ("optimizer=AdamW.build(3)", "AdamW.build makes no value"),
        ("optimizer=__import__('os').system('true')", "makes no value of an experiment"),
        ("optimizer=(lambda: 3)()", "makes no value of an experiment"),
        ("optimizer=bf16", "has no build; use a value such as jaxtrain.AdamW"),
        ("steps=certify", "steps is 10, and 'certify' is str; give an int"),
    ],
)
def test_a_written_value_that_does_not_fit_is_refused(setting: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        with_fields(experiment(model=DECODER), [setting])


@pytest.mark.parametrize("settings", ["precision=bf16", {("precision", jaxtrain.bf16)}])
def test_settings_are_a_list_of_texts(settings: Any) -> None:
    with pytest.raises(ValueError, match="give a list of texts, such as"):
        with_fields(experiment(), settings)


@dataclass(frozen=True)
class Own:
    """A user's own config with build."""

    width: int = 4
    bias: float | None = 0.5

    def build(self, rngs: Any) -> Any:
        raise AssertionError("no model is built here")


@dataclass(frozen=True)
class Unresolved(Own):
    depth: Missing = 1  # noqa: F821


def test_an_annotation_without_meaning_is_told() -> None:
    with pytest.raises(ValueError, match=r"Unresolved has an annotation .*'Missing' is"):
        with_fields(experiment(model=Unresolved()), ["model.bias=None"])


def test_fields_of_a_users_own_config_are_held_to_its_annotations() -> None:
    given = experiment(model=Own())
    assert with_fields(given, ["model.bias=None"]).model.bias is None
    with pytest.raises(ValueError, match="width is 4, and None is NoneType; give an int"):
        with_fields(given, ["model.width=None"])
    with pytest.raises(ValueError, match="is str; give bf16 without quotes"):
        with_fields(given, ["precision='bf16'"])
