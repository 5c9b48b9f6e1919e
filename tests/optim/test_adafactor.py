"""Padded vocabularies: what a layer-wise optimizer does to real rows depends on real rows only."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxtrain.mesh.sharding import PaddedAxis
from jaxtrain.nn.module import take_apart
from jaxtrain.optim.optimizer import Adafactor, Lamb, Lars, Optimizer
from jaxtrain.optim.shards import WHOLE, LeafSum, real_means
from jaxtrain.transformer.attention import AttentionConfig
from jaxtrain.transformer.block import BlockConfig
from jaxtrain.transformer.decoder import DecoderConfig
from jaxtrain.transformer.feed_forward import MlpConfig

VOCAB, EMBED, STEPS = 9, 8, 4
BLOCK = BlockConfig(AttentionConfig(2), MlpConfig(8))
CASES = {
    "factored": Adafactor(0.1, min_dim_size_to_factor=4),
    "not factored": Adafactor(0.1),
    "factored only if padding counts": Adafactor(0.1, min_dim_size_to_factor=VOCAB + 1),
    "clipped": Adafactor(0.1, min_dim_size_to_factor=4, clipping_threshold=0.1, relative=False),
    "lamb": Lamb(0.1),
    "lars": Lars(0.1),
}


def axes_of(*, tied: bool, vocab_multiple: int) -> dict[str, Any]:
    """The axes of a decoder's tables."""
    config = DecoderConfig(
        VOCAB, EMBED, layers=1, period=(BLOCK,), tied=tied, vocab_multiple=vocab_multiple
    )
    axes = take_apart(nnx.eval_shape(lambda: config.build(jax.random.key(0)))).axes
    return {name: axes[name] for name in (["embedding"] if tied else ["embedding", "head"])}


def trained(optimizer: Optimizer, *, tied: bool, vocab_multiple: int) -> dict[str, np.ndarray]:
    """The real rows of the tables after some steps; the padded ones start at zero and stay so."""
    axes = axes_of(tied=tied, vocab_multiple=vocab_multiple)
    transform = optimizer.build(axes, steps=STEPS, batch=1)
    padding = -VOCAB % vocab_multiple
    rng = np.random.default_rng(0)

    def draw() -> dict[str, jax.Array]:
        real = {name: rng.normal(size=(VOCAB, EMBED)) for name in axes}
        return {
            k: jnp.asarray(np.pad(v, ((0, padding), (0, 0))), jnp.float32) for k, v in real.items()
        }

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = draw()
    state = transform.init(params)
    for _ in range(3):
        params, state = step(params, state, draw())
    assert all((table[VOCAB:] == 0).all() for table in params.values())
    return {name: np.asarray(table[:VOCAB]) for name, table in params.items()}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("case", CASES)
def test_real_rows_move_alike_however_far_the_vocabulary_is_padded(case: str, tied: bool) -> None:
    plain, padded = (trained(CASES[case], tied=tied, vocab_multiple=m) for m in (1, 64))
    assert plain.keys() == padded.keys()
    for name, table in plain.items():
        np.testing.assert_allclose(padded[name], table, rtol=2e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("size", "step"), [(0.0, 1e-3), (1e-4, 1e-3), (0.5, 0.5)])
def test_a_relative_rate_is_of_the_layers_size_or_eps2(size: float, step: float) -> None:
    """Else what begins at zero would never move."""
    axes = {"w": ("embed", "mlp")}
    params = {"w": jnp.full((4, 4), size)}
    transform = Adafactor(0.1).build(axes, steps=3, batch=1)
    moved, _ = transform.update({"w": jnp.ones((4, 4))}, transform.init(params), params)
    np.testing.assert_allclose(moved["w"], np.full((4, 4), -0.1 * step), rtol=1e-5)


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)], ids=str)
def test_real_mean_leaves_padding_out(dims: tuple[int, ...]) -> None:
    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    names = (PaddedAxis("vocab", 3), PaddedAxis("mlp", 2))
    (found,) = real_means(WHOLE, [LeafSum(jnp.asarray(x), names, dims)])
    kept = x[: 3 if 0 in dims else 4, : 2 if 1 in dims else 3]
    np.testing.assert_allclose(found, kept.mean(dims, keepdims=True))
