"""Which leaves Muon takes, and its Newton-Schulz iteration against the singular values."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxtrain.nn.module import take_apart
from jaxtrain.optim.elementwise import AdamW
from jaxtrain.optim.muon import QUINTIC, Muon, newton_schulz, partition
from jaxtrain.transformer.attention import AttentionConfig
from jaxtrain.transformer.block import BlockConfig
from jaxtrain.transformer.decoder import DecoderConfig
from jaxtrain.transformer.feed_forward import MlpConfig

AXES = {
    "embedding": ("vocab", "embed"),
    "positions": ("seq", "embed"),
    "head": ("embed", "vocab"),
    "norm": ("embed",),
    "block": {
        "norm": ("layers", "embed"),
        "query": ("layers", "embed", "heads", "head_dim"),
        "query_bias": ("layers", "heads", "head_dim"),
        "query_norm": ("layers", "head_dim"),
        "output": ("layers", "heads", "head_dim", "embed"),
        "up": ("layers", "embed", "mlp"),
        "down": ("layers", "mlp", "embed"),
        "experts_up": ("layers", "experts", "embed", "mlp"),
    },
}


def test_partition_of_a_decoder() -> None:
    assert partition(AXES) == {
        "embedding": "adam",
        "positions": "adam",
        "head": "adam",
        "norm": "adam",
        "block": {
            "norm": "adam",
            "query": "muon",
            "query_bias": "adam",
            "query_norm": "adam",
            "output": "muon",
            "up": "muon",
            "down": "muon",
            "experts_up": "muon",
        },
    }


def test_partition_of_the_leaves_of_a_real_decoder() -> None:
    """GPT-2's kind, with learned positions, biases and a head of its own."""
    attention = AttentionConfig(2, rope=None, qkv_bias=True, out_bias=True)
    block = BlockConfig(attention, MlpConfig(8, gated=False, bias=True))
    config = DecoderConfig(
        vocab=5, embed=4, layers=3, period=(block,), prefix=(block,), learned_positions=6,
        vocab_multiple=8,
    )  # fmt: skip
    model = nnx.eval_shape(lambda: config.build(jax.random.key(0)))
    found = partition(take_apart(model).axes)
    matrices = {f"attention.{name}" for name in ("query", "key", "value", "out")}
    matrices |= {"mlp.up", "mlp.down"}
    taken = {name for name, group in found.items() if group == "muon"}
    assert taken == {f"{part}.0.{name}" for part in ("prefix", "period") for name in matrices}
    assert {"embedding", "positions", "head"} <= found.keys() - taken


@pytest.mark.parametrize("shape", [(4, 4), (4, 9), (9, 4), (2, 3, 4, 6)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_newton_schulz_keeps_singular_vectors_and_flattens_values(shape, dtype) -> None:
    """Against the SVD: x = U S V^T goes to U p(S) V^T, p the quintic five times over."""
    x = np.random.default_rng(0).normal(size=shape)
    u, s, v = np.linalg.svd(x, full_matrices=False)
    values = s / np.linalg.norm(x, axis=(-2, -1))[..., None]
    a, b, c = QUINTIC
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    found = jax.jit(functools.partial(newton_schulz, dtype=dtype))(jnp.asarray(x, jnp.float32))
    assert found.dtype == jnp.float32
    atol = 2e-4 if dtype == jnp.float32 else 0.15
    np.testing.assert_allclose(found, (u * values[..., None, :]) @ v, atol=atol)


@pytest.mark.parametrize("shape", [(5, 8), (8, 5)], ids=str)
def test_newton_schulz_equals_the_peer_on_each_matrix(shape) -> None:
    x = jax.random.normal(jax.random.key(1), (2, 3, *shape))
    coefficients = jnp.asarray(QUINTIC)
    peer = jax.jit(optax.contrib._muon.orthogonalize_via_newton_schulz)
    found = jax.jit(newton_schulz)(x)
    for i, j in np.ndindex(2, 3):
        np.testing.assert_allclose(found[i, j], peer(x[i, j], coefficients), atol=2e-5)


def test_newton_schulz_of_zero_is_zero() -> None:
    assert (newton_schulz(jnp.zeros((2, 3, 4))) == 0).all()


def test_adam_of_its_own() -> None:
    """An `adam` given is used as it is: here its rate is ten times Muon's."""
    axes = {"up": ("embed", "mlp"), "norm": ("embed",)}
    params = {"up": jnp.eye(3), "norm": jnp.ones(3)}
    grads = {"up": jnp.eye(3), "norm": jnp.full(3, 7.0)}
    transform = Muon(0.01, adam=AdamW(0.1)).build(axes, steps=3, batch=1)
    updates, _ = transform.update(grads, transform.init(params), params)
    np.testing.assert_allclose(updates["norm"], jnp.full(3, -0.1), rtol=1e-5)
