"""The train step, and the evaluation step beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.collectives.compressed import Compressed
from jaxtrain.collectives.vary import vary
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
from jaxtrain.step.guard import make_watch
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

    choice: how a compressed reducer sums. metrics: loss (nats a weighted token), what the model
    sums beside it over the same weight, weight (tokens that counted), grad_norm, param_norm,
    update_norm, learning_rate (where it is known), loss_scale, skipped (so far), all fp32; those of
    `make_watch` and `routing_metrics`; `keep_gradients`: those before clipping, and of buffers.
    """
    e, buffers = assembly.experiment, assembly.buffers
    sums = make_gradients(assembly, mesh, choice)
    watch = make_watch(assembly, mesh, choice)
    update = make_update(assembly, mesh)
    norm = partial(global_norms, assembly=assembly, mesh=mesh)
    rate, counted = make_rate(assembly), partial(routing_metrics, assembly, mesh)
    step_key = named_key(jax.random.key(e.seed), "step")

    def step(state: TrainState, batch: Arrays) -> tuple[TrainState, Metrics]:
        scale = state.loss_scale.scale if state.loss_scale else jnp.float32(1.0)
        # The loss is a sum over tokens; a loss scale is meant for their mean.
        seed = scale / assembly.tokens_power_of_two(batch)
        key = jax.random.fold_in(step_key, state.step)
        seeded = with_seed(state.params, buffers.tallies, seed)
        g = sums(seeded, state.rest, batch, key, seed, usable_codec_state(state.residuals))
        count = jnp.where(g.sums.count > 0, g.sums.count, 1.0)
        summed = without_buffers(g.grads, buffers), g.exact
        grads, exact = jax.tree.map(lambda x: x / (count * seed), summed)
        (grad_norm,) = norm((grads,), "optimizer")
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(g.sums.loss)
        verdict, compared = watch(grads, exact, state)
        clipped = grads
        if e.clip_norm is not None:
            clipped = clip_by_global_norm(grads, grad_norm, e.clip_norm)
        params, optimizer, updates = update(state, clipped)
        (update_norm,) = norm((updates,), "optimizer")
        (param_norm,) = norm((without_buffers({**state.params, **params}, buffers),), "params")
        ema = updated_averages(state, params, e.ema_decay)
        params |= next_buffers(assembly, state.params, g.grads)
        found = (params, optimizer, g.rest, ema, g.residuals)
        after = next_state(state, found, finite, verdict, assembly)
        metrics = {
            **{name: total / count for name, total in g.sums.beside.items()},
            "loss": g.sums.loss / count,
            "weight": g.sums.count,
            "grad_norm": grad_norm,
            "param_norm": param_norm,
            "update_norm": update_norm,
            "loss_scale": scale,
            "skipped": after.skipped.astype(jnp.float32),
        }
        metrics |= rate(state, optimizer) | compared | counted(g.grads, count)
        return after, metrics | ({"gradients": g.grads | grads} if keep_gradients else {})

    return assembly.with_matmul_precision(step)


def make_update(
    assembly: Assembly, mesh: jax.sharding.Mesh
) -> Callable[[TrainState, Arrays], tuple[Arrays, Any, Any]]:
    """(state, gradients) -> (the trained parameters after the optimizer, as they rest; its state;
    what was added)."""
    transform = assembly.transform_on(mesh)

    def update(state: TrainState, grads: Arrays) -> tuple[Arrays, Any, Any]:
        shards = assembly.constrain({k: state.params[k] for k in grads}, mesh, "optimizer")
        updates, taken = transform.update(grads, state.optimizer, shards)
        optimizer = jax.tree.map(lambda new, old: new.astype(old.dtype), taken, state.optimizer)
        return (
            to_rest_sharding(optax.apply_updates(shards, updates), assembly, mesh),
            optimizer,
            updates,
        )

    return update


def next_state(
    state: TrainState, found: tuple[Any, ...], finite: jax.Array, verdict: Any, assembly: Assembly
) -> TrainState:
    """The state one step later: with what was `found` (trained parameters and scales, optimizer
    state, rest, averages, residuals) where the gradients are finite, else as it was. verdict: on
    compressed sums; it stands after a skipped step too, for its sums may be why it is one."""
    trained = {k: state.params[k] for k in found[0]}
    kept = (trained, state.optimizer, state.rest, state.ema, codec_state(state.residuals))
    params, optimizer, rest, ema, residuals = select_if_finite(finite, found, kept)
    return TrainState(
        step=state.step + 1,
        params={**state.params, **params},
        optimizer=optimizer,
        rest=rest,
        ema=ema,
        loss_scale=assembly.next_scale(state.loss_scale, finite),
        skipped=state.skipped + ~finite,
        residuals=residuals | verdict,
    )


def make_rate(assembly: Assembly) -> Callable[[TrainState, Any], Metrics]:
    """(state, optimizer state after the step) -> the step's learning_rate: of our optimizers by
    their schedule; of a user's own where its state says one, as `optax.inject_hyperparams` does."""
    e = assembly.experiment
    if type(e.optimizer) in (*ELEMENTWISE, *SHARDED):
        rate = rate_fn(e.optimizer.learning_rate, steps=e.steps, batch=assembly.largest_batch)
        return lambda state, _: {"learning_rate": rate(state.step - state.skipped)}

    def said(_: TrainState, taken: Any) -> Metrics:
        found = injected_rate(taken)
        return {} if found is None else {"learning_rate": found.astype(jnp.float32)}

    return said


def make_loss(assembly: Assembly, comm: Communicator | None) -> LossFunction:
    """(params, rest, microbatch, key or None) -> (loss, count and what is beside, rest after)."""
    static = assembly.split.static
    if assembly.description is None:
        return own_loss(static, compute=assembly.experiment.precision.compute)

    def loss(params: Arrays, rest: Arrays, batch: Arrays, key: Any) -> tuple[LossSums, Arrays]:
        model = put_together(static, {**params, **rest})
        sums = model.loss(batch, key=key, comm=comm, loop=assembly.loop)
        refuse_other_sums(assembly.described.sums, sums)
        return sums, rest

    return loss


def trace_loss(assembly: Assembly) -> None:
    """A user's own loss, traced on one microbatch as a step and an evaluation call it. Raises
    ValueError for fields that it reads and the batch does not have, and for its answer."""
    batch = {
        name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        for name, leaf in assembly.abstract_batch().items()
    }
    params, rest = assembly.abstract.params, assembly.abstract.rest
    loss = assembly.with_matmul_precision(make_loss(assembly, None))
    jax.eval_shape(loss, params, rest, batch, jax.eval_shape(lambda: jax.random.key(0)))
    jax.eval_shape(lambda *arrays: loss(*arrays, None), params, rest, batch)


def make_gradients(
    assembly: Assembly, mesh: jax.sharding.Mesh, choice: Choice
) -> Callable[..., Gradients]:
    """(params, rest, batch, key, scale, residuals) -> Gradients, in the assembly's mode."""
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
    """How gradients are summed once a step: exactly, or as `choice` has it of a compressed
    reducer."""
    reducer = assembly.experiment.execution.reducer
    if not isinstance(reducer, Compressed):
        return ExactSums(reduction)
    splits = assembly.splits.residuals
    specs = jax.tree.map(lambda _, d: partition_spec(d), assembly.abstract.residuals, splits)
    compressed = CompressedSums(reducer, assembly.parts, choice)
    return WithCompression(reduction, compressed, codec_state(specs))


def local_sums(assembly: Assembly, reduction: Reduction) -> LocalSums:
    """What a device makes of its rows: one microbatch after another, or in a pipeline."""
    comm = explicit_communicator(assembly, reduction)
    if assembly.pipeline is not None:
        return pipeline_sums(assembly, comm, reduction)
    loss = make_loss(assembly, comm if reduction.sharded else comm.whole())
    return microbatch_sums(loss, reduction, comm.fetch_once)


def make_reduction(assembly: Assembly) -> Reduction:
    """How the explicit step's gradients reach the optimizer's split."""
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
    """Parameters that the optimizer's split was updated in, as they rest."""
    if assembly.explicit:
        reduction, check_vma = make_reduction(assembly), assembly.check_vma
        params = gather_updated_params(params, mesh=mesh, reduction=reduction, check_vma=check_vma)
    return assembly.constrain(params, mesh, "params")


def global_norms(
    trees: tuple[Any, ...], table: str, *, assembly: Assembly, mesh: jax.sharding.Mesh
) -> jax.Array:
    """2-norms of trees that rest as `table` says."""
    splits = {k: getattr(place, table) for k, place in assembly.places.items()}
    return jnp.sqrt(squared_norm(trees, splits=splits, mesh=mesh if assembly.explicit else None))


def make_evaluation_step(assembly: Assembly, mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    """(params, rest, batch) -> loss, count and what is summed beside them, no dropout; batch:
    [`evaluated_at_once`, rows, ...], which is one batch, or several on their way through a
    pipeline."""

    def one_by(comm: Communicator) -> Callable[..., LossSums]:
        loss = make_loss(assembly, comm)

        def of_batch(params: Arrays, rest: Arrays, batch: Arrays) -> LossSums:
            return loss(params, rest, jax.tree.map(lambda x: x[0], batch), None)[0]

        return of_batch

    if not assembly.explicit:
        return assembly.with_matmul_precision(one_by(gspmd_communicator(assembly, mesh)))
    comm = explicit_communicator(assembly)
    on_device = one_by(comm) if assembly.pipeline is None else pipeline_loss(assembly, comm)

    def summed(params: Arrays, rest: Arrays, batch: Arrays) -> LossSums:
        axes = tuple(assembly.sizes)
        params, batch = jax.tree.map(lambda x: vary(x, axes), (params, batch))
        return all_reduce_sums(on_device(params, rest, batch), axes)

    run = jax.shard_map(
        summed,
        mesh=mesh,
        in_specs=(
            {k: partition_spec(p.params) for k, p in assembly.places.items()},
            {},
            assembly.batch_specs,
        ),
        out_specs=partition_spec(()),
        check_vma=assembly.check_vma,
    )
    return assembly.with_matmul_precision(run)


def compile_step(
    assembly: Assembly,
    mesh: jax.sharding.Mesh,
    shardings: TrainState,
    batch: Any = None,
    choice: Choice = Choice(),  # noqa: B008 (frozen)
) -> Any:
    """The compiled `make_train_step` for the shapes of `batch` (arrays or ShapeDtypeStructs), state
    donated."""
    traced = trace_step(assembly, mesh, shardings, batch, choice)
    return traced.lower().compile(compiler_options=assembly.compiler_options or None)


def trace_step(
    assembly: Assembly,
    mesh: jax.sharding.Mesh,
    shardings: TrainState,
    batch: Any = None,
    choice: Choice = Choice(),  # noqa: B008 (frozen)
) -> Any:
    """What `compile_step` compiles, with its jaxpr."""
    return jax.jit(
        make_train_step(assembly, mesh, choice=choice),
        donate_argnums=0,
        in_shardings=(shardings, assembly.batch_shardings(mesh)),
        out_shardings=(shardings, named_sharding(mesh, ())),
        keep_unused=True,  # the arguments are the state and the batch, whatever is read of them
    ).trace(assembly.abstract, batch or assembly.abstract_batch())
