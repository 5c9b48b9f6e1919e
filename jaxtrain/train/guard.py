"""How far compressed sums are from the exact ones, and when that is too far."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.collectives.compressed import Compressed, Guard
from jaxtrain.train.assembly import Assembly
from jaxtrain.train.compressed_sums import Choice
from jaxtrain.train.gradients import Gradients, squared_norm
from jaxtrain.train.state import TrainState

Watch = Callable[[Gradients, TrainState], tuple[dict[str, Any], dict[str, jax.Array]]]


def make_watch(assembly: Assembly, mesh: jax.sharding.Mesh, choice: Choice) -> Watch:
    """(gradients, state before) -> (residuals after, metrics), for steps of a compressed reducer.

    metrics: `compressed`, whether the step's sums were; in a measured step `reducer_error`,
    |compressed - exact| / |exact| over all compressed leaves, and `reducer_cosine`; with a guard
    `guard_tripped`, the step (counted from 0) whose sample was beyond its bounds, or -1.
    """
    reducer = assembly.experiment.execution.reducer
    if not isinstance(reducer, Compressed):
        return lambda g, before: ({}, {})
    guard = reducer.guard
    acts = choice.codec is not None and assembly.explicit

    def watch(g: Gradients, before: TrainState) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        tripped = before.residuals["tripped"]
        metrics = {"compressed": jnp.float32(acts)}
        if guard is not None and choice.measured and acts:
            error, cosine = distance(g, assembly, mesh)
            metrics |= {"reducer_error": error, "reducer_cosine": cosine}
            first = beyond(guard, error, cosine) & (tripped < 0)
            tripped = jnp.where(first, before.step, tripped)
        if guard is not None:
            metrics["guard_tripped"] = tripped.astype(jnp.float32)
        return {**g.residuals, "tripped": tripped}, metrics

    return watch


def beyond(guard: Guard, error: jax.Array, cosine: jax.Array) -> jax.Array:
    """Whether either is on the wrong side of its bound."""
    wrong = jnp.bool_(False)
    if guard.max_error is not None:
        wrong |= error > guard.max_error
    if guard.min_cosine is not None:
        wrong |= cosine < guard.min_cosine
    return wrong


def distance(
    g: Gradients, assembly: Assembly, mesh: jax.sharding.Mesh
) -> tuple[jax.Array, jax.Array]:
    """(relative error, cosine) of the compressed sums, all leaves as one vector. Of the zero vector
    the error is 0 and the cosine 1."""
    made = {k: g.grads[k] for k in g.exact}
    apart = {k: made[k] - exact for k, exact in g.exact.items()}
    splits = {k: assembly.places[k].optimizer for k in g.exact}
    lost, compressed, exact = squared_norm((apart, made, g.exact), splits=splits, mesh=mesh)
    some = (exact > 0) & (compressed > 0)
    cosine = (compressed + exact - lost) / (2 * jnp.sqrt(compressed * exact))
    error = jnp.sqrt(lost / jnp.where(exact > 0, exact, 1))
    return error, jnp.where(some, cosine, jnp.where(lost > 0, 0.0, 1.0))
