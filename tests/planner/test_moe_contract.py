"""The contract with mixtures of experts: predicted and compiled collectives are equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs import held

import jaxtrain
from jaxtrain.certificate.layouts import Layout, experiment_on
from jaxtrain.certificate.shrink import shrink
from jaxtrain.planner.assembled import facts_of
from jaxtrain.planner.traffic import step_traffic
from jaxtrain.step.assembly import assemble

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
CUBE = (("data", 2), ("fsdp", 2), ("tensor", 2))
STAGED = (("fsdp", 2), ("stage", 2), ("tensor", 2))
DOTS, FULL = "scanned, remat dots_and_attention", "scanned, prefetch, remat full"
ALL = "unrolled, remat none"


def routed(**fields: Any) -> jaxtrain.Experiment:
    """The small experiment with experts in every block, and those fields of the model, in which 1
    stands for such a block and 0 for a dense one."""
    dense = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    (block,) = dense.model.period
    blocks = (block, replace(block, mlp=jaxtrain.MoeConfig(block.mlp.hidden, experts=4)))
    parts = {part: fields.pop(part, ()) for part in ("prefix", "suffix")}
    parts["period"] = fields.pop("period", (1,))
    found: dict[str, Any] = {k: tuple(blocks[i] for i in part) for k, part in parts.items()}
    return replace(dense, model=replace(dense.model, **found, **fields))


def assembled(layout: Layout, given: dict[str, Any] | None = None, **fields: Any) -> Any:
    """The small experiment on a layout; given: its fields that are not the model's."""
    experiment = replace(experiment_on(routed(**fields), layout), **given or {})
    return assemble(experiment, jaxtrain.mesh_from_axes(**dict(layout.axes)))


def slow(name: str, *case: Any, **fields: Any) -> Any:
    return pytest.param(*case, fields, id=name, marks=pytest.mark.slow)


def by_hand(name: str, *case: Any, **fields: Any) -> Any:
    return pytest.param(*case, fields, id=name, marks=pytest.mark.exhaustive)


def staged(pipeline: str, periods: int, loop: str = DOTS, **fields: Any) -> Layout:
    return Layout(STAGED, pipeline=pipeline, microbatches=2, periods=periods, loop=loop, **fields)


BESIDE: dict[str, Any] = {"layers": 4, "period": (0,), "prefix": (1,), "suffix": (1,)}
ROUTERS = jaxtrain.FineTuning(trainable=("*.mlp.router",))
ADAPTERS = jaxtrain.FineTuning(lora=jaxtrain.LoRA(2, 4.0))

CASES = [
    slow("adapters", Layout(CUBE, loop=DOTS), given={"fine_tuning": ADAPTERS}, **BESIDE),
    slow("routers alone", Layout(CUBE, loop=DOTS), given={"fine_tuning": ROUTERS}, **BESIDE),
    by_hand("adapters, 1F1B", staged("1F1B", 2), given={"fine_tuning": ADAPTERS}, suffix=(1,)),
    pytest.param(Layout(CUBE, loop=DOTS), {}, id="plain"),
    slow("zero bubble", staged("zero bubble", 2)),
    slow("zero bubble, nothing saved", staged("zero bubble", 2, FULL), period=(0, 1), layers=4),
    by_hand("everything saved", Layout(CUBE)),
    slow("nothing saved, zero1", Layout(CUBE, loop=FULL, sharding="zero1")),
    by_hand(
        "rings, layer by layer", Layout(CUBE, "explicit, ring looped, layer by layer", loop=DOTS)
    ),
    by_hand("bf16", Layout(CUBE, "explicit, recursive", loop=FULL, precision="bf16")),
    by_hand(
        "beside dense blocks",
        Layout(CUBE, "explicit, ring looped, layer by layer", "data parallel", loop=FULL),
        layers=6,
        period=(0, 1),
        prefix=(1,),
        suffix=(1,),
    ),
    by_hand("1F1B", staged("1F1B", 3, ALL)),
    slow("zero bubble, beside dense blocks", staged("zero bubble", 2), period=(1, 0), suffix=(1,)),
    by_hand("zero bubble, two chunks", staged("zero bubble, 2 chunks, residuals", 4, FULL)),
    by_hand(
        "zero bubble, zero2", staged("zero bubble", 3, "unrolled, remat none", sharding="zero2")
    ),
    by_hand("Muon", Layout(CUBE, loop=DOTS), given={"optimizer": jaxtrain.Muon(0.1)}),
    by_hand("LAMB", Layout(CUBE, loop=DOTS), given={"optimizer": jaxtrain.optim.Lamb(0.1)}),
    by_hand(
        "Adafactor",
        Layout(CUBE, loop=DOTS),
        given={"optimizer": jaxtrain.optim.Adafactor(0.1, min_dim_size_to_factor=8)},
    ),
]


@pytest.mark.parametrize(("layout", "fields"), CASES)
def test_the_contract_is_kept(layout: Layout, fields: dict[str, Any]) -> None:
    assembly = assembled(layout, **fields)
    found = held(assembly)
    assert found.lines and not found.broken, "\n".join(map(str, found.broken))


@pytest.mark.parametrize("loop", [ALL, FULL, DOTS])
def test_experts_move_the_tokens_of_a_dense_layer_whatever_their_number(loop: str) -> None:
    """Each device has a slice of every expert: tokens are gathered and scattered once a layer."""

    def of_tokens(kind: int) -> list[Any]:
        parts: dict[str, Any] = {"period": (kind,), "prefix": (kind,), "layers": 3}
        sent = step_traffic(facts_of(assembled(Layout(CUBE, loop=loop), **parts)))
        return [each for each in sent if each.axes == ("tensor",)]

    assert of_tokens(1) == of_tokens(0) != []
