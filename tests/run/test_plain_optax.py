"""Runs whose optimizer or learning rate is optax's, or a function: held against our own with the
same numbers, and against closed forms."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jaxtrain
from jaxtrain import cli
from jaxtrain.experiment import config_of, with_fields
from jaxtrain.experiment.stored import stored_field
from jaxtrain.optim.leaves import everything
from jaxtrain.optim.plain import Optax
from jaxtrain.step.assembly import assemble

RATE, STEPS = 1e-2, 3
NUMBERS: dict[str, Any] = {"b1": 0.8, "b2": 0.9, "eps": 1e-6, "weight_decay": 0.2}
OURS = jaxtrain.AdamW(RATE, **NUMBERS, decay=everything)
Train = Callable[..., jaxtrain.Result]


def adamw() -> optax.GradientTransformation:
    return optax.adamw(RATE, **NUMBERS)


def another() -> optax.GradientTransformation:
    return optax.adamw(2 * RATE)


@pytest.fixture
def train(tmp_path: Path) -> Train:
    def run(
        experiment: jaxtrain.Experiment,
        *,
        axes: dict[str, int] | None = None,
        name: str | None = None,
        **options: Any,
    ) -> jaxtrain.Result:
        mesh = jaxtrain.mesh_from_axes(**(axes or {"data": 1}))
        return jaxtrain.train(
            experiment, mesh, run_dir=None if name is None else tmp_path / name,
            cache_dir=tmp_path, stream=io.StringIO(), **options,
        )  # fmt: skip

    return run


def losses(result: jaxtrain.Result) -> list[float]:
    return [line["loss"] for line in result.history]


@pytest.mark.parametrize(
    ("model", "rules", "axes"),
    [("decoder", jaxtrain.fsdp(), {"fsdp": 2}), ("own", jaxtrain.zero1(), {"data": 2})],
    ids=("explicit, fsdp", "gspmd, zero1"),
)
def test_optaxs_adamw_trains_as_ours(
    model: str, rules: Any, axes: dict[str, int], train: Train, request: pytest.FixtureRequest
) -> None:
    """On a mesh that splits leaves, whose state is split as ours is."""
    given = request.getfixturevalue(model)
    ours = replace(given, optimizer=OURS, steps=STEPS, sharding=rules)
    first, second = (train(each, axes=axes) for each in (ours, replace(ours, optimizer=adamw())))
    np.testing.assert_allclose(losses(second), losses(first), rtol=1e-6)
    assert "learning_rate" in first.history[0] and "learning_rate" not in second.history[0]
    for one, other in zip(*map(moments, (first, second)), strict=True):
        assert one.sharding == other.sharding and one.shape == other.shape
        np.testing.assert_allclose(np.asarray(other), np.asarray(one), rtol=1e-4, atol=1e-9)
    assert any(not x.sharding.is_fully_replicated for x in moments(second))


def moments(result: jaxtrain.Result) -> list[jax.Array]:
    """Adam's two, leaf by leaf; counts left out."""
    assert result.session is not None
    return [x for x in jax.tree.leaves(result.session.state.optimizer) if x.ndim]


def test_a_state_in_no_tree_of_the_parameters_is_refused(decoder: jaxtrain.Experiment) -> None:
    given = replace(decoder, optimizer=optax.adafactor(1e-2))
    with pytest.raises(ValueError, match=r"v_row.* has shape \(1,\).*as jaxtrain's Adafactor"):
        assemble(given, jaxtrain.mesh_from_axes(fsdp=2))


def test_the_rate_is_logged_where_the_state_says_it(own: jaxtrain.Experiment, train: Train) -> None:
    rate = optax.linear_schedule(1.0, 0.0, 4)
    given = replace(own, optimizer=optax.inject_hyperparams(optax.sgd)(rate), steps=STEPS)
    assert [line["learning_rate"] for line in train(given).history] == [1.0, 0.75, 0.5]


# A function of the step.


def third(step: jax.Array) -> jax.Array:
    return 0.9 / (1.0 + step)


def test_a_function_of_the_step_is_the_learning_rate(
    own: jaxtrain.Experiment, poisoned: Any, train: Train, tmp_path: Path
) -> None:
    """In the metrics and in the update, skipped steps not counted; row 8 is of the second."""
    given = replace(own, data=poisoned(own.data, 8), steps=5)
    given = replace(given, optimizer=replace(own.optimizer, learning_rate=third))
    result = train(given, name="run")
    logged = [line["learning_rate"] for line in result.history]
    taken = [0, 1, 1, 2, 3]
    np.testing.assert_allclose(logged, [0.9 / (1 + n) for n in taken], rtol=1e-6)
    for line in (result.history[0], *result.history[2:]):
        np.testing.assert_allclose(
            line["update_norm"] / line["grad_norm"], line["learning_rate"], rtol=1e-5
        )
    config = json.loads((tmp_path / "run" / "config.json").read_text())["experiment"]
    assert config["optimizer"]["learning_rate"] == f"{__name__}:third"
    back = stored_field(tmp_path / "run", "optimizer", trust=__name__)
    assert back == given.optimizer
    with pytest.raises(ValueError, match=r"optimizer.learning_rate is .* not of this library"):
        stored_field(tmp_path / "run", "optimizer")


def test_a_schedule_of_optaxs_trains_in_memory_only(
    own: jaxtrain.Experiment, train: Train, tmp_path: Path
) -> None:
    rate = optax.cosine_decay_schedule(0.5, 4)
    given = replace(own, optimizer=replace(own.optimizer, learning_rate=rate), steps=STEPS)
    logged = [line["learning_rate"] for line in train(given, settings=["precision=fp32"]).history]
    expected = [0.25 * (1 + np.cos(np.pi * step / 4)) for step in range(STEPS)]
    np.testing.assert_allclose(logged, expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"optimizer.learning_rate is .*closures cannot be stored"):
        train(given, name="run")
    assert not (tmp_path / "run").exists()


def test_check_tells_a_function_that_gives_no_rate_with_all_else(own: jaxtrain.Experiment) -> None:
    wrong = replace(own.optimizer, learning_rate=lambda step: [step])
    given = replace(own, optimizer=wrong, microbatches=3)
    with pytest.raises(ValueError, match=r"2 things to mend[\s\S]*gives \["):
        jaxtrain.check(given, jaxtrain.mesh_from_axes(data=1))


# Where it is kept.


def test_a_function_that_returns_it_is_stored_by_its_name(
    own: jaxtrain.Experiment, train: Train, tmp_path: Path
) -> None:
    policy = jaxtrain.SavePolicy(every=100)
    given = replace(own, optimizer=adamw, steps=4, checkpoints=policy)
    assert given.optimizer == Optax(adamw)
    whole = train(replace(given, optimizer=adamw()), steps=4, settings=["checkpoints=None"])
    train(given, name="run", steps=2)
    config = json.loads((tmp_path / "run" / "config.json").read_text())["experiment"]
    assert config["optimizer"] == f"{__name__}:adamw"
    rest = train(given, name="run")
    assert losses(rest) == losses(whole)[2:]
    assert stored_field(tmp_path / "run", "optimizer", trust=__name__) is adamw
    with pytest.raises(ValueError, match=r"optimizer is .* not of this library"):
        stored_field(tmp_path / "run", "optimizer")
    for other, said in ((another, "adamw.*, now .*another"), (OURS, "now .*AdamW")):
        with pytest.raises(ValueError, match=f"holds another experiment: experiment.optim.*{said}"):
            train(replace(given, optimizer=other), name="run")


def test_a_transformation_itself_is_not_stored(
    own: jaxtrain.Experiment, train: Train, tmp_path: Path
) -> None:
    said = (
        r"experiment\.optimizer is an optax transformation, two closures, which cannot be stored; "
        r"write a function at the top of a module that returns it, .*, and give optimizer=adam"
    )
    with pytest.raises(ValueError, match=said):
        train(replace(own, optimizer=adamw()), name="run")
    assert not (tmp_path / "run").exists()
    file = tmp_path / "plain.py"
    text = (
        "import jaxtrain, optax\n"
        "def adam():\n    return optax.adamw(3e-4)\n"
        "def experiment():\n"
        "    block = jaxtrain.BlockConfig(jaxtrain.AttentionConfig(2), jaxtrain.MlpConfig(8))\n"
        "    return jaxtrain.Experiment(jaxtrain.DecoderConfig(16, 8, 1, (block,)),\n"
        "        jaxtrain.data.BigramChain(16, 8), OPTIMIZER, steps=2, batch=2)\n"
    )
    file.write_text(text.replace("OPTIMIZER", "optax.adamw(3e-4)"))
    with pytest.raises(ValueError, match=said):
        jaxtrain.load_experiment(file)
    file.write_text(text.replace("OPTIMIZER", "adam"))
    found = jaxtrain.load_experiment(file)
    assert config_of(found)["optimizer"] == "plain:adam"
    assert cli.main(["check", str(file), "--mesh", "cpu_1"]) == 0
    assert with_fields(found, ["optimizer=SGD(0.1)"]).optimizer == jaxtrain.SGD(0.1)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (optax.adamw, r"has no build; call it, or use a value such as jaxtrain.AdamW"),
        (jaxtrain.AdamW, r"has no build; use a value such as jaxtrain.AdamW"),
        (object, r"optimizer=<class 'object'> has no build; use a value"),
        (3, r"optimizer=3 has no build; use a value"),
    ],
)
def test_what_is_no_optimizer_is_told(own: jaxtrain.Experiment, wrong: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(own, optimizer=wrong)


def gives_none() -> None:
    return None


def test_check_tells_a_function_that_gives_no_optimizer(own: jaxtrain.Experiment) -> None:
    given = replace(own, optimizer=gives_none, batch=0)
    with pytest.raises(ValueError, match=r"optimizer=gives_none gives None; return an optax") as e:
        jaxtrain.check(given, jaxtrain.mesh_from_axes(data=1))
    assert "batch=0" in str(e.value)


# What check notes.

INJECTED = optax.inject_hyperparams(optax.adamw)(learning_rate=RATE)
SILENT, STACKED = "no learning rate is logged", "computes over whole leaves"


@pytest.mark.parametrize(
    ("model", "optimizer", "noted"),
    [
        ("decoder", INJECTED, []),
        ("decoder", adamw(), [SILENT]),
        ("decoder", optax.inject_hyperparams(optax.lamb)(learning_rate=RATE), [STACKED]),
        ("decoder", optax.lamb(RATE), [SILENT, STACKED]),
        ("own", optax.lamb(RATE), [SILENT]),
        ("decoder", jaxtrain.optim.Lamb(RATE), []),
    ],
    ids=("injected", "adamw", "lamb, injected", "lamb", "lamb, unstacked", "our Lamb"),
)
def test_what_an_optimizer_of_optaxs_does_to_stacks_is_noted(
    model: str, optimizer: Any, noted: list[str], request: pytest.FixtureRequest
) -> None:
    given = replace(request.getfixturevalue(model), optimizer=optimizer)
    notes = jaxtrain.check(given, jaxtrain.mesh_from_axes(data=1)).notes
    assert len(notes) == len(noted)
    for note, words in zip(notes, noted, strict=True):
        assert words in note
    if STACKED in noted:
        assert "(reduce_sum), and 9 leaves are stacks, such as period.0." in notes[-1]
