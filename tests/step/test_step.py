"""One train step: what it does to the state, what it reports, and what it does when it must not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxtrain
from jaxtrain import bf16, fp32
from jaxtrain.optim import LossScale, Precision, fp16
from jaxtrain.optim.rate import ScaledRate
from jaxtrain.optim.schedule import WarmupLinear
from jaxtrain.session.session import Session
from jaxtrain.step.assembly import active_mesh, assemble
from jaxtrain.step.train_step import make_evaluation_step

BATCH = 8  # rows of a step in the experiments of tiny.py

Opened = Callable[..., Session]
Stepped = Callable[[Session], dict[str, float]]


def values(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def kept(state: Any) -> list[np.ndarray]:
    """What a skipped step must leave to the bit."""
    return values((state.params, state.optimizer, state.model_state, state.ema))


MESHES = [{}, {"fsdp": 2, "tensor": 2}]


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_loss_falls_towards_the_entropy_of_the_chain(
    decoder: jaxtrain.Experiment, opened: Opened, stepped: Stepped, axes: dict[str, int]
) -> None:
    session = opened(replace(decoder, batch=16), **axes)
    losses = [stepped(session)["loss"] for _ in range(80)]
    assert losses[0] == pytest.approx(np.log(16), abs=0.1), "before training all are as likely"
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    assert np.mean(losses[-5:]) > np.log(2) - 0.05, "below the entropy of two equal successors"


PRECISIONS = {
    "fp32": fp32,
    "bf16": bf16,
    "fp16": replace(fp16, loss_scale=LossScale(initial=1024.0)),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_that_is_not_finite_is_skipped_and_counted(
    own: jaxtrain.Experiment, opened: Opened, stepped: Stepped, poisoned: Any, precision: str
) -> None:
    data = poisoned(own.data, row=2 * BATCH + 3)
    session = opened(
        replace(own, data=data, precision=PRECISIONS[precision], ema_decay=0.5,
                optimizer=jaxtrain.AdamW(1e-2)),
        data=2, fsdp=2,
    )  # fmt: skip
    for _ in range(2):
        assert stepped(session)["skipped"] == 0
    before, scale = kept(session.state), values(session.state.loss_scale)
    skipped = stepped(session)
    assert not np.isfinite(skipped["grad_norm"])
    assert skipped["skipped"] == 1
    assert same(kept(session.state), before)
    assert int(session.state.step) == 3
    if precision == "fp16":
        assert float(session.state.loss_scale.scale) == scale[0] / 2
    after = stepped(session)
    assert np.isfinite(after["loss"])
    assert after["skipped"] == 1, "counted once"
    assert not same(kept(session.state), before)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_fp16_overflow_halves_the_scale_until_it_fits_alike_on_every_device(
    decoder: jaxtrain.Experiment, opened: Opened, stepped: Stepped, axes: dict[str, int]
) -> None:
    scaling = LossScale(initial=2.0**22, window=3)
    session = opened(replace(decoder, precision=replace(fp16, loss_scale=scaling)), **axes)
    scale, good, skipped = scaling.initial, 0, 0
    for _ in range(16):
        metrics = stepped(session)
        assert metrics["loss_scale"] == scale
        if metrics["skipped"] > skipped:
            scale, good, skipped = scale / 2, 0, skipped + 1
        else:
            good += 1
            if good == 3:
                scale, good = scale * 2, 0
        state = session.state
        for leaf in (
            state.loss_scale.scale,
            state.loss_scale.good_steps,
            state.skipped,
            state.step,
        ):
            copies = {float(np.asarray(shard.data)) for shard in leaf.addressable_shards}
            assert len(copies) == 1, "devices disagree"
        assert float(state.loss_scale.scale) == scale
    assert skipped > 0, "2^22 is too much for fp16 cotangents"
    assert skipped < 16, "no step fitted"
    assert np.isfinite(metrics["loss"])
    assert all(np.isfinite(leaf).all() for leaf in values(session.state.params))


def test_a_window_of_finite_steps_doubles_the_scale(
    own: jaxtrain.Experiment, opened: Opened, stepped: Stepped
) -> None:
    precision = Precision(compute=jnp.float16, loss_scale=LossScale(initial=4.0, window=2))
    session = opened(replace(own, precision=precision))
    scales = [stepped(session)["loss_scale"] for _ in range(5)]
    assert scales == [4.0, 4.0, 8.0, 8.0, 16.0]


def test_a_loss_scale_changes_nothing_that_is_learned(
    own: jaxtrain.Experiment, opened: Opened, stepped: Stepped
) -> None:
    """A power of two, in fp32: to the bit."""
    runs = []
    for scale in (None, LossScale(initial=2.0**10)):
        session = opened(replace(own, precision=Precision(loss_scale=scale)), data=2)
        losses = [stepped(session)["loss"] for _ in range(3)]
        runs.append((losses, values(session.state.params)))
    assert runs[0][0] == runs[1][0]
    assert same(runs[0][1], runs[1][1])


def test_ema_is_the_recursion_of_the_weights(
    own: jaxtrain.Experiment, opened: Opened, stepped: Stepped
) -> None:
    session = opened(replace(own, ema_decay=0.75), fsdp=2)
    expected = values(session.state.params)
    assert same(values(session.state.ema), expected), "starts at the weights"
    for step in range(30):
        stepped(session)
        now = values(session.state.params)
        kept = min(0.75, (1 + step) / (10 + step))  # a young average forgets its start sooner
        expected = [kept * e + (1 - kept) * p for e, p in zip(expected, now, strict=True)]
        for found, wanted in zip(values(session.state.ema), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)
    assert not same(values(session.state.ema), now)


@pytest.mark.parametrize("bound", [None, 1e-3, 1e3])
def test_plain_gradient_descent_moves_by_rate_times_clipped_gradient(
    own: jaxtrain.Experiment, opened: Opened, stepped: Stepped, bound: float | None
) -> None:
    session = opened(replace(own, clip_norm=bound), data=2)
    for _ in range(3):
        before = np.concatenate([v.ravel() for v in values(session.state.params)])
        metrics = stepped(session)
        after = np.concatenate([v.ravel() for v in values(session.state.params)])
        length = min(metrics["grad_norm"], bound or np.inf)
        assert metrics["grad_norm"] > 1e-3
        assert metrics["update_norm"] == pytest.approx(0.5 * length, rel=1e-5)
        assert np.linalg.norm(after - before) == pytest.approx(0.5 * length, rel=1e-4)
        assert metrics["param_norm"] == pytest.approx(np.linalg.norm(after), rel=1e-6)


@pytest.mark.parametrize("schedule", [WarmupLinear(0.5, warmup=3)], ids=["warm-up"])
@pytest.mark.parametrize("reference", [None, 2 * BATCH])
def test_the_rate_reported_is_the_one_applied_and_waits_for_skipped_steps(
    own: jaxtrain.Experiment,
    opened: Opened,
    stepped: Stepped,
    poisoned: Any,
    schedule: Any,
    reference: Any,
) -> None:
    rate = schedule if reference is None else ScaledRate(schedule, reference_batch=reference)
    factor = 1.0 if reference is None else 0.5**0.5
    experiment = replace(
        own,
        data=poisoned(own.data, row=BATCH),
        optimizer=replace(own.optimizer, learning_rate=rate),
    )
    session = opened(experiment)
    # warm-up over (1 .. 3) / 4 of the peak; the second step is skipped and its rate comes again.
    for i, share in enumerate((0.25, 0.5, 0.5, 0.75, 1.0)):
        metrics = stepped(session)
        assert metrics["learning_rate"] == pytest.approx(0.5 * share * factor, rel=1e-6)
        if i != 1:
            applied = metrics["update_norm"] / metrics["grad_norm"]
            assert applied == pytest.approx(metrics["learning_rate"], rel=1e-5)


def test_a_ramps_rates_are_those_of_its_largest_batch(
    own: jaxtrain.Experiment, opened: Opened, stepped: Stepped
) -> None:
    """The rate is scaled by the batch that most of the run has, in every step of it."""
    rate = ScaledRate(0.5, reference_batch=BATCH)
    ramp = jaxtrain.data.BatchRamp(start=BATCH, end=4 * BATCH, increment=3 * BATCH, steps=2)
    session = opened(replace(own, batch=ramp, optimizer=replace(own.optimizer, learning_rate=rate)))
    assert session.assembly.abstract_batch()["tokens"].shape == (1, 4 * BATCH, 8)
    for step in range(4):
        metrics = stepped(session)
        assert metrics["weight"] == (BATCH if step < 2 else 4 * BATCH) * 8
        assert metrics["learning_rate"] == pytest.approx(0.5 * 4**0.5)
        applied = metrics["update_norm"] / metrics["grad_norm"]
        assert applied == pytest.approx(0.5 * 4**0.5, rel=1e-5)


class Drawn(nnx.Module):
    """Its loss is a number drawn with the key, and no parameter's doing."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.idle = nnx.Param(jnp.ones((2, 2)), axes=("embed", "mlp"))

    def loss(self, batch: dict[str, jax.Array], *, key: Any) -> tuple[jax.Array, jax.Array]:
        drawn = jnp.float32(0.0) if key is None else jax.random.uniform(key)
        return drawn + 0.0 * jnp.sum(self.idle[...]), jnp.float32(1.0)


def drawn(rngs: nnx.Rngs) -> Drawn:
    return Drawn(rngs)


def test_every_step_and_microbatch_draws_anew_and_a_seed_the_same(
    own: jaxtrain.Experiment, opened: Opened, stepped: Stepped
) -> None:
    runs = []
    for changes in ({}, {}, {"seed": 1}, {"microbatches": 4}):
        session = opened(replace(own, model=drawn, **changes))
        runs.append([stepped(session)["loss"] for _ in range(4)])
    assert runs[0] == runs[1]
    assert len({loss for run in runs for loss in run}) == 12
    # One draw taken four times would be the mean of four, whose first is that of one microbatch.
    assert all(abs(a - b) > 1e-4 for a, b in zip(runs[0], runs[3], strict=True))


class Endless(nnx.Module):
    """Its loss is infinite, and every gradient finite."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.matrix = nnx.Param(jnp.ones((2, 2)), axes=("embed", "mlp"))

    def loss(self, batch: dict[str, jax.Array], *, key: Any) -> tuple[jax.Array, jax.Array]:
        return jnp.sum(self.matrix[...]) + jnp.float32(jnp.inf), jnp.float32(1.0)


def endless(rngs: nnx.Rngs) -> Endless:
    return Endless(rngs)


def test_a_step_whose_loss_is_not_finite_is_skipped_too(
    own: jaxtrain.Experiment, opened: Opened, stepped: Stepped
) -> None:
    session = opened(replace(own, model=endless))
    before = kept(session.state)
    metrics = stepped(session)
    assert np.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 1
    assert metrics["skipped"] == 1 and same(kept(session.state), before)


@pytest.mark.parametrize(
    ("model", "microbatches"), [("own", 1), ("own", 2), ("own", 4), ("decoder", 2)]
)
def test_weight_is_the_sum_of_the_batch_and_divides_the_loss(
    request: pytest.FixtureRequest, opened: Opened, microbatches: int, model: str
) -> None:
    experiment = request.getfixturevalue(model)
    data = replace(experiment.data, isolate_documents=True)
    session = opened(replace(experiment, data=data, microbatches=microbatches), data=2)
    _, batch = session.loader.next()
    rows = session.dataset.rows(np.arange(BATCH))
    metrics = session.step(batch)
    assert float(metrics["weight"]) == rows["weights"].sum() < rows["weights"].size
    if model == "decoder":
        assert float(metrics["loss"]) == pytest.approx(np.log(16), abs=0.1), "nats a weighted token"


def test_a_donated_state_is_replaced_whole(
    own: jaxtrain.Experiment, opened: Opened, stepped: Stepped
) -> None:
    session = opened(own, fsdp=2)
    before = jax.tree.leaves(session.state)
    stepped(session)
    assert session.alive()
    assert any(leaf.is_deleted() for leaf in before), "the old state's buffers are used again"


@pytest.mark.parametrize("check_vma", [True, False])
def test_evaluation_checks_replication_as_training_does(
    decoder: jaxtrain.Experiment, check_vma: bool
) -> None:
    execution = jaxtrain.Execution("explicit", check_vma=check_vma)
    spec = jaxtrain.mesh_from_axes(data=2, fsdp=2, tensor=2)
    assembly = assemble(replace(decoder, execution=execution), spec)
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "fsdp", "tensor"))
    step = make_evaluation_step(assembly, active_mesh(mesh, assembly.sizes))
    state = assembly.abstract
    traced = jax.make_jaxpr(step)(state.params, state.model_state, assembly.abstract_batch())
    assert f"check_vma={check_vma}" in str(traced)
