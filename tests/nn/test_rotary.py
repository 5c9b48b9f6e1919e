"""Rotary embedding against complex multiplication in float64, and its laws."""

from __future__ import annotations

import cmath
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.nn.rotary import LinearScaling, Llama3Scaling, Rope, rotate, tables

BATCH, SEQ, HEADS = 2, 11, 3
ROPES = [
    Rope(),
    Rope(theta=500000.0),
    Rope(scaling=LinearScaling(factor=4.0)),
    Rope(theta=500000.0, scaling=Llama3Scaling(factor=32.0, original_seq=64)),
]


def draw(head_dim, dtype=jnp.float32):
    rng = np.random.default_rng(head_dim)
    x = jnp.asarray(rng.normal(size=(BATCH, SEQ, HEADS, head_dim)), dtype)
    return x, jnp.asarray(rng.integers(0, 500, (BATCH, SEQ)), jnp.int32)


def turned(rope, x, positions):
    return rotate(x, *tables(rope, positions, x.shape[-1]))


def llama3_frequency(frequency, s):
    """By cases, as the formula is published."""
    wavelength = 2 * math.pi / frequency
    if wavelength < s.original_seq / s.high_freq_factor:
        return frequency
    if wavelength > s.original_seq / s.low_freq_factor:
        return frequency / s.factor
    smooth = (s.original_seq / wavelength - s.low_freq_factor) / (
        s.high_freq_factor - s.low_freq_factor
    )
    return (1 - smooth) * frequency / s.factor + smooth * frequency


def frequency(rope, pair, head_dim):
    plain = rope.theta ** (-2 * pair / head_dim)
    if isinstance(rope.scaling, LinearScaling):
        return plain / rope.scaling.factor
    return plain if rope.scaling is None else llama3_frequency(plain, rope.scaling)


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 8, 64])
def test_a_pair_is_a_complex_number_turned_by_position_times_frequency(rope, head_dim):
    x, positions = draw(head_dim)
    found = np.asarray(turned(rope, x, positions), np.float64)
    half = head_dim // 2
    z = np.asarray(x, np.float64)[..., :half] + 1j * np.asarray(x, np.float64)[..., half:]
    turn = [
        [[cmath.exp(1j * int(p) * frequency(rope, i, head_dim)) for i in range(half)] for p in row]
        for row in positions
    ]
    expected = z * np.array(turn)[:, :, None]
    np.testing.assert_allclose(found[..., :half], expected.real, atol=2e-4)
    np.testing.assert_allclose(found[..., half:], expected.imag, atol=2e-4)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    rope = Rope(theta=500000.0, scaling=scaling)
    plain, found = Rope(theta=500000.0).frequencies(128), rope.frequencies(128)
    expected = [llama3_frequency(f, scaling) for f in plain]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    ratio = plain / found
    assert ratio[0] == 1.0
    np.testing.assert_allclose(ratio[-1], 8.0)
    assert ((ratio > 1.001) & (ratio < 7.999)).any(), "no frequency is in the blended band"


@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_scores_depend_on_the_distance_of_positions_only(rope):
    x, positions = draw(16)
    y = jnp.flip(x, axis=1)

    def scores(shift):
        pair = (turned(rope, z, positions + shift) for z in (x, y))
        return jnp.einsum("bqhd,bkhd->bhqk", *pair)

    np.testing.assert_allclose(scores(0), scores(37), atol=2e-3)
    np.testing.assert_allclose(
        jnp.linalg.norm(turned(rope, x, positions), axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5
    )


def test_the_gradient_is_the_rotation_back():
    x, positions = draw(8)
    cos, sin = tables(Rope(), positions, 8)
    _, pull = jax.vjp(lambda x: rotate(x, cos, sin), x)
    np.testing.assert_allclose(pull(rotate(x, cos, sin))[0], x, atol=1e-5)


def test_one_row_of_positions_serves_every_row_of_the_batch():
    x, _ = draw(8)
    row = jnp.arange(SEQ, dtype=jnp.int32)[None]
    every = jnp.broadcast_to(row, (BATCH, SEQ))
    np.testing.assert_array_equal(turned(Rope(), x, row), turned(Rope(), x, every))


def test_16_bit_inputs_are_turned_in_fp32():
    x, positions = draw(16, jnp.bfloat16)
    found = turned(Rope(), x, positions)
    assert found.dtype == jnp.bfloat16
    exact = turned(Rope(), x.astype(jnp.float32), positions)
    np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16))


BAD = [
    (lambda: Rope(theta=0.5), "theta=0.5"),
    (lambda: Rope().frequencies(7), "use 6 or 8"),
    (lambda: LinearScaling(factor=0.5), "factor=0.5"),
    (lambda: Llama3Scaling(factor=0.5, low_freq_factor=4.0), r"factor=0\.5.*low_freq_factor=4\.0"),
    (lambda: Llama3Scaling(original_seq=0), "original_seq=0"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_fields_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
