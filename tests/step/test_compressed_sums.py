"""Compressed sums in the step: nothing is lost for good, on any mesh; the host chooses rightly."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import jaxtrain
from jaxtrain.checkpoint.manager import CheckpointManager
from jaxtrain.collectives.ring import Ring
from jaxtrain.compression.codecs import Int8, Sign, TopK
from jaxtrain.compression.compressed import Compressed, Guard
from jaxtrain.compression.powersgd import PowerSGD
from jaxtrain.compression.residuals import (
    compressed_parts,
    no_residuals,
    redistribute,
    residual_splits,
    usable_codec_state,
)
from jaxtrain.compression.sums import Choice, CompressedSums, GuardReader, choose
from jaxtrain.mesh.sharding import Leaf, partition_spec
from jaxtrain.session.session import open_session
from jaxtrain.step.assembly import assemble
from jaxtrain.step.guard import Distance, beyond, distance

KEY = jax.random.key(0)
SIZES = {"data": 2, "fsdp": 2, "tensor": 2}


def leaf(path: str, axes: Any, shape: tuple[int, ...], split: Any) -> Leaf:
    return Leaf(path, shape, "float32", axes, split, split, split)


MATRIX = ("layers", "embed", "mlp")
PLACES = {
    "whole": leaf("whole", MATRIX, (2, 6, 8), ((), (), ())),
    "fsdp": leaf("fsdp", MATRIX, (2, 6, 8), ((), ("fsdp",), ())),
    "both": leaf("both", MATRIX, (2, 6, 8), ((), ("fsdp",), ("tensor",))),
    "nowhere": leaf("nowhere", MATRIX, (2, 6, 8), ((), ("fsdp",), ("data", "tensor"))),
}
REDUCERS = [
    Compressed(Int8(block=16)),
    Compressed(Sign(block=16), by=Ring()),
    Compressed(TopK(0.2)),
    Compressed(PowerSGD(2)),
    Compressed(PowerSGD(4)),  # more than `both` has columns on a device: exact there
]


def eight() -> Mesh:
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    return Mesh(devices, tuple(SIZES), axis_types=(AxisType.Auto,) * 3)


@lru_cache
def one_step(reducer: Compressed, choice: Choice) -> Callable[..., Any]:
    """jit of (contributions [8, *shape] by leaf, residuals, unit, key) -> CompressedSums.sum."""
    parts = compressed_parts(reducer, 0, PLACES, SIZES)
    abstract = jax.eval_shape(lambda: no_residuals(reducer, parts, 0))
    splits = residual_splits(abstract, parts)
    specs = jax.tree.map(lambda _, d: partition_spec(d), abstract, splits)
    del specs["tripped"]
    spread = PartitionSpec(tuple(SIZES))

    def on_device(xs: Any, residuals: Any, unit: Any, key: Any) -> Any:
        mine = {}
        for name, x in xs.items():
            mine[name] = x[0]
            for dim, axes in enumerate(PLACES[name].optimizer):
                if axes:
                    n = mine[name].shape[dim] // jax.lax.axis_size(axes)
                    at = jax.lax.axis_index(axes) * n
                    mine[name] = jax.lax.dynamic_slice_in_dim(mine[name], at, n, dim)
        return CompressedSums(reducer, parts, choice).sum(mine, residuals, unit, key)

    out = {k: partition_spec(p.optimizer) for k, p in PLACES.items()}
    return jax.jit(
        jax.shard_map(
            on_device,
            mesh=eight(),
            in_specs=({k: spread for k in PLACES}, specs, PartitionSpec(), PartitionSpec()),
            out_specs=(out, specs, out if choice.measured else {}),
        )
    )


def contributions(seed: int) -> dict[str, np.ndarray]:
    """What each device adds: the same on devices that differ only along axes that split the leaf,
    so that the dense sum is the mean over those times the devices that sum it."""
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(8, *p.shape)).astype(np.float32) for k, p in PLACES.items()}


def dense(xs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tile by tile the sum over the devices that hold it."""
    out = {}
    for name, place in PLACES.items():
        x = xs[name].reshape(2, 2, 2, *place.shape)
        total = np.zeros(place.shape)
        for at in np.ndindex(2, 2, 2):
            index = []
            for n, axes in zip(place.shape, place.optimizer, strict=True):
                tile, parts = 0, 1
                for axis in axes:
                    tile, parts = tile * 2 + at[list(SIZES).index(axis)], parts * 2
                index.append(slice(tile * n // parts, (tile + 1) * n // parts))
            total[tuple(index)] += x[at][tuple(index)]
        out[name] = total
    return out


@pytest.mark.parametrize(
    "reducer",
    [*REDUCERS[:2], *(pytest.param(r, marks=pytest.mark.slow) for r in REDUCERS[2:])],
    ids=str,
)
def test_sums_so_far_and_residuals_are_the_true_sums(reducer: Compressed) -> None:
    """After every step, whatever its unit, and an exact one leaves no residual."""
    parts = compressed_parts(reducer, 0, PLACES, SIZES)
    residuals = no_residuals(reducer, parts, 0)
    del residuals["tripped"]
    programs = [one_step(reducer, Choice(reducer.codec))] * 3 + [one_step(reducer, Choice())]
    made, true = ({k: 0.0 for k in PLACES} for _ in range(2))
    for i, program in enumerate(programs):
        xs, unit = contributions(i), 2.0 ** (i + 3)
        sums, residuals, _ = program(xs, residuals, jnp.float32(unit), jax.random.key(i))
        for name, total in dense(xs).items():
            made[name] = made[name] + np.asarray(sums[name], np.float64) / unit
            true[name] = true[name] + total / unit
            waiting = np.asarray(residuals["errors"][name], np.float64).sum(0)
            np.testing.assert_allclose(made[name] + waiting, true[name], atol=2e-5, err_msg=name)
        lossy = {k for k, e in residuals["errors"].items() if np.abs(e).max() > 0}
        takes = {k for k, part in parts.items() if part.takes(reducer.codec)}
        assert lossy == (takes if i < 3 else set())
        assert "nowhere" not in takes


def test_a_measured_step_has_the_exact_sums_beside_the_same_ones() -> None:
    reducer = REDUCERS[0]
    parts = compressed_parts(reducer, 0, PLACES, SIZES)
    residuals = no_residuals(reducer, parts, 0)
    del residuals["tripped"]
    args = (contributions(0), residuals, jnp.float32(4), KEY)
    plain, after, none = one_step(reducer, Choice(reducer.codec))(*args)
    measured, same_after, exact = one_step(reducer, Choice(reducer.codec, measured=True))(*args)
    assert none == {}
    for name, total in dense(args[0]).items():
        np.testing.assert_allclose(exact[name], total, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(plain[name], measured[name])
        np.testing.assert_array_equal(after["errors"][name], same_after["errors"][name])


def test_parts_of_a_leaf_round_by_noise_of_their_own() -> None:
    """Equal numbers in both: the errors of a column would add up over its parts."""
    reducer, xs = REDUCERS[0], contributions(0)
    tile = xs["fsdp"].reshape(2, 2, 2, 2, 6, 8)[:, :1, :, :, :3]
    xs["fsdp"] = np.tile(tile, (1, 2, 1, 1, 2, 1)).reshape(8, 2, 6, 8)
    residuals = no_residuals(reducer, compressed_parts(reducer, 0, PLACES, SIZES), 0)
    del residuals["tripped"]
    _, after, _ = one_step(reducer, Choice(reducer.codec))(xs, residuals, jnp.float32(4), KEY)
    upper, lower = np.split(np.asarray(after["errors"]["fsdp"]), 2, axis=2)
    assert (upper != lower).mean() > 0.3  # two roundings are equal in half of all cases or more


RAMP = TopK(0.1, ramp=((4, 0.5),))
GUARD = Guard(every=3, min_cosine=0.5)


@pytest.mark.parametrize(
    ("reducer", "step", "tripped", "wanted"),
    [
        (jaxtrain.collectives.Lax(), 7, -1, Choice()),
        (Compressed(Sign(), warmup_steps=2), 1, -1, Choice()),
        (Compressed(Sign(), warmup_steps=2), 2, -1, Choice(Sign())),
        (Compressed(RAMP), 3, -1, Choice(TopK(0.5))),
        (Compressed(RAMP), 4, -1, Choice(TopK(0.1))),
        (Compressed(Sign(), guard=GUARD), 3, -1, Choice(Sign(), measured=True)),
        (Compressed(Sign(), guard=GUARD), 4, 3, Choice(Sign())),
        (Compressed(Sign(), guard=GUARD), 5, 3, Choice()),
        (Compressed(Sign(), guard=GUARD), 0, 0, Choice(Sign(), measured=True)),
        (Compressed(Sign(), guard=GUARD, warmup_steps=4), 3, -1, Choice()),
        (Compressed(Sign(), guard=GUARD, warmup_steps=4), 4, -1, Choice(Sign(), measured=True)),
        (Compressed(Sign(), guard=GUARD, warmup_steps=4), 6, -1, Choice(Sign())),
        (Compressed(Sign(), guard=GUARD, warmup_steps=4), 7, -1, Choice(Sign(), measured=True)),
    ],
)
def test_the_host_chooses_among_programs(
    reducer: Any, step: int, tripped: int, wanted: Choice
) -> None:
    assert choose(reducer, step, tripped) == wanted


@pytest.mark.parametrize("resume", range(8))
def test_step_n_selects_step_n_plus_two_whether_resumed_or_not(resume: int) -> None:
    """A made-up run whose sample of step 3 is beyond the bounds, resumed before step `resume`."""
    reducer, state = Compressed(Sign(), guard=GUARD), -1
    reader, exact = GuardReader(), []
    for step in range(8):
        if step == resume:
            reader = GuardReader(step, state)
        choice = reader.choose(reducer)
        exact.append(choice == Choice())
        state = step if choice.measured and step == 3 and state < 0 else state
        reader.push({"guard_tripped": np.float32(state)})
    assert exact == [False] * 5 + [True] * 3


@pytest.mark.parametrize("tripped", [-1, 0, 7])
def test_errors_of_a_distrusted_codec_are_not_added(tripped: int) -> None:
    """Its factors are nobody's gradients and stay."""
    residuals = {"errors": {"a": jnp.ones((2, 3))}, "factors": {"a": jnp.ones(4)}}
    found = usable_codec_state({**residuals, "tripped": jnp.int32(tripped)})
    assert found.keys() == residuals.keys()
    np.testing.assert_array_equal(found["errors"]["a"], np.full((2, 3), float(tripped < 0)))
    np.testing.assert_array_equal(found["factors"]["a"], np.ones(4))


@pytest.mark.parametrize("magnitude", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("wrong", [1e-12, 0.1, 1e6])
def test_distances_are_those_of_fp64_at_any_magnitude(magnitude: float, wrong: float) -> None:
    rng = np.random.default_rng(0)
    exact = magnitude * rng.normal(size=100)
    made = exact + wrong * magnitude * rng.normal(size=100)
    found = told(made[:60], made[60:], exact[:60], exact[60:])
    a, b = np.float32(made).astype(np.float64), np.float32(exact).astype(np.float64)
    size, true = np.linalg.norm(a), np.linalg.norm(b)
    np.testing.assert_allclose(found.error, np.linalg.norm(a - b) / true, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.cosine, a @ b / size / true, atol=1e-6)
    assert -1 <= found.cosine <= 1
    assert beyond(Guard(max_error=0.5, min_cosine=0.9), found) == (wrong == 1e6)


def told(*parts: Any) -> Distance:
    """The distance of one vector of two leaves from another."""
    a, b, c, d = (jnp.asarray(x, jnp.float32) for x in parts)
    return distance({"a": a, "b": b}, {"a": c, "b": d}, splits={}, mesh=None)


ONES, ZEROS = np.ones(3), np.zeros(3)


@pytest.mark.parametrize("guard", [Guard(min_cosine=0.1), Guard(max_error=2, min_cosine=None)])
@pytest.mark.parametrize(
    ("made", "exact", "trips"),
    [
        (np.nan * ONES, ONES, True),
        (np.inf * ONES, ONES, True),
        (1e30 * ONES, ONES, True),  # its square is beyond fp32
        (np.nan * ONES, ZEROS, True),
        (-ONES * 2, ONES, True),
        (np.nan * ONES, np.inf * ONES, False),  # as when a loss scale is too high
        (ONES, np.inf * ONES, False),
        (ONES, ZEROS, False),  # errors of earlier steps, in a step of no tokens
        (ZEROS, ZEROS, False),
        (1e-25 * ONES, 1e-25 * ONES, False),
    ],
)
def test_what_is_not_finite_is_beyond_every_bound(
    guard: Guard, made: Any, exact: Any, trips: bool
) -> None:
    found = told(ONES, made, ONES * np.any(exact), exact)
    if not np.any(exact):
        found = told(ZEROS, made, ZEROS, exact)
    assert beyond(guard, found) == trips
    if not np.isfinite(made).all():
        assert np.isnan(found.error) and np.isnan(found.cosine)


# In the step.


@dataclass(frozen=True)
class Sabotaged:
    """`Int8` that from the third step on sends its numbers in wrong places, or none at all."""

    codec: Any = Int8(block=16, stochastic=False)  # noqa: RUF009 (frozen)
    displaced: bool = False
    harm: str = "displaced"
    poisoned: bool = False

    def payload_bytes(self, size: int) -> int:
        return self.codec.payload_bytes(size)

    def encode(self, x: Any, key: Any, stream: Any) -> Any:
        return self.codec.encode(jnp.roll(x, 5 * self.displaced, axis=1), key, stream)

    def decode(self, payload: Any, size: int, key: Any) -> Any:
        found = self.codec.decode(payload, size, key)
        return found * jnp.nan if self.poisoned else found

    def at(self, step: int) -> Any:
        return replace(self, **{self.harm: step >= 2})


def with_reducer(experiment: Any, reducer: Any, **changes: Any) -> Any:
    execution = jaxtrain.Execution(reducer=reducer, small_leaf=16)
    return replace(experiment, execution=execution, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["displaced", "poisoned"])
@pytest.mark.sampled(2)
def test_the_guard_trips_when_the_codec_is_sabotaged_and_stays(
    decoder: jaxtrain.Experiment, tmp_path: Path, harm: str
) -> None:
    """Also where the steps in between are skipped, the one that trips among them."""
    guard = Guard(every=2, min_cosine=0.5)
    reducer = Compressed(Sabotaged(harm=harm), error_feedback=False, guard=guard)
    given = with_reducer(decoder, reducer, steps=9, checkpoints=jaxtrain.SavePolicy(every=100))
    mesh, said = jaxtrain.mesh_from_axes(data=2), io.StringIO()

    def train(steps: int) -> Any:
        return jaxtrain.train(
            given, mesh, run_dir=tmp_path / "run", steps=steps, cache_dir=tmp_path, stream=said
        )

    first, second = train(4), train(9)
    lines = [line for line in said.getvalue().splitlines() if "guard" in line]
    assert len(lines) == 1 and lines[0][9:].startswith("step 3 compressed sums are beyond")
    assert lines[0].endswith("sums are exact from step 5 on")
    history = first.history + second.history
    assert [h["compressed"] for h in history] == [1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert [h["guard_tripped"] for h in history] == [-1, -1, 2, 2, 2, 2, 2, 2, 2]
    sampled = {h["step"]: h["reducer_cosine"] for h in history if "reducer_cosine" in h}
    assert sampled.keys() == {1, 3}
    assert sampled[1] > 0.99
    assert np.isnan(sampled[3]) if harm == "poisoned" else abs(sampled[3]) < 0.5
    assert history[-1]["skipped"] == (2 if harm == "poisoned" else 0)


@pytest.mark.slow
def test_what_a_distrusted_codec_left_is_dropped(
    decoder: jaxtrain.Experiment, opened: Any, stepped: Any
) -> None:
    """The first exact step after a trip moves the parameters as a run of exact sums does."""
    guard = Guard(every=1, min_cosine=0.5)
    given = replace(decoder, optimizer=jaxtrain.SGD(0.1, momentum=0.0, weight_decay=0.0))
    session = opened(with_reducer(given, Compressed(Sabotaged(), guard=guard)), data=2)
    exact = opened(with_reducer(given, jaxtrain.collectives.Lax()), data=2)
    for _ in range(4):
        assert stepped(session)["compressed"] == 1
        stepped(exact)
    left = [np.abs(e).max() for e in session.state.residuals["errors"].values()]
    assert int(session.state.residuals["tripped"]) == 2 and max(left) > 0.1
    exact.state = jax.tree.map(jnp.copy, replace(session.state, residuals={}))
    found, wanted = stepped(session), stepped(exact)
    assert found["compressed"] == 0 and found["grad_norm"] == pytest.approx(wanted["grad_norm"])
    for name, value in exact.state.params.items():
        np.testing.assert_allclose(session.state.params[name], value, atol=1e-6, err_msg=name)
    assert not any(np.any(e) for e in session.state.residuals["errors"].values())


@pytest.mark.exhaustive
def test_a_healthy_codec_does_not_trip_it_and_no_guard_samples_nothing(
    decoder: jaxtrain.Experiment,
) -> None:
    guard = Guard(every=1, min_cosine=0.9, max_error=0.5)
    mesh = jaxtrain.mesh_from_axes(data=2)
    given = with_reducer(decoder, Compressed(Int8(block=16), guard=guard), steps=4)
    history = jaxtrain.train(given, mesh).history
    assert all(h["compressed"] == 1 and h["guard_tripped"] == -1 for h in history)
    assert all(0 < h["reducer_error"] < 0.2 < h["reducer_cosine"] < 1.001 for h in history)
    plain = jaxtrain.train(with_reducer(given, Compressed(Int8(block=16))), mesh).history
    assert not {"guard_tripped", "reducer_error"} & plain[-1].keys()
    assert [h["loss"] for h in plain] == pytest.approx([h["loss"] for h in history], rel=1e-6)


@pytest.mark.parametrize(
    "codec",
    [
        pytest.param(TopK(0.1), marks=pytest.mark.exhaustive),
        pytest.param(PowerSGD(2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_residuals_are_saved_and_their_sums_come_to_any_mesh(
    decoder: jaxtrain.Experiment, tmp_path: Path, codec: Any
) -> None:
    policy = jaxtrain.SavePolicy(every=3)
    given = with_reducer(decoder, Compressed(codec), steps=6, checkpoints=policy)
    run = tmp_path / "run"
    axes = {"data": 2, "fsdp": 2}
    mesh = jaxtrain.mesh_from_axes(**axes)
    part = jaxtrain.train(given, mesh, run_dir=run, steps=3, cache_dir=tmp_path)
    saved = jax.tree.map(np.asarray, part.session.state.residuals)
    sums = {k: e.astype(np.float64).sum(0) for k, e in saved["errors"].items()}
    assert max(np.abs(total).max() for total in sums.values()) > 0
    meshes = (axes, {"data": 4}, {"data": 1}, {"data": 2, "tensor": 2})
    for other in meshes:
        spec = jaxtrain.mesh_from_axes(**other)
        with CheckpointManager(run / "checkpoints", policy) as saves:
            session = open_session(given, spec, cache_dir=tmp_path, checkpoints=saves)
            found = jax.tree.map(np.asarray, session.state.residuals)
            for name, total in sums.items():
                assert found["errors"][name].shape[1:] == total.shape
                np.testing.assert_allclose(
                    found["errors"][name].astype(np.float64).sum(0), total, atol=1e-7, err_msg=name
                )
            if other == axes:
                jax.tree.map(np.testing.assert_array_equal, found, saved)
            metrics = session.step(session.loader.next()[1])
            assert np.isfinite(metrics["loss"])
            if other == {"data": 1}:
                assert not any(np.any(e) for e in session.state.residuals["errors"].values())
            session.close()
    resumed = jaxtrain.train(given, mesh, run_dir=run, cache_dir=tmp_path)
    whole = jaxtrain.train(given, mesh, cache_dir=tmp_path)
    for a, b in zip(*(jax.tree.leaves(r.session.state) for r in (resumed, whole)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_factors_of_another_shape_begin_again() -> None:
    new = {"factors": {"a": jnp.zeros((2, 1, 3, 2)), "b": jnp.zeros((1, 1, 3, 2))}}
    old = {"factors": {"a": jnp.ones((4, 1, 3, 2)), "b": jnp.ones((1, 1, 3, 2))}}
    first = jax.tree.map(lambda x: x + 7, new)
    found = redistribute(old, new, first)["factors"]
    np.testing.assert_array_equal(found["a"], first["factors"]["a"])
    np.testing.assert_array_equal(found["b"], old["factors"]["b"])


@pytest.mark.parametrize(
    "codec",
    [
        TopK(0.1),
        pytest.param(Int8(block=16), marks=pytest.mark.slow),
        pytest.param(PowerSGD(2), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.sampled(2)
def test_a_skipped_step_leaves_the_residuals_as_they_were(
    decoder: jaxtrain.Experiment, opened: Any, stepped: Any, poisoned: Any, codec: Any
) -> None:
    data = poisoned(decoder.data, row=8)  # of the second batch of eight
    session = opened(with_reducer(decoder, Compressed(codec), data=data), data=2)
    assert stepped(session)["skipped"] == 0
    before = jax.tree.map(np.asarray, session.state.residuals)
    assert stepped(session)["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, session.state.residuals, before)
    assert np.isfinite(stepped(session)["loss"])


def test_without_a_compressed_reducer_the_state_holds_nothing_of_it(
    decoder: jaxtrain.Experiment,
) -> None:
    for reducer in (jaxtrain.collectives.Lax(), jaxtrain.collectives.Hierarchical()):
        assembly = assemble(with_reducer(decoder, reducer), jaxtrain.mesh_from_axes(data=2))
        assert assembly.abstract.residuals == {} and assembly.parts == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reduce_layers": True}, "carries its errors from step to step; use reduce_layers=False"),
        ({"small_leaf": 10**6}, "compresses no leaf: .* use a lower small_leaf"),
        ({"mode": "gspmd"}, "under gspmd XLA sums the gradients: use reducer=Lax"),
    ],
)
def test_what_a_compressed_reducer_does_not_do_is_refused(
    decoder: jaxtrain.Experiment, changes: Any, message: str
) -> None:
    execution = jaxtrain.Execution(**{"reducer": Compressed(Sign()), "small_leaf": 16, **changes})
    with pytest.raises(ValueError, match=message):
        assemble(replace(decoder, execution=execution), jaxtrain.mesh_from_axes(data=2))


POWER = Compressed(PowerSGD(64))


@pytest.mark.parametrize(
    ("reducer", "axes", "changes", "message"),
    [
        (Compressed(Sign()), {"fsdp": 2}, {}, "use a mesh axis data > 1, or sharding=data_paralle"),
        (Compressed(Sign()), {"tensor": 2}, {}, r"tensor=2, .* data > 1, or reducer=Lax\(\)$"),
        (
            Compressed(Sign()),
            {"data": 2, "tensor": 2},
            {"sharding": jaxtrain.zero1() | jaxtrain.tensor()},
            r"use sharding=data_parallel\(\) \| tensor\(\), or reducer=Lax\(\)$",
        ),
        (POWER, {"data": 2, "fsdp": 2}, {}, "at most 4 rows and columns, .* use rank=4 or lower"),
        (Compressed(Sign(), warmup_steps=20), {"data": 2}, {}, r"none of the 20 .* use warm.*=3 "),
    ],
)
def test_a_reducer_that_would_compress_nothing_is_refused(
    decoder: jaxtrain.Experiment, reducer: Any, axes: Any, changes: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        assemble(with_reducer(decoder, reducer, **changes), jaxtrain.mesh_from_axes(**axes))


@pytest.mark.parametrize(
    ("reducer", "axes", "changes"),
    [
        (Compressed(Sign()), {"data": 2, "fsdp": 2}, {}),
        (Compressed(Sign()), {"fsdp": 2}, {"sharding": jaxtrain.data_parallel()}),
        (Compressed(Sign()), {"data": 2, "tensor": 2}, {}),
        (Compressed(PowerSGD(4)), {"data": 2, "fsdp": 2}, {}),
        (Compressed(Sign(), warmup_steps=3), {"data": 2}, {}),
        (Compressed(Sign()), {"data": 1}, {}),
    ],
)
def test_what_it_says_to_use_is_accepted(
    decoder: jaxtrain.Experiment, reducer: Any, axes: Any, changes: Any
) -> None:
    given = with_reducer(decoder, reducer, **changes)
    parts = assemble(given, jaxtrain.mesh_from_axes(**axes)).parts
    assert any(part.takes(reducer.codec) for part in parts.values()) or axes == {"data": 1}


def test_on_one_device_all_steps_are_one_program(
    decoder: jaxtrain.Experiment, opened: Any, stepped: Any
) -> None:
    session = opened(with_reducer(decoder, Compressed(RAMP, guard=GUARD)), data=1)
    found = [stepped(session) for _ in range(5)]
    assert len(session.compiled) == 1
    assert all(each["compressed"] == 0 and each["guard_tripped"] == -1 for each in found)


def test_fields_of_the_guard_are_held_to_their_ranges() -> None:
    with pytest.raises(ValueError, match=r"every=0 must be.*max_error=-1.*min_cosine=2"):
        Guard(every=0, max_error=-1, min_cosine=2)
    with pytest.raises(ValueError, match="max_error and min_cosine are both None"):
        Guard(max_error=None, min_cosine=None)
