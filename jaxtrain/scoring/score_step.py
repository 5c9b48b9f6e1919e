"""Programs that give numbers of each token, where an evaluation gives their sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax

from jaxtrain.arrays import Leaves
from jaxtrain.collectives.named import sum_over
from jaxtrain.losses.token_scores import MARKS, TokenScores
from jaxtrain.nn.module import with_attributes
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.train_step import evaluated_on, evaluation_loss


def make_score_step(
    assembly: Assembly, mesh: jax.sharding.Mesh, weights: str
) -> Callable[[Leaves, Leaves, Leaves], jax.Array]:
    """(params, model state, batch [`evaluated_at_once`, rows, ...]) -> losses in nats, fp32, with
    the shape and sharding of the batch's field `weights`.

    The summed loss is linear in the weights of tokens, so its derivative with respect to them is
    each token's loss: the number that training multiplies by the weight, to the bit.
    """
    step = _derivatives(assembly, mesh, (weights,))
    return lambda *arguments: step(*arguments)[0]


def make_token_step(
    assembly: Assembly, mesh: jax.sharding.Mesh, weights: str
) -> Callable[[Leaves, Leaves, Leaves], tuple[jax.Array, ...]]:
    """(params, model state, batch) -> those losses, and 1 where a target is the likeliest id. For
    models whose `leave` honours `objective`; the batch also has `MARKS`, of any numbers."""
    return _derivatives(_with_token_scores(assembly), mesh, (weights, MARKS))


def _derivatives(
    assembly: Assembly, mesh: jax.sharding.Mesh, fields: tuple[str, ...]
) -> Callable[[Leaves, Leaves, Leaves], tuple[jax.Array, ...]]:
    """Returns the program of the loss's derivatives with respect to fields of the batch, which are
    split alike."""
    on_device = evaluation_loss(assembly, mesh)

    def derivatives(params: Leaves, model_state: Leaves, batch: Leaves) -> tuple[jax.Array, ...]:
        def total(values: Leaves) -> jax.Array:
            return on_device(params, model_state, {**batch, **values}).loss

        of_fields = jax.grad(total)({name: batch[name] for name in fields})
        return tuple(of_fields[name] for name in fields)

    split_axes = {axis for dim in assembly.batch_splits[fields[0]] for axis in dim}
    replicated = tuple(axis for axis in assembly.sizes if axis not in split_axes)
    # Devices that have the same token have shares of its loss.
    total = partial(jax.tree.map, partial(sum_over, "loss", axes=replicated))
    specs = tuple(assembly.batch_specs[name] for name in fields)
    return evaluated_on(assembly, mesh, derivatives, total, specs)


def _with_token_scores(assembly: Assembly) -> Assembly:
    """Returns the assembly of the same model with `TokenScores` as its objective."""

    static = with_attributes(assembly.split.static, objective=TokenScores())
    return replace(assembly, split=assembly.split._replace(static=static))
