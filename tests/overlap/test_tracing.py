"""A function taken apart into operations, and run again one by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain.overlap.tracing import trace

X, W = jnp.ones((4, 8)), jnp.ones((8, 16))
FLOPS = 2 * 4 * 8 * 16
"""Of X @ W."""


def twice(x, w):
    return lax.scan(lambda x, _: (x @ w @ w.T, None), x, None, length=3)[0]


def chosen(x, w):
    return lax.cond(x.sum() > 0, lambda: x @ w, lambda: (x @ w) @ w.T @ w)


@jax.custom_vjp
def own(x, w):
    return x @ w


own.defvjp(lambda x, w: (x @ w, None), lambda _, dy: (dy, dy))

GROUPS = jnp.array([1, 3], jnp.int32)


def of_groups(x, w):
    return lax.ragged_dot(x, jnp.stack([w, w]), GROUPS)


def kernel(x, w, flops=None):
    cost = flops and pl.CostEstimate(flops=flops, bytes_accessed=0, transcendentals=0)

    def multiply(x, w, out):
        out[...] = x[...] @ w[...]

    shape = jax.ShapeDtypeStruct((4, 16), jnp.float32)
    return pl.pallas_call(multiply, out_shape=shape, interpret=True, cost_estimate=cost)(x, w)


CASES = {
    "a product": (lambda x, w: x @ w, [FLOPS]),
    "in a call": (jax.jit(lambda x, w: jnp.tanh(x @ w)), [FLOPS]),
    "of one's own derivative": (own, [FLOPS]),
    "computed again": (jax.checkpoint(lambda x, w: jnp.sin(x @ w)), [FLOPS]),
    "in batches": (lambda x, w: jnp.einsum("bij,bjk->bik", x[None], w[None]), [FLOPS]),
    "turns of a scan": (twice, [3 * 2 * FLOPS]),
    "the least of a choice": (chosen, [FLOPS]),
    "calls in a scan": (
        lambda x, w: lax.scan(lambda x, _: (jax.jit(own)(x, w) @ w.T, None), x, None, length=3)[0],
        [3 * 2 * FLOPS],
    ),
    "of groups": (of_groups, [FLOPS]),
    "of groups, pulled back": (
        lambda x, w: jax.vjp(of_groups, x, w)[1](jnp.ones((4, 16))),
        [FLOPS, FLOPS],
    ),
    "a kernel that says": (lambda x, w: kernel(x, w, 77), [77]),
    "none": (lambda x, w: x.sum() + w.sum(), []),
    "that nothing reads": (lambda x, w: (x @ w, x.sum())[1], []),
}


@pytest.mark.parametrize("name", CASES)
def test_operations_run_one_by_one_give_what_the_function_gives(name):
    function, flops = CASES[name]
    program = trace(function, (X, W))
    assert [each.flops for each in program.operations if each.flops] == flops
    for each in program.operations:
        program.run(each)
    for found, wanted in zip(
        jax.tree.leaves(program.result()), jax.tree.leaves(function(X, W)), strict=True
    ):
        np.testing.assert_array_equal(found, wanted)


def test_of_a_kernel_that_does_not_say_nothing_is_known():
    for function in (kernel, lambda x, w: lax.map(lambda x: kernel(x, w), x[None])):
        found = [each.flops for each in trace(function, (X, W)).operations]
        assert None in found


def test_names_are_those_it_was_traced_under():
    def function(x, w):
        with jax.named_scope("outer"):
            return jax.jit(inner)(x, w)

    def inner(x, w):
        with jax.named_scope("inner"):
            return x @ w

    (product,) = (each for each in trace(function, (X, W)).operations if each.flops)
    assert product.scope == "outer/inner"


def test_settings_are_those_it_was_traced_with():
    """Of random bits JAX has two ways, by a setting that an equation keeps."""

    def bits(key):
        with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
            return jax.random.bits(key, (4,))

    key = jax.random.key(0)
    program = trace(bits, (key,))
    for each in program.operations:
        program.run(each)
    assert not np.array_equal(bits(key), jax.random.bits(key, (4,)))
    np.testing.assert_array_equal(program.result(), bits(key))


def test_of_a_barrier_only_what_is_read_behind_it_is_left():
    """As compilers leave it: a product must not be kept for a barrier's sake."""

    def function(x, w):
        x, unread = lax.optimization_barrier((x, x @ w))
        again = jax.checkpoint(lambda x, y: (x + 1, y * 2))(x, unread + 1)
        return again[0]

    program = trace(function, (X, W))
    assert not any(each.flops for each in program.operations)
    for each in program.operations:
        program.run(each)
    np.testing.assert_array_equal(program.result(), X + 1)


def test_a_collective_that_nothing_reads_is_left_out():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))

    def on_device(x):
        program = trace(lambda x: (lax.psum(x @ x.T, "a"), x + 1)[1], (x,))
        found.extend(each.name for each in program.operations)
        return x

    found: list[str] = []
    specs = jax.sharding.PartitionSpec("a")
    jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=specs))(jnp.ones((4, 2)))
    assert "add" in found and not {"psum", "psum_invariant", "dot_general"} & set(found)


def test_a_permute_is_found_where_it_is():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    pairs = [(0, 1), (1, 0)]

    def sent(x):
        return lax.ppermute(x, "a", pairs)

    def on_device(x):
        program = trace(
            lambda x: (sent(x), lax.scan(lambda x, _: (sent(x), None), x, None, length=2)[0]), (x,)
        )
        found.extend((each.is_permute, each.has_permutes) for each in program.operations)
        for each in program.operations:
            program.run(each)
        return program.result()

    found: list[tuple[bool, bool]] = []
    specs = jax.sharding.PartitionSpec("a")
    run = jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=specs)
    once, back = jax.jit(run)(jnp.arange(4.0))
    assert sorted(found) == [(False, True), (True, True)]
    assert once.tolist() == [2, 3, 0, 1] and back.tolist() == [0, 1, 2, 3]


def test_what_acts_is_run_though_nothing_reads_it():
    told = []

    def function(x):
        jax.debug.callback(lambda x: told.append(float(x)), x.sum())
        return x

    def run(x):
        program = trace(function, (x,))
        for each in program.operations:
            program.run(each)
        return program.result()

    jax.block_until_ready(jax.jit(run)(jnp.ones(3)))
    jax.effects_barrier()
    assert told == [3.0]
