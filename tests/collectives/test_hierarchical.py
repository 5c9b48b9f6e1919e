"""Sums in levels: the sum, equal bits everywhere, and what crosses each level's links."""

from __future__ import annotations

import math
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives.choice import Collectives
from jaxtrain.collectives.cost import hierarchical
from jaxtrain.collectives.hierarchical import Hierarchical
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.vary import same
from jaxtrain.mesh.hardware import LINKS
from jaxtrain.program.collectives import collectives

AXES = ("replica", "data", "fsdp")
REDUCERS = [
    Hierarchical(),
    Hierarchical(Ring(1), Ring(1)),
    Hierarchical(Recursive(), Ring(unroll=False)),
    Hierarchical(Lax(), Recursive()),
]
LEVELS = [(8,), (2, 4), (4, 2), (3, 2), (2, 2, 2)]


@lru_cache
def summed(by, levels, axes=None):
    """jit of the sum over `axes` (None: all) of an array whose entry d device d holds."""
    names = AXES[-len(levels) :]
    devices = np.array(jax.devices()[: math.prod(levels)]).reshape(levels)
    mesh = jax.sharding.Mesh(devices, names, axis_types=(jax.sharding.AxisType.Auto,) * len(levels))
    over = axes or names
    rest = tuple(a for a in names if a not in over)

    def local(x):
        return same(by.all_reduce(x[0], over), over)[None]

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(names), out_specs=P(rest)))


@pytest.mark.parametrize("shape", [(24,), (5, 3), (1,)], ids=str)
@pytest.mark.parametrize("levels", LEVELS, ids=str)
@pytest.mark.parametrize("by", REDUCERS, ids=str)
def test_the_sum_is_on_every_device_to_the_bit(by, levels, shape):
    rng = np.random.default_rng(len(levels))
    x = rng.normal(size=(math.prod(levels), *shape)).astype(np.float32)
    found = summed(by, levels)(x)
    np.testing.assert_allclose(found[0], x.astype(np.float64).sum(0), rtol=1e-5, atol=1e-5)
    for shard in found.addressable_shards:
        np.testing.assert_array_equal(shard.data, found.addressable_shards[0].data)


@pytest.mark.parametrize("axes", [("replica", "fsdp"), ("data", "fsdp"), ("data",)], ids=str)
@pytest.mark.parametrize("by", REDUCERS[:2], ids=str)
def test_a_sum_over_some_axes_leaves_the_others_alone(by, axes):
    x = np.random.default_rng(0).integers(-9, 9, (2, 2, 2, 7)).astype(np.float32)
    dims = tuple(AXES.index(a) for a in axes)
    wanted = x.sum(dims).reshape(-1, 7)
    np.testing.assert_array_equal(summed(by, (2, 2, 2), axes)(x.reshape(8, 7)), wanted)


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 7), ("float16", 10)])
@pytest.mark.parametrize("by", REDUCERS[::3], ids=str)
def test_16_bit_sums_are_rounded_once_a_device(by, dtype, bits):
    draws = np.random.default_rng(1).normal(size=(8, 33))
    x = jnp.asarray(draws, dtype)
    found = summed(by, (2, 4))(x)
    assert found.dtype == x.dtype
    wide = np.asarray(x, np.float32)
    bound = 8 * 2.0 ** -(bits + 1) * np.abs(wide).sum(0)
    np.testing.assert_array_less(np.abs(np.asarray(found[0], np.float32) - wide.sum(0)), bound)


def sent(size, levels, dtype="float32"):
    """`cost.hierarchical` of the mesh axes `levels`, slowest first as they are. Bytes do not depend
    on the links."""
    nbytes = size * jnp.dtype(dtype).itemsize
    link = LINKS["nvlink4"]
    return hierarchical([(n, link) for n in reversed(levels)], nbytes, "lax", dtype)[::-1]


@pytest.mark.parametrize(
    ("levels", "size", "dtype"),
    [
        *((n, size, "float32") for n in LEVELS if len(n) > 1 for size in (48, 50)),
        ((2, 4), 50, "float16"),
    ],
    ids=str,
)
def test_what_is_sent_is_what_the_program_says(levels, size, dtype):
    x = jnp.zeros((math.prod(levels), size), dtype)
    found = collectives(summed(Hierarchical(), levels).lower(x).compile().as_text())
    fast = len(levels) - 1
    kinds = ["all-reduce", *fast * ["all-gather"], *fast * ["reduce-scatter"]]
    assert sorted(each.kind for each in found) == sorted(kinds)
    at = np.arange(math.prod(levels)).reshape(levels)
    for level, wanted in enumerate(sent(size, levels, dtype)):
        groups = np.moveaxis(at, level, -1).reshape(-1, levels[level])
        mine = [each for each in found if as_set(each.groups) == as_set(groups)]
        assert sum(each.total_wire_bytes for each in mine) == pytest.approx(wanted.device_bytes)


def as_set(groups):
    return {frozenset(map(int, group)) for group in groups}


@pytest.mark.parametrize("levels", LEVELS, ids=str)
def test_a_node_sends_as_much_as_a_sum_over_nodes_of_whole_buffers(levels):
    """Each level is an all-reduce, between what is below it, of the whole buffer."""
    size = 96 * math.prod(levels)
    for n, level in zip(levels, sent(size, levels), strict=True):
        assert level.group_bytes == pytest.approx(2 * (n - 1) / n * size * 4)


def test_one_level_is_the_slow_algorithm_itself():
    x = np.random.default_rng(0).normal(size=(8, 33)).astype(np.float32)
    for by in (Ring(), Recursive(), Lax()):
        jaxpr = str(jax.make_jaxpr(summed(Hierarchical(by, Lax()), (8,)))(x))
        assert "reduce_scatter" not in jaxpr and "all_gather" not in jaxpr
        plain = summed(by, (8,))(x)
        np.testing.assert_array_equal(summed(Hierarchical(by), (8,))(x), plain)


@pytest.mark.parametrize("kind", [Collectives, Hierarchical])
@pytest.mark.parametrize(
    ("value", "fix"),
    [("ring", r"=Ring\(\)"), (Recursive, r"=Recursive\(\)"), (2, r"=Lax\(\), Ring\(\) or")],
)
def test_a_choice_is_an_algorithms_value(kind, value, fix):
    first, second, *others = (name for name in kind.__dataclass_fields__ if name != "experts")
    for name in (first, second, *others):
        with pytest.raises(
            ValueError, match=f"{name}=.* must be an algorithm's value; use {name}{fix}"
        ):
            kind(**{name: value})
    with pytest.raises(ValueError, match=f"{first}=.*; {second}="):
        kind(value, value)
    with pytest.raises(ValueError, match=r"experts=.* must say how rows travel; use Padded\(\)"):
        Collectives(experts=value)
