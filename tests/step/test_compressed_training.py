"""What compressed sums cost in loss: a small stdlib_lm of 300 steps on eight devices, by hand.

pytest -m exhaustive tests/step/test_compressed_training.py    (about ten minutes on two cores)

The bounds are on the held-out loss relative to the exact run's, after 45 steps (15%) of exact sums;
experiments/LOG.md has what was reached.
"""

from __future__ import annotations

import io
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import jaxtrain
from jaxtrain.compression import Compressed, Fp8, Int8, PowerSGD, Sign, TopK
from jaxtrain.experiment import load_experiment

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
STEPS, WARMUP = 300, 45


pytestmark = pytest.mark.usefixtures("optimising_compiler")  # they run for longer than they compile


def small(optimizer: Any, clip_norm: float | None) -> jaxtrain.Experiment:
    e = load_experiment(EXPERIMENT)
    block = jaxtrain.BlockConfig(jaxtrain.AttentionConfig(heads=4), jaxtrain.MlpConfig(hidden=128))
    return replace(
        e,
        model=replace(e.model, embed=64, layers=2, period=(block,)),
        data=replace(e.data, seq=64),
        optimizer=optimizer,
        clip_norm=clip_norm,
        steps=STEPS,
        evaluation=jaxtrain.Evaluation(every=STEPS, batches=8, final_batches=32),
        checkpoints=None,
        sharding=jaxtrain.data_parallel(),
    )


ADAMW = (jaxtrain.AdamW(jaxtrain.WarmupCosine(4e-3, warmup=30), weight_decay=0.1), 1.0)
SGD = (jaxtrain.SGD(jaxtrain.WarmupCosine(0.2, warmup=30), momentum=0.0, weight_decay=0.0), None)
"""(optimizer, clip_norm)."""


@lru_cache
def held_out(reducer: Any, optimizer: Any, clip_norm: float | None) -> float:
    execution = jaxtrain.Execution(reducer=reducer, small_leaf=1024)
    given = replace(small(optimizer, clip_norm), execution=execution)
    mesh = jaxtrain.mesh_from_axes(data=8)
    return jaxtrain.train(given, mesh, stream=io.StringIO()).evaluation["eval_loss"]


def excess(codec: Any, how: Any, **fields: Any) -> float:
    """How much higher the loss ends than the exact run's, relative."""
    reducer = Compressed(codec, warmup_steps=WARMUP, **fields)
    return held_out(reducer, *how) / held_out(jaxtrain.collectives.Lax(), *how) - 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("codec", [Int8(), Fp8(), PowerSGD(16)], ids=str)
def test_adamw_ends_where_the_exact_run_does(codec: Any) -> None:
    assert excess(codec, ADAMW) < 0.01


@pytest.mark.exhaustive
@pytest.mark.parametrize("codec", [TopK(0.01), Sign(block=64)], ids=str)
def test_sgd_ends_where_the_exact_run_does(codec: Any) -> None:
    """AdamW and clipping are no linear functions of the gradient: they undo error feedback."""
    assert excess(codec, SGD) < 0.03


@pytest.mark.exhaustive
def test_without_error_feedback_top_k_is_worse() -> None:
    assert excess(TopK(0.01), SGD, error_feedback=False) > excess(TopK(0.01), SGD) + 0.015
