"""Norms against numpy in float64, values and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.nn.module import put_together, take_apart
from jaxtrain.nn.norm import LayerNorm, Norm, RMSNorm

CONFIGS = [
    RMSNorm(),
    RMSNorm(eps=0.5),
    RMSNorm(unit_offset=True),
    LayerNorm(),
    LayerNorm(eps=0.5),
    LayerNorm(bias=False),
]


def oracle(config, x, scale, bias):
    x = np.asarray(x, np.float64)
    if isinstance(config, RMSNorm):
        y = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config.eps)
        return y * (1 + scale if config.unit_offset else scale)
    y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.eps)
    return y * scale + (bias if config.bias else 0.0)


def trained(config, size, axis="embed"):
    """The module with parameters that are not at their starting values."""
    static, params, rest, axes = take_apart(Norm(config, size, axis=axis))
    assert rest == {} and axes == dict.fromkeys(params, (axis,))
    rng = np.random.default_rng(3)
    values = {k: jnp.asarray(rng.normal(size=v.shape), jnp.float32) for k, v in params.items()}
    return static, values


@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 2, 6)])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_values_and_gradients(config, shape):
    static, params = trained(config, 6)
    rng = np.random.default_rng(0)
    x = jnp.asarray(3 * rng.normal(size=shape) + 1, jnp.float32)
    dy = rng.normal(size=shape)

    def run(params, x):
        return put_together(static, params)(x)

    def wanted(params, x):
        values = {k: np.asarray(v, np.float64) for k, v in params.items()}
        return oracle(config, x, values["scale"], values.get("bias"))

    np.testing.assert_allclose(run(params, x), wanted(params, x), rtol=2e-5, atol=2e-5)
    grads = jax.grad(lambda p, x: jnp.sum(run(p, x) * dy), argnums=(0, 1))(params, x)

    def slope(direction_p, direction_x, h=1e-5):
        at = [
            np.sum(wanted({k: np.float64(v) + s * direction_p[k] for k, v in params.items()},
                          np.float64(x) + s * direction_x) * dy)
            for s in (h, -h)
        ]  # fmt: skip
        return (at[0] - at[1]) / (2 * h)

    zeros = {k: np.zeros(v.shape) for k, v in params.items()}
    for seed in range(3):
        rng = np.random.default_rng(seed)
        d_x = rng.normal(size=shape)
        found = np.sum(np.asarray(grads[1], np.float64) * d_x)
        np.testing.assert_allclose(found, slope(zeros, d_x), rtol=2e-4, atol=1e-4)
        d_p = {k: rng.normal(size=v.shape) for k, v in params.items()}
        found = sum(np.sum(np.asarray(grads[0][k], np.float64) * d_p[k]) for k in params)
        np.testing.assert_allclose(found, slope(d_p, np.zeros(shape)), rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_new_norm_only_normalises(config):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 8)), jnp.float32)
    y = Norm(config, 8)(x)
    scale = 0.0 if getattr(config, "unit_offset", 0) else 1.0
    np.testing.assert_allclose(y, oracle(config, x, scale, 0.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_half_precision_is_computed_in_fp32(config):
    """What comes out is the fp32 result rounded once, even where squares overflow or round away."""
    static, params = trained(config, 64)
    x = 300 + jnp.asarray(np.random.default_rng(2).normal(size=(4, 64)), jnp.float16)
    module = put_together(static, params)
    found, wanted = module(x), module(x.astype(jnp.float32)).astype(jnp.float16)
    assert found.dtype == jnp.float16 and bool(jnp.isfinite(found).all())
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_row_of_zeros_has_finite_gradients(config):
    module = Norm(config, 4)
    grad = jax.grad(lambda x: module(x).sum())(jnp.zeros((2, 4)))
    assert bool(jnp.isfinite(grad).all())
