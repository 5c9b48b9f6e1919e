"""Multi-head latent attention against NumPy in fp64, in training and in generation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_latent import latent_attention
from flax import nnx

import jaxtrain
from jaxtrain.attention.rotary.rope import Rope, tables
from jaxtrain.attention.rotary.scaling import Yarn
from jaxtrain.nn.local import Local
from jaxtrain.nn.module import build, put_together, take_apart
from jaxtrain.nn.param import Initialisation
from jaxtrain.transformer.latent import LatentAttention, LatentAttentionConfig
from jaxtrain.transformer.place import Context, Place

ROWS, SEQ, EMBED = 2, 7, 12
SMALL: dict[str, Any] = dict(latent=10, nope_head_dim=6, rope_head_dim=4, rope=Rope(theta=50.0))
CASES = {
    "latents of both, short values": LatentAttentionConfig(
        2, **SMALL, value_head_dim=5, query_latent=8
    ),
    "queries of tokens, long values, a scale": LatentAttentionConfig(
        3, **SMALL, value_head_dim=13, scale=0.7
    ),
}


def batch() -> dict[str, np.ndarray]:
    at, cut = np.tile(np.arange(SEQ), (ROWS, 1)), np.array([[3], [SEQ]])
    return {
        "segments": (at >= cut) + 1,
        "starts": np.where(at >= cut, cut, 0),
        "positions": np.where(at >= cut, at - cut, at),
    }


def made(config: LatentAttentionConfig) -> tuple[Any, dict[str, np.ndarray], np.ndarray]:
    """(static form, parameters in fp64 that are fp32 numbers, x)."""
    place = Place(EMBED, 1, Initialisation(), ((config.rope, config.rope_head_dim),), None)
    module = build(lambda key: LatentAttention(config, place, key=key), jax.random.key(0))
    split = take_apart(module)
    rng = np.random.default_rng(0)

    def drawn(shape: tuple[int, ...], start: float = 0.0) -> np.ndarray:
        return (0.5 * rng.normal(size=shape) + start).astype(np.float32).astype(np.float64)

    params = {k: drawn(v.shape, k.endswith("scale")) for k, v in split.params.items()}
    return split.static, params, drawn((ROWS, SEQ, EMBED))


def context(config: LatentAttentionConfig, at: np.ndarray, **fields: Any) -> Context:
    positions = jnp.asarray(at, jnp.int32)
    ropes = (tables(config.rope, positions, config.rope_head_dim, SEQ),)
    return Context(positions, fields.pop("starts", None), ropes, None, **fields)


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_equal_numpys_in_fp64(name: str) -> None:
    """Each leaf's gradient, and that of x, along a direction: by central differences in fp64."""
    config, found = CASES[name], batch()
    static, params, x = made(config)
    rng = np.random.default_rng(1)
    dy = rng.normal(size=(ROWS, SEQ, EMBED))
    seen = context(config, found["positions"], starts=jnp.asarray(found["starts"], jnp.int32))

    def ours(given: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        flat = given["x"].reshape(-1, EMBED)
        leaves = {k: v for k, v in given.items() if k != "x"}
        y = put_together(static, leaves)(flat, seen, Local(), None)[0].reshape(x.shape)
        return jnp.sum(y * dy), y

    def theirs(given: dict[str, np.ndarray]) -> float:
        return float(np.sum(latent_attention(config, given, given["x"], found) * dy))

    every = {**params, "x": x}
    narrow = {k: jnp.asarray(v, jnp.float32) for k, v in every.items()}
    grads, y = jax.jit(jax.grad(ours, has_aux=True))(narrow)
    np.testing.assert_allclose(y, latent_attention(config, params, x, found), rtol=0, atol=2e-5)
    for leaf, value in every.items():
        way = rng.normal(size=value.shape)
        step = 1e-6 / np.linalg.norm(way)
        after, before = (theirs({**every, leaf: value + s * step * way}) for s in (1, -1))
        wanted = (after - before) / (2 * step)
        size = np.linalg.norm(grads[leaf]) * np.linalg.norm(way)
        assert size > 1e-2, f"{leaf} has no gradient"
        assert abs(np.sum(grads[leaf] * way) - wanted) < 2e-5 * size, leaf


def test_yarn_scales_scores_as_deepseek_has_it() -> None:
    """DeepSeek-V3: sqrt(192) ** -1 times (0.1 ln 40 + 1) squared; none without mscale_all_dim."""
    stretched = Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    found = LatentAttentionConfig(2, rope=Rope(scaling=stretched)).scoring_scale()
    np.testing.assert_allclose(found, 1.8739 / 192**0.5, rtol=1e-4)
    assert LatentAttentionConfig(2, rope=Rope(scaling=Yarn(40.0, 9))).scoring_scale() == 192**-0.5


def test_flops_are_those_of_its_products() -> None:
    """Scores have nope + rope dims, values their own; what pads them is not counted."""
    a, seq = CASES["latents of both, short values"], 16
    block = jaxtrain.BlockConfig(a, jaxtrain.MlpConfig(20))
    config = jaxtrain.DecoderConfig(vocab=8, embed=EMBED, layers=3, period=(block,))
    found = config.flops(seq=seq, sequences=2)
    matrices = EMBED * (8 + 10 + 4) + 8 * 2 * 10 + 10 * 2 * (6 + 5) + 2 * 5 * EMBED + 3 * 20 * EMBED
    assert found.matmul == 2 * 2 * seq * (3 * matrices + 8 * EMBED)
    assert found.attention_full == 3 * 2 * 2 * seq**2 * 2 * (10 + 5)


def test_adapters_are_in_what_is_absorbed() -> None:
    """A generated token meets latent_up with its adapter as if that were merged."""
    config = CASES["latents of both, short values"]
    static, params, x = made(config)
    rng = np.random.default_rng(2)
    a, b = (
        rng.normal(size=size) for size in ((config.latent, 2), (2, params["latent_up"].shape[1]))
    )
    at = np.zeros((ROWS, 1), np.int32)

    def generated(leaves: dict[str, np.ndarray], **pair: np.ndarray) -> jax.Array:
        given = {k: jnp.asarray(v, jnp.float32) for k, v in leaves.items()}
        module = put_together(static, given)
        for name, value in pair.items():
            setattr(module, f"latent_up_lora_{name}", nnx.Param(jnp.asarray(value, jnp.float32)))
        module.lora_scale = 0.5
        cache = config.empty_cache(EMBED, (ROWS, 2), jnp.float32)
        first = jnp.asarray(x[:, 0], jnp.float32)
        return module(first, context(config, at, index=jnp.int32(0)), Local(), cache)[0]

    merged = {**params, "latent_up": params["latent_up"] + 0.5 * a @ b}
    np.testing.assert_allclose(generated(params, a=a, b=b), generated(merged), atol=1e-4)
    assert np.abs(generated(params) - generated(merged)).max() > 0.1


@pytest.mark.parametrize("name", CASES)
def test_absorbed_generation_equals_the_training_form(name: str) -> None:
    """Three tokens at once, then one by one; the cache has latents and one rotary key alone."""
    config, at = CASES[name], np.tile(np.arange(SEQ), (ROWS, 1))
    static, params, x = made(config)
    module = put_together(static, {k: jnp.asarray(v, jnp.float32) for k, v in params.items()})
    whole = {"segments": np.ones((ROWS, SEQ)), "positions": at}
    wanted = latent_attention(config, params, x, whole)
    cache = config.empty_cache(EMBED, (ROWS, SEQ + 2), jnp.float32)
    assert {k: v.shape[2:] for k, v in cache._asdict().items()} == {
        "latents": (config.latent,),
        "rope_keys": (config.rope_head_dim,),
    }

    @jax.jit
    def step(x: jax.Array, at: jax.Array, cache: Any, index: jax.Array) -> tuple[jax.Array, Any]:
        return module(x.reshape(-1, EMBED), context(config, at, index=index), Local(), cache)

    start = 0
    for stop in (3, *range(4, SEQ + 1)):
        new = slice(start, stop)
        y, cache = step(jnp.asarray(x[:, new], jnp.float32), at[:, new], cache, jnp.int32(start))
        found = np.reshape(y, (ROWS, -1, EMBED))
        np.testing.assert_allclose(found, wanted[:, new], rtol=0, atol=2e-5)
        start = stop
