"""Certificates of products in 8 bits: by bounds of their own, against as many microbatches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import jaxtrain
from jaxtrain.certificate import certify
from jaxtrain.certificate.certify import Certificate, Difference
from jaxtrain.certificate.layouts import NARROW, PIPELINES, Layout, experiment_on, layouts
from jaxtrain.quantization import Delayed, Fp8Products, Int8Products

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
CUBE = (("data", 2), ("fsdp", 2), ("tensor", 2))


@pytest.fixture
def small() -> jaxtrain.Experiment:
    experiment = jaxtrain.load_experiment(EXPERIMENT)
    return replace(experiment, precision=replace(jaxtrain.bf16, products=Fp8Products(Delayed())))


@pytest.mark.parametrize("which", ["quick", "all"])
def test_every_layout_has_such_products(which: str) -> None:
    due, count = layouts(8, which, narrow=True)
    assert len(due) == count and all(layout.narrow for layout in due)
    assert {layout.dtype for layout in due} == {"float32", "bfloat16"}
    assert {layout.pipeline for layout in due} == {*PIPELINES}
    assert {layout.activation for layout in due} == {"own"}, "a product may be exactly zero"
    assert not any(layout.narrow for layout in layouts(8, which)[0])


def test_a_layout_has_the_experiments_own_products(small: jaxtrain.Experiment) -> None:
    for name, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
        plain = experiment_on(small, Layout(CUBE, precision=name)).precision
        narrow = experiment_on(small, Layout(CUBE, precision=name + NARROW)).precision
        assert plain.products is None and narrow.products == Fp8Products(Delayed())
        assert {jnp.dtype(each.compute).name for each in (plain, narrow)} == {dtype}


def test_scales_are_of_microbatches_and_so_is_the_reference() -> None:
    for microbatches in (1, 4):
        layout = Layout(CUBE, microbatches=microbatches, precision="fp32" + NARROW)
        assert layout.reference().microbatches == microbatches
        assert layout.reference().precision == layout.precision


@pytest.mark.parametrize(
    ("precision", "fields", "passed"),
    [
        ("fp32" + NARROW, {}, True),
        ("fp32" + NARROW, dict(grad_rel=0.2, loss_rel=1e-3, state_rel=0.2), True),
        ("fp32" + NARROW, dict(norm_rel=5e-2), True),
        ("fp32" + NARROW, dict(norm_rel=7e-2), False),
        ("fp32" + NARROW, dict(grad_rel=0.3), False),
        ("fp32" + NARROW, dict(first_loss_rel=2e-5), False),
        ("bf16" + NARROW, dict(first_loss_rel=2e-5, grad_rel=0.2, state_rel=0.2), True),
        ("bf16" + NARROW, dict(loss_rel=4e-2), False),
        ("bf16" + NARROW, dict(grad_rel=0.3), False),
        ("bf16" + NARROW, dict(state_rel=0.5), False),
        ("fp32", dict(grad_rel=1e-2), False),
    ],
)
def test_losses_are_equal_at_equal_parameters_and_later_as_in_bf16(
    precision: str, fields: dict[str, Any], passed: bool
) -> None:
    layout = Layout(CUBE, precision=precision)
    exact = Difference(layout, 0.0, 0.0, 0.0, True, "a", 0.0, 0.0, "params a")
    found = exact._replace(**fields)
    assert found.passed is passed
    summary = Certificate(1, [found]).summary()
    assert ("with products in 8 bits first loss" in summary) is layout.narrow
    assert ("first loss" in str(found)) is layout.narrow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "products"),
    [
        (Layout(CUBE, precision="fp32" + NARROW, optimizer="SGD, averages"), Int8Products()),
        (Layout((("fsdp", 8),), "gspmd", precision="bf16" + NARROW), Fp8Products(Delayed())),
        (
            Layout(
                (("fsdp", 2), ("stage", 2), ("tensor", 2)),
                precision="bf16" + NARROW,
                pipeline="zero bubble",
                microbatches=4,
                periods=4,
            ),
            Fp8Products(),
        ),
    ],
    ids=str,
)
def test_products_in_8_bits_pass(
    layout: Layout, products: Any, small: jaxtrain.Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def only(devices: int, which: str, *, narrow: bool, **_: Any) -> tuple[list[Layout], int]:
        asked.append(narrow)
        return [layout], 1

    monkeypatch.setattr(certify, "layouts", only)
    experiment = replace(small, precision=replace(small.precision, products=products))
    ((difference, _),) = certify.certify(experiment)
    assert asked == [True] and difference.passed, str(difference)
    assert difference.grad_rel > 1e-5, "fp32 without them is nearer"
    assert difference.first_loss_rel <= difference.loss_rel
