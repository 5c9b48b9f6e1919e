"""PowerSGD against numpy's projections and singular values."""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from typecheck import unchecked

from jaxtrain.collectives.hierarchical import Hierarchical
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring
from jaxtrain.compression.powersgd import PowerSGD, PowerSGDState, first_factor, powersgd_all_reduce
from jaxtrain.program.collectives import collectives

KEY = jax.random.key(1)
ROWS, COLS, RANK = 12, 9, 3


@lru_cache
def on_devices(n, *, by=None, feedback=True, check_vma=True, axes=("data",)):
    """jit of (matrices, errors, q) -> the same of the next step, a row for each device."""
    mesh = jax.make_mesh(
        (n,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:n]
    )

    def local(m, error, q):
        state = PowerSGDState(error[0] if feedback else None, q[0])
        estimate, state = powersgd_all_reduce(m[0], state, axes, by or Lax())
        return estimate[None], state.error[None] if feedback else error, state.q[None]

    spec = P("data")
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    )


def start(n, *shape, rank=RANK):
    return np.zeros((n, *shape), np.float32), np.stack([first_factor(shape, rank, KEY)] * n)


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def low_rank(n, rank, seed=0):
    """Matrices of n devices whose sum has rank `rank` and whose own rank is full."""
    own = normal(n, ROWS, COLS, seed=seed)
    own -= own.mean(0)
    return own + normal(ROWS, rank, seed=seed) @ normal(rank, COLS, seed=seed) / np.float32(n)


@pytest.mark.parametrize("shape", [(ROWS, COLS), (COLS, ROWS), (2, 3, ROWS, COLS)], ids=str)
@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_estimate_is_the_sum_projected_on_its_image_of_q(n, shape):
    m = normal(n, *shape)
    error, q = start(n, *shape)
    estimate, _, _ = on_devices(n)(m, error, q)
    total = m.sum(0, dtype=np.float64)
    u, _ = np.linalg.qr(total @ q[0])
    wanted = u @ u.mT @ total
    np.testing.assert_allclose(estimate, np.stack([wanted] * n), atol=2e-5)
    assert np.linalg.matrix_rank(wanted).max() == RANK


@pytest.mark.parametrize("by", [Lax(), Ring(2), Recursive()], ids=str)
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_sum_of_that_rank_is_found_at_once(by, check_vma):
    m = low_rank(8, RANK)
    estimate, *_ = on_devices(8, by=by, check_vma=check_vma)(m, *start(8, ROWS, COLS))
    np.testing.assert_allclose(estimate[0], m.sum(0), atol=1e-4)


@pytest.mark.parametrize("by", [Lax(), Ring(2), Recursive()], ids=str)
def test_nothing_is_lost_for_good_and_all_devices_agree(by):
    """Returned sums + the devices' errors = true sums, after every step."""
    error, q = start(8, 2, ROWS, COLS)
    returned, true = np.zeros((2, ROWS, COLS)), np.zeros((2, ROWS, COLS))
    for i in range(4):
        m = normal(8, 2, ROWS, COLS, seed=i)
        estimate, error, q = map(np.asarray, on_devices(8, by=by)(m, error, q))
        for same in (estimate, q):
            np.testing.assert_array_equal(same, np.broadcast_to(same[:1], same.shape))
        returned, true = returned + estimate[0], true + m.sum(0, dtype=np.float64)
        np.testing.assert_allclose(returned + error.sum(0, dtype=np.float64), true, atol=5e-5)
    assert np.abs(error).max() > 0.1


def test_steps_on_one_sum_approach_its_best_approximation():
    """Power iteration without feedback: the error falls to that of the truncated SVD."""
    m = normal(4, ROWS, COLS)
    total = m.sum(0, dtype=np.float64)
    best = np.sqrt((np.linalg.svd(total, compute_uv=False)[RANK:] ** 2).sum())
    error, q = start(4, ROWS, COLS)
    distances = []
    for _ in range(40):
        estimate, error, q = on_devices(4, feedback=False)(m, error, q)
        distances.append(np.linalg.norm(estimate[0] - total))
    assert distances[0] > 1.02 * best
    np.testing.assert_allclose(distances[-1], best, rtol=1e-3)


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_steps_after_zeros_find_the_sum_again(magnitude):
    """The warm start must not be lost in a step without gradients, or of tiny or huge ones."""
    error, q = start(4, ROWS, COLS)
    step = on_devices(4, feedback=False)
    for m in (low_rank(4, 1), np.zeros((4, ROWS, COLS), np.float32), low_rank(4, RANK, seed=1)):
        m = m * np.float32(magnitude)
        estimate, error, q = step(m, error, q)
        np.testing.assert_allclose(estimate[0], m.sum(0), atol=1e-3 * magnitude)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_reaches_every_device(number):
    m = normal(8, ROWS, COLS)
    m[5, 7, 2] = number
    estimate, *_ = on_devices(8)(m, *start(8, ROWS, COLS))
    assert not np.isfinite(estimate).all((1, 2)).any()


@pytest.mark.parametrize("axes", [(), ("data",)])
def test_one_device_keeps_its_numbers_and_its_state(axes):
    args = (normal(1, ROWS, COLS), normal(1, ROWS, COLS, seed=1), normal(1, COLS, RANK))
    for a, b in zip(on_devices(1, axes=axes)(*args), args, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_bytes_on_the_wire_of_the_compiled_program(n):
    """Two all-reduces, of as many bytes as the arithmetic says, beside the matrices' own."""
    shape, rank = (2, 256, 512), 4
    args = (np.zeros((n, *shape), np.float32), *start(n, *shape, rank=rank))
    found = collectives(on_devices(n).lower(*args).compile().as_text())
    assert {(each.kind, each.dtype) for each in found} == {("all-reduce", "f32")}
    assert sum(each.buffer_bytes for each in found) == PowerSGD(rank).payload_bytes(shape)
    sent = sum(each.total_wire_bytes for each in found)
    ratio = sent / (2 * (n - 1) / n * 4 * np.prod(shape))
    np.testing.assert_allclose(ratio, rank * (256 + 512) / (256 * 512))


def test_factors_are_summed_in_levels_too():
    m, state = normal(8, ROWS, COLS), start(8, ROWS, COLS)
    found, plain = on_devices(8, by=Hierarchical())(m, *state), on_devices(8)(m, *state)
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("shape", [(7,), (2, 40), (40, 2), (9, 40, 2)], ids=str)
def test_shapes_too_small_for_the_rank_are_refused(shape):
    with pytest.raises(ValueError, match="rank=3 needs matrices of that many rows and columns"):
        state = PowerSGDState(None, jnp.zeros((2, 3)))
        unchecked(powersgd_all_reduce)(jnp.zeros(shape), state, (), Lax())


def test_wrong_ranks_are_refused():
    with pytest.raises(ValueError, match="rank=0 must be a whole number of 1 or more"):
        PowerSGD(0)
    assert PowerSGD(3).at(17) == PowerSGD(3)
