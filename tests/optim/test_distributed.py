"""Sums and whole matrices on a mesh are those of one place, and only what is said moves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxtrain.mesh.sharding import dims, fsdp, named_sharding, tensor
from jaxtrain.optim.distributed import OnMesh
from jaxtrain.optim.muon import newton_schulz
from jaxtrain.optim.shards import LeafSum
from jaxtrain.program.collectives import collectives

RULES = (fsdp() | tensor()).params


def on_mesh(**sizes: int) -> OnMesh:
    count = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(sizes.values()))
    mesh = Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    return OnMesh(mesh, lambda names: dims(names, RULES, sizes=sizes), sizes)


def compiled(shards: OnMesh, names, shape, function=newton_schulz):
    where = named_sharding(shards.mesh, shards.split_of(names))
    run = jax.jit(
        lambda x: shards.by_matrix(function, x, names), in_shardings=where, out_shardings=where
    )
    return run.lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile(), where


MESHES = [{"fsdp": 8}, {"tensor": 4}, {"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 4}]


@pytest.mark.parametrize("layers", [1, 4, 11])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_equals_newton_schulz_in_one_place(sizes, layers):
    x = jax.random.normal(jax.random.key(0), (layers, 16, 24))
    run, where = compiled(on_mesh(**sizes), ("layers", "embed", "mlp"), x.shape)
    np.testing.assert_allclose(run(jax.device_put(x, where)), newton_schulz(x), atol=3e-5)


@pytest.mark.parametrize(
    ("names", "shape", "stacked"),
    [
        (("embed", "mlp"), (16, 24), 0),
        (("layers", "embed", "heads", "head_dim"), (3, 16, 4, 6), 1),
        (("layers", "experts", "heads", "head_dim", "embed"), (2, 3, 4, 6, 16), 2),
    ],
)
def test_a_function_gets_whole_matrices_in_their_own_dims(names, shape, stacked):
    def by_matrix(x):
        assert x.shape[stacked - len(shape) :] == shape[stacked:]
        over = tuple(range(stacked - len(shape), 0))
        return x / (1 + jnp.abs(x).max(over, keepdims=True))

    x = jax.random.normal(jax.random.key(0), shape)
    run, where = compiled(on_mesh(fsdp=4, tensor=2), names, shape, by_matrix)
    np.testing.assert_allclose(run(jax.device_put(x, where)), by_matrix(x), rtol=1e-6)


def test_a_stack_is_sent_twice_and_one_matrix_once():
    for layers, kind, times in ((8, "all-to-all", 2), (1, "all-gather", 8)):
        run, _ = compiled(on_mesh(fsdp=8), ("layers", "embed", "mlp"), (layers, 16, 24))
        found = collectives(run.as_text())
        assert {each.kind for each in found} == {kind}
        held = layers * 16 * 24 * 4 // 8
        assert sum(each.total_wire_bytes for each in found) == times * held * 7 // 8


NAMES = {
    "up": (("layers", "embed", "mlp"), (3, 16, 24)),
    "table": (("vocab", "embed"), (32, 16)),
    "scale": (("layers", "embed"), (3, 16)),
}


def test_sums_of_many_leaves_are_one_all_reduce_for_each_set_of_axes():
    shards = on_mesh(data=2, fsdp=2, tensor=2)
    rng = np.random.default_rng(0)
    leaves = {k: rng.normal(size=shape).astype(np.float32) for k, (_, shape) in NAMES.items()}
    asked = [("up", (1, 2)), ("table", (0, 1)), ("up", (1,)), ("up", (2,)), ("scale", (1,))]
    asked += [("table", (0,)), ("up", ())]

    def run(tree):
        return shards.sums([LeafSum(tree[k], NAMES[k][0], over) for k, over in asked])

    where = {k: named_sharding(shards.mesh, shards.split_of(n)) for k, (n, _) in NAMES.items()}
    program = jax.jit(run, in_shardings=(where,)).lower(leaves).compile()
    for (k, over), found in zip(asked, program(jax.device_put(leaves, where)), strict=True):
        wanted = leaves[k].sum(over, keepdims=True)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    # Over fsdp x tensor both whole leaves; over fsdp "up", split over tensor; over tensor "up" and
    # "table", split over fsdp. "scale" is whole everywhere.
    found = collectives(program.as_text())
    assert {each.kind for each in found} == {"all-reduce"}
    sent = sum(each.count * each.buffer_bytes for each in found)
    assert sent == 4 * ((3 + 1) + 3 * 24 // 2 + (3 * 16 // 2 + 16 // 2))


def test_no_sums_are_no_program():
    assert on_mesh(fsdp=2).sums([]) == []
