"""Gradients of a step's mean loss, and what a compressed reducer keeps and measures of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.arrays import Leaves
from jaxtrain.compression.compressed import Compressed
from jaxtrain.compression.residuals import codec_state, usable_codec_state
from jaxtrain.compression.sums import Choice, CompressedSums
from jaxtrain.mesh.sharding import partition_spec
from jaxtrain.models.buffers import without_buffers
from jaxtrain.models.routers import with_grad_scale
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.communicators import explicit_communicator, gspmd_communicator
from jaxtrain.step.gradients import (
    Gradients,
    LocalSums,
    Reduction,
    StepSums,
    explicit_gradients,
    gspmd_gradients,
    microbatch_sums,
)
from jaxtrain.step.guard import make_compare
from jaxtrain.step.losses import make_loss
from jaxtrain.step.padding import without_padding
from jaxtrain.step.pipeline import pipeline_sums
from jaxtrain.step.routing import routing_metrics
from jaxtrain.step.state import TrainState
from jaxtrain.step.step_sums import ExactSums, WithCompression


class MeanGradients(NamedTuple):
    """Gradients of the mean loss, and all else that a batch gives.

    loss: summed. grads: of trained parameters, in the optimizer's split. buffers: sums that the
    backward pass has left in buffers. model_state: a user model's, after the step. codec_state: of
    compressed sums. guard_state: of their guard, for the next step even if this one is skipped.
    metrics: loss (nats a weighted token), the model's other sums over the same weight, weight
    (number of weighted tokens); those of `make_compare` and `routing_metrics`.
    """

    loss: jax.Array
    grads: Leaves
    buffers: Leaves
    model_state: Leaves
    codec_state: Any
    guard_state: Any
    metrics: dict[str, Any]


def make_mean_gradients(
    assembly: Assembly,
    mesh: jax.sharding.Mesh,
    choice: Choice = Choice(),  # noqa: B008 (frozen)
) -> Callable[[TrainState, Leaves, jax.Array, jax.Array], MeanGradients]:
    """(state, batch, scale, key) -> MeanGradients, in the assembly's mode. scale: of the loss, a
    sum over tokens, while it is differentiated. choice: how a compressed reducer sums."""
    sums, buffers = _make_sums(assembly, mesh, choice), assembly.buffers
    compare = make_compare(assembly, mesh, choice)

    def gradients(
        state: TrainState, batch: Leaves, scale: jax.Array, key: jax.Array
    ) -> MeanGradients:
        params = with_grad_scale(state.params, buffers.tallies, scale)
        residuals = usable_codec_state(state.residuals)
        summed = sums(params, state.model_state, batch, key, scale, residuals)
        trained = without_buffers(summed.grads, buffers)
        count = jnp.where(summed.sums.count > 0, summed.sums.count, 1.0)
        grads, exact = jax.tree.map(lambda g: g / (count * scale), (trained, summed.exact))
        guard_state, reducer_metrics = compare(grads, exact, state)
        in_buffers = {k: g for k, g in summed.grads.items() if k not in trained}
        metrics = {name: total / count for name, total in summed.sums.others.items()}
        metrics |= {"loss": summed.sums.loss / count, "weight": summed.sums.count}
        metrics |= reducer_metrics | routing_metrics(assembly, mesh, in_buffers, count)
        return MeanGradients(
            loss=summed.sums.loss,
            grads=grads,
            buffers=in_buffers,
            model_state=summed.model_state,
            codec_state=summed.residuals,
            guard_state=guard_state,
            metrics=metrics,
        )

    return gradients


def _make_sums(
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

    def constrain(grads: Leaves) -> Leaves:
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
