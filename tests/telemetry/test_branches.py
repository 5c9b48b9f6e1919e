"""The law on traced programs: which branches may hold which collectives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.program.branches import branch_violations

RIGHT = [(0, 1), (1, 0)]


def traced(function):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.Mesh(devices, ("data", "stage"), axis_types=axes)
    spec = P(("data", "stage"))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec)
    return jax.make_jaxpr(jax.jit(mapped))(jnp.zeros((4, 2)))


def first(axis):
    return lax.axis_index(axis) == 0


def shifted(x):
    return lax.ppermute(x, "stage", RIGHT)


def summed(x):
    return lax.pcast(lax.psum(x, "stage"), "stage", to="varying")


def same(x):
    return x


def looped(x):
    return lax.fori_loop(0, 2, lambda _, x: shifted(x), x)


def counted(x):
    return lax.while_loop(lambda x: x.sum() < 1, lambda x: shifted(x) + 1, x)


CASES = [
    (
        lambda x: lax.cond(first("stage"), shifted, same, x),
        ["ppermute over stage stands in a cond"],
    ),
    (lambda x: lax.cond(first("stage"), same, summed, x), ["psum"]),
    (lambda x: lax.cond(first("stage"), looped, same, x), ["ppermute"]),
    (lambda x: lax.switch(lax.axis_index("stage"), [same, shifted], x), ["ppermute"]),
    (counted, ["ppermute over stage stands in a while"]),
    (lambda x: lax.cond(first("data"), shifted, same, x), []),
    (lambda x: lax.cond(first("stage"), same, lambda x: 2 * x, x), []),
    (lambda x: lax.cond(lax.psum(x.sum(), ("data", "stage")) > 0, shifted, same, x), []),
    (looped, []),
]


@pytest.mark.parametrize(("function", "said"), CASES)
def test_the_law(function, said):
    found = branch_violations(traced(function))
    assert len(found) == len(said), found
    for text, words in zip(found, said, strict=True):
        assert words in text and "varies over stage" in text


def test_the_remedy_is_told():
    (text,) = branch_violations(traced(CASES[0][0]))
    assert "jnp.where" in text
