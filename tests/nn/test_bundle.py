"""A bundle of leaves in one collective against jax.lax leaf by leaf, and its adjointness."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.vary import vary
from jaxtrain.nn.bundle import bundles, gather_bundle, rounds, scatter_bundle, travelling_together

AXES = ("data", "fsdp")
SIZES = {"data": 2, "fsdp": 4}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)


CASES = {
    "one leaf": ({"a": (2, 3)}, {"a": (0, ("fsdp",))}, {}),
    "two dims": (
        {"a": (2, 3), "b": (5, 2), "c": (2, 2, 3)},
        {"a": (0, ("fsdp",)), "b": (1, ("fsdp",)), "c": (1, ("fsdp",))},
        {},
    ),
    "two sets of axes": (
        {"a": (2, 3), "b": (5, 2), "c": (3, 2), "d": (4,)},
        {
            "a": (0, ("fsdp",)),
            "b": (1, ("data", "fsdp")),
            "c": (0, ("fsdp",)),
            "d": (0, ("data", "fsdp")),
        },
        {},
    ),
    "two dtypes, one whole": (
        {"a": (2, 3), "b": (5, 2), "c": (3, 2), "d": (4, 2), "e": (7,)},
        {"a": (0, ("fsdp",)), "b": (1, ("fsdp",)), "c": (0, ("fsdp",)), "d": (0, ("fsdp",))},
        {"c": jnp.bfloat16, "d": jnp.bfloat16},
    ),
    "nothing split": ({"a": (2, 3)}, {}, {}),
}


def values(shapes, dtypes, seed):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=(2, 4, *shape)), dtypes.get(name, jnp.float32))
        for name, shape in shapes.items()
    }


def whole_shapes(shapes, split):
    out = dict(shapes)
    for name, (dim, axes) in split.items():
        n = int(np.prod([SIZES[a] for a in axes]))
        shape = shapes[name]
        out[name] = (*shape[:dim], shape[dim] * n, *shape[dim + 1 :])
    return out


def mapped(function, mesh, check_vma=True):
    """function on a device's dicts; device (i, j) holds entry [i, j] of every array."""

    def local(*trees):
        out = function(*jax.tree.map(lambda a: a[0, 0], trees))
        return jax.tree.map(lambda o: vary(o, AXES)[None, None], out)

    specs = {"in_specs": P(*AXES), "out_specs": P(*AXES)}
    return jax.jit(jax.shard_map(local, mesh=mesh, check_vma=check_vma, **specs))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_gather_and_scatter_equal_lax_per_leaf(mesh, case, check_vma):
    shapes, split, dtypes = CASES[case]
    x = values(shapes, dtypes, 0)
    y = values(whole_shapes(shapes, split), dtypes, 1)

    def per_leaf(x, y):
        gathered, scattered = dict(x), dict(y)
        for name, (dim, axes) in split.items():
            gathered[name] = lax.all_gather(x[name], axes, axis=dim, tiled=True)
            scattered[name] = lax.psum_scatter(y[name], axes, scatter_dimension=dim, tiled=True)
        return gathered, scattered

    def bundled(x, y):
        return gather_bundle(x, split, Lax()), scatter_bundle(y, split, Lax())

    found, wanted = mapped(bundled, mesh, check_vma)(x, y), mapped(per_leaf, mesh)(x, y)
    for name in shapes:
        np.testing.assert_array_equal(found[0][name], wanted[0][name], err_msg=name)
        assert found[0][name].dtype == found[1][name].dtype == x[name].dtype
        rtol = 1e-6 if x[name].dtype == jnp.float32 else 2e-2
        np.testing.assert_allclose(
            np.asarray(found[1][name], np.float32),
            np.asarray(wanted[1][name], np.float32),
            rtol=rtol,
            atol=rtol,
            err_msg=name,
        )


@pytest.mark.parametrize("case", [c for c in CASES if "dtypes" not in c])
def test_scatter_is_the_adjoint_of_gather(mesh, case):
    """<A x, y> = <x, A' y> summed over all devices."""
    shapes, split, dtypes = CASES[case]
    x = values(shapes, dtypes, 2)
    y = values(whole_shapes(shapes, split), dtypes, 3)

    def inner(x, y):
        gathered, scattered = gather_bundle(x, split, Lax()), scatter_bundle(y, split, Lax())
        left = sum(jnp.vdot(gathered[k], y[k]) for k in x)
        right = sum(jnp.vdot(x[k], scattered[k]) for k in x)
        return jnp.stack([left, right])

    left, right = mapped(inner, mesh)(x, y).sum((0, 1))
    np.testing.assert_allclose(left, right, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_one_collective_for_each_dtype_and_set_of_axes(mesh, case):
    shapes, split, dtypes = CASES[case]
    groups = {(split[name][1], dtypes.get(name)) for name in split}
    x = values(shapes, dtypes, 0)
    y = values(whole_shapes(shapes, split), dtypes, 1)
    gather = str(jax.make_jaxpr(mapped(lambda x: gather_bundle(x, split, Lax()), mesh))(x))
    scatter = str(jax.make_jaxpr(mapped(lambda y: scatter_bundle(y, split, Lax()), mesh))(y))
    assert len(re.findall(r"= all_gather\w*\[", gather)) == len(groups)
    assert len(re.findall(r"= (?:reduce|psum)_scatter\w*\[", scatter)) == len(groups)


def test_a_leaf_split_over_two_dims_takes_two_rounds(mesh):
    splits = {
        "two": (((), ()), (("fsdp",), ("data",))),
        "one": (((), ("data",)), ((), ("data", "fsdp"))),
        "none": (((), ("data",)), ((), ("data",))),
    }
    turns = rounds(splits)
    assert turns == [{"two": (0, ("fsdp",)), "one": (1, ("fsdp",))}, {"two": (1, ("data",))}]
    x = np.arange(48.0, dtype=np.float32).reshape(8, 6)

    def there_and_back(local):
        whole = {"two": local, "one": local.T}
        for split in turns:
            whole = gather_bundle(whole, split, Lax())
        back = dict(whole)
        for split in reversed(turns):
            back = scatter_bundle(back, split, Lax())
        return vary(whole["two"], AXES)[None, None], back["two"]

    run = jax.shard_map(
        there_and_back,
        mesh=mesh,
        in_specs=P("fsdp", "data"),
        out_specs=(P(*AXES), P("fsdp", "data")),
    )
    whole, back = jax.jit(run)(x)
    np.testing.assert_array_equal(whole, np.broadcast_to(x, (2, 4, 8, 6)))
    np.testing.assert_array_equal(back, 8 * x)


def test_small_leaves_are_bundled_and_large_ones_go_alone():
    split = {"a": (0, ("data",)), "b": (1, ("data",)), "c": (0, ("fsdp",))}
    found = bundles(split, {"a": 4, "b": 5, "c": 3}, 4)
    assert found == [{"a": split["a"], "c": split["c"]}, {"b": split["b"]}]


@pytest.mark.parametrize(
    ("by", "axes", "alone"),
    [(Recursive(), ("x",), 7), (Ring(1), ("x",), 7), (Ring(1), ("x", "y"), 3)],
    ids=["recursive", "a short ring", "a long ring"],
)
def test_the_largest_leaves_travel_alone_where_collectives_are_permutes_of_ours(by, axes, alone):
    """Of each dtype and set of axes; of equal ones the first by name."""
    shapes = dict(zip("ihgfedcba", (4, 9, 4, 7, 4, 4, 4, 4, 4), strict=True))
    split = {**dict.fromkeys(shapes, (0, axes)), "z": (0, ("y",)), "w": (0, axes)}
    arrays = {k: jnp.zeros(n) for k, n in {**shapes, "z": 99}.items()}
    arrays["w"] = jnp.zeros(9, jnp.bfloat16)
    found = []

    def on_device(x):
        found.extend(travelling_together(by, split, arrays))
        assert travelling_together(Lax(), split, arrays) == [split]
        return x

    mesh = jax.make_mesh((2, 4), ("y", "x"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = P("x")
    jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=specs))(jnp.ones(4))
    by_size = ["h", "f", "a", "b", "c", "d", "e", "g", "i"]
    rest = [sorted(by_size[alone:])]
    assert [sorted(part) for part in found] == [
        *([name] for name in by_size[:alone]), *rest, ["z"], ["w"]
    ]  # fmt: skip
    assert {k: v for part in found for k, v in part.items()} == split
