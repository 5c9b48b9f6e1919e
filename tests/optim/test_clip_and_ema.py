"""Clipping and the moving average against closed forms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.optim.gradients import clip_by_global_norm, ema_update, warmed_decay

TREE = {"a": jnp.array([[3.0, 0.0], [0.0, 4.0]]), "b": {"c": jnp.array(12.0)}}


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 12.9, 13.0, 100.0])
def test_clip(max_norm: float) -> None:
    clipped = clip_by_global_norm(TREE, optax.tree.norm(TREE), max_norm)
    peer, _ = optax.clip_by_global_norm(max_norm).update(TREE, optax.EmptyState())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), clipped, peer)
    np.testing.assert_allclose(optax.tree.norm(clipped), min(13.0, max_norm), rtol=1e-6)
    if max_norm >= 13.0:
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), clipped, TREE)))


def test_clip_of_zero_gradients_and_of_16_bit_ones() -> None:
    zero = {"a": jnp.zeros(3, jnp.bfloat16)}
    clipped = clip_by_global_norm(zero, optax.tree.norm(zero), 1.0)
    assert (clipped["a"] == 0).all() and clipped["a"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"max_norm=0\.0"):
        clip_by_global_norm(zero, optax.tree.norm(zero), 0.0)


@pytest.mark.parametrize("warmup", [False, True])
def test_ema_of_a_line(warmup: bool) -> None:
    """Against the sum written out: sum_t (1 - d_t) x_t prod_{u > t} d_u."""
    steps, decay = 30, 0.9
    decays = [min(decay, (1 + t) / (10 + t)) if warmup else decay for t in range(steps)]
    values = [1.0 + 2.0 * t for t in range(steps)]
    expected = 5.0 * np.prod(decays)
    for t in range(steps):
        expected += (1 - decays[t]) * values[t] * np.prod(decays[t + 1 :])
    ema = {"w": jnp.full(2, 5.0), "n": jnp.int32(0)}
    update = jax.jit(lambda e, p, t: ema_update(e, p, decay, t, warmup=warmup))
    for t in range(steps):
        ema = update(ema, {"w": jnp.full(2, values[t]), "n": jnp.int32(t)}, t)
    np.testing.assert_allclose(ema["w"], np.full(2, expected), rtol=1e-5)
    assert ema["n"] == steps - 1


def test_ema_keeps_its_own_dtype_and_refuses_a_decay_of_one() -> None:
    ema, params = {"w": jnp.zeros(2)}, {"w": jnp.ones(2, jnp.bfloat16)}
    assert ema_update(ema, params, 0.999, 0)["w"].dtype == jnp.float32
    np.testing.assert_allclose(ema_update(ema, params, 0.999, 0)["w"], 0.001, rtol=1e-4)
    with pytest.raises(ValueError, match=r"decay=1\.0"):
        ema_update(ema, params, 1.0, 0)


def test_warmed_decay_reaches_the_decay() -> None:
    found = [float(warmed_decay(0.99, step)) for step in (0, 1, 10, 10_000)]
    np.testing.assert_allclose(found, [0.1, 2 / 11, 11 / 20, 0.99], rtol=1e-6)
