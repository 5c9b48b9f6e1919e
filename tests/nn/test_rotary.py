"""Rotary embedding against complex multiplication in float64, and its laws."""

from __future__ import annotations

import cmath
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.attention.rotary.rope import Rope, rotate, tables
from jaxtrain.attention.rotary.scaling import (
    DynamicNtk,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    Yarn,
)

BATCH, SEQ, HEADS = 2, 11, 3
LONG = LongRope((1.0, 1.5, 2.0, 3.0), (2.0, 4.0, 8.0, 16.0), factor=4.0, original_seq=8)
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


def turned(rope, x, positions, seq=SEQ):
    return rotate(x, *tables(rope, positions, x.shape[-1], seq))


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
    plain, found = Rope(theta=500000.0).frequencies(128, 1), rope.frequencies(128, 1)
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
    cos, sin = tables(Rope(), positions, 8, SEQ)
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


def yarn_divisor(pair, theta, dims, s):
    """What a pair's frequency is divided by, pair by pair as the formula is published."""

    def dim_of(turns):
        return dims * math.log(s.original_seq / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(s.beta_fast), dim_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    ramp = min(max((pair - low) / (high - low), 0), 1)
    return 1 / (ramp / s.factor + 1 - ramp)


YARNS = [
    (Yarn(4.0, 4096), 10000.0, 128),
    (Yarn(40.0, 4096, mscale=0.7, mscale_all_dim=1.2), 10000.0, 64),
    (Yarn(16.0, 2048, 8.0, 2.0, truncate=False), 500000.0, 96),
    (Yarn(2.0, 8), 10000.0, 8),
]


@pytest.mark.parametrize(("scaling", "theta", "dims"), YARNS)
def test_yarn_keeps_fast_pairs_and_divides_slow_ones(scaling, theta, dims):
    plain = Rope(theta).frequencies(dims, 1)
    divisors = [yarn_divisor(pair, theta, dims, scaling) for pair in range(dims // 2)]
    found = Rope(theta, scaling).frequencies(dims, 1)
    np.testing.assert_allclose(plain / found, divisors, rtol=1e-12)
    np.testing.assert_allclose(divisors[-1], scaling.factor)


SCALES = [
    (Yarn(4.0, 4096), 0.1 * math.log(4) + 1),
    (Yarn(1.0, 4096), 1.0),
    (Yarn(4.0, 4096, mscale=0.5), 0.1 * math.log(4) + 1),
    (Yarn(40.0, 64, mscale=0.5, mscale_all_dim=1.0),
     (0.05 * math.log(40) + 1) / (0.1 * math.log(40) + 1)),
    (Yarn(4.0, 4096, attention_factor=1.3, mscale=0.5, mscale_all_dim=1.0), 1.3),
    (LONG, math.sqrt(1 + math.log(4) / math.log(8))),
    (LongRope((1.0,), (1.0,), 4.0, 8, attention_factor=1.19), 1.19),
    (DynamicNtk(4.0, 8), 1.0),
    (None, 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("scaling", "factor"), SCALES)
def test_cos_and_sin_are_multiplied_so_that_scores_have_the_square(scaling, factor):
    x, positions = draw(2 if isinstance(scaling, LongRope) and scaling is not LONG else 8)
    assert Rope(scaling=scaling).attention_scaling == pytest.approx(factor, rel=1e-12)
    norms = [jnp.linalg.norm(y, axis=-1) for y in (x, turned(Rope(scaling=scaling), x, positions))]
    np.testing.assert_allclose(norms[1], factor * norms[0], rtol=1e-5)


def test_dynamic_ntk_grows_theta_with_the_sequence_beyond_the_first_training():
    dims, rope = 16, Rope(100.0, DynamicNtk(factor=3.0, original_seq=8))
    for seq in (1, 8, 9, 20, 64):
        grown = 100.0 * (3.0 * max(seq, 8) / 8 - 2.0) ** (dims / (dims - 2))
        expected = [grown ** (-2 * i / dims) for i in range(dims // 2)]
        np.testing.assert_allclose(rope.frequencies(dims, seq), expected, rtol=1e-12)
        traced = jax.jit(lambda seq: rope.frequencies(dims, seq))(jnp.int32(seq))
        np.testing.assert_allclose(traced, expected, rtol=1e-6)


def test_longrope_takes_its_long_factors_beyond_the_first_training():
    rope, plain = Rope(100.0, LONG), Rope(100.0).frequencies(8, 1)
    assert rope.switch == 8 and Rope(scaling=DynamicNtk(2.0, 8)).switch is None
    for seq, divisors in ((1, LONG.short_factor), (8, LONG.short_factor), (9, LONG.long_factor)):
        np.testing.assert_allclose(plain / rope.frequencies(8, seq), divisors, rtol=1e-12)
        traced = jax.jit(lambda seq: rope.frequencies(8, seq))(jnp.int32(seq))
        np.testing.assert_allclose(plain / np.asarray(traced), divisors, rtol=1e-6)


def test_a_part_of_a_head_is_turned_as_a_smaller_head_and_the_rest_is_left():
    x, positions = draw(8)
    found = turned(Rope(partial_rotary_factor=0.75), x, positions)
    np.testing.assert_array_equal(found[..., :6], turned(Rope(), x[..., :6], positions))
    np.testing.assert_array_equal(found[..., 6:], x[..., 6:])


BAD = [
    (lambda: Rope(theta=0.5), "theta=0.5"),
    (lambda: Rope().frequencies(7, 1), "use 6 or 8"),
    (lambda: LinearScaling(factor=0.5), "factor=0.5"),
    (lambda: Llama3Scaling(factor=0.5, low_freq_factor=4.0), r"factor=0\.5.*low_freq_factor=4\.0"),
    (lambda: Llama3Scaling(original_seq=0), "original_seq=0"),
    (lambda: Rope(partial_rotary_factor=1.5), "partial_rotary_factor=1.5"),
    (lambda: Rope(partial_rotary_factor=0.4).frequencies(8, 1), "would turn 3; use a head_dim"),
    (lambda: Yarn(0.5, 0, 1.0, 2.0, attention_factor=-1.0, mscale=0.0),
     r"factor=0\.5.*original_seq=0.*beta_slow=2\.0.*attention_factor=-1\.0.*mscale=0\.0"),
    (lambda: DynamicNtk(0.5, 0), r"factor=0\.5.*original_seq=0"),
    (lambda: Rope(scaling=DynamicNtk(2.0, 8)).frequencies(2, 1), "no other; turn 4 dims"),
    (lambda: LongRope((0.0,), (1.0,), 0.5, 1), r"factor=0\.5.*original_seq=1.*short_factor has 0"),
    (lambda: Rope(scaling=LONG).frequencies(4, 1), "short_factor has 4 .* 2 pairs.*long_factor"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_fields_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
