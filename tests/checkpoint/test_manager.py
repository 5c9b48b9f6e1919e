"""What is restored equals to the bit what was saved, on any mesh; what does not fit is refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from object_store import object_store

from jaxtrain.checkpoint import CheckpointError, CheckpointManager, SavePolicy

EIGHT = ((8,), ("fsdp",))
ROWS = P("fsdp")


class Scaler(NamedTuple):
    scale: jax.Array
    history: dict[str, jax.Array]
    unused: None


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    count = int(np.prod(shape))
    return Mesh(np.array(jax.devices()[:count]).reshape(shape), names)


def place(tree, mesh: Mesh, spec: P):
    """Arrays of `tree` on `mesh`: those with two dims by `spec`, the others replicated."""
    return jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, spec if x.ndim == 2 else P())), tree
    )


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def make_state(seed: int = 0):
    """Each kind of leaf a train state has; values that no cast through another dtype survives."""
    normal = jax.random.normal(jax.random.key(seed), (8, 16))
    params = {"period": [{"q": normal}], "head": {"w": (3 * normal).astype(jnp.bfloat16)}}
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1.0, 0.0, 10))
    )
    return {
        "params": params,
        "optimizer": optimizer.init(params),
        "scaler": Scaler(jnp.float16(1 / 3), {"0": jnp.zeros((0, 8)), "1": normal[0] > 0}, None),
        "keys": {
            "one": jax.random.key(seed + 7),
            "many": jax.random.split(jax.random.key(8), (8, 16)),
        },
        "other_key": jax.random.key(3, impl="rbg"),
        "step": jnp.int32(4),
        "fp8": normal.astype(jnp.float8_e4m3fn),
        "int8": (40 * normal).astype(jnp.int8),
    }


def bits(x: jax.Array) -> bytes:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()


def assert_bit_equal(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, b.ndim)
        assert bits(a) == bits(b)


@pytest.fixture(scope="module", params=["disk", "store"])
def saved(request, tmp_path_factory):
    """One state, saved once from eight devices, on the disk or in an object store."""
    on_disk = request.param == "disk"
    with nullcontext() if on_disk else object_store():
        directory = tmp_path_factory.mktemp("saved") if on_disk else "s3://bucket/saved"
        state = place(make_state(), mesh_of(*EIGHT), ROWS)
        metadata = {"step": 4, "position": 10**15, "lr": 0.1 + 0.2, "config": {"sizes": [1, 2]}}
        with CheckpointManager(directory, SavePolicy(every=1, keep=1)) as manager:
            manager.save(4, state, metadata)
        yield directory, state, metadata


@pytest.mark.parametrize(
    ("shape", "names", "spec"),
    [
        (*EIGHT, ROWS),
        ((2, 4), ("tensor", "data"), P("data", "tensor")),
        ((4,), ("fsdp",), P("fsdp")),
        ((8,), ("tensor",), P(None, "tensor")),
        ((1,), ("data",), P()),
    ],
    ids=["same", "2x4", "four devices", "columns", "one device"],
)
def test_restores_to_the_bit_onto_any_mesh(saved, shape, names, spec):
    directory, _, metadata = saved
    wanted = place(make_state(seed=5), mesh_of(shape, names), spec)
    with CheckpointManager(directory, SavePolicy()) as manager:
        found, found_metadata = manager.restore(4, abstract(wanted))
        assert found_metadata == metadata == manager.manifest(4).metadata
    assert_bit_equal(found, place(make_state(), mesh_of(shape, names), spec))


def test_restored_keys_draw_what_the_saved_ones_drew(saved):
    directory, state, _ = saved
    with CheckpointManager(directory, SavePolicy()) as manager:
        found, _ = manager.restore(4, abstract(state))
    for name in ("keys", "other_key"):
        for old, new in zip(
            jax.tree.leaves(state[name]), jax.tree.leaves(found[name]), strict=True
        ):
            draw = jax.vmap(lambda key: jax.random.bits(key))
            assert (draw(old.reshape(-1)) == draw(new.reshape(-1))).all()


def test_containers_may_change_when_paths_do_not(saved):
    directory, state, _ = saved
    scaler = state["scaler"]
    moved = state | {"scaler": {"scale": scaler.scale, "history": list(scaler.history.values())}}
    with CheckpointManager(directory, SavePolicy()) as manager:
        found, _ = manager.restore(4, abstract(moved))
    assert_bit_equal(found, moved)


def test_every_leaf_that_does_not_fit_is_named_and_nothing_is_read(saved):
    directory, state, _ = saved
    wanted = abstract(state)
    q = wanted["params"]["period"][0].pop("q")
    head = wanted["params"]["head"]
    head["w"] = jax.ShapeDtypeStruct((8, 32), jnp.bfloat16, sharding=q.sharding)
    head["bias"] = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=q.sharding)
    wanted["int8"] = jax.ShapeDtypeStruct((8, 16), jnp.int16, sharding=q.sharding)
    wanted["step"] = jax.ShapeDtypeStruct((), jnp.int32)
    wanted["other_key"] = wanted["keys"]["one"]
    manager = CheckpointManager(directory, SavePolicy())
    with pytest.raises(ValueError) as error:
        manager.restore(4, wanted)
    assert not isinstance(error.value, CheckpointError)
    lines = str(error.value).splitlines()
    assert "in 6 places" in lines[0]
    assert [line.strip() for line in lines[1:-1]] == [
        "int8: stored int8[8,16], expected int16[8,16]",
        "other_key: stored key<rbg>[], expected key<fry>[]",
        "params.head.bias: not stored, expected float32[16]",
        "params.head.w: stored bfloat16[8,16], expected bfloat16[8,32]",
        "step: asked for without a sharding; say where it goes",
        "params.period.0.q: stored float32[8,16], not asked for",
    ]
    assert manager._orbax is None, "it must be refused before anything is opened"


def test_donating_right_after_save_changes_nothing_that_is_written(make_anywhere):
    manager = make_anywhere()
    placed = NamedSharding(mesh_of(*EIGHT), ROWS)
    start = np.arange(2.0**18, dtype="float32").reshape(512, 512)
    step = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
    other = jax.device_put(jnp.asarray(start), placed)
    step(other).block_until_ready()
    assert other.is_deleted(), "this step must overwrite its input, or the test shows nothing"
    x = jax.device_put(jnp.asarray(start), placed)
    manager.save(1, {"x": x}, {})
    for _ in range(5):
        x = step(x)
    x.block_until_ready()
    found, _ = manager.restore(1, abstract({"x": x}))
    assert (np.asarray(found["x"]) == start).all()


def test_a_run_that_resumes_goes_on_as_if_it_had_not_stopped(make_anywhere):
    optimizer = optax.adamw(1e-2)
    inputs = jax.random.normal(jax.random.key(0), (4, 8, 8))

    @jax.jit
    def update(state, x):
        def loss(w):
            return jnp.square(jnp.tanh(x @ w) - x).sum()

        grads = jax.grad(loss)(state["w"])
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["w"])
        return {"w": state["w"] + updates, "optimizer": optimizer_state}

    w = jax.device_put(jnp.eye(8), NamedSharding(mesh_of(*EIGHT), ROWS))
    state = {"w": w, "optimizer": jax.jit(optimizer.init)(w)}
    manager = make_anywhere()
    for step, x in enumerate(inputs):
        if step == 2:
            manager.save(step, state, {"position": step})
        state = update(state, x)
    manager.close()
    again, metadata = make_anywhere().restore(2, abstract(state))
    for x in inputs[metadata["position"] :]:
        again = update(again, x)
    assert_bit_equal(again, state)
