"""The train step and the evaluation step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.arrays import Leaves
from jaxtrain.collectives.vary import vary
from jaxtrain.compression.residuals import codec_state
from jaxtrain.compression.sums import Choice
from jaxtrain.losses.cross_entropy import LossSums
from jaxtrain.mesh.sharding import named_sharding, partition_spec
from jaxtrain.models.buffers import without_buffers
from jaxtrain.nn.param import named_key
from jaxtrain.optim.gradients import clip_by_global_norm
from jaxtrain.optim.optimizer import ELEMENTWISE, SHARDED
from jaxtrain.optim.precision import select_if_finite
from jaxtrain.optim.rate import injected_rate, rate_fn
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.communicators import explicit_communicator, gspmd_communicator
from jaxtrain.step.gradients import (
    all_reduce_sums,
    gather_updated_params,
    squared_norm,
)
from jaxtrain.step.losses import make_loss
from jaxtrain.step.mean_gradients import MeanGradients, make_mean_gradients, make_reduction
from jaxtrain.step.pipeline import pipeline_loss
from jaxtrain.step.routing import next_buffers
from jaxtrain.step.state import TrainState, updated_averages

Metrics = dict[str, jax.Array]
StepFunction = Callable[[TrainState, Leaves], tuple[TrainState, Metrics]]


def make_train_step(
    assembly: Assembly,
    mesh: jax.sharding.Mesh,
    *,
    keep_gradients: bool = False,
    choice: Choice = Choice(),  # noqa: B008 (frozen)
) -> StepFunction:
    """(state, batch) -> (state, metrics), to be jitted with the state donated.

    choice: how a compressed reducer sums. metrics: those of `MeanGradients`, grad_norm, param_norm,
    update_norm, learning_rate (if known), loss_scale, skipped (so far), all fp32; with
    `keep_gradients` the gradients before clipping, and those of buffers.
    """
    e, buffers = assembly.experiment, assembly.buffers
    gradients, update = make_mean_gradients(assembly, mesh, choice), make_update(assembly, mesh)
    norm = partial(global_norms, assembly=assembly, mesh=mesh)
    rate, step_key = make_rate(assembly), named_key(jax.random.key(e.seed), "step")

    def step(state: TrainState, batch: Leaves) -> tuple[TrainState, Metrics]:
        scale = state.loss_scale.scale if state.loss_scale else jnp.float32(1.0)
        # The loss is a sum over tokens; a loss scale is for their mean.
        grad_scale = scale / assembly.tokens_power_of_two(batch)
        key = jax.random.fold_in(step_key, state.step)
        new = gradients(state, batch, grad_scale, key)
        (grad_norm,) = norm((new.grads,), "optimizer")
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(new.loss)
        grads = clip_by_global_norm(new.grads, grad_norm, e.clip_norm)
        params, optimizer, updates = update(state, grads)
        (update_norm,) = norm((updates,), "optimizer")
        (param_norm,) = norm((without_buffers({**state.params, **params}, buffers),), "params")
        ema = updated_averages(state, params, e.ema_decay)
        params |= next_buffers(assembly, state.params, new.buffers)
        updated = next_state(assembly, state, new, params, optimizer, ema, finite)
        metrics = new.metrics | rate(state, optimizer)
        metrics |= {"grad_norm": grad_norm, "param_norm": param_norm, "update_norm": update_norm}
        metrics |= {"loss_scale": scale, "skipped": updated.skipped.astype(jnp.float32)}
        kept: Any = {"gradients": new.buffers | new.grads} if keep_gradients else {}
        return updated, metrics | kept

    return assembly.with_matmul_precision(step)


def make_update(
    assembly: Assembly, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Leaves], tuple[Leaves, Any, Any]]:
    """(state, gradients) -> (the updated trained parameters, sharded as at rest; the optimizer's
    new state; the updates)."""
    transform = assembly.transform_on(mesh)

    def update(state: TrainState, grads: Leaves) -> tuple[Leaves, Any, Any]:
        shards = assembly.constrain({k: state.params[k] for k in grads}, mesh, "optimizer")
        updates, updated = transform.update(grads, state.optimizer, shards)
        optimizer = jax.tree.map(lambda new, old: new.astype(old.dtype), updated, state.optimizer)
        return (
            to_rest_sharding(optax.apply_updates(shards, updates), assembly, mesh),
            optimizer,
            updates,
        )

    return update


def next_state(
    assembly: Assembly,
    state: TrainState,
    new: MeanGradients,
    params: Leaves,
    optimizer: Any,
    ema: Leaves,
    finite: jax.Array,
) -> TrainState:
    """Returns the next state: with the new values if the gradients are finite, else with the old
    ones, but for the state of a reducer's guard: its sums may be the cause. params: trained ones
    and scales."""
    old = {k: state.params[k] for k in params}
    previous = (old, state.optimizer, state.model_state, state.ema, codec_state(state.residuals))
    updated = (params, optimizer, new.model_state, ema, new.codec_state)
    params, optimizer, model_state, ema, residuals = select_if_finite(finite, updated, previous)
    return TrainState(
        step=state.step + 1,
        params={**state.params, **params},
        optimizer=optimizer,
        model_state=model_state,
        ema=ema,
        loss_scale=assembly.next_scale(state.loss_scale, finite),
        skipped=state.skipped + ~finite,
        residuals=residuals | new.guard_state,
    )


def make_rate(assembly: Assembly) -> Callable[[TrainState, Any], Metrics]:
    """(state, new optimizer state) -> the step's learning_rate. Our optimizers have a schedule; a
    user's own may have one in its state, as `optax.inject_hyperparams` does."""
    e = assembly.experiment
    if type(e.optimizer) in (*ELEMENTWISE, *SHARDED):
        rate = rate_fn(e.optimizer.learning_rate, steps=e.steps, batch=assembly.largest_batch)
        return lambda state, _: {"learning_rate": rate(state.step - state.skipped)}

    def said(_: TrainState, optimizer: Any) -> Metrics:
        rate = injected_rate(optimizer)
        return {} if rate is None else {"learning_rate": rate.astype(jnp.float32)}

    return said


def to_rest_sharding(params: Any, assembly: Assembly, mesh: jax.sharding.Mesh) -> Leaves:
    """Reshards parameters from the optimizer's split to their sharding at rest."""
    if assembly.explicit:
        reduction, check_vma = make_reduction(assembly), assembly.check_vma
        params = gather_updated_params(params, mesh=mesh, reduction=reduction, check_vma=check_vma)
    return assembly.constrain(params, mesh, "params")


def global_norms(
    trees: tuple[Any, ...], table: str, *, assembly: Assembly, mesh: jax.sharding.Mesh
) -> jax.Array:
    """2-norms of trees that are sharded by `table`."""
    splits = {k: getattr(place, table) for k, place in assembly.places.items()}
    return jnp.sqrt(squared_norm(trees, splits=splits, mesh=mesh if assembly.explicit else None))


def evaluation_loss(assembly: Assembly, mesh: jax.sharding.Mesh) -> Callable[..., LossSums]:
    """(params, model state, batch [`evaluated_at_once`, rows, ...]) -> LossSums without dropout; in
    the explicit mode a device's shares, inside shard_map. One batch, or several in a pipeline."""
    if assembly.pipeline is not None:
        return pipeline_loss(assembly, explicit_communicator(assembly))
    explicit = assembly.explicit
    loss = make_loss(
        assembly,
        explicit_communicator(assembly) if explicit else gspmd_communicator(assembly, mesh),
    )

    def of_batch(params: Leaves, model_state: Leaves, batch: Leaves) -> LossSums:
        return loss(params, model_state, jax.tree.map(lambda x: x[0], batch), None)[0]

    return of_batch


def evaluated_on(
    assembly: Assembly,
    mesh: jax.sharding.Mesh,
    on_device: Callable[..., Any],
    total: Callable[[Any], Any],
    out_specs: Any,
) -> Callable[..., Any]:
    """Returns `on_device`, of (params, model state, batch), for arrays on the mesh. In explicit
    mode it runs inside shard_map, and `total` adds the devices' shares."""
    if not assembly.explicit:
        return assembly.with_matmul_precision(on_device)

    def added(params: Leaves, model_state: Leaves, batch: Leaves) -> Any:
        varied = jax.tree.map(lambda x: vary(x, tuple(assembly.sizes)), (params, batch))
        return total(on_device(varied[0], model_state, varied[1]))

    params = {k: partition_spec(p.params) for k, p in assembly.places.items()}
    specs: Any = dict(in_specs=(params, {}, assembly.batch_specs), out_specs=out_specs)
    run = jax.shard_map(added, mesh=mesh, check_vma=assembly.check_vma, **specs)
    return assembly.with_matmul_precision(run)


def make_evaluation_step(assembly: Assembly, mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    """`evaluation_loss` of arrays on the mesh, summed over devices."""
    total = partial(all_reduce_sums, axes=tuple(assembly.sizes))
    return evaluated_on(assembly, mesh, evaluation_loss(assembly, mesh), total, partition_spec(()))


def compile_step(
    assembly: Assembly,
    mesh: jax.sharding.Mesh,
    shardings: TrainState,
    batch: Any = None,
    choice: Choice = Choice(),  # noqa: B008 (frozen)
) -> Any:
    """Compiles `make_train_step` for the shapes of `batch` (arrays or ShapeDtypeStructs), with the
    state donated."""
    traced = trace_step(assembly, mesh, shardings, batch, choice)
    return traced.lower().compile(compiler_options=assembly.compiler_options or None)


def trace_step(
    assembly: Assembly,
    mesh: jax.sharding.Mesh,
    shardings: TrainState,
    batch: Any = None,
    choice: Choice = Choice(),  # noqa: B008 (frozen)
) -> Any:
    """Traces the program that `compile_step` compiles, with its jaxpr."""
    return jax.jit(
        make_train_step(assembly, mesh, choice=choice),
        donate_argnums=0,
        in_shardings=(shardings, assembly.batch_shardings(mesh)),
        out_shardings=(shardings, named_sharding(mesh, ())),
        keep_unused=True,  # the arguments are the state and the complete batch
    ).trace(assembly.abstract, batch or assembly.abstract_batch())
