"""A loss of pairs sends and multiplies what is predicted of it, pipelines and cut rows included."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_context_contract import DOTS, FULL, LONG, STAGED, assert_predicted, small
from test_contract import EXPERIMENT, assembled

import jaxtrain
from jaxtrain.certificate.layouts import Layout
from jaxtrain.certificate.shrink import shrink

CUBE = (("data", 2), ("fsdp", 2), ("tensor", 2))
CUT = (("context", 2), ("tensor", 4))
LAYOUTS = [
    Layout(CUT, loop=DOTS),
    Layout(CUBE, loop=FULL),
    Layout(LONG, precision="bf16", context="two levels"),
    Layout((("fsdp", 8),), "explicit, ring"),
    Layout(STAGED, pipeline="1F1B", loop=DOTS, microbatches=4, periods=4),
    Layout(
        (("fsdp", 2), ("stage", 2), ("tensor", 2)),
        pipeline="zero bubble",
        microbatches=4,
        periods=4,
    ),
]


def of_pairs(chunk_tokens=None, **tuning):
    """The context tests' model, with logits of `chunk_tokens` at a time, None for all at once."""
    pairs = jaxtrain.FineTuning(preferences=jaxtrain.losses.DPO(), **tuning)
    experiment = replace(jaxtrain.load_experiment(EXPERIMENT), fine_tuning=pairs)
    model = replace(small().model, chunk_tokens=chunk_tokens)
    return replace(shrink(experiment, devices=8), model=model)


@pytest.mark.parametrize("chunk_tokens", [None, 4])
@pytest.mark.parametrize(
    "layout",
    [LAYOUTS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS[1:])],
    ids=str,
)
def test_what_is_sent_and_multiplied_is_predicted(layout, chunk_tokens):
    """Logits of several chunks are computed twice, those of one chunk once."""
    assert_predicted(assembled(layout, of_pairs(chunk_tokens)))


@pytest.mark.slow
def test_a_head_that_is_not_trained_sends_no_gradient():
    assert_predicted(assembled(LAYOUTS[0], of_pairs(4, trainable=("period.*",))))
