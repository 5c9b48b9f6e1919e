"""The two-phase sum: what it loses comes later, what it sends is what the arithmetic says.

One reference runs the same two phases on the host, a device after the other, with no collective.
"""

from __future__ import annotations

import math
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from typecheck import unchecked

from jaxtrain.collectives import cost
from jaxtrain.collectives.hierarchical import Hierarchical
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.ring import Ring
from jaxtrain.compression.codecs import Fp8, Int8, RandomK, Sign, TopK
from jaxtrain.compression.compressed import (
    Compressed,
    ErrorState,
    Guard,
    compressed_all_reduce,
    no_errors,
)
from jaxtrain.compression.powersgd import PowerSGD
from jaxtrain.mesh.hardware import LINKS
from jaxtrain.program.collectives import collectives

CODECS = [
    Int8(block=64),
    Int8(block=64, stochastic=False),
    Fp8(block=64),
    Sign(block=64),
    TopK(density=0.1),
    RandomK(density=0.1),
]
SIZE = 301
KEY = jax.random.key(3)


def mesh_of(shape, names):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


@lru_cache
def on_devices(codec, shape=(8,), axes=("data",), *, by=None, feedback=True, check_vma=True):
    """jit of (x, worker, owner, key) -> the same of the next step, a row for each device."""
    mesh = mesh_of(shape, ("data", "fsdp")[: len(shape)])

    def local(x, worker, owner, key):
        error = ErrorState(worker[0], owner[0]) if feedback else None
        result, error = compressed_all_reduce(x[0], error, axes, codec, key, by or Lax())
        return result[None], *([e[None] for e in error] if feedback else (worker, owner))

    spec = P(mesh.axis_names)
    return jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(spec, spec, spec, P()), out_specs=spec, check_vma=check_vma
        )
    )


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def zeros(n, size=SIZE):
    return tuple(np.zeros((n, e.size), np.float32) for e in no_errors(size, n))


def on_the_host(codec, x, worker, owner, key):
    """The two phases in a loop over the devices."""
    n, size = x.shape
    tile = owner.shape[1]
    rows = np.zeros((n, n * tile), np.float32)
    rows[:, :size] = x + worker
    rows = jnp.asarray(rows.reshape(n, n, tile))
    turn = lambda r, stream: codec.decode(codec.encode(r, key, stream), tile, key)  # noqa: E731
    got = np.stack([turn(rows[d], d) for d in range(n)])
    totals = got.sum(0) + owner
    totals.reshape(-1)[size:] = 0
    back = np.concatenate([turn(jnp.asarray(totals[d : d + 1]), n + d) for d in range(n)])
    lost = (np.asarray(rows) - got).reshape(n, -1)[:, :size]
    lost_sums = totals - back
    lost_sums.reshape(-1)[size:] = 0
    return back.reshape(-1)[:size], lost, lost_sums


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 8))])
def test_nothing_is_lost_for_good_and_all_devices_agree(codec, n):
    """Returned sums + workers' errors + owners' errors = true sums, after every step."""
    step = on_devices(codec, (n,))
    returned, true = np.zeros(SIZE), np.zeros(SIZE)
    worker, owner = zeros(n)
    for i in range(4):
        x = normal(n, SIZE, seed=i)
        result, worker, owner = map(np.asarray, step(x, worker, owner, jax.random.fold_in(KEY, i)))
        np.testing.assert_array_equal(result, np.broadcast_to(result[:1], result.shape))
        assert np.abs(owner).max() > 0 or isinstance(codec, RandomK)  # places are the workers'
        returned, true = returned + result[0], true + x.sum(0, dtype=np.float64)
        waiting = worker.sum(0, dtype=np.float64) + owner.reshape(-1)[:SIZE]
        np.testing.assert_allclose(returned + waiting, true, atol=2e-5)
        assert not owner.reshape(-1)[SIZE:].any()


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_result_is_that_of_two_phases_on_the_host(codec):
    n = 3
    state = normal(n, SIZE, seed=1), np.zeros((n, 101), np.float32)
    x = normal(n, SIZE)
    result, *errors = on_devices(codec, (n,))(x, *state, KEY)
    wanted, *lost = on_the_host(codec, x, *state, KEY)
    np.testing.assert_allclose(result[0], wanted, rtol=1e-5, atol=1e-6)
    for a, b in zip(errors, lost, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"by": Ring(1)},
        {"by": Ring(2, unroll=False)},
        {"check_vma": False},
        {"shape": (2, 4), "axes": ("data", "fsdp")},
    ],
    ids=str,
)
@pytest.mark.parametrize("codec", [Int8(block=64), TopK(density=0.1)], ids=str)
def test_what_moves_the_bytes_changes_no_bit(codec, how):
    args = (normal(8, SIZE), *zeros(8), KEY)
    for a, b in zip(on_devices(codec, **how)(*args), on_devices(codec)(*args), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_sum_over_one_axis_leaves_the_other_alone(codec):
    worker, owner = zeros(8)
    owner = np.zeros((8, -(-SIZE // 2)), np.float32)
    x = normal(8, SIZE)
    found = on_devices(codec, (2, 4), ("data",))(x, worker, owner, KEY)
    for j in range(4):
        pair = [j, 4 + j]
        wanted = on_devices(codec, (2,))(x[pair], worker[pair], owner[pair], KEY)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(np.asarray(a)[pair], b)


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_without_feedback_the_first_result_is_the_same_and_no_state_is_left(codec):
    args = (normal(8, SIZE), *zeros(8), KEY)
    kept, *_ = on_devices(codec)(*args)
    dropped, *untouched = on_devices(codec, feedback=False)(*args)
    np.testing.assert_array_equal(kept, dropped)
    assert not np.any(untouched[0]) and not np.any(untouched[1])


def test_one_device_keeps_its_numbers_and_its_state():
    args = (normal(1, SIZE), normal(1, SIZE, seed=1), normal(1, SIZE, seed=2))
    for axes in ((), ("data",)):
        found = on_devices(Sign(), (1,), axes)(*args, KEY)
        for a, b in zip(found, args, strict=True):
            np.testing.assert_array_equal(a, b)


def test_devices_round_by_noise_of_their_own():
    """Equal numbers on all devices: their errors would add up if the noise were the same."""
    x = np.broadcast_to(normal(1, SIZE), (8, SIZE))
    _, worker, _ = on_devices(Int8(block=64))(x, *zeros(8), KEY)
    worker = np.asarray(worker)
    assert len({row.tobytes() for row in worker}) == 8
    spread = np.sqrt((worker.sum(0) ** 2).mean() / (worker**2).mean())
    assert 0.8 * np.sqrt(8) < spread < 1.2 * np.sqrt(8)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_number_that_is_not_finite_reaches_every_device(codec):
    step = on_devices(codec)
    for number in (np.nan, np.inf, -np.inf):
        x = normal(8, SIZE)
        x[5, 200] = number
        assert not np.isfinite(step(x, *zeros(8), KEY)[0]).all(1).any()
    # Finite on each device, and beyond fp32 as a sum.
    x = np.full((8, SIZE), 3e38, np.float32)
    assert not np.isfinite(step(x, *zeros(8), KEY)[0]).all(1).any()


@pytest.mark.parametrize("n", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
@pytest.mark.parametrize(
    ("codec", "most"),
    [
        (Int8(), 0.27),
        (Fp8(), 0.27),
        (Sign(), 0.034),
        (TopK(0.01), 0.03),
        (RandomK(0.01), 0.015),
    ],
    ids=str,
)
def test_bytes_on_the_wire_of_the_compiled_program(codec, most, n):
    """Beside an fp32 ring all-reduce; all of them bytes, and as many as the arithmetic says."""
    size = 2**16 + 5
    shapes = [jnp.zeros((n, size)), *(jnp.zeros((n, e.size)) for e in no_errors(size, n))]
    text = on_devices(codec, (n,)).lower(*shapes, KEY).compile().as_text()
    found = collectives(text)
    assert [(each.kind, each.dtype) for each in found] == [
        ("all-to-all", "u8"),
        ("all-gather", "u8"),
    ]
    sent = sum(each.total_wire_bytes for each in found)
    payload = n * codec.payload_bytes(math.ceil(size / n))
    predicted = cost.compressed_all_reduce(n, payload, payload, LINKS["nvlink4"])
    assert sent == predicted.traffic.device_bytes
    assert sent / (2 * (n - 1) / n * 4 * size) <= most


@lru_cache
def descent(codec, feedback):
    """|w - optimum| / |optimum| after gradient descent on sum over devices of |w - a|^2 / 2, by
    steps. The devices' optima differ by offsets that cancel in the sum, in a few coordinates of
    each owner's tile: as many as `TopK(1 / 8)` sends, and greater than most of
    what is to be learnt."""
    n, tile, steps = 4, 32, 800
    optimum = normal(n * tile)
    offsets = np.zeros((n, n, tile), np.float32)
    offsets[:, :, :4] = 4 * np.array([1, -1, 2, -2])[:, None, None]
    optima = optimum + offsets.reshape(n, -1)

    def local(a):
        def step(carry, i):
            w, error = carry
            summed, error = compressed_all_reduce(
                w - a[0], error, ("data",), codec, jax.random.fold_in(KEY, i), Lax()
            )
            w = w - 0.02 / n * summed
            return (w, error), w

        like = lambda e: lax.pcast(e, ("data",), to="varying")  # noqa: E731
        error = jax.tree.map(like, no_errors(n * tile, n)) if feedback else None
        carry = (like(jnp.zeros(n * tile)), error)
        return lax.scan(step, carry, jnp.arange(steps))[1][None]

    mesh = mesh_of((n,), ("data",))
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    path = np.asarray(run(optima))[0]
    return np.linalg.norm(path - optimum, axis=1) / np.linalg.norm(optimum)


@pytest.mark.parametrize("codec", [TopK(1 / 8), RandomK(1 / 8), Sign(block=32), Int8()], ids=str)
def test_descent_converges_with_error_feedback(codec):
    assert descent(codec, True)[-100:].mean() < 0.1


def test_top_k_without_error_feedback_does_not():
    """It sends the numbers that cancel, for ever."""
    assert descent(TopK(1 / 8), False)[-100:].min() > 0.5


def test_the_first_steps_are_exact_and_then_the_codec_is_that_of_the_step():
    reducer = Compressed(TopK(0.01, ramp=((50, 0.25),)), warmup_steps=20)
    found = [reducer.at(step) for step in (0, 19, 20, 49, 50)]
    assert found == [None, None, TopK(0.25), TopK(0.25), TopK(0.01)]
    assert Compressed(PowerSGD(2)).at(0) == PowerSGD(2)


def test_wrong_fields_are_refused_all_at_once():
    with pytest.raises(ValueError, match=r"error_feedback=1 must be.*warmup_steps=-1 must be"):
        Compressed(Int8(), error_feedback=1, warmup_steps=-1)
    for codec in ("int8", Int8):
        with pytest.raises(ValueError, match=r"is no codec; use a value such as Int8\(\)"):
            Compressed(codec)
    for by in ("ring", Ring):
        with pytest.raises(ValueError, match=r"by=.*is no algorithm; use Lax.*guard='x' is no gu"):
            Compressed(Int8(), by=by, guard="x")
    with pytest.raises(ValueError, match=r"makes sums only.*an all-gather; use by=Lax\(\), Ring"):
        Compressed(Int8(), by=Hierarchical())
    assert Compressed(PowerSGD(), by=Hierarchical()).by == Hierarchical()
    with pytest.raises(ValueError, match=r"max_error='a' must be a positive.*min_cosine=True must"):
        Guard(max_error="a", min_cosine=True)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_no_numbers_are_summed_to_none(codec):
    for kept in on_devices(codec)(*(np.zeros((8, 0), np.float32),) * 3, KEY):
        assert kept.shape == (8, 0)


@pytest.mark.parametrize(
    ("x", "error", "said"),
    [
        (jnp.zeros(8, jnp.bfloat16), None, r"is bfloat16\[8\]; use x.astype"),
        (jnp.zeros((2, 4)), no_errors(4, 1), r"float32\[2, 4\].*begin with no_errors\(8, 1\)"),
        (jnp.zeros(8), no_errors(8, 2), r"\(\(8,\), \(4,\)\); begin with no_errors\(8, 1\)"),
    ],
)
def test_wrong_operands_are_refused(x, error, said):
    with pytest.raises(ValueError, match=said):
        unchecked(compressed_all_reduce)(x, error, (), Int8(), KEY, Lax())
