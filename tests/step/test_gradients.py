"""Accumulation and reductions of gradients, against one batch and a sum over device copies."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxtrain.collectives.hierarchical import Hierarchical
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.vary import vary
from jaxtrain.compression.codecs import TopK
from jaxtrain.compression.compressed import Compressed
from jaxtrain.compression.residuals import (
    codec_state,
    compressed_parts,
    no_residuals,
    residual_splits,
)
from jaxtrain.compression.sums import Choice, CompressedSums
from jaxtrain.losses.cross_entropy import LossSums
from jaxtrain.mesh.sharding import Leaf, named_sharding, partition_spec
from jaxtrain.step import gradients
from jaxtrain.step.gradients import (
    Reduction,
    accumulate,
    explicit_gradients,
    gather_updated_params,
    gspmd_gradients,
    microbatch_sums,
    squared_norm,
)
from jaxtrain.step.step_sums import WithCompression

KEY = jax.random.key(0)


def loss(params: Any, rest: Any, batch: Any, key: Any) -> tuple[LossSums, Any]:
    predicted = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
    error = jnp.square(predicted - batch["y"]) * batch["weights"]
    return LossSums(jnp.sum(error), jnp.sum(batch["weights"])), {"seen": rest["seen"] + 1}


def problem(weights: np.ndarray) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = {
        "w": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32),
        "v": jnp.asarray(rng.normal(size=4), jnp.float32),
    }
    shape = weights.shape
    batch = {
        "x": jnp.asarray(rng.normal(size=(*shape, 3)), jnp.float32),
        "y": jnp.asarray(rng.normal(size=shape), jnp.float32),
        "weights": jnp.asarray(weights, jnp.float32),
    }
    return params, batch


RAGGED = {
    "even": np.ones((4, 6)),
    "ragged": (np.arange(6) < np.array([6, 1, 3, 2])[:, None]) * 1.0,
    "one microbatch all padding": (np.arange(6) < np.array([4, 0, 6, 1])[:, None]) * 1.0,
    "the first all padding": (np.arange(6) < np.array([0, 5, 2, 1])[:, None]) * 1.0,
    "fractional weights": np.random.default_rng(1).random((4, 6)),
}


@pytest.mark.parametrize("name", RAGGED)
def test_microbatches_sum_to_what_one_batch_gives(name: str) -> None:
    params, batch = problem(RAGGED[name])
    found = gspmd_gradients(loss, constrain=lambda g: g)(
        params, {"seen": jnp.int32(0)}, batch, KEY, jnp.float32(1.0), {}
    )
    whole = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)

    def total(params: Any) -> jax.Array:
        return loss(params, {"seen": 0}, whole, None)[0].loss

    expected, wanted = jax.value_and_grad(total)(params)
    np.testing.assert_allclose(found.sums.loss, expected, rtol=1e-6)
    np.testing.assert_allclose(found.sums.count, RAGGED[name].sum(), rtol=1e-6)
    for leaf in wanted:
        np.testing.assert_allclose(found.grads[leaf], wanted[leaf], rtol=2e-5, atol=1e-5)
    assert int(found.model_state["seen"]) == len(RAGGED[name]), "other state is threaded through"


def test_residuals_are_paid_back_in_means_of_the_step() -> None:
    """They are of a mean gradient: a step of any weight and loss scale adds that much more."""
    params, batch = problem(RAGGED["ragged"])
    step = gspmd_gradients(loss, constrain=lambda g: g)
    arguments = (params, {"seen": jnp.int32(0)}, batch, KEY, jnp.float32(4.0))
    errors = {"w": jnp.full((1, 3, 4), 0.5), "v": jnp.full((1, 4), -2.0)}
    plain, paid = (step(*arguments, residuals) for residuals in ({}, {"errors": errors}))
    for name, error in errors.items():
        due = plain.grads[name] / (4.0 * RAGGED["ragged"].sum()) + error[0]
        np.testing.assert_allclose(
            paid.grads[name] / (4.0 * RAGGED["ragged"].sum()), due, rtol=1e-5, atol=1e-6
        )
        assert not np.any(paid.residuals["errors"][name])


def test_residuals_of_compressed_sums_are_what_the_mean_gradient_lacks() -> None:
    """Of the step's mean, whatever its weight and loss scale."""
    reducer, sizes, scale = Compressed(TopK(0.2)), {"data": 2}, 4.0
    params, batch = problem(RAGGED["ragged"])
    places = {
        k: Leaf(k, p.shape, "float32", ("embed", "mlp")[: p.ndim], *[((),) * p.ndim] * 3)
        for k, p in params.items()
    }
    parts = compressed_parts(reducer, 0, places, sizes)
    reduction = Reduction(places, sizes, True, small_leaf=0)
    residuals = no_residuals(reducer, parts, 0)
    splits = residual_splits(residuals, parts)
    specs = jax.tree.map(lambda _, d: partition_spec(d), residuals, splits)
    step = explicit_gradients(
        microbatch_sums(lambda *a: (loss(*a[:1], {"seen": 0}, *a[2:])[0], {}), reduction, dict),
        WithCompression(
            reduction, CompressedSums(reducer, parts, Choice(reducer.codec)), codec_state(specs)
        ),
        mesh=Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AxisType.Auto,)),
        reduction=reduction,
        batch_specs={k: PartitionSpec(None, "data") for k in batch},
    )
    found = jax.jit(step)(params, {}, batch, KEY, jnp.float32(scale), codec_state(residuals))
    exact = gspmd_gradients(loss, constrain=lambda g: g)(
        params, {"seen": jnp.int32(0)}, batch, KEY, jnp.float32(scale), {}
    )
    count = RAGGED["ragged"].sum()
    assert found.sums.count == count
    for name, error in found.residuals["errors"].items():
        lacks = (exact.grads[name] - found.grads[name]) / (scale * count)
        assert np.abs(lacks).max() > 1e-2
        np.testing.assert_allclose(error.sum(0), lacks, rtol=1e-4, atol=1e-6)
    nothing = {**batch, "weights": jnp.zeros_like(batch["weights"])}
    after = jax.jit(step)(
        params, {}, nothing, KEY, jnp.float32(scale), codec_state(found.residuals)
    )
    assert after.sums.count == 0
    for name, error in after.residuals["errors"].items():
        # Of a step that learns from nothing, what is sent is of earlier steps, by its scale alone.
        kept = error.sum(0) + after.grads[name] / scale
        np.testing.assert_allclose(
            kept, found.residuals["errors"][name].sum(0), rtol=1e-4, atol=1e-6
        )


def test_accumulation_is_in_fp32_and_scaled_and_keys_differ() -> None:
    params, batch = problem(np.ones((3, 2)))
    keys = []

    def half(params: Any, rest: Any, batch: Any, key: Any) -> Any:
        sums, rest = loss(params, rest, batch, key)
        noise = jax.random.normal(key, ())
        more = sums.loss + noise * jnp.sum(params["v"])
        return sums._replace(loss=more), {"seen": rest["seen"], "n": noise}

    low = {"w": params["w"].astype(jnp.bfloat16), "v": params["v"]}
    args = (low, {"seen": jnp.int32(0), "n": jnp.float32(0)}, batch, KEY)
    one, eight = (
        gspmd_gradients(half, constrain=lambda g: g)(*args, jnp.float32(scale), {})
        for scale in (1.0, 8.0)
    )
    assert {g.dtype for g in one.grads.values()} == {jnp.dtype(jnp.float32)}
    for leaf in one.grads:
        np.testing.assert_allclose(eight.grads[leaf], 8 * one.grads[leaf], rtol=1e-2)
    np.testing.assert_array_equal(eight.sums.loss, one.sums.loss)
    for number in range(3):
        keys.append(float(jax.random.normal(jax.random.fold_in(KEY, number), ())))
    plain = gspmd_gradients(loss, constrain=lambda g: g)(
        low, {"seen": jnp.int32(0)}, batch, KEY, jnp.float32(1.0), {}
    )
    drift = np.asarray(one.grads["v"] - plain.grads["v"])
    np.testing.assert_allclose(drift, np.full(4, sum(keys)), rtol=1e-4)


def test_one_microbatch_needs_no_loop() -> None:
    params, batch = problem(np.ones((1, 2)))

    def run(params: Any) -> Any:
        return accumulate(
            loss, params, {"seen": 0}, batch, key=KEY, scale=jnp.float32(1),
            reduce_microbatch=lambda g: g, types=lambda x: x,
        )  # fmt: skip

    assert "scan" not in str(jax.make_jaxpr(run)(params))


# Reductions. A leaf's gradient lies on every device as its own contribution; what comes out must be
# the sum of all contributions, split as the optimizer has it.

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
W, S = (8, 4), (6,)


def leaf(path: str, shape: tuple[int, ...], params: Any, optimizer: Any, in_use: Any) -> Leaf:
    return Leaf(path, shape, "float32", (None,) * len(shape), params, optimizer, in_use)


PLACES = {
    "whole": leaf("whole", W, ((), ()), ((), ()), ((), ())),
    "fsdp": leaf("fsdp", W, (("fsdp",), ()), (("fsdp",), ()), ((), ())),
    "tensor": leaf("tensor", W, ((), ("tensor",)), ((), ("tensor",)), ((), ("tensor",))),
    "zero": leaf("zero", W, ((), ()), (("fsdp", "data"), ()), ((), ())),
    "both": leaf(
        "both", W, (("fsdp",), ("tensor",)), (("fsdp", "data"), ("tensor",)), ((), ("tensor",))
    ),
    "small": leaf("small", S, ((),), ((),), ((),)),
    "zero, dim 1": leaf("zero, dim 1", W, ((), ()), ((), ("fsdp", "data")), ((), ())),
    "two dims": leaf("two dims", W, ((), ()), (("fsdp",), ("data",)), ((), ())),
}


def eight_devices() -> Mesh:
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    return Mesh(devices, tuple(SIZES), axis_types=(AxisType.Auto,) * 3)


def contributions(split: Any, shape: tuple[int, ...], name: str) -> tuple[np.ndarray, np.ndarray]:
    """([8, *local shape], the dense sum): device d's contribution covers its tile of `split`."""
    rng = np.random.default_rng(len(name))
    dense, local = np.zeros(shape, np.float32), []
    names = list(SIZES)
    for at in np.ndindex(2, 2, 2):
        index = []
        for n, axes in zip(shape, split, strict=True):
            tile, ways = 0, 1
            for axis in axes:
                tile, ways = tile * 2 + at[names.index(axis)], ways * 2
            index.append(slice(tile * n // ways, (tile + 1) * n // ways))
        part = rng.integers(-8, 8, dense[tuple(index)].shape).astype(np.float32)
        dense[tuple(index)] += part
        local.append(part)
    return np.stack(local), dense


REDUCERS = [Lax(), Ring(1), Recursive(), Hierarchical(), Hierarchical(Recursive(), Ring())]


@pytest.mark.parametrize("reducer", REDUCERS, ids=str)
@pytest.mark.parametrize("bucket", [0, 10**9], ids=["each leaf", "one bucket"])
@pytest.mark.parametrize("sharded", [True, False], ids=["every microbatch", "once a step"])
def test_reductions_give_the_dense_sum_in_the_optimizers_split(
    sharded: bool, bucket: int, reducer: Any
) -> None:
    reduction = Reduction(PLACES, SIZES, sharded, reducer=reducer, small_leaf=bucket)
    # `gather`'s adjoint has already scattered what rests split, when that is per microbatch.
    pairs = {k: contributions(reduction.gradient_split(p), p.shape, k) for k, p in PLACES.items()}
    mesh = eight_devices()
    spread = PartitionSpec(tuple(SIZES))

    def on_device(local: Any) -> Any:
        mine = {k: v[0] for k, v in local.items()}
        return reduction.reduce_step(reduction.reduce_microbatch(mine))

    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=({k: spread for k in pairs},),
        out_specs={k: partition_spec(p.optimizer) for k, p in PLACES.items()},
    )
    out = jax.jit(run)({k: local for k, (local, _) in pairs.items()})
    for name, (_, dense) in pairs.items():
        np.testing.assert_array_equal(out[name], dense, err_msg=name)
        wanted = named_sharding(mesh, PLACES[name].optimizer)
        assert out[name].sharding.is_equivalent_to(wanted, dense.ndim), name


@pytest.mark.parametrize("bucket", [True, False])
def test_small_leaves_travel_together(bucket: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(gradients, "gradient_sum", lambda name, x, *by: called.append(name) or x)
    places = {k: PLACES["small"] for k in ("a", "b", "c")}
    grads = {k: jnp.full(S, float(i)) for i, k in enumerate(places)}
    out = Reduction(places, SIZES, True, small_leaf=12 if bucket else 0).reduce_step(grads)
    assert called == (["small gradients"] if bucket else ["gradients"] * 3)
    for name, g in grads.items():
        np.testing.assert_array_equal(out[name], g)


@pytest.mark.parametrize("small_leaf", [0, 10**6])
def test_a_layers_leaves_are_summed_once(small_leaf: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacked ones in their layer, together where they are small; the others at the end."""
    called: list[str] = []
    monkeypatch.setattr(gradients, "gradient_sum", lambda name, x, *by: called.append(name) or x)
    monkeypatch.setattr(gradients, "vary", lambda x, axes: x)
    monkeypatch.setattr(gradients, "same", lambda x, axes: x)
    stacked = PLACES["small"]._replace(axes=("layers",))
    places = {
        "p.a": stacked,
        "p.b": stacked,
        "p.zero": PLACES["zero"]._replace(axes=("layers", None)),
        "p.alone": PLACES["small"],
    }
    reduction = Reduction(places, SIZES, True, small_leaf=small_leaf, layers=True)
    layer = {k.removeprefix("p."): jnp.zeros(3) for k in places}
    assert reduction.all_reduce_layer(layer, "p.").keys() == layer.keys()
    assert called == (["layer gradients"] if small_leaf else ["layer gradients"] * 2)
    called.clear()
    assert reduction.all_reduce({k: jnp.zeros(3) for k in places}).keys() == places.keys()
    assert len(called) == 2 and "layer gradients" not in called


@pytest.mark.parametrize("small_leaf", [0, 10**6])
def test_updated_parameters_are_gathered_to_be_as_they_rest(small_leaf: int) -> None:
    mesh = eight_devices()
    dense = {k: jax.random.normal(KEY, p.shape) for k, p in PLACES.items()}
    shards = {
        k: jax.device_put(x, named_sharding(mesh, PLACES[k].optimizer)) for k, x in dense.items()
    }
    reduction = Reduction(PLACES, SIZES, True, Ring(), small_leaf=small_leaf)
    found = jax.jit(lambda x: gather_updated_params(x, mesh=mesh, reduction=reduction))(shards)
    for name, x in dense.items():
        np.testing.assert_array_equal(found[name], x)
        wanted = named_sharding(mesh, PLACES[name].params)
        assert found[name].sharding.is_equivalent_to(wanted, x.ndim), name


@pytest.mark.parametrize("count", [1, 5])
def test_collectives_do_not_grow_with_the_number_of_small_leaves(count: int) -> None:
    """Those of a step's gradients on the way to the optimizer's split, and of what it updates."""
    places = {f"{k}.{i}": PLACES[k] for k in ("zero", "zero, dim 1", "small") for i in range(count)}
    places["large"] = leaf("large", (64, 4), ((), ()), (("fsdp", "data"), ()), ((), ()))
    reduction, mesh = Reduction(places, SIZES, True, small_leaf=50), eight_devices()
    arrays = {k: jnp.zeros(p.shape) for k, p in places.items()}
    specs = {k: partition_spec(p.optimizer) for k, p in places.items()}

    def on_device(grads: Any) -> Any:
        return reduction.reduce_step(
            reduction.reduce_microbatch({k: vary(g, tuple(SIZES)) for k, g in grads.items()})
        )

    def step(grads: Any) -> Any:
        run = jax.shard_map(on_device, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs)
        return gather_updated_params(run(grads), mesh=mesh, reduction=reduction)

    program = str(jax.make_jaxpr(step)(arrays))
    # The small leaves in one, the large one in another.
    assert len(re.findall(r"= (?:reduce|psum)_scatter\w*\[", program)) == 2
    assert len(re.findall(r"= all_gather\w*\[", program)) == 2
    # Sums over tensor (ZeRO's), one for large and one for small; over all axes, of "small".
    assert len(re.findall(r"= psum\w*\[", program)) == 3


@pytest.mark.parametrize("table", ["params", "optimizer"])
def test_squared_norm_counts_every_copy_once(table: str) -> None:
    tree = {k: jax.random.normal(KEY, p.shape) * (i + 1) for i, (k, p) in enumerate(PLACES.items())}
    splits = {k: getattr(p, table) for k, p in PLACES.items()}
    twice = {k: 2 * x for k, x in tree.items()}
    found = jax.jit(lambda *t: squared_norm(t, splits=splits, mesh=eight_devices()))(tree, twice)
    dense = sum(float(np.sum(np.square(x))) for x in tree.values())
    np.testing.assert_allclose(found, dense * np.array([1, 4]), rtol=1e-6)
