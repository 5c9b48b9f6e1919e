"""What stands behind a loop with collectives and does not wait for it, in programs of a few lines;
and that `collectives.order.after` makes it wait, changing nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives.order import after
from jaxtrain.collectives.ring import Ring
from jaxtrain.program.order import side_by_side

N = 4


def send(x: jax.Array) -> jax.Array:
    return lax.ppermute(x, "data", [(i, (i + 1) % N) for i in range(N)])


def loop(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda _, x: jnp.tanh(send(x)), x)


def branch(x: jax.Array) -> jax.Array:
    return lax.cond(jnp.sum(lax.psum(x, "data")) > 0, send, jnp.tanh, x)


def quiet(x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x) * 2, x)


def compiled(function, count: int = 2):
    mesh = jax.make_mesh((N,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    run = jax.shard_map(
        lambda *xs: function(*xs), mesh=mesh, in_specs=(P("data"),) * count, out_specs=P("data")
    )
    arrays = [jax.ShapeDtypeStruct((N * 32, 32), jnp.float32)] * count
    return jax.jit(run).lower(*arrays).compile().as_text()


def in_turn(first, then):
    def run(x, y):
        x = first(x)
        return x, then(after(y, x))

    return run


def beside(first, then):
    return lambda x, y: (first(x), then(y))


PAIRS = [(loop, loop), (branch, branch), (branch, loop), (loop, branch)]


@pytest.mark.parametrize(("first", "then"), PAIRS)
def test_two_that_wait_for_nothing_are_told_until_one_waits(first, then):
    (said,) = side_by_side(compiled(beside(first, then)))
    assert "does not wait for" in said and "shard_map" in said
    assert not side_by_side(compiled(in_turn(first, then)))


def test_a_plain_collective_behind_a_loop_is_told():
    text = compiled(beside(loop, lambda y: y))
    lines = text.splitlines()
    # Where it stands in the schedule is XLA's to choose: here, behind the loop.
    at = next(i for i, line in enumerate(lines) if " while(" in line)
    sent = "  %late = f32[32,32]{1,0} collective-permute(%late_sent), channel_id=1"
    start = next(i for i in range(at, 0, -1) if lines[i].startswith("ENTRY"))
    made = "  %late_sent = f32[32,32]{1,0} constant({...})"
    lines[at + 1 : at + 1] = [sent]
    lines[start + 1 : start + 1] = [made]
    found = side_by_side("\n".join(lines))
    assert len(found) == 1 and found[0].startswith("collective-permute late does not wait")


def test_one_in_front_of_a_loop_is_told_where_the_schedule_is_lost():
    text = compiled(lambda x, y: (loop(x), send(y)))
    assert text.index("collective-permute(%param") < text.index(" while(")
    assert not side_by_side(text)
    (said,) = side_by_side(text, scheduled=False)
    assert said.startswith("while ") and " does not wait for collective-permute " in said


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (loop(x), quiet(y)),
        lambda x, y: (quiet(x), loop(y)),
        lambda x, y: (quiet(x), send(y)),
        lambda x, y: loop(loop(x) + y),
    ],
)
def test_nothing_is_told_of_one_that_waits_or_sends_nothing(function):
    assert not side_by_side(compiled(function))


@pytest.mark.parametrize("ring", [Ring(1, unroll=False), Ring(2, unroll=False)], ids=str)
def test_a_rings_loop_is_none_on_cpu(ring):
    """Two of them beside each other are what a layer's backward pass has."""

    def twice(x, y):
        return ring.all_gather(x, ("data",), 0), ring.reduce_scatter(y, ("data",), 0)

    text = compiled(twice)
    assert not side_by_side(text) and " while(" not in text
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((N,), ("data",), axis_types=auto)
    run = jax.shard_map(twice, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    arrays = [jax.ShapeDtypeStruct((N * 32, 32), jnp.float32)] * 2
    elsewhere = jax.jit(run).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
    assert elsewhere.count("stablehlo.while") >= 2


VALUES = {
    "float32": [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 3.0],
    "bfloat16": [0.0, np.nan, -np.inf, 2.0],
    "int32": [0, -1, 2**31 - 1, -(2**31)],
    "bool": [True, False],
}


@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize("done", VALUES)
def test_after_changes_no_bit(dtype, done):
    x = jnp.array(VALUES[dtype], dtype)
    for first in VALUES[done]:
        found = jax.jit(after)({"x": x}, [jnp.array([first, 1], done), jnp.array(0.0)])["x"]
        assert found.dtype == x.dtype and np.asarray(found).tobytes() == np.asarray(x).tobytes()
    assert after({"x": x}, [])["x"] is x


def test_after_changes_no_gradient():
    def f(x, y):
        return jnp.sum(after(jnp.sin(x), y) * y)

    x, y = jnp.array([0.3, 2.0]), jnp.array([1.5, -1.0])
    dx, dy = jax.jit(jax.grad(f, argnums=(0, 1)))(x, y)
    np.testing.assert_allclose(dx, np.cos(x) * y, rtol=1e-6)
    np.testing.assert_allclose(dy, np.sin(x), rtol=1e-6)


def test_after_keeps_the_types_that_gradients_go_by():
    """What is equal on all devices has a gradient that is summed over them."""
    mesh = jax.make_mesh((N,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def gradient(y, x, weights):
        return jax.grad(lambda y: jnp.sum(after(y * weights, (weights, x, x[:0]))))(y)

    y, x = jnp.arange(1.0, 1.0 + N), jnp.ones(N)
    specs = dict(mesh=mesh, out_specs=P("data"))
    found = jax.shard_map(gradient, in_specs=(P("data"), P("data"), P()), **specs)(y, x, 3.0)
    np.testing.assert_array_equal(found, np.full(N, 3.0))
    same = jax.shard_map(lambda y, x: after(y, (y, x)), in_specs=(P(), P("data")), **specs)
    with pytest.raises(ValueError, match=r"equal over \['data'\].*vary\(x, \('data',\)\)"):
        same(y, x)


def test_after_is_nothing_off_cpu():
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    traced = jax.jit(after).trace(x, x)
    for platform, read in (("tpu", False), ("cuda", False), ("cpu", True)):
        lowered = traced.lower(lowering_platforms=(platform,)).as_text()
        main, *_ = lowered.split("func.func private")
        assert (main.count("%arg1") > 1) is read
