"""Newton-Schulz by exchange equals Newton-Schulz in one place, and moves only what it says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxtrain.mesh.sharding import dims, fsdp, named_sharding, tensor
from jaxtrain.optim.distributed import whole_matrices
from jaxtrain.optim.muon import Muon, newton_schulz
from jaxtrain.telemetry.hlo import collectives

NAMES = ("layers", "embed", "mlp")
RULES = (fsdp() | tensor()).params


def mesh_of(**sizes: int) -> Mesh:
    count = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@pytest.mark.parametrize("layers", [1, 4, 8, 11])
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 8}, {"tensor": 4}, {"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 4}], ids=str
)
def test_equals_newton_schulz_in_one_place(sizes, layers):
    mesh = mesh_of(**sizes)
    x = jax.random.normal(jax.random.key(0), (layers, 16, 24))
    split = dims(NAMES, RULES, sizes=sizes)
    distribute = whole_matrices(mesh, lambda names: dims(names, RULES, sizes=sizes), sizes)
    run = jax.jit(distribute(newton_schulz, NAMES), in_shardings=named_sharding(mesh, split))
    np.testing.assert_allclose(run(x), newton_schulz(x), atol=3e-5)


def test_sends_the_leaf_twice_and_nothing_else():
    sizes = {"fsdp": 8}
    mesh = mesh_of(**sizes)
    x = jax.ShapeDtypeStruct((8, 16, 24), jnp.float32)
    split = dims(NAMES, RULES, sizes=sizes)
    distribute = whole_matrices(mesh, lambda names: dims(names, RULES, sizes=sizes), sizes)
    compiled = jax.jit(
        distribute(newton_schulz, NAMES), in_shardings=named_sharding(mesh, split)
    ).lower(x).compile()  # fmt: skip
    found = collectives(compiled.as_text())
    assert {c.kind for c in found} == {"all-to-all"}
    local = 8 * 16 * 24 * 4 // 8
    assert sum(c.total_wire_bytes for c in found) == 2 * local * 7 // 8


def test_a_whole_muon_update_is_the_same():
    sizes = {"fsdp": 4, "tensor": 2}
    mesh, axes = mesh_of(**sizes), {"w": NAMES, "scale": ("layers", "embed")}
    key = jax.random.key(1)
    params = {"w": jax.random.normal(key, (3, 16, 24)), "scale": jnp.ones((3, 16))}
    grads = jax.tree.map(lambda p: jax.random.normal(key, p.shape), params)
    where = {k: named_sharding(mesh, dims(a, RULES, sizes=sizes)) for k, a in axes.items()}
    distribute = whole_matrices(mesh, lambda names: dims(names, RULES, sizes=sizes), sizes)
    plain = Muon(0.1).build(axes, steps=10, batch=8)
    split = Muon(0.1).build(axes, steps=10, batch=8, distribute=distribute)
    wanted, _ = plain.update(grads, plain.init(params), params)
    placed = jax.device_put(params, where)
    found, _ = jax.jit(split.update)(jax.device_put(grads, where), split.init(placed), placed)
    for name in params:
        np.testing.assert_allclose(found[name], wanted[name], atol=3e-5)
