"""The loss of a microbatch: of a model with a description, or of a user's own module."""

from __future__ import annotations

from typing import Any

import jax

from jaxtrain.arrays import Leaves
from jaxtrain.losses.cross_entropy import LossSums, refuse_other_sums
from jaxtrain.nn.communicator import Communicator
from jaxtrain.nn.module import put_together
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.gradients import LossFunction
from jaxtrain.step.own_module import own_loss


def make_loss(assembly: Assembly, comm: Communicator | None) -> LossFunction:
    """(params, model state, microbatch, key or None) -> (LossSums, updated model state)."""
    static = assembly.split.static
    if assembly.description is None:
        return own_loss(static, compute=assembly.experiment.precision.compute)

    def loss(params: Leaves, state: Leaves, batch: Leaves, key: Any) -> tuple[LossSums, Leaves]:
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
    params, model_state = assembly.abstract.params, assembly.abstract.model_state
    loss = assembly.with_matmul_precision(make_loss(assembly, None))
    jax.eval_shape(loss, params, model_state, batch, jax.eval_shape(lambda: jax.random.key(0)))
    jax.eval_shape(lambda *arrays: loss(*arrays, None), params, model_state, batch)
