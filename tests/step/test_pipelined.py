"""A decoder in a pipeline: the features that the certificate's layouts leave out, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain
from jaxtrain.pipeline.executor import Executor
from jaxtrain.step import on_stages
from jaxtrain.step.assembly import assemble
from jaxtrain.step.on_stages import OnStages

LAYERS, MICROBATCHES = 3, 4


@dataclass(frozen=True, kw_only=True)
class Poisoned(Executor):
    """Its buffers hold no numbers before they hold anything."""

    fill: float = float("nan")


TABLE = """
F0,
F1,     F0 B0
F2 B0,  F1 B1
F3 B1,  F2 B2
B2,
,       F3
,       B3
B3,
"""
"""1F1B of two stages and four microbatches with an idle moment before the last one."""


def deep(experiment: jaxtrain.Experiment, **changes: Any) -> jaxtrain.Experiment:
    model = replace(experiment.model, layers=LAYERS, **changes)
    return replace(experiment, model=model, microbatches=MICROBATCHES, steps=100)


def piped(experiment: jaxtrain.Experiment, **fields: Any) -> jaxtrain.Experiment:
    pipeline = jaxtrain.Pipeline(**fields)
    return replace(experiment, execution=replace(experiment.execution, pipeline=pipeline))


def with_ends(e: jaxtrain.Experiment) -> jaxtrain.Experiment:
    (block,) = e.model.period
    heads = replace(block, attention=replace(block.attention, heads=4, head_dim=2))
    return deep(e, prefix=(heads,), suffix=(heads,), period=(block,))


def other_half(e: jaxtrain.Experiment) -> jaxtrain.Experiment:
    """Untied, learned positions, biases, LayerNorm, GELU."""
    (block,) = e.model.period
    attention = replace(block.attention, rope=None, qkv_bias=True, out_bias=True)
    mlp = replace(block.mlp, gated=False, bias=True, activation=jaxtrain.transformer.gelu_tanh)
    block = replace(block, attention=attention, mlp=mlp, norm=jaxtrain.nn.LayerNorm())
    model = dict(period=(block,), norm=jaxtrain.nn.LayerNorm(), tied=False, learned_positions=8)
    return deep(e, **model)


FEATURES: dict[str, Callable[[Any], Any]] = {
    "blocks beside the period": with_ends,
    "untied, positions, biases": other_half,
    "fp16": lambda e: replace(deep(e), precision=jaxtrain.optim.fp16),
    "Muon": lambda e: replace(deep(e), optimizer=jaxtrain.Muon(3e-3)),
    "Adafactor": lambda e: replace(
        deep(e), optimizer=jaxtrain.optim.Adafactor(3e-3, min_dim_size_to_factor=8)
    ),
    "LAMB": lambda e: replace(deep(e), optimizer=jaxtrain.optim.Lamb(3e-3)),
    "averaged weights": lambda e: replace(deep(e), ema_decay=0.9),
    "a batch ramp": lambda e: replace(deep(e), batch=jaxtrain.data.BatchRamp(8, 16, 8, 2)),
    "two blocks a period": lambda e: deep(e, period=e.model.period * 3),
}
MESHES = (dict(stage=2, tensor=2), dict(fsdp=2, stage=2))
PIPES = (dict(schedule="interleaved", chunks=2), dict(schedule="zero_bubble"))


def losses(session: Any, stepped: Any, count: int = 4) -> list[float]:
    return [stepped(session)["loss"] for _ in range(count)]


OFTEN = (
    "fp16",
    "blocks beside the period",
    "untied, positions, biases",
    "Adafactor",
    "averaged weights",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n in OFTEN else pytest.mark.exhaustive)
        for n in FEATURES
    ],
)
@pytest.mark.sampled(5)
def test_a_feature_trains_as_on_one_device(name: str, decoder: Any, opened: Any, stepped: Any):
    experiment = FEATURES[name](decoder)
    at = list(FEATURES).index(name)
    mesh, pipe = MESHES[at % 2], PIPES[at // 2 % 2]
    expected = losses(opened(experiment), stepped)
    found = losses(opened(piped(experiment, **pipe), **mesh), stepped)
    bound = 2e-3 if experiment.precision == jaxtrain.optim.fp16 else 1e-5
    np.testing.assert_allclose(found, expected, rtol=bound)
    assert found[-1] != found[0]


@pytest.mark.slow
def test_a_table_of_ones_own_trains_as_on_one_device(
    decoder: Any, opened: Any, stepped: Any, tmp_path: Path
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(TABLE, encoding="utf-8")
    experiment = deep(decoder)
    expected = losses(opened(experiment), stepped)
    found = losses(opened(piped(experiment, schedule=str(path)), stage=2), stepped)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "save",
    [
        pytest.param("inputs", marks=pytest.mark.slow),
        pytest.param("residuals", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.usefixtures("optimising_compiler")
def test_what_idle_buffers_hold_is_read_by_nobody(
    save: str, decoder: Any, opened: Any, stepped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = piped(deep(decoder), schedule="zero_bubble", chunks=2, save=save)
    clean = losses(opened(experiment, stage=2), stepped)
    monkeypatch.setattr(on_stages, "OnStages", partial(OnStages, executor=Poisoned))
    assert losses(opened(experiment, stage=2), stepped) == clean
    assert np.isfinite(clean).all()


def sharp(x: jax.Array) -> jax.Array:
    """Its derivative is no number at zero, where the activations of padding are: 0 * inf, as of
    sign(x) sqrt(|x|); elsewhere that of `silu`."""
    return jax.nn.silu(x) + 0.0 * jnp.sqrt(jnp.abs(x))


UNEVEN = {
    "1F1B": (dict(), 3, pytest.mark.exhaustive),
    "1F1B, residuals": (dict(save="residuals"), 3, pytest.mark.exhaustive),
    "GPipe": (dict(schedule="gpipe"), 3, pytest.mark.exhaustive),
    "GPipe, residuals": (dict(schedule="gpipe", save="residuals"), 3, pytest.mark.exhaustive),
    "chunks": (dict(schedule="interleaved", chunks=2), 5, pytest.mark.exhaustive),
    "chunks, residuals": (
        dict(schedule="interleaved", chunks=2, save="residuals"),
        5,
        pytest.mark.exhaustive,
    ),
    "zero bubble": (dict(schedule="zero_bubble"), 3, pytest.mark.exhaustive),
    "zero bubble, residuals": (
        dict(schedule="zero_bubble", save="residuals"),
        3,
        pytest.mark.exhaustive,
    ),
    "zero bubble, chunks": (
        dict(schedule="zero_bubble", chunks=2),
        5,
        pytest.mark.exhaustive,
    ),
    "zero bubble, chunks, residuals": (
        dict(schedule="zero_bubble", chunks=2, save="residuals"),
        3,
        (),
    ),
}
"""(pipeline, layers, marks): two stages, some slots of padding; 3 layers in 4 chunks leave one with
nothing else."""


@pytest.mark.parametrize("name", [pytest.param(k, marks=v[2]) for k, v in UNEVEN.items()])
def test_nothing_comes_out_of_padding(
    name: str, decoder: Any, opened: Any, stepped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its zeros make of an activation, and idle ticks of the NaN they begin with. Dropout
    is that of one device: masks are of a microbatch's rows and of layers in natural order."""
    pipe, layers, _ = UNEVEN[name]
    (block,) = decoder.model.period
    block = replace(block, mlp=replace(block.mlp, activation=sharp), dropout=0.1)
    experiment = replace(deep(decoder, period=(block,)), ema_decay=0.9)
    experiment = replace(experiment, model=replace(experiment.model, layers=layers))
    expected = losses(opened(experiment), stepped)
    monkeypatch.setattr(on_stages, "OnStages", partial(OnStages, executor=Poisoned))
    session = opened(piped(experiment, **pipe), stage=2)
    assert session.assembly.on_stages.layout.padding
    np.testing.assert_allclose(losses(session, stepped), expected, rtol=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(session.state))


REFUSED: dict[str, tuple[Callable[[Any], Any], dict[str, int], str]] = {
    "gspmd": (
        lambda e: replace(deep(e), execution=jaxtrain.Execution(mode="gspmd")),
        dict(stage=2),
        "that mode does not run stage",
    ),
    "layer by layer": (
        lambda e: replace(deep(e), execution=jaxtrain.Execution(reduce_layers=True)),
        dict(stage=2),
        "sums in every tick of a pipeline",
    ),
    "1F1B with chunks": (
        lambda e: piped(deep(e), chunks=2),
        dict(stage=2),
        "one_f_one_b has no chunks",
    ),
    "a vocabulary in unequal slices": (
        lambda e: deep(e, vocab=18, vocab_multiple=1),
        dict(stage=4),
        "vocab=18, padded to 18 by vocab_multiple=1, does not split over stage=4 .*; use "
        "vocab_multiple=4, or stage=2",
    ),
    "tokens that do not split": (
        lambda e: replace(deep(e), batch=4, data=replace(e.data, seq=3)),
        dict(stage=2),
        "3 tokens does not split over stage=2",
    ),
    "heads of blocks beside the period": (
        lambda e: deep(e, prefix=e.model.period),
        dict(stage=4),
        "split over stage too: heads=2 does not split over stage=4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_pipeline_cannot_do_is_refused(name: str, decoder: Any) -> None:
    change, mesh, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        assemble(change(decoder), jaxtrain.mesh_from_axes(**mesh))


def test_a_model_of_ones_own_has_no_stages(own: Any) -> None:
    with pytest.raises(ValueError, match="cuts models that describe themselves"):
        assemble(own, jaxtrain.mesh_from_axes(stage=2))


def test_a_table_that_is_not_there_is_refused(decoder: Any) -> None:
    with pytest.raises(ValueError, match=r"execution\.pipeline: .*nowhere\.csv"):
        assemble(piped(deep(decoder), schedule="nowhere.csv"), jaxtrain.mesh_from_axes(stage=2))
