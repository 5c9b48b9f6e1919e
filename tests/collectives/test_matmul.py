"""Collective matmuls against the dense product: values and both gradients."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives.matmul import Tiled, gather_matmul, matmul_scatter, multiply
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.vary import vary

RINGS = (Ring(1), Ring(2), Ring(1, unroll=False), Ring(2, unroll=False))
K, COLUMNS = 6, (4, 5)


def on_devices(function, n, in_specs, out_specs, check_vma):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:n]), ("tensor",))
    return jax.jit(
        jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
        )
    )


def draw(make, *shapes):
    rng = np.random.default_rng(11)
    if make == "integers":
        return [rng.integers(-1, 2, s) for s in shapes]
    return [rng.normal(size=s) for s in shapes]


def close(found, wanted, make, dtype, sums=1):
    for a, b in zip(found, wanted, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if make == "integers":
            np.testing.assert_array_equal(a, b)
        else:
            # A rounding of half a unit in the last place, which is 2^-7 or 2^-10, on each device
            # that a sum goes through.
            bound = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
            assert np.abs(a - b).max() <= sums * bound * np.abs(b).max()


TABLE = [
    *((ring, 3, True, "float32", make) for ring in RINGS for make in ("normal", "integers")),
    *((Ring(2), n, vma, "float32", "normal") for n in (1, 2, 8) for vma in (True, False)),
    *((ring, 4, True, "bfloat16", make) for ring in RINGS[1:3] for make in ("normal", "integers")),
]
TABLE += [
    pytest.param(*p, marks=pytest.mark.exhaustive if i % 3 else pytest.mark.slow)
    for i, p in enumerate(
        itertools.product(
            RINGS,
            (1, 2, 3, 4, 8),
            (True, False),
            ("float32", "bfloat16", "float16"),
            ("normal", "integers"),
        )
    )
    if p not in TABLE
]
"""Slow is a third of the whole product, exhaustive the rest."""


@pytest.mark.parametrize(("ring", "n", "check_vma", "dtype", "make"), TABLE, ids=str)
@pytest.mark.sampled(5)
def test_gather_matmul(ring, n, check_vma, dtype, make):
    """Two weights share one gather. x [tokens, K] split by tokens, weights by columns."""
    tokens = 2 * n
    x, *ws = draw(make, (tokens, K), *((K, n * c) for c in COLUMNS))
    dys = draw(make, *((tokens, n * c) for c in COLUMNS))
    x, ws, dys = jax.tree.map(lambda a: jnp.asarray(a, dtype), (x, ws, dys))

    def local(x, ws, dys):
        ys, pull = jax.vjp(lambda x, ws: gather_matmul(x, ws, ("tensor",), ring), x, tuple(ws))
        # The cotangent waits for the product: no two rings of a program may race.
        dys = [dy + (0 * y).astype(dy.dtype) for dy, y in zip(dys, ys, strict=True)]
        return ys, pull(tuple(dys))

    rows, columns = P("tensor"), [P(None, "tensor")] * 2
    run = on_devices(
        local, n, (rows, columns, columns), (tuple(columns), (rows, tuple(columns))), check_vma
    )
    (y0, y1), (dx, (dw0, dw1)) = run(x, ws, dys)
    x, w0, w1, dy0, dy1 = (np.asarray(a, np.float64) for a in (x, *ws, *dys))
    wanted = (x @ w0, x @ w1, dy0 @ w0.T + dy1 @ w1.T, x.T @ dy0, x.T @ dy1)
    products, (dx_wanted, *dws) = wanted[:2], wanted[2:]
    close((y0, y1, dw0, dw1), (*products, *dws), make, dtype)
    close((dx,), (dx_wanted,), make, dtype, sums=n)


@pytest.mark.parametrize(("ring", "n", "check_vma", "dtype", "make"), TABLE, ids=str)
@pytest.mark.sampled(5)
def test_matmul_scatter(ring, n, check_vma, dtype, make):
    """x [tokens, K n] split by columns, the weight by rows; the result by tokens. Beside it another
    pair, of one column a device."""
    tokens = 2 * n
    shapes = (tokens, K * n), (K * n, COLUMNS[0]), (tokens, n), (n, COLUMNS[0])
    x, w, z, b, dy = (jnp.asarray(a, dtype) for a in draw(make, *shapes, (tokens, COLUMNS[0])))

    def local(xs, ws, dy):
        y, pull = jax.vjp(lambda xs, ws: matmul_scatter(xs, ws, ("tensor",), ring), xs, ws)
        return y, *pull(dy + (0 * y).astype(dy.dtype))

    columns, rows = P(None, "tensor"), P("tensor")
    run = on_devices(local, n, (columns, rows, rows), (rows, columns, rows), check_vma)
    y, (dx, dz), (dw, db) = run((x, z), (w, b), dy)
    x, w, z, b, dy64 = (np.asarray(a, np.float64) for a in (x, w, z, b, dy))
    close((dx, dw), (dy64 @ w.T, x.T @ dy64), make, dtype)
    close((dz, db), (dy64 @ b.T, z.T @ dy64), make, dtype)
    close((y,), (x @ w + z @ b,), make, dtype, sums=n)


@pytest.mark.parametrize(("dtype", "result"), [("float32", "float32"), ("bfloat16", "float32")])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("ring", "n"), [(Ring(1), 3), (Ring(2), 4), (Ring(1, unroll=False), 2)])
def test_a_gradient_is_scattered_while_it_is_made(ring, n, dim, dtype, result):
    """x and dy split by tokens, the weight whole; a tile of its gradient comes from each device, in
    the dtype it is asked for: 16-bit products are summed, and stay, in fp32."""
    shape = (2 * n, 3 * n)
    x, w, dy = (
        jnp.asarray(a, dtype) for a in draw("normal", (4 * n, shape[0]), shape, (4 * n, shape[1]))
    )
    part = tuple(size // n if i == dim else size for i, size in enumerate(shape))

    def local(x, w, dy):
        tile = vary(jnp.zeros(part, result), ("tensor",))
        weight = Tiled(vary(w, ("tensor",)), tile, dim, ("tensor",), ring, jnp.dtype(result))
        y, pull = jax.vjp(multiply, x, weight)
        dx, of_weight = pull(dy + (0 * y).astype(dy.dtype))
        return y, dx, of_weight.tile

    rows, tiles = P("tensor"), P("tensor") if dim == 0 else P(None, "tensor")
    y, dx, dw = on_devices(local, n, (rows, P(), rows), (rows, rows, tiles), True)(x, w, dy)
    assert dw.dtype == result
    x, w, dy64 = (np.asarray(a, np.float64) for a in (x, w, dy))
    close((y, dx), (x @ w, dy64 @ w.T), "normal", dtype)
    close((dw,), (x.T @ dy64,), "normal", result)


def test_without_axes_it_is_the_product():
    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    np.testing.assert_array_equal(matmul_scatter((x,), (w,), (), Ring()), x @ w)
    np.testing.assert_array_equal(gather_matmul(x, (w,), (), Ring())[0], x @ w)


def test_tokens_that_do_not_split_are_refused():
    def local(x, w):
        return matmul_scatter((x,), (w,), ("tensor",), Ring())

    with pytest.raises(ValueError, match="5 entries, which do not split over tensor = 2"):
        on_devices(local, 2, (P(), P()), P("tensor"), True)(jnp.ones((5, 3)), jnp.ones((3, 4)))
