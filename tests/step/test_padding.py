"""Rows beyond the vocabulary and slots without a layer: zeros that stay zeros, in norms too."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest

import jaxtrain
from jaxtrain.compression import Compressed, Fp8, Int8, PowerSGD, Sign, TopK

WORDS, LAYERS, RATE = 13, 5, 0.1
"""Three slots on each of two stages: what one of two devices of `data` sums compressed has layers
and padding in one block."""
REDUCERS = {
    "sign": Compressed(Sign()),
    "sign, no feedback": Compressed(Sign(), error_feedback=False),
    "signs in blocks": Compressed(Sign(block=8)),
    "int8": Compressed(Int8(block=16)),
    "int8, nearest": Compressed(Int8(block=16, stochastic=False)),
    "fp8": Compressed(Fp8(block=16)),
    "top k": Compressed(TopK(0.3)),
    "PowerSGD": Compressed(PowerSGD(2)),
    "exact": jaxtrain.collectives.Lax(),
    "ring": jaxtrain.collectives.Ring(),
}
OPTIMIZERS = {
    "SGD": jaxtrain.SGD(RATE, momentum=0.0, weight_decay=0.0),
    "momentum": jaxtrain.SGD(RATE),
    "AdamW": jaxtrain.AdamW(3e-2),
    "Lion": jaxtrain.optim.Lion(3e-3),
    "LAMB": jaxtrain.optim.Lamb(3e-2),
    "LARS": jaxtrain.optim.Lars(3e-2),
    "Muon": jaxtrain.Muon(3e-2),
    "Adafactor": jaxtrain.optim.Adafactor(3e-2, min_dim_size_to_factor=4),
}
FLOOR = dict.fromkeys(OPTIMIZERS, 0.0) | {"Adafactor": 1.001e-30}
"""Adafactor adds it to the square of every gradient."""
DEFAULT = {("sign", "SGD")}


def marks(pair: tuple[str, str]) -> Any:
    return () if pair in DEFAULT else pytest.mark.exhaustive


def real(session: Any) -> dict[str, np.ndarray]:
    """For each parameter where it is no padding."""
    slots = session.assembly.on_stages.layout.layer_of[0] >= 0
    masks = {}
    for name, leaf in session.state.params.items():
        rows = np.arange(leaf.shape[0]) < WORDS if name in ("embedding", "head") else True
        rows = slots if name.startswith("period.") else rows
        at = np.reshape(rows, (-1, *[1] * (leaf.ndim - 1)))
        masks[name] = np.broadcast_to(at, leaf.shape)
    return masks


def norm(leaves: dict[str, np.ndarray], where: dict[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(x[where[k]])) for k, x in leaves.items())))


@pytest.mark.parametrize(
    ("reducer", "optimizer"),
    [pytest.param(*pair, marks=marks(pair)) for pair in product(REDUCERS, OPTIMIZERS)],
)
def test_padding_stays_zero_and_outside_norms(
    reducer: str, optimizer: str, decoder: Any, opened: Any, stepped: Any
) -> None:
    """In parameters, the optimizer's state, averages and residuals, after every one of 4 steps."""
    model = replace(decoder.model, vocab=WORDS, layers=LAYERS, tied=False)
    experiment = replace(
        decoder,
        model=model,
        data=replace(decoder.data, vocab=WORDS),
        microbatches=2,
        optimizer=OPTIMIZERS[optimizer],
        ema_decay=0.9,
        execution=jaxtrain.Execution(reducer=REDUCERS[reducer], small_leaf=0),
    )
    session = opened(experiment, data=2, stage=2)
    where = real(session)
    assert {k for k, mask in where.items() if not mask.all()} == set(session.state.params) - {
        "norm.scale"
    }
    for _ in range(4):
        before = {k: np.asarray(x) for k, x in session.state.params.items()}
        metrics = stepped(session)
        after = {k: np.asarray(x) for k, x in session.state.params.items()}
        moved = norm({k: after[k] - before[k] for k in after}, where)
        assert metrics["param_norm"] == pytest.approx(norm(after, where), rel=1e-5)
        rounded = 2**-24 * norm(after, where)  # of each parameter to which an update is added
        assert metrics["update_norm"] == pytest.approx(moved, rel=1e-4, abs=rounded)
        if optimizer == "SGD":
            assert metrics["grad_norm"] == pytest.approx(moved / RATE, rel=1e-4)
        for path, leaf in jax.tree_util.tree_leaves_with_path(session.state):
            name = next((p.key for p in reversed(path) if getattr(p, "key", None) in where), None)
            if name is not None and leaf.shape[-where[name].ndim :] == where[name].shape:
                padding = np.broadcast_to(~where[name], leaf.shape)
                found = np.abs(np.asarray(leaf)[padding]).max(initial=0)
                assert found <= FLOOR[optimizer], jax.tree_util.keystr(path)
