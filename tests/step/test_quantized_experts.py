"""Mixtures of experts in 8 bits: one run on every mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from two_steps import run

import jaxtrain
from jaxtrain.mesh import ShardingRules
from jaxtrain.nn import LayerLoop
from jaxtrain.optim import fp32
from jaxtrain.quantization import Delayed, Fp8Products, Int8Products
from jaxtrain.step.assembly import assemble

PRECISIONS = {
    "fp8": replace(fp32, products=Fp8Products()),
    "int8": replace(fp32, products=Int8Products()),
    "delayed": replace(fp32, products=Fp8Products(Delayed(4))),
}
SCANNED = LayerLoop(unroll=False, remat="full")
SHOWN = [("fsdp, tensor", "delayed"), ("experts apart", "fp8")]
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "fsdp, tensor": ({"fsdp": 2, "tensor": 2}, {}),
    "data, scanned": ({"data": 2, "fsdp": 2, "tensor": 2}, {"loop": SCANNED}),
    "gspmd": ({"fsdp": 2, "tensor": 2}, {"mode": "gspmd"}),
    "experts apart": ({"fsdp": 2, "expert": 2}, {}),
    "experts, tensor": ({"data": 2, "expert": 2, "tensor": 2}, {"loop": SCANNED}),
    "experts, gspmd": ({"expert": 2, "tensor": 2}, {"mode": "gspmd"}),
    "experts on stages": ({"expert": 2, "stage": 2, "tensor": 2}, {}),
    "stages": ({"fsdp": 2, "stage": 2, "tensor": 2}, {}),
}

ALL = [(k, name) for k in LAYOUTS for name in PRECISIONS]
CASES = [
    SHOWN[1],
    *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ALL if case != SHOWN[1]),
]


@pytest.fixture
def mixture(decoder: jaxtrain.Experiment) -> jaxtrain.Experiment:
    """Layers of four experts."""
    block = replace(decoder.model.period[0], mlp=jaxtrain.MoeConfig(hidden=16, experts=4))
    model = replace(decoder.model, period=(block,))
    return replace(decoder, model=model, optimizer=jaxtrain.SGD(0.5), microbatches=2)


ONE: dict[tuple[str, int], Any] = {}


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_a_mixture_in_8_bits_is_the_same_on_every_mesh(
    mixture: jaxtrain.Experiment, opened: Any, layout: str, name: str
) -> None:
    layers = 1 if (layout, name) in SHOWN else 2
    model = replace(mixture.model, layers=layers)
    experiment = replace(mixture, model=model, precision=PRECISIONS[name])
    if (name, layers) not in ONE:
        ONE[name, layers] = run(opened, experiment, {}, {})
    losses, params, scales = ONE[name, layers]
    found, moved, after = run(opened, experiment, *LAYOUTS[layout])
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    np.testing.assert_allclose(moved, params, rtol=0, atol=2e-5)
    assert after.keys() == scales.keys() and bool(scales) == (name == "delayed")
    assert all(np.array_equal(after[k], leaf) for k, leaf in scales.items())


REFUSED: list[tuple[dict[str, Any], dict[str, int], str]] = [
    ({"execution": jaxtrain.Execution(expert_chunk=8)}, {}, "expert_chunk=None, or products=None"),
    (
        {"sharding": ShardingRules(params=(("experts", ("fsdp",)),))},
        {"fsdp": 2},
        "along experts, over fsdp",
    ),
    (
        {"fine_tuning": jaxtrain.FineTuning(lora=jaxtrain.LoRA(2, targets=("*.mlp.*", "*.out")))},
        {},
        r"experts' matrices \S+mlp.gate, \S+mlp.up, \S+mlp.down can have no adapter in 8 bits; use "
        r"targets=\('period.0.attention.out', 'period.0.mlp.router'\), or products=None",
    ),
]


def test_other_matrices_beside_experts_in_8_bits_have_adapters(
    mixture: jaxtrain.Experiment,
) -> None:
    targets = ("period.0.attention.out", "period.0.mlp.router")
    tuning = jaxtrain.FineTuning(lora=jaxtrain.LoRA(2, targets=targets))
    given = replace(mixture, fine_tuning=tuning, precision=PRECISIONS["fp8"])
    adapted = assemble(given, jaxtrain.mesh_from_axes()).places
    assert {name for name in adapted if "lora" in name} == {
        f"{target}_lora_{end}" for target in targets for end in "ab"
    }


@pytest.mark.parametrize(("fields", "axes", "words"), REFUSED)
def test_what_experts_in_8_bits_cannot_do_is_refused(
    mixture: jaxtrain.Experiment, fields: dict[str, Any], axes: dict[str, int], words: str
) -> None:
    spec, wide = jaxtrain.mesh_from_axes(**axes), replace(mixture, **fields)
    assemble(wide, spec)
    with pytest.raises(ValueError, match=words):
        assemble(replace(wide, precision=PRECISIONS["fp8"]), spec)
