"""Families' blocks on a mesh: the same run as on one device, which sends what is predicted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from programs import held

import jaxtrain
from jaxtrain import AttentionConfig, BlockConfig, MlpConfig
from jaxtrain.attention import DynamicNtk, LinearScaling, LongRope, Rope, Yarn
from jaxtrain.certificate.certify import difference
from jaxtrain.certificate.layouts import Layout, experiment_on
from jaxtrain.certificate.outcome import program
from jaxtrain.certificate.shrink import shrink
from jaxtrain.nn import RMSNorm
from jaxtrain.step.assembly import assemble
from jaxtrain.transformer import gelu_tanh

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
CUBE = (("fsdp", 2), ("context", 2), ("tensor", 2))
STAGED = (("fsdp", 2), ("stage", 2), ("tensor", 2))
DOTS, FULL = "scanned, remat dots_and_attention", "scanned, prefetch, remat full"
ALL = "unrolled, remat none"

NORM, OFFSET = RMSNorm(1e-6), RMSNorm(1e-6, unit_offset=True)
GEGLU, SWIGLU = MlpConfig(6912, gelu_tanh), MlpConfig(8192)


def gemma(attention: AttentionConfig) -> BlockConfig:
    return BlockConfig(attention, GEGLU, norm=OFFSET, post_norm=OFFSET)


G2 = AttentionConfig(8, 4, 256, window=4096, softcap=50.0, scale=224**-0.5)
G3 = AttentionConfig(4, 1, 256, Rope(1e4), window=512, scale=256**-0.5, qk_norm=OFFSET)
GLOBAL = replace(G3, window=None, rope=Rope(1e6, LinearScaling(8.0)))
SLIDING, WHOLE = gemma(G3), gemma(GLOBAL)
ACROSS: dict[str, Any] = {"qk_norm": OFFSET, "qk_norm_across_heads": True}
LONG = LongRope((1.0, 1.1, 1.3) * 16, (2.0, 4.0, 8.0) * 16, factor=32.0, original_seq=4096)
PHI = BlockConfig(AttentionConfig(24, 8, 128, Rope(1e4, LONG, 0.75), window=262144), SWIGLU)
OLMO = BlockConfig(
    AttentionConfig(16, 16, 128, Rope(5e5), qk_norm=NORM, qk_norm_across_heads=True),
    SWIGLU,
    norm=None,
    post_norm=NORM,
)
TABLES: dict[str, tuple[tuple[BlockConfig, ...], tuple[BlockConfig, ...], dict[str, Any]]] = {
    # In 26 layers windows end with two that have no full one behind them.
    "gemma 3": (
        (SLIDING,) * 2,
        (*(SLIDING,) * 3, WHOLE, *(SLIDING,) * 2),
        {"layers": 26, "norm": OFFSET, "embedding_scale": 1152**0.5},
    ),
    "gemma 2": (
        (),
        (gemma(G2), gemma(replace(G2, window=None))),
        {"layers": 26, "norm": OFFSET, "embedding_scale": 2304**0.5, "logit_softcap": 30.0},
    ),
    "olmo 2": ((), (OLMO,), {"layers": 16, "tied": False}),
    "phi 4 mini": ((), (PHI,), {"layers": 32}),
    # What the others have, in one block, and in two that are unlike.
    "one block": (
        (),
        (gemma(replace(G2, head_dim=128, rope=Rope(1e4, LONG, 0.75), **ACROSS)),),
        {"layers": 4, "norm": OFFSET, "embedding_scale": 48.0, "logit_softcap": 30.0},
    ),
    "all of them": (
        (),
        (
            replace(SLIDING, attention=replace(G3, rope=Rope(1e4, DynamicNtk(2.0, 4096)))),
            replace(OLMO, attention=replace(OLMO.attention, rope=Rope(1e4, LONG, 0.75))),
        ),
        {"layers": 8, "norm": OFFSET, "logit_softcap": 30.0},
    ),
    "yarn beside the stack": (
        (replace(OLMO, attention=replace(OLMO.attention, rope=Rope(1e4, Yarn(4.0, 4096)))),),
        (OLMO,),
        {"layers": 10, "suffix": (OLMO,)},
    ),
}


@cache
def small(name: str) -> jaxtrain.Experiment:
    """A family's model as published, then small."""
    prefix, period, fields = TABLES[name]
    experiment = jaxtrain.load_experiment(EXPERIMENT)
    sizes = {"vocab": 262144, "embed": 2304, "prefix": prefix, "period": period}
    model = replace(experiment.model, **sizes, **fields)
    assert model.violations() == []
    return shrink(replace(experiment, model=model), devices=8)


def by_hand(name: str, layout: Layout) -> Any:
    return pytest.param(name, layout, marks=pytest.mark.exhaustive)


LAYOUTS = [
    ("one block", Layout(CUBE, loop=DOTS, periods=1, optimizer="SGD, averages")),
    by_hand("all of them", Layout(CUBE, loop=DOTS)),
    *(by_hand(name, Layout(CUBE, loop=DOTS)) for name in ("gemma 2", "olmo 2")),
    # Adam makes a whole step of a gradient that is zero but for rounding, and one number has one.
    by_hand("gemma 3", Layout(CUBE, loop=DOTS, optimizer="SGD, averages")),
    by_hand("phi 4 mini", Layout(CUBE, loop=FULL)),
    by_hand("yarn beside the stack", Layout(STAGED, pipeline="1F1B", periods=2, loop=DOTS)),
    by_hand("all of them", Layout(STAGED, pipeline="zero bubble", periods=2, loop=FULL)),
    by_hand("all of them", Layout((("data", 2), ("tensor", 4)), mode="gspmd", loop=FULL)),
]


@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=str)
def test_a_mesh_does_not_change_the_run(name: str, layout: Layout) -> None:
    run, alone = (program(small(name), each)() for each in (layout, layout.reference()))
    found = difference(layout, run, alone)
    assert found.passed, str(found)


ADAPTERS = jaxtrain.FineTuning(lora=jaxtrain.LoRA(2, 4.0))
NORMS = jaxtrain.FineTuning(trainable=("*.query_norm.scale", "*_post_norm.scale"))
CONTRACTS = [
    ("olmo 2", Layout(CUBE, loop=DOTS), None),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in (
            ("all of them", Layout(CUBE, loop=DOTS), None),
            ("all of them", Layout(CUBE, loop=FULL), None),
            ("all of them", Layout(CUBE, loop=ALL), None),
            ("olmo 2", Layout(CUBE, loop=DOTS, precision="bf16"), ADAPTERS),
            ("olmo 2", Layout((("fsdp", 2), ("tensor", 4)), loop=FULL), NORMS),
            ("yarn beside the stack", Layout(STAGED, pipeline="1F1B", loop=DOTS), None),
            ("yarn beside the stack", Layout(STAGED, pipeline="zero bubble", loop=DOTS), None),
            ("all of them", Layout(STAGED, pipeline="zero bubble", loop=DOTS), None),
        )
    ),
]


@pytest.mark.parametrize(("name", "layout", "tuning"), CONTRACTS, ids=str)
def test_a_step_sends_what_is_predicted(name: str, layout: Layout, tuning: Any) -> None:
    e = replace(experiment_on(small(name), layout), fine_tuning=tuning)
    kept = held(assemble(e, jaxtrain.mesh_from_axes(**dict(layout.axes))))
    assert kept.lines and not kept.broken, "\n".join(map(str, kept.broken))
    assert any("squares over heads" in why for line in kept.lines for why in line.why)
