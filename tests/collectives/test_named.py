"""The registered reductions against sums over a dim of the whole array, values and gradients."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives import named
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.vary import same, vary

AXES = ("data", "tensor")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)


def on_devices(function, mesh, *, check_vma=True):
    """function(local, ...) on [2, 4, ...] arrays whose device (i, j) holds entry [i, j]."""

    def local(*arrays):
        out = function(*(vary(a[0, 0], AXES) for a in arrays))
        return jax.tree.map(lambda o: vary(o, AXES)[None, None], out)

    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=P(*AXES), out_specs=P(*AXES), check_vma=check_vma)
    )


def values(*shape):
    return jnp.asarray(np.random.default_rng(7).normal(size=(2, 4, *shape)), jnp.float32)


def group_dims(axes):
    return tuple(AXES.index(a) for a in axes)


@pytest.mark.parametrize("axes", [(), ("data",), ("tensor",), ("data", "tensor")])
@pytest.mark.parametrize("name", named.SUMS)
def test_sum_over_leaves_the_sum_everywhere(mesh, name, axes):
    x = values(3)
    found = on_devices(lambda x: named.sum_over(name, x, axes), mesh)(x)
    wanted = x.sum(group_dims(axes), keepdims=True) if axes else x
    np.testing.assert_allclose(found, jnp.broadcast_to(wanted, x.shape), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axes", [(), ("data",), ("tensor",), ("data", "tensor")])
@pytest.mark.parametrize("by", [Lax(), Ring(), Recursive()], ids=str)
@pytest.mark.parametrize("name", [*named.GRADIENT_SUMS, *named.LINK_SUMS])
def test_a_sum_by_a_reducer_leaves_the_sum_everywhere(mesh, name, by, axes):
    summed = named.link_sum if name in named.LINK_SUMS else named.gradient_sum
    x = values(3)
    found = on_devices(lambda x: summed(name, x, axes, by), mesh)(x)
    wanted = x.sum(group_dims(axes), keepdims=True) if axes else x
    np.testing.assert_allclose(found, jnp.broadcast_to(wanted, x.shape), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("axes", [(), ("data",), ("tensor",), ("data", "tensor")])
def test_sum_scatter_keeps_tile_i_on_device_i(mesh, axes, dim):
    x = values(8, 8)
    for name in named.SUM_SCATTERS:
        found = np.asarray(
            on_devices(lambda x, n=name: named.sum_scatter(n, x, axes, dim, Lax()), mesh)(x)
        )
        total = np.asarray(x.sum(group_dims(axes), keepdims=True) if axes else x)
        total = np.broadcast_to(total, x.shape)
        for i, j in itertools.product(range(2), range(4)):
            at = {"data": (i, 2), "tensor": (j, 4)}
            index, n = 0, 1
            for axis in axes:
                index, n = index * at[axis][1] + at[axis][0], n * at[axis][1]
            wanted = np.split(total[i, j], n, axis=dim)[index]
            np.testing.assert_allclose(found[i, j], wanted, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("axes", [(), ("data",), ("data", "tensor")])
def test_all_gather_is_the_adjoint_of_sum_scatter(mesh, axes, dim, check_vma):
    """<gather x, y> = <x, scatter y>, inner products over all devices."""
    n = int(np.prod([{"data": 2, "tensor": 4}[a] for a in axes], initial=1))
    x = values(8, 8)
    shape = (8 * n, 8) if dim == 0 else (8, 8 * n)
    y = values(*shape)

    def inner(x, y):
        whole = named.all_gather(x, axes, dim, Lax())
        part = named.sum_scatter("row", y, axes, dim, Lax())
        return jnp.stack([jnp.vdot(whole, y), jnp.vdot(x, part)])

    left, right = on_devices(inner, mesh, check_vma=check_vma)(x, y).sum((0, 1))
    np.testing.assert_allclose(left, right, rtol=1e-5)


def test_reductions_are_looked_up_when_they_are_called(mesh, monkeypatch):
    """What a mutation test relies on: a table entry replaced is the entry used."""
    x = values(4)
    monkeypatch.setitem(named.SUMS, "loss", lambda x, axes: 2 * jax.lax.psum(x, axes))
    monkeypatch.setitem(named.SUM_SCATTERS, "row", lambda x, axes, dim, by: x[:2])
    doubled = on_devices(lambda x: named.sum_over("loss", x, ("data",)), mesh)(x)
    np.testing.assert_allclose(doubled[0], 2 * x.sum(0), rtol=1e-6)
    removed = on_devices(lambda x: named.sum_scatter("row", x, ("data",), 0, Lax()), mesh)(x)
    np.testing.assert_array_equal(removed, x[:, :, :2])


def test_unregistered_reductions_are_refused(mesh):
    with pytest.raises(KeyError, match="unheard"):
        on_devices(lambda x: named.sum_over("unheard", x, ("data",)), mesh)(values(2))


def test_vary_changes_the_type_only(mesh):
    def types(x):
        one = jnp.float32(1.0)
        varied = vary(one, AXES)
        assert jax.typeof(one).manual_axis_type.varying == frozenset()
        assert jax.typeof(varied).manual_axis_type.varying == frozenset(AXES)
        assert vary(varied, ("data",)) is varied
        return x * varied

    x = values(2)
    np.testing.assert_array_equal(on_devices(types, mesh)(x), x)


@pytest.mark.parametrize("check_vma", [True, False])
def test_same_changes_the_type_only(mesh, check_vma):
    def local(x):
        whole = same(vary(x, AXES), ("tensor",))
        if check_vma:
            assert jax.typeof(whole).manual_axis_type.varying == frozenset({"data"})
            assert same(whole, ("tensor",)) is whole
        return whole

    run = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P("data"), check_vma=check_vma)
    )
    x = values(2)[0, 0]
    np.testing.assert_array_equal(run(x), jnp.concatenate([x, x]))
    assert "custom" not in run.lower(x).as_text().lower(), "the word of equality is in the program"


@pytest.mark.parametrize("by", [Ring(), Recursive()], ids=str)
def test_types_still_see_an_axis_that_no_reducer_summed_over(mesh, by):
    def local(x):
        return named.gradient_sum("gradients", vary(x, AXES), ("tensor",), by)

    with pytest.raises(ValueError, match="out_specs"):
        jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P())(values(2)[0, 0])
