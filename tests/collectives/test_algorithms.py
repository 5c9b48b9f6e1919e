"""Every collective of every algorithm against its `lax` twin: values and gradients.

All cases of an algorithm run in one program, each waiting for the one before: XLA:CPU may start
independent collectives in different orders on different devices, and then waits for ever.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives import algorithm as collective
from jaxtrain.collectives import ring
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring

ALGORITHMS = (Ring(1), Ring(2), Ring(1, unroll=False), Ring(2, unroll=False), Recursive())
SIZES = (1, 2, 3, 4, 8)
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
DIMS = {
    "all_gather": ((0, 0), (1, 0), (2, 0)),
    "reduce_scatter": ((0, 0), (2, 0)),
    "all_reduce": ((0, 0),),
    "all_to_all": ((0, 1), (0, 0), (0, 2), (2, 0), (2, 1)),
    "broadcast": ((0, 0),),
    "reduce": ((0, 0),),
    "gather": ((0, 0), (2, 0)),
    "scatter": ((0, 0), (2, 0)),
}
"""Dims that are joined or split; all_to_all's second is the one it joins."""


class Case(NamedTuple):
    name: str
    dtype: str
    dim: int = 0
    other: int = 0

    def shape(self, n):
        splits = self.name in ("reduce_scatter", "scatter", "all_to_all")
        return (2 * n, 3, n) if splits else (2, 3, 5)

    def apply(self, x, axes, by):
        n = jax.lax.axis_size(axes)
        where = {
            "all_reduce": (),
            "all_to_all": (self.dim, self.other),
            "broadcast": (n // 2,),
            "reduce": (n - 1,),
            "gather": (self.dim, n // 2),
            "scatter": (self.dim, n - 1),
        }.get(self.name, (self.dim,))
        return getattr(collective, self.name)(x, axes, *where, by)


FULL = tuple(Case(name, t, *dims) for name in DIMS for dims in DIMS[name] for t in DTYPES)
SHORT = tuple(
    case for case in FULL if case.dtype == "float32" or (case.dim, case.other) in ((0, 0), (0, 1))
)
"""Every dim in fp32, every dtype along one dim."""


def mesh_of(shape, names=("data",)):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


def integers(shape, seed):
    """-1, 0 and 1: their sums over 8 devices are exact in every dtype."""
    return np.random.default_rng(seed).integers(-1, 2, shape)


def normal(shape, seed):
    return np.random.default_rng(seed).normal(size=shape)


def results(by, mesh, axes, cases, make, *, check_vma=True, compute=None):
    """[(values, gradients)] of the cases, [devices, ...]: one program for all.

    Arrays are rounded to a case's dtype, then computed in `compute` (None: that dtype).
    """
    everywhere, n = mesh.axis_names, int(np.prod([mesh.shape[a] for a in axes]))

    def apply(case):
        return lambda x: collective.vary(case.apply(x, axes, by), everywhere)

    def local(xs, cotangents):
        last, out = jnp.float32(0), []

        def after(x):
            return collective.vary(x[0] + (0 * last).astype(x.dtype), everywhere)

        for case, x, dy in zip(cases, xs, cotangents, strict=True):
            y = apply(case)(after(x))
            last = y.reshape(-1)[0].astype(jnp.float32)
            # Linear, so that the gradient is the same at any point and the forward pass is dead.
            (dx,) = jax.vjp(apply(case), after(x))[1](after(dy))
            last = dx.reshape(-1)[0].astype(jnp.float32)
            out.append((y[None], dx[None]))
        return out

    def mapped(function):
        return jax.shard_map(
            function, mesh=mesh, in_specs=P(everywhere), out_specs=P(everywhere),
            check_vma=check_vma,
        )  # fmt: skip

    def rounded(shape, seed, dtype):
        return jnp.asarray(make(shape, seed), dtype).astype(compute or dtype)

    xs = [rounded((mesh.size, *c.shape(n)), [1, n, i], c.dtype) for i, c in enumerate(cases)]
    cotangents = []
    for i, (case, x) in enumerate(zip(cases, xs, strict=True)):
        shape = jax.eval_shape(mapped(lambda x, case=case: apply(case)(x[0])[None]), x).shape
        cotangents.append(rounded(shape, [2, n, i], case.dtype))
    quick = {"xla_backend_optimization_level": 0}  # compile time is what this costs
    found = jax.jit(mapped(local), compiler_options=quick)(xs, cotangents)
    return jax.tree.map(np.asarray, found)


def spelt(value):
    """Test ids: the two tables of cases by name."""
    return {SHORT: "short", FULL: "full"}.get(value, str(value))


@lru_cache
def twin(n, cases, make, compute=None):
    return results(Lax(), mesh_of((n,)), ("data",), cases, make, compute=compute)


def matches(found, wanted, cases, equal):
    for case, *pairs in zip(cases, found, wanted, strict=True):
        for what, a, b in zip(("values", "gradients"), *pairs, strict=True):
            equal(a, b, case, f"{what} of {case}")


def exactly(a, b, case, where):
    np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32), err_msg=where)


def table(quick, slow, exhaustive=()):
    """Parameters of all three, the second's marked slow, the third's exhaustive."""
    rest = [
        pytest.param(*p, marks=mark)
        for some, mark in ((slow, pytest.mark.slow), (exhaustive, pytest.mark.exhaustive))
        for p in some
        if p not in quick and (some is slow or p not in slow)
    ]
    return [pytest.param(*p) for p in quick] + rest


EVERY = [(by, n, vma) for by in ALGORITHMS for n in SIZES for vma in (True, False)]


@pytest.mark.parametrize(
    ("by", "n", "check_vma", "cases"),
    table(
        [(Recursive(), 3, True, SHORT)],
        [],
        [(*each, cases) for each in EVERY for cases in (SHORT, FULL)],
    ),
    ids=spelt,
)
def test_exact_on_small_integers(by, n, check_vma, cases):
    found = results(by, mesh_of((n,)), ("data",), cases, integers, check_vma=check_vma)
    matches(found, twin(n, cases, integers), cases, exactly)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_by_doubling_and_halving_where_devices_are_a_power_of_two(n):
    """Of every dim, in fp32."""
    cases = tuple(c for c in SHORT if c.dtype == "float32")
    cases = tuple(c for c in cases if c.name in ("all_gather", "reduce_scatter"))
    found = results(Recursive(), mesh_of((n,)), ("data",), cases, integers)
    matches(found, twin(n, cases, integers), cases, exactly)


def magnitudes(shape, seed):
    return np.abs(normal(shape, seed))


HALF_UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def within_rounding(n):
    """fp32: 1e-6 of the maximum. 16 bits: n roundings, each of a sum of some of the terms, so of
    no more than the sum of their magnitudes. (fp8's narrow range overflows on normal numbers: it is
    in the exact table only.)"""

    def close(a, b, case, where):
        (b, most), bound = b, HALF_UNIT.get(case.dtype)
        if bound is None:
            np.testing.assert_array_less(np.abs(a - b), 1e-6 * np.abs(b).max() + 1e-30, where)
            return
        bound = n * bound * (1 + bound) ** n * most
        np.testing.assert_array_less(np.abs(a.astype(np.float32) - b), bound + 1e-30, where)

    return close


@pytest.mark.parametrize(
    ("by", "n", "check_vma", "cases"),
    table(
        [(Ring(2), 3, True, SHORT)],
        [(Recursive(), 3, True, SHORT)],
        [(*each, cases) for each in EVERY for cases in (SHORT, FULL)],
    ),
    ids=spelt,
)
def test_sums_are_rounded_once_a_device(by, n, check_vma, cases):
    cases = tuple(case for case in cases if case.dtype != "float8_e4m3fn")
    found = results(by, mesh_of((n,)), ("data",), cases, normal, check_vma=check_vma)
    wanted, most = (twin(n, cases, make, "float32") for make in (normal, magnitudes))
    both = [tuple(zip(*pairs, strict=True)) for pairs in zip(wanted, most, strict=True)]
    matches(found, both, cases, within_rounding(n))


@pytest.mark.parametrize(
    ("by", "axes"),
    table(
        [(Ring(2), ("tensor", "data")), (Recursive(), ("data",))],
        [
            (by, axes)
            for by in (Ring(2), Recursive())
            for axes in (("data",), ("tensor",), ("data", "tensor"), ("tensor", "data"))
        ],
    ),
    ids=str,
)
@pytest.mark.sampled(3)
def test_over_some_axes_of_a_mesh(by, axes):
    mesh = mesh_of((2, 3), ("data", "tensor"))
    cases = tuple(Case(name, "float32", *dims[0]) for name, dims in DIMS.items())
    wanted = results(Lax(), mesh, axes, cases, integers)
    matches(results(by, mesh, axes, cases, integers), wanted, cases, exactly)


@pytest.mark.parametrize("by", [*ALGORITHMS, Lax()], ids=str)
def test_no_axes_is_the_identity(by):
    x = jnp.arange(6.0).reshape(2, 3)
    for name in DIMS:
        where = {"all_reduce": (), "all_to_all": (0, 1), "gather": (0, 0), "scatter": (0, 0)}
        assert getattr(collective, name)(x, (), *where.get(name, (0,)), by) is x


def refused(function, shape=(5, 2)):
    mesh = mesh_of((2,))
    return jax.eval_shape(
        jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P("data")), jnp.zeros(shape)
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: collective.reduce_scatter(x, ("data",), 0, Ring()), "pad it to 6"),
        (lambda x: collective.all_to_all(x, ("data",), 0, 1, Ring()), "5 entries, which do not"),
        (lambda x: collective.scatter(x, ("data",), 0, 0, Ring()), "data = 2 devices"),
        (lambda x: collective.broadcast(x, ("data",), 2, Ring()), "root=2 .* use 0 to 1"),
        (lambda x: collective.gather(x, ("data",), 0, -1, Ring()), "root=-1"),
        (lambda x: collective.all_gather(x, ("data",), 2, Ring()), "dim=2 .* 0 to 1, or -2 to -1"),
        (lambda x: collective.all_to_all(x, ("data",), 1, -3, Lax()), "dim=-3 is no dim"),
        (lambda x: collective.scatter(x[0, 0], ("data",), 0, 0, Lax()), "a scalar has none"),
    ],
)
def test_what_does_not_fit_is_refused(function, message):
    with pytest.raises(ValueError, match=message):
        refused(function)


@pytest.mark.parametrize("by", [*ALGORITHMS, Lax()], ids=str)
def test_dims_count_from_either_end(by):
    mesh, x = mesh_of((2,)), jnp.zeros((2, 4, 6))

    def traced(name, dims):
        where = {
            "all_to_all": dims,
            "gather": (dims[0], 1),
            "scatter": (dims[0], 1),
        }.get(name, dims[:1])

        def local(x):
            return getattr(collective, name)(x, ("data",), *where, by)

        def both(x):
            y, pull = jax.vjp(local, x)
            return y, pull(y)[0]

        run = jax.shard_map(both, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return jax.make_jaxpr(run)(jnp.concatenate([x, x]))

    for name in ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"):
        pairs = ((-1, -2), (2, 1)), ((-3, -1), (0, 2)), ((-2, -2), (1, 1))
        for negative, positive in pairs:
            assert str(traced(name, negative)) == str(traced(name, positive)), name


@pytest.mark.parametrize("by", [Ring(), Recursive(), Lax()], ids=str)
def test_empty_arrays_have_the_shape_of_others(by):
    """A leaf may have no elements. Each shape against that of an array with one row more."""
    cases = [Case(name, "float32", *dims) for name in DIMS for dims in DIMS[name]]

    def both(x, case):
        y, pull = jax.vjp(lambda x: case.apply(x, ("data",), by), x)
        return y, pull(y)[0]

    def local(xs):
        return [[y[None] for y in both(x, case)] for x, case in zip(xs, cases, strict=True)]

    def shapes(empty):
        run = jax.shard_map(local, mesh=mesh_of((2,)), in_specs=P(), out_specs=P("data"))
        xs = [jnp.zeros([size * (d not in empty) for d, size in enumerate((4, 4, 4))])] * len(cases)
        return (
            [[y.shape for y in ys] for ys in jax.jit(run)(xs)]
            if empty
            else [[y.shape for y in ys] for ys in jax.eval_shape(run, xs)]
        )

    for empty in range(3):
        for found, whole, case in zip(shapes((empty,)), shapes(()), cases, strict=True):
            wanted = [(s[0], *(n * (d != empty) for d, n in enumerate(s[1:]))) for s in whole]
            assert found == wanted, case


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(directions=3), "directions=3 must be 1 or 2; use 2"),
        (dict(directions=True), "directions=True"),
        (dict(unroll="no"), "unroll='no' must be True or False"),
        (dict(directions=0, unroll=1), "unroll=1 .*directions=0"),
    ],
)
def test_a_rings_fields_are_checked(fields, said):
    with pytest.raises(ValueError, match=said):
        Ring(**fields)


@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("directions", [1, 2])
def test_chains_reach_every_other_device_once(n, directions):
    chains = Ring(directions).chains(n)
    reached = [way * h % n for way, hops in chains for h in range(1, hops + 1)]
    assert sorted(reached) == list(range(1, n))
    assert max((hops for _, hops in chains), default=0) == -(-(n - 1) // directions)


@pytest.mark.parametrize("limit", [ring.INT32_MAX, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_tiles_are_taken_and_put_by_their_number_modulo_n(limit, dim, monkeypatch):
    """Also as along a dim whose offsets do not fit an int32."""
    monkeypatch.setattr(ring, "INT32_MAX", limit)
    n, x = 3, np.arange(6 * 12 * 9).reshape(6, 12, 9)
    tiles = np.split(x, n, dim)
    for at in range(-n, 2 * n):
        found = ring.take(jnp.asarray(x), jnp.int32(at), n, dim)
        np.testing.assert_array_equal(found, tiles[at % n])
        wanted = [t * 0 for t in tiles]
        wanted[at % n] = tiles[at % n]
        placed = ring.put(jnp.zeros_like(x), found, jnp.int32(at), n, dim)
        np.testing.assert_array_equal(placed, np.concatenate(wanted, dim))


def test_no_offset_is_beyond_int32():
    """Of an array too large for a test: a slice begins at the number of a tile, which is not
    multiplied by a tile's size."""
    x = jax.ShapeDtypeStruct((2, 2**32), jnp.int8)
    tile, at = jax.ShapeDtypeStruct((2, 2**30), jnp.int8), jax.ShapeDtypeStruct((), jnp.int32)
    took = jax.make_jaxpr(lambda x, at: ring.take(x, at, 4, 1))(x, at)
    placed = jax.make_jaxpr(lambda x, tile, at: ring.put(x, tile, at, 4, 1))(x, tile, at)
    for traced in map(str, (took, placed)):
        assert " = mul " not in traced and "i8[2,4,1073741824]" in traced
