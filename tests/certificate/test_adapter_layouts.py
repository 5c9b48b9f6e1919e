"""Adapters on meshes: the certificate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import jaxtrain
from jaxtrain.certificate import certify
from jaxtrain.certificate.layouts import Layout, experiment_on, layouts
from jaxtrain.certificate.outcome import program
from jaxtrain.certificate.shrink import shrink
from jaxtrain.experiment import load_experiment

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
LAYOUT = Layout(
    (("data", 2), ("stage", 4)),
    pipeline="zero bubble",
    microbatches=4,
    periods=3,
    precision="bf16",
)
"""Layers do not divide over its stages, so adapters rest in slots with padding."""
LAYOUTS = [
    LAYOUT,
    pytest.param(LAYOUT._replace(optimizer="SGD, averages"), marks=pytest.mark.slow),
    pytest.param(
        Layout(
            (("fsdp", 2), ("stage", 2), ("tensor", 2)),
            "explicit, ring",
            "zero2",
            loop="scanned, remat dots_and_attention",
            packing=False,
            dropout=0.1,
            precision="bf16",
            pipeline="interleaved",
            periods=3,
            optimizer="SGD, averages",
        ),
        marks=pytest.mark.slow,
    ),
]


def experiment(alpha: float = 16.0) -> jaxtrain.Experiment:
    adapters = jaxtrain.LoRA(8, alpha, targets=("*.attention.*", "*.mlp.*"))
    return replace(load_experiment(EXPERIMENT), fine_tuning=jaxtrain.FineTuning(lora=adapters))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_in_bf16_equal_one_device(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, remembered: None
) -> None:
    """Gradients of A too: a step of Adam from B = 0 would set them 0.15 and more apart."""

    def one(*_: object, adapters: bool, **options: object) -> tuple[list[Layout], int]:
        assert adapters
        return [layout], 1

    monkeypatch.setattr(certify, "layouts", one)
    ((difference, _),) = certify.certify(experiment())
    assert difference.passed, str(difference)


def test_every_adapter_has_gradients_in_the_first_step() -> None:
    outcome = program(shrink(experiment(), devices=8), LAYOUT)()
    (gradients,) = outcome.grads
    adapters = {name for name in outcome.init if "_lora_" in name}
    assert gradients.keys() == adapters and len(adapters) == 14
    assert all(np.any(gradients[name]) for name in adapters)
    of_b = np.concatenate([outcome.init[n].ravel() for n in adapters if n.endswith("_b")])
    assert np.std(of_b) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("which", ["quick", "all"])
def test_no_activation_is_steep_at_zero(which: str) -> None:
    """In bf16 a product and its adapter's may sum to zero."""
    due, count = layouts(8, which, adapters=True)
    assert len(due) == count and {layout.activation for layout in due} == {"own"}


@pytest.mark.parametrize(("alpha", "scale"), [(4.0, 0.5), (16.0, 2.0), (128.0, 2.0)])
def test_a_small_adapter_has_a_moderate_scale(alpha: float, scale: float) -> None:
    """And SGD's rate allows for it."""
    small = shrink(experiment(alpha), devices=8)
    assert small.fine_tuning is not None and small.fine_tuning.lora is not None
    lora = small.fine_tuning.lora
    assert lora.rank == 2 and lora.alpha / lora.rank == scale
    by_sgd = experiment_on(small, LAYOUT._replace(optimizer="SGD, averages"))
    assert getattr(by_sgd.optimizer, "learning_rate") == 0.5 / max(1, scale) ** 2  # noqa: B009
    assert experiment_on(small, LAYOUT).optimizer == small.optimizer
