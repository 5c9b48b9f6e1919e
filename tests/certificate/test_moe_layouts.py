"""Mixtures of experts on meshes: the certificate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import jaxtrain
from jaxtrain.certificate import certify
from jaxtrain.certificate.layouts import Layout, experiment_on
from jaxtrain.certificate.shrink import shrink
from jaxtrain.experiment import load_experiment
from jaxtrain.transformer.small import OF_EXPERT

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
CUBE = (("data", 2), ("fsdp", 2), ("tensor", 2))
STAGED = (("fsdp", 2), ("stage", 2), ("tensor", 2))
DOTS, FULL = "scanned, remat dots_and_attention", "scanned, prefetch, remat full"
APART = (("data", 2), ("expert", 2), ("tensor", 2))
BALANCED = jaxtrain.MoeConfig(
    64,
    experts=8,
    router=jaxtrain.moe.SigmoidRouter(bias=True, scale=2.0),
    shared=jaxtrain.transformer.SharedExpert(64),
    balance=jaxtrain.moe.Balance(0.01, 1e-3, 1e-3),
)
SWITCH = jaxtrain.MoeConfig(
    64,
    experts=8,
    experts_per_token=1,
    router=jaxtrain.moe.SoftmaxRouter(renormalise=False),
    capacity=jaxtrain.moe.Capacity(1.25),
    balance=jaxtrain.moe.Balance(0.01),
)
EXPERTS_APART = [
    (BALANCED, Layout(APART, loop=FULL)),
    (SWITCH, Layout((("fsdp", 2), ("expert", 4)), sharding="zero1")),
    (BALANCED, Layout((("fsdp", 2), ("expert", 2), ("tensor", 2)), "gspmd")),
    (SWITCH, Layout((("expert", 8),), "explicit, ring", loop=DOTS)),
    (
        BALANCED,
        Layout(
            (("expert", 2), ("stage", 2), ("tensor", 2)),
            pipeline="zero bubble",
            microbatches=4,
            periods=4,
            loop=DOTS,
        ),
    ),
]
LAYOUTS = [
    Layout(CUBE, loop=FULL),
    Layout(CUBE, "gspmd"),
    Layout(CUBE, "explicit, ring", "zero1", loop=DOTS, packing=False),
    Layout(CUBE, "explicit, recursive", "data parallel", loop=DOTS, precision="bf16"),
    Layout(STAGED, pipeline="zero bubble", microbatches=4, periods=4, loop=DOTS),
    Layout(CUBE, "gspmd", precision="bf16"),
    Layout((("fsdp", 4), ("tensor", 2)), "explicit, hierarchical sums", dropout=0.1),
    Layout((("tensor", 8),), "explicit, ring looped, layer by layer", "zero2", loop=FULL),
    Layout(STAGED, pipeline="1F1B", microbatches=4, periods=3, loop=FULL),
    Layout((("data", 2), ("stage", 4)), pipeline="zero bubble, 2 chunks, residuals", periods=4),
]


def experiment(*, ends: bool = False) -> jaxtrain.Experiment:
    """Every layer has eight experts, two of them for each token; with `ends` so have those before
    and after the others, which are dense."""
    dense = load_experiment(EXPERIMENT)
    (block,) = dense.model.period
    routed = replace(block, mlp=jaxtrain.MoeConfig(block.mlp.hidden, experts=8))
    parts: dict[str, Any] = {"period": (routed,)}
    if ends:
        parts = {"prefix": (routed,), "suffix": (routed,), "layers": dense.model.layers + 2}
    return replace(dense, model=replace(dense.model, **parts))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_equal_one_device(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, remembered: None
) -> None:
    monkeypatch.setattr(certify, "layouts", lambda devices, which, **_: ([layout], 1))
    ((difference, _),) = certify.certify(experiment())
    assert difference.passed, str(difference)


@pytest.mark.parametrize(
    ("mixture", "layout"),
    [
        *(pytest.param(*each, marks=pytest.mark.slow) for each in EXPERTS_APART[:3]),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in EXPERTS_APART[3:]),
    ],
    ids=lambda each: str(each) if isinstance(each, Layout) else type(each.router).__name__,
)
@pytest.mark.sampled(3)
def test_experts_apart_equal_one_device(
    mixture: jaxtrain.MoeConfig, layout: Layout, monkeypatch: pytest.MonkeyPatch, remembered: None
) -> None:
    """Held against as many microbatches: auxiliary losses are of each."""
    monkeypatch.setattr(certify, "layouts", lambda devices, which, **_: ([layout], 1))
    given = experiment()
    block = replace(given.model.period[0], mlp=mixture)
    given = replace(given, model=replace(given.model, period=(block,)))
    ((difference, _),) = certify.certify(given)
    assert difference.passed, str(difference)


@pytest.mark.exhaustive
def test_experts_beside_a_pipeline_are_split_over_stages_too(
    monkeypatch: pytest.MonkeyPatch, remembered: None
) -> None:
    layout = Layout(STAGED, pipeline="1F1B", microbatches=4, periods=3, loop=DOTS)
    monkeypatch.setattr(certify, "layouts", lambda devices, which, **_: ([layout], 1))
    ((difference, _),) = certify.certify(experiment(ends=True))
    assert difference.passed, str(difference)


@pytest.mark.parametrize(
    ("experts", "k", "small"),
    [
        (8, 2, (8, 2)),
        (2, 2, (8, 2)),
        (3, 2, (8, 2)),
        (4, 3, (8, 3)),
        (64, 6, (8, 4)),
        (8, 1, (8, 1)),
        (1, 1, (8, 1)),
    ],
)
def test_shrinking_leaves_routers_something_to_learn(
    experts: int, k: int, small: tuple[int, int]
) -> None:
    """The share of one chosen expert is 1, whatever its router says. And every device has one."""
    block = experiment().model.period[0]
    block = replace(block, mlp=jaxtrain.MoeConfig(64, experts, k))
    given = replace(experiment(), model=replace(experiment().model, period=(block,)))
    found = shrink(given, devices=8).model.period[0].mlp
    assert (found.experts, found.experts_per_token) == small


def test_shrinking_keeps_experts_and_layouts_keep_their_routing() -> None:
    small = shrink(experiment(), devices=8)
    routed = small.model.period[0].mlp
    assert routed == jaxtrain.MoeConfig(OF_EXPERT, experts=8)
    for precision in ("fp32", "bf16"):
        found = experiment_on(small, Layout(CUBE, precision=precision)).model.period
        assert found[0].mlp == replace(routed, kept_routing=small.batch * small.data.seq)
    block = replace(small.model.period[0], mlp=replace(routed, experts=64, experts_per_token=6))
    wide = shrink(replace(small, model=replace(small.model, period=(block,))), devices=8)
    assert wide.model.period[0].mlp == replace(routed, experts_per_token=4)
