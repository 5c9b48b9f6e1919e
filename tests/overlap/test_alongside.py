"""Communication alongside computation: the same bits, and every permute behind a product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring
from jaxtrain.mesh.mesh import make_mesh, mesh_from_axes
from jaxtrain.overlap.alongside import alongside
from tests.permutes import bodies, tied_permutes

AXES = ("fsdp",)
BY = {"recursive": Recursive(), "ring": Ring(1), "two rings": Ring(2)}
WORKS = (3, 4, 8)
"""Devices."""


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """Four products, one of them within a call and one that is computed again."""
    h = jax.nn.relu(x @ w)
    again = jax.checkpoint(lambda h: jnp.maximum(h @ w.T, -h.sum()))
    return x + again(h) @ w @ w.T


def pulled_back(x: jax.Array, w: jax.Array) -> Any:
    y, vjp = jax.vjp(layer, x, w)
    return vjp(y)


def communication(by: Any) -> Callable[..., Any]:
    def communicate(shard: jax.Array, gradient: jax.Array) -> Any:
        return by.all_gather(shard, AXES, 0), by.reduce_scatter(gradient, AXES, 0)

    return communicate


def tied(compute: Callable[..., Any], by: Any, flops_per_byte: float) -> Callable[..., Any]:
    def run(x: jax.Array, w: jax.Array, shard: jax.Array, gradient: jax.Array) -> Any:
        sent = (communication(by), (shard, gradient))
        return alongside((compute, (x, w)), sent, flops_per_byte=flops_per_byte)

    return run


def untied(compute: Callable[..., Any], by: Any) -> Callable[..., Any]:
    return lambda x, w, *sent: (compute(x, w), communication(by)(*sent))


def arguments(n: int) -> tuple[jax.Array, ...]:
    """Small whole numbers, mostly zeros: fp32 is exact, however a program rounds."""
    rng = np.random.default_rng(0)
    shapes = (8 * n, 16), (16, 32), (4 * n, 3), (2 * n * n, 5)
    draw = np.array([-1, 1, *[0] * 6], np.float32)
    return tuple(jnp.asarray(rng.choice(draw, shape)) for shape in shapes)


def on_devices(function: Callable[..., Any], n: int) -> Any:
    mesh = make_mesh(mesh_from_axes(fsdp=n))
    specs = (P("fsdp"), P(), P("fsdp"), P("fsdp"))
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("fsdp"), check_vma=False)
    )


@pytest.mark.parametrize("n", WORKS)
@pytest.mark.parametrize("name", BY)
def test_it_is_both_to_the_bit(name: str, n: int) -> None:
    """However many permutes there are for the products, forward and back."""

    def both(x: jax.Array, w: jax.Array) -> Any:
        return layer(x, w), pulled_back(x, w)

    wanted = on_devices(untied(both, BY[name]), n)(*arguments(n))
    for flops_per_byte in (0.0, 1.0, 1e9):
        found = on_devices(tied(both, BY[name], flops_per_byte), n)(*arguments(n))
        for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
            assert np.abs(a).max() < 2**24 and np.array_equal(a, b)


def equations_of(function: Callable[..., Any], n: int) -> list[Any]:
    """Of the program of a device."""
    traced = on_devices(function, n).trace(*arguments(n)).jaxpr
    return bodies(traced.jaxpr)[1]


@pytest.mark.parametrize("name", BY)
def test_a_permute_stands_between_a_products_operands_and_its_result(name: str) -> None:
    """It waits for what the product waits for, and who reads the product waits for it."""
    equations = equations_of(tied(layer, BY[name], 0.0), 4)
    assert sum(e.primitive.name == "dot_general" for e in equations) == 4
    # The gather's and the scatter's, of which neither waits for the other, hop by hop.
    hops = {"recursive": [0, 1], "ring": [0, 1, 2], "two rings": [0, 1]}[name]
    found = tied_permutes(equations)
    assert len(found) == sum(e.primitive.name == "ppermute" for e in equations)
    assert sorted(set(found)) == [(hop, hop) for hop in hops]


def test_a_long_permute_travels_during_several_products() -> None:
    """A gather over four devices has two hops, of 4 x 3 and of twice as many numbers of fp32; each
    product of 8 rows, 16 by 32, has 8,192 FLOPs."""

    def gathered(x: jax.Array, w: jax.Array, shard: jax.Array, _: jax.Array) -> Any:
        sent = (lambda shard: Recursive().all_gather(shard, AXES, 0), (shard,))
        return alongside((layer, (x, w)), sent, flops_per_byte=8192 / 48)

    assert tied_permutes(equations_of(gathered, 4)) == [(0, 0), (1, 2)]


def test_products_behind_which_a_permute_travels_already_hide_no_other() -> None:
    """As long as the others are enough."""

    def by_itself(x: jax.Array, w: jax.Array) -> jax.Array:
        """Five products, the second and the fourth of which hide a permute of its own."""
        x, moved = x @ w, lax.ppermute(w, "fsdp", [(0, 1), (1, 0)])
        x = x @ w.T
        x, more = (x + moved.sum()) @ w, lax.ppermute(moved, "fsdp", [(0, 1), (1, 0)])
        return (x @ w.T + more.sum()) @ w

    def run(x: jax.Array, w: jax.Array, shard: jax.Array, gradient: jax.Array) -> Any:
        sent = (communication(Recursive()), (shard, gradient))
        return alongside((by_itself, (x, w)), sent, flops_per_byte=0.0)

    assert tied_permutes(equations_of(run, 4)) == [(0, 0)] * 2 + [(2, 2)] * 2

    def fewer(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.ppermute(x, "fsdp", [(0, 1), (1, 0)]) @ w @ w.T

    def others(x: jax.Array, w: jax.Array, shard: jax.Array, gradient: jax.Array) -> Any:
        sent = (communication(Recursive()), (shard, gradient))
        return alongside((fewer, (x, w)), sent, flops_per_byte=0.0)

    assert tied_permutes(equations_of(others, 4)) == [(0, 0)] * 2 + [(1, 1)] * 2


def test_of_many_permutes_four_travel_at_once() -> None:
    """The largest of each hop apart from one another."""
    sizes = (4, 1, 3, 2, 6, 5)

    def run(x: jax.Array, w: jax.Array, *_: jax.Array) -> Any:
        def swapped(*arrays: jax.Array) -> Any:
            return [lax.ppermute(each, "fsdp", [(0, 1), (1, 0)]) for each in arrays]

        sent = (swapped, tuple(x[0, :size] for size in sizes))
        return alongside((layer, (x, w)), sent, flops_per_byte=0.0)

    equations = equations_of(run, 2)
    permuted = [e.invars[0].aval.size for e in equations if e.primitive.name == "ppermute"]
    assert permuted == [6, 4, 2, 5, 3, 1]
    assert tied_permutes(equations) == [(0, 0)] * 3 + [(1, 1)] * 3
    sizes = (5, 4, 3, 2)
    assert tied_permutes(equations_of(run, 2)) == [(0, 0)] * 4
    sizes = (5, 4, 3, 2, 1)
    assert tied_permutes(equations_of(run, 2)) == [(0, 0)] * 3 + [(1, 1)] * 2


def test_what_is_far_smaller_than_the_largest_product_hides_nothing() -> None:
    def uneven(x: jax.Array, w: jax.Array) -> jax.Array:
        return (x @ w) * (x[:1, :1] @ w[:1, :1]) @ w.T

    equations = equations_of(tied(uneven, Recursive(), 0.0), 4)
    assert set(tied_permutes(equations)) == {(0, 0), (2, 2)}


def test_a_kernel_that_states_no_flops_counts_as_the_least_product() -> None:
    """So that a permute that takes as long hides behind it alone."""
    like = jax.ShapeDtypeStruct((8, 16), jnp.float32)

    def with_kernel(x: jax.Array, w: jax.Array) -> jax.Array:
        double = pl.pallas_call(
            lambda x, out: out.__setitem__(..., 2 * x[...]), out_shape=like, interpret=True
        )
        return double(x) @ w @ w.T

    def run(x: jax.Array, w: jax.Array, shard: jax.Array, _: jax.Array) -> Any:
        sent = (lambda shard: Recursive().all_gather(shard, AXES, 0), (shard,))
        return alongside((with_kernel, (x, w)), sent, flops_per_byte=8192 / 96)

    equations = equations_of(run, 4)
    permutes, kernels, products = (
        [i for i, e in enumerate(equations) if e.primitive.name == name]
        for name in ("ppermute", "pallas_call", "dot_general")
    )
    assert permutes[0] < kernels[0] < permutes[1] < products[0]
    assert tied_permutes(equations) == [(0, 0)]


def test_work_that_communicates_within_hides_nothing() -> None:
    """A loop of products and permutes: a permute of another beside it would wait for its link."""

    def ring(x: jax.Array, w: jax.Array) -> jax.Array:
        def turn(x: jax.Array, _: None) -> Any:
            return lax.ppermute(x @ w @ w.T, "fsdp", [(0, 1), (1, 0)]), None

        return lax.scan(turn, x, None, length=3)[0] @ w

    assert tied_permutes(equations_of(tied(ring, Recursive(), 0.0), 2)) == [(0, 0)] * 2


def test_what_is_computed_again_is_not_merged_with_the_first_time() -> None:
    """Its operands are behind a barrier, as those of `jax.checkpoint` are."""

    def one(x: jax.Array, w: jax.Array, shard: jax.Array, gradient: jax.Array) -> Any:
        return alongside((pulled_back, (x, w)), (lambda: (), ()), flops_per_byte=0.0)

    equations = equations_of(one, 2)
    assert not any(e.primitive.name in ("checkpoint", "remat", "remat2") for e in equations)
    (barrier,) = (e for e in equations if e.primitive.name == "optimization_barrier")
    products = [e for e in equations if e.primitive.name == "dot_general"]
    behind = [p for p in products if set(map(id, p.invars)) & set(map(id, barrier.outvars))]
    assert behind
