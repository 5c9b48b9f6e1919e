"""Each codec against numpy's account of it: bytes, errors, numbers that are not finite."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.compression.codecs import Fp8, Int8, RandomK, Sign, TopK

KEY = jax.random.key(5)
CODECS = [
    Int8(),
    Int8(block=32, stochastic=False),
    Fp8(),
    Fp8(block=48),
    Sign(),
    Sign(block=20),
    TopK(),
    TopK(density=0.3),
    RandomK(),
    RandomK(density=1 / 3),
]
SCALED = [codec for codec in CODECS if hasattr(codec, "block")]
SIZES = (1, 7, 8, 20, 48, 255, 257, 1001)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def round_trip(codec, x, key=KEY, stream=0):
    return np.asarray(codec.decode(codec.encode(x, key, stream), x.shape[1], key))


def blocks(x, block):
    """Every number's block, as [(row, start, stop)]."""
    n, size = x.shape
    return [(r, i, min(i + block, size)) for r in range(n) for i in range(0, size, block)]


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_payload_bytes_are_those_of_the_payload(codec, size):
    payload = jax.eval_shape(codec.encode, normal(3, size), KEY, 0)
    assert (payload.shape, payload.dtype) == ((3, codec.payload_bytes(size)), jnp.uint8)
    assert jax.eval_shape(lambda p: codec.decode(p, size, KEY), payload).shape == (3, size)


@pytest.mark.parametrize(
    ("codec", "most"),
    [
        (Int8(), 0.255), (Fp8(), 0.255), (Sign(), 0.032), (TopK(0.01), 0.0201), (RandomK(), 0.0101)
    ],
    ids=str,
)  # fmt: skip
def test_payload_bytes_of_long_rows_beside_fp32(codec, most):
    assert codec.payload_bytes(10**6) / (4 * 10**6) <= most


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 50, 513])
@pytest.mark.parametrize("codec", SCALED, ids=str)
@pytest.mark.sampled(3)
def test_errors_of_scaled_codecs_are_bounded_by_their_blocks(codec, size):
    # Made in fp64: XLA:CPU takes denormals for zero, and fp32's range must hold the sums.
    magnitudes = np.array([1e-42, 1e-30, 1, 1e30, 1e37])[:, None]
    x = np.random.default_rng(1).normal(size=(5, size)).clip(-4, 4) * magnitudes
    x = x.astype(np.float32)
    y = round_trip(codec, jnp.asarray(x)).astype(np.float64)
    for row, start, stop in blocks(x, codec.block):
        mine, got = x[row, start:stop].astype(np.float64), y[row, start:stop]
        tiny = 512 * np.finfo(np.float32).tiny
        top = np.abs(mine).max()
        if isinstance(codec, Int8):
            bound = top / 127 * (1 if codec.stochastic else 0.5)
        elif isinstance(codec, Fp8):
            bound = np.maximum(np.abs(mine) / 16, top / 448 * 2**-10)
        else:
            bound = np.abs(np.abs(mine) - np.abs(mine).mean())
        assert (np.abs(got - mine) <= bound + 1e-5 * top + tiny).all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_zeros_stay_zeros(codec):
    np.testing.assert_array_equal(round_trip(codec, jnp.zeros((2, 301))), np.zeros((2, 301)))


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.sampled(3)
def test_no_codec_leaves_more_than_there_was(codec):
    """|x - C(x)| <= |x|: what error feedback rests on (Karimireddy et al. 2019, assumption A)."""
    x = normal(4, 1001) ** 3
    lost = np.linalg.norm(x - round_trip(codec, x), axis=1)
    assert (lost < np.linalg.norm(x, axis=1)).all()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 8, 21, 1001])
def test_sign_is_the_sign_times_the_mean_magnitude(size):
    x = np.asarray(normal(2, size))
    wanted = np.empty_like(x)
    for row, start, stop in blocks(x, 20):
        mine = x[row, start:stop]
        wanted[row, start:stop] = np.sign(mine) * np.abs(mine).mean()
    np.testing.assert_allclose(round_trip(Sign(block=20), jnp.asarray(x)), wanted, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec", [Int8(block=32, stochastic=False), Fp8(block=48), Sign(block=20)], ids=str
)
def test_a_short_block_is_encoded_as_if_it_were_alone(codec):
    x = normal(2, codec.block + 13)
    first, last = x[:, : codec.block], x[:, codec.block :]
    wanted = np.concatenate([round_trip(codec, first), round_trip(codec, last)], axis=1)
    np.testing.assert_array_equal(round_trip(codec, x), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("density", [0.01, 0.25, 1.0])
@pytest.mark.parametrize("size", [1, 40, 333])
def test_top_k_is_numpys(size, density, ties):
    x = np.asarray(normal(3, size))
    x = np.round(x) if ties else x
    kept = max(1, round(density * size))
    order = np.argsort(-np.abs(x), axis=1, kind="stable")[:, :kept]
    wanted = np.zeros_like(x)
    np.put_along_axis(wanted, order, np.take_along_axis(x, order, 1), 1)
    np.testing.assert_array_equal(round_trip(TopK(density), jnp.asarray(x)), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 100, 250])
def test_random_k_keeps_one_of_each_stretch_the_same_in_all_rows(size):
    x = np.asarray(normal(3, size))
    kept = round_trip(RandomK(0.1), jnp.asarray(x))
    assert ((kept == x) | (kept == 0)).all()
    chosen = kept != 0
    assert (chosen == chosen[:1]).all()
    for start in range(0, size - size % 10, 10):
        assert chosen[0, start : start + 10].sum() == 1
    assert chosen[0, size - size % 10 :].sum() <= 1


def test_random_k_draws_every_place_equally_often():
    draws, places = 3000, 20
    x = jnp.ones((1, places))
    keys = jax.random.split(KEY, draws)
    codec = RandomK(0.2)
    hits = jax.jit(jax.vmap(lambda k: codec.decode(codec.encode(x, k, 0), places, k)))(keys).sum(0)
    deviation = (np.asarray(hits[0]) - draws * 0.2) / np.sqrt(draws * 0.2 * 0.8)
    assert np.abs(deviation).max() < 4.5


def test_stochastic_rounding_is_unbiased_and_nearest_is_not():
    draws = 4000
    x = normal(1, 256)
    means = {}
    for codec in (Int8(), Int8(stochastic=False)):
        decoded = jax.jit(
            jax.vmap(lambda s, c=codec: c.decode(c.encode(x, KEY, s), 256, KEY)),
        )(jnp.arange(draws))
        means[codec.stochastic] = np.asarray(decoded, np.float64).mean(0)
    scale = np.abs(x).max() / 127
    part = np.asarray(x, np.float64) / scale % 1
    deviation = np.sqrt(np.maximum(part * (1 - part), 1e-3) / draws) * scale
    z = (means[True] - x) / deviation
    assert np.abs(z).max() < 5 and np.abs(z.mean()) < 4 / np.sqrt(256)
    assert 0.8 < np.sqrt((z**2).mean()) < 1.2  # it is noise, not the identity
    assert np.abs((means[False] - x) / deviation).max() > 20


@pytest.mark.slow
def test_streams_are_other_noise_and_keys_other_places():
    x = normal(1, 512)
    assert (round_trip(Int8(), x, stream=0) != round_trip(Int8(), x, stream=1)).any()
    np.testing.assert_array_equal(round_trip(Int8(), x), round_trip(Int8(), x))
    other = jax.random.key(6)
    assert (round_trip(RandomK(), x) != round_trip(RandomK(), x, key=other)).any()
    np.testing.assert_array_equal(
        round_trip(RandomK(), x, stream=0), round_trip(RandomK(), x, stream=1)
    )


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.sampled(3)
def test_a_number_that_is_not_finite_is_seen_in_its_row_alone(codec):
    bad = np.array([np.nan, -np.nan, np.inf, -np.inf], np.float32)
    x = np.array(normal(24, 301))
    clean = round_trip(codec, jnp.asarray(x))
    for row, (number, at) in enumerate(itertools.product(bad, (0, 150, 300))):
        x[2 * row, at] = number
    found = round_trip(codec, jnp.asarray(x))
    assert not np.isfinite(found[::2]).all(1).any()
    np.testing.assert_array_equal(found[1::2], clean[1::2])


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_without_a_ramp_a_codec_is_that_of_every_step(codec):
    assert codec.at(0) == codec.at(10**9) == codec


def test_the_ramp_says_which_density_a_step_has():
    codec = TopK(0.01, ramp=((10, 0.25), (30, 0.0625)))
    found = {step: codec.at(step) for step in (0, 9, 10, 29, 30, 1000)}
    wanted = {0: 0.25, 9: 0.25, 10: 0.0625, 29: 0.0625, 30: 0.01, 1000: 0.01}
    assert found == {step: TopK(density) for step, density in wanted.items()}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Int8(block=0, stochastic=1), "block=0.*stochastic=1 must be True or False"),
        (lambda: Fp8(block=2.5), "block=2.5 must be a whole number of 1 or more"),
        (lambda: Sign(block=True), "block=True"),
        (lambda: TopK(0), r"density=0 must lie in \(0, 1\]"),
        (lambda: TopK(0.1, ramp=((0, 0.5), (5, 2))), r"ramp\[0\]\[0\]=0.*ramp\[1\]\[1\]=2"),
        (lambda: TopK(0.1, ramp=((7, 0.5), (5, 0.2))), r"\[7, 5\]; use \[5, 7\]"),
        (lambda: TopK(0.1, ramp=[(1, 0.5)]), r"ramp=\[\(1, 0.5\)\] must be a tuple of pairs"),
        (lambda: TopK(2, ramp=0.5), r"density=2 must.*ramp=0.5 must be .*use for example \(\("),
        (lambda: RandomK(1.5), "density=1.5"),
        (lambda: RandomK(1e-320), "density=1e-320 must be at least one in 1048576; use for"),
        (lambda: RandomK(0.03), "use 0.0303.*, one in 33"),
    ],
)
def test_wrong_fields_are_refused_all_at_once(make, said):
    with pytest.raises(ValueError, match=said):
        make()
