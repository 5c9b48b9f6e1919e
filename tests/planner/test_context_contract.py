"""What attention sends and multiplies where rows are cut: as the compiled program has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from programs import lowered
from test_contract import assembled, told

import jaxtrain
from jaxtrain.certificate.layouts import Layout
from jaxtrain.certificate.shrink import shrink
from jaxtrain.contract.contract import contract
from jaxtrain.planner.arithmetic import asked_flops
from jaxtrain.program.collectives import collectives, dot_flops
from jaxtrain.program.order import side_by_side
from jaxtrain.program.stablehlo import lowered_collectives
from jaxtrain.program.text import program_text

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
LONG = (("data", 2), ("context", 4))
SPLIT = (("fsdp", 2), ("context", 2), ("tensor", 2))
STAGED = (("stage", 2), ("context", 4))
DOTS, FULL = "scanned, remat dots_and_attention", "scanned, prefetch, remat full"
KEPT = "scanned, prefetch, kept weights"
PIPELINED = dict(microbatches=4, periods=4)
LAYOUTS = [
    Layout(LONG, loop=DOTS),
    Layout(SPLIT, loop=FULL, context="heads"),
    Layout(LONG, loop=DOTS, precision="bf16", context="two levels"),
    Layout(LONG, context="ring, in order"),
    Layout(LONG, context="gathered keys"),
    Layout(SPLIT, "explicit, ring"),
    Layout(SPLIT, loop=KEPT),
    Layout(STAGED, pipeline="zero bubble", loop=DOTS, **PIPELINED),
    Layout(STAGED, pipeline="GPipe, residuals", loop=FULL, context="two levels", **PIPELINED),
]


def small(**attention):
    """The certificate's experiment, with grouped queries and what else is given of its blocks."""
    experiment = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    (block,) = experiment.model.period
    block = replace(block, attention=replace(block.attention, kv_heads=4, **attention))
    return replace(experiment, model=replace(experiment.model, period=(block,)))


def assert_predicted(assembly):
    before = lowered(assembly)
    text = program_text(before.compile(compiler_options=assembly.compiler_options or None))
    assert not side_by_side(text)
    found = contract(assembly, lowered_collectives(before), collectives(text))
    assert found.lines and not found.broken, told(found.broken)
    asked = asked_flops(assembly)
    if asked is not None:
        assert 0.9 * asked < dot_flops(text) <= 1.01 * asked


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS[2:])],
    ids=str,
)
@pytest.mark.sampled(9)
def test_the_contract_is_kept_and_flops_are_those_asked_for(layout):
    assert_predicted(assembled(layout, small()))


QUERIES = jaxtrain.FineTuning(trainable=("*.attention.query",))
KEYS = jaxtrain.FineTuning(trainable=("*.attention.key",))
LORA = jaxtrain.FineTuning(lora=jaxtrain.LoRA(2, targets=("*.attention.query",)))


@pytest.mark.parametrize(
    ("tuning", "context"),
    [
        (QUERIES, "ring, zig-zag"),
        (QUERIES, "two levels"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (KEYS, "ring, zig-zag"),
                (LORA, "ring, in order"),
                (QUERIES, "gathered keys"),
            ]
        ),
    ],
)
def test_first_layers_send_no_gradients_of_keys_for_queries_alone(tuning, context):
    layout = Layout((("data", 2), ("context", 4)), context=context)
    assert_predicted(assembled(layout, replace(small(), fine_tuning=tuning)))


@pytest.mark.slow
@pytest.mark.parametrize("context", ["ring, zig-zag", "ring, in order", "gathered keys"])
@pytest.mark.parametrize("window", [2, 6, 13])
@pytest.mark.sampled(3)
def test_hops_of_windows_are_predicted(context, window):
    assert_predicted(assembled(Layout(LONG, context=context), small(window=window)))
