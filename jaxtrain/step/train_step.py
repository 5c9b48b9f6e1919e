"""The train step and the evaluation step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.collectives.vary import vary
from jaxtrain.compression.compressed import Compressed
from jaxtrain.compression.residuals import codec_state, usable_codec_state
from jaxtrain.compression.sums import Choice, CompressedSums
from jaxtrain.mesh.sharding import named_sharding, partition_spec
from jaxtrain.models.buffers import without_buffers
from jaxtrain.models.routers import with_seed
from jaxtrain.nn.communicator import Communicator
from jaxtrain.nn.loss import LossSums, refuse_other_sums
from jaxtrain.nn.module import put_together
from jaxtrain.nn.param import named_key
from jaxtrain.optim.gradients import clip_by_global_norm
from jaxtrain.optim.optimizer import ELEMENTWISE, SHARDED
from jaxtrain.optim.precision import select_if_finite
from jaxtrain.optim.rate import injected_rate, rate_fn
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.communicators import explicit_communicator, gspmd_communicator
from jaxtrain.step.gradients import (
    Gradients,
    LocalSums,
    LossFunction,
    Reduction,
    StepSums,
    all_reduce_sums,
    explicit_gradients,
    gather_updated_params,
    gspmd_gradients,
    microbatch_sums,
    squared_norm,
)
from jaxtrain.step.guard import make_compare
from jaxtrain.step.own_module import own_loss
from jaxtrain.step.padding import without_padding
from jaxtrain.step.pipeline import pipeline_loss, pipeline_sums
from jaxtrain.step.routing import next_buffers, routing_metrics
from jaxtrain.step.state import TrainState, updated_averages
from jaxtrain.step.step_sums import ExactSums, WithCompression

Arrays = dict[str, Any]
Metrics = dict[str, jax.Array]
StepFunction = Callable[[TrainState, Arrays], tuple[TrainState, Metrics]]


def make_train_step(
    assembly: Assembly,
    mesh: jax.sharding.Mesh,
    *,
    keep_gradients: bool = False,
    choice: Choice = Choice(),  # noqa: B008 (frozen)
) -> StepFunction:
    """(state, batch) -> (state, metrics), to be jitted with the state donated.

    choice: how a compressed reducer sums. metrics: loss (nats a weighted token), the model's other
    sums over the same weight, weight (number of weighted tokens), grad_norm, param_norm,
    update_norm, learning_rate (if known), loss_scale, skipped (so far), all fp32; those of
    `make_compare` and `routing_metrics`; with `keep_gradients` those before clipping, and of
    buffers.
    """
    e, buffers = assembly.experiment, assembly.buffers
    sums = make_gradients(assembly, mesh, choice)
    compare = make_compare(assembly, mesh, choice)
    update = make_update(assembly, mesh)
    norm = partial(global_norms, assembly=assembly, mesh=mesh)
    rate, counted = make_rate(assembly), partial(routing_metrics, assembly, mesh)
    step_key = named_key(jax.random.key(e.seed), "step")

    def step(state: TrainState, batch: Arrays) -> tuple[TrainState, Metrics]:
        scale = state.loss_scale.scale if state.loss_scale else jnp.float32(1.0)
        # The loss is a sum over tokens; a loss scale is for their mean.
        grad_scale = scale / assembly.tokens_power_of_two(batch)
        key = jax.random.fold_in(step_key, state.step)
        seeded = with_seed(state.params, buffers.tallies, grad_scale)
        g = sums(seeded, state.rest, batch, key, grad_scale, usable_codec_state(state.residuals))
        count = jnp.where(g.sums.count > 0, g.sums.count, 1.0)
        summed = without_buffers(g.grads, buffers), g.exact
        grads, exact = jax.tree.map(lambda x: x / (count * grad_scale), summed)
        (grad_norm,) = norm((grads,), "optimizer")
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(g.sums.loss)
        guard_state, reducer_metrics = compare(grads, exact, state)
        clipped = grads
        if e.clip_norm is not None:
            clipped = clip_by_global_norm(grads, grad_norm, e.clip_norm)
        params, optimizer, updates = update(state, clipped)
        (update_norm,) = norm((updates,), "optimizer")
        (param_norm,) = norm((without_buffers({**state.params, **params}, buffers),), "params")
        ema = updated_averages(state, params, e.ema_decay)
        params |= next_buffers(assembly, state.params, g.grads)
        results = (params, optimizer, g.model_state, ema, g.residuals)
        updated = next_state(state, results, finite, guard_state, assembly)
        metrics = {
            **{name: total / count for name, total in g.sums.beside.items()},
            "loss": g.sums.loss / count,
            "weight": g.sums.count,
            "grad_norm": grad_norm,
            "param_norm": param_norm,
            "update_norm": update_norm,
            "loss_scale": scale,
            "skipped": updated.skipped.astype(jnp.float32),
        }
        metrics |= rate(state, optimizer) | reducer_metrics | counted(g.grads, count)
        return updated, metrics | ({"gradients": g.grads | grads} if keep_gradients else {})

    return assembly.with_matmul_precision(step)


def make_update(
    assembly: Assembly, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Arrays], tuple[Arrays, Any, Any]]:
    """(state, gradients) -> (the updated trained parameters, sharded as at rest; the optimizer's
    new state; the updates)."""
    transform = assembly.transform_on(mesh)

    def update(state: TrainState, grads: Arrays) -> tuple[Arrays, Any, Any]:
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
    state: TrainState, new: tuple[Any, ...], finite: jax.Array, guard: Any, assembly: Assembly
) -> TrainState:
    """Returns the next state: with the values of `new` (trained parameters and scales, optimizer
    state, model state, averages, residuals) if the gradients are finite, else with the old ones.
    guard: state of the guard of compressed sums. It is kept after a skipped step too, since its
    sums may be the cause."""
    trained = {k: state.params[k] for k in new[0]}
    previous = (trained, state.optimizer, state.rest, state.ema, codec_state(state.residuals))
    params, optimizer, model_state, ema, residuals = select_if_finite(finite, new, previous)
    return TrainState(
        step=state.step + 1,
        params={**state.params, **params},
        optimizer=optimizer,
        rest=model_state,
        ema=ema,
        loss_scale=assembly.next_scale(state.loss_scale, finite),
        skipped=state.skipped + ~finite,
        residuals=residuals | guard,
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


def make_loss(assembly: Assembly, comm: Communicator | None) -> LossFunction:
    """(params, model state, microbatch, key or None) -> (LossSums, updated model state)."""
    static = assembly.split.static
    if assembly.description is None:
        return own_loss(static, compute=assembly.experiment.precision.compute)

    def loss(params: Arrays, state: Arrays, batch: Arrays, key: Any) -> tuple[LossSums, Arrays]:
        model = put_together(static, {**params, **state})
        sums = model.loss(batch, key=key, comm=comm, loop=assembly.loop)
        refuse_other_sums(assembly.described.sums, sums)
        return sums, state

    return loss


def trace_loss(assembly: Assembly) -> None:
    """Traces a user's own loss on one microbatch, as a step and an evaluation call it. Raises
    ValueError for fields that it reads and the batch does not have, and for an invalid result."""
    batch = {
        name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        for name, leaf in assembly.abstract_batch().items()
    }
    params, model_state = assembly.abstract.params, assembly.abstract.rest
    loss = assembly.with_matmul_precision(make_loss(assembly, None))
    jax.eval_shape(loss, params, model_state, batch, jax.eval_shape(lambda: jax.random.key(0)))
    jax.eval_shape(lambda *arrays: loss(*arrays, None), params, model_state, batch)


def make_gradients(
    assembly: Assembly, mesh: jax.sharding.Mesh, choice: Choice
) -> Callable[..., Gradients]:
    """(params, model state, batch, key, scale, residuals) -> Gradients, in the assembly's mode."""
    if assembly.explicit:
        reduction = make_reduction(assembly)
        sums = explicit_gradients(
            local_sums(assembly, reduction),
            make_step_sums(assembly, reduction, choice),
            mesh=mesh,
            reduction=reduction,
            batch_specs=assembly.batch_specs,
            check_vma=assembly.check_vma,
        )
        if not isinstance(assembly.experiment.execution.reducer, Compressed):
            return sums
        return lambda *inputs: without_padding(assembly, sums(*inputs))

    def constrain(grads: Arrays) -> Arrays:
        return assembly.constrain(grads, mesh, "optimizer")

    loss = make_loss(assembly, gspmd_communicator(assembly, mesh))
    return gspmd_gradients(loss, constrain=constrain, frozen=assembly.frozen)


def make_step_sums(assembly: Assembly, reduction: Reduction, choice: Choice) -> StepSums:
    """Sums of gradients once a step: exact, or those of a compressed reducer with `choice`."""
    reducer = assembly.experiment.execution.reducer
    if not isinstance(reducer, Compressed):
        return ExactSums(reduction)
    splits = assembly.splits.residuals
    specs = jax.tree.map(lambda _, d: partition_spec(d), assembly.abstract.residuals, splits)
    compressed = CompressedSums(reducer, assembly.parts, choice)
    return WithCompression(reduction, compressed, codec_state(specs))


def local_sums(assembly: Assembly, reduction: Reduction) -> LocalSums:
    """A device's sums over its rows: one microbatch after another, or in a pipeline."""
    comm = explicit_communicator(assembly, reduction)
    if assembly.pipeline is not None:
        return pipeline_sums(assembly, comm, reduction)
    loss = make_loss(assembly, comm if reduction.sharded else comm.pregathered())
    return microbatch_sums(loss, reduction, comm.fetch_once)


def make_reduction(assembly: Assembly) -> Reduction:
    """The reduction from the explicit step's gradients to the optimizer's split."""
    execution = assembly.experiment.execution
    reducer = execution.reducer
    return Reduction(
        assembly.places,
        assembly.sizes,
        assembly.experiment.sharding.accumulate_sharded,
        assembly.collectives.fsdp,
        reducer.by if isinstance(reducer, Compressed) else reducer,
        execution.small_leaf,
        execution.reduce_layers,
    )


def to_rest_sharding(params: Any, assembly: Assembly, mesh: jax.sharding.Mesh) -> Arrays:
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

    def of_batch(params: Arrays, model_state: Arrays, batch: Arrays) -> LossSums:
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

    def added(params: Arrays, model_state: Arrays, batch: Arrays) -> Any:
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
