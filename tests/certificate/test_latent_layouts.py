"""Latent attention on meshes: the certificate of a model like DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxtrain
from jaxtrain.certificate import certify
from jaxtrain.certificate.layouts import Layout
from jaxtrain.experiment import load_experiment
from jaxtrain.moe import Groups, SigmoidRouter
from jaxtrain.transformer import LatentAttentionConfig, SharedExpert

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
CUBE = (("data", 2), ("fsdp", 2), ("tensor", 2))
STAGED = (("fsdp", 2), ("stage", 2), ("tensor", 2))
DOTS, FULL = "scanned, remat dots_and_attention", "scanned, prefetch, remat full"
ATTENTION = LatentAttentionConfig(heads=8, latent=32, query_latent=48)
MIXTURE = jaxtrain.MoeConfig(
    64,
    experts=8,
    router=SigmoidRouter(bias=True, scale=2.5, groups=Groups(4, 2, best=2)),
    shared=SharedExpert(64),
)
LAYOUTS = [
    Layout((("fsdp", 2), ("context", 2), ("tensor", 2)), loop=DOTS),
    Layout(STAGED, pipeline="zero bubble", microbatches=4, periods=4, loop=DOTS),
    Layout((("data", 2), ("expert", 2), ("tensor", 2)), loop=FULL),
    Layout(CUBE, "gspmd", precision="bf16"),
    Layout(CUBE, "explicit, ring", "zero1", loop=FULL),
    Layout(CUBE, "explicit, ring looped, layer by layer", "zero2", loop=DOTS, precision="bf16"),
    Layout((("stage", 4), ("tensor", 2)), pipeline="1F1B", microbatches=4, periods=4, loop=FULL),
    Layout((("fsdp", 2), ("context", 4)), "explicit, ring", loop=FULL, dropout=0.1),
]


def experiment() -> jaxtrain.Experiment:
    """A dense layer, then layers with experts."""
    given = load_experiment(EXPERIMENT)
    (block,) = given.model.period
    dense = replace(block, attention=ATTENTION)
    parts: dict[str, Any] = {"prefix": (dense,), "period": (replace(dense, mlp=MIXTURE),)}
    return replace(given, model=replace(given.model, layers=3, **parts))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_equal_one_device(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, remembered: None
) -> None:
    monkeypatch.setattr(certify, "layouts", lambda devices, which, **_: ([layout], 1))
    ((difference, _),) = certify.certify(experiment())
    assert difference.passed, str(difference)


def test_steps_on_a_mesh_are_those_of_one_device(
    decoder: jaxtrain.Experiment, opened: Callable[..., Any], stepped: Callable[..., Any]
) -> None:
    """Heads, tokens and matrices cut; three gathers' gradients are sums over `tensor`."""
    attention = LatentAttentionConfig(
        4, latent=8, nope_head_dim=4, rope_head_dim=2, value_head_dim=4, query_latent=12
    )
    (block,) = decoder.model.period
    model = replace(decoder.model, period=(replace(block, attention=attention),))
    given = replace(decoder, model=model, optimizer=jaxtrain.SGD(0.5))
    sessions = [opened(given), opened(given, fsdp=2, context=2, tensor=2)]
    for _ in range(2):
        one, cut = (stepped(session) for session in sessions)
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(cut[name], one[name], rtol=1e-5, err_msg=name)
