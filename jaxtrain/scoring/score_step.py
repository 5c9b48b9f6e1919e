"""The program that gives a loss for each token, where an evaluation gives their sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxtrain.collectives.named import sum_over
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.train_step import evaluated_on, evaluation_loss

Arrays = dict[str, Any]


def make_score_step(
    assembly: Assembly, mesh: jax.sharding.Mesh, weights: str
) -> Callable[[Arrays, Arrays, Arrays], jax.Array]:
    """(params, model state, batch [`evaluated_at_once`, rows, ...]) -> losses in nats, fp32, with
    the shape and sharding of the batch's field `weights`.

    The summed loss is linear in the weights of tokens, so its derivative with respect to them is
    each token's loss: the number that training multiplies by the weight, to the bit.
    """
    on_device = evaluation_loss(assembly, mesh)

    def losses(params: Arrays, model_state: Arrays, batch: Arrays) -> jax.Array:
        def total(values: jax.Array) -> jax.Array:
            return on_device(params, model_state, {**batch, weights: values}).loss

        return jax.grad(total)(batch[weights])

    split_axes = {axis for dim in assembly.batch_splits[weights] for axis in dim}
    replicated = tuple(axis for axis in assembly.sizes if axis not in split_axes)
    # Devices that have the same token have shares of its loss.
    total = partial(sum_over, "loss", axes=replicated)
    return evaluated_on(assembly, mesh, losses, total, assembly.batch_specs[weights])
