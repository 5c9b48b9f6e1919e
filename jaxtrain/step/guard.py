"""How far compressed sums are from the exact ones, and when that is too far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.collectives.compressed import Compressed, Guard
from jaxtrain.compression.sums import Choice
from jaxtrain.mesh.sharding import Dims
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.gradients import squared_norm
from jaxtrain.step.state import TrainState

Arrays = dict[str, Any]
Watch = Callable[[Arrays, Arrays, TrainState], tuple[Arrays, dict[str, jax.Array]]]


def make_watch(assembly: Assembly, mesh: jax.sharding.Mesh, choice: Choice) -> Watch:
    """(mean gradients, exact ones where measured, state before) -> (verdict, metrics), for steps of
    a compressed reducer. verdict: the `tripped` of the residuals after.

    metrics: `compressed`, whether any of the step's sums were; in a measured step `reducer_error`,
    |compressed - exact| / |exact| over all compressed leaves, and `reducer_cosine`; with a guard
    `guard_tripped`, the step (counted from 0) whose sample was beyond its bounds, or -1.
    """
    reducer = assembly.experiment.execution.reducer
    if not isinstance(reducer, Compressed):
        return lambda grads, exact, before: ({}, {})
    guard = reducer.guard
    acts = any(part.takes(choice.codec) for part in assembly.parts.values())
    splits = {k: assembly.places[k].optimizer for k in assembly.parts}

    def watch(
        grads: Arrays, exact: Arrays, before: TrainState
    ) -> tuple[Arrays, dict[str, jax.Array]]:
        tripped = before.residuals["tripped"]
        metrics = {"compressed": jnp.float32(acts)}
        if guard is not None and choice.measured and acts:
            made = {k: grads[k] for k in exact}
            found = distance(made, exact, splits=splits, mesh=mesh)
            metrics |= {"reducer_error": found.error, "reducer_cosine": found.cosine}
            tripped = jnp.where(beyond(guard, found) & (tripped < 0), before.step, tripped)
        if guard is not None:
            metrics["guard_tripped"] = tripped.astype(jnp.float32)
        return {"tripped": tripped}, metrics

    return watch


class Distance(NamedTuple):
    """Of compressed sums from the exact ones, all leaves as one vector. NaN where either is not
    finite; of the zero vector from itself 0 and 1."""

    error: jax.Array
    """|compressed - exact| / |exact|."""
    cosine: jax.Array
    comparable: jax.Array
    """Whether the exact sums can be judged by: finite, and not all zero unless the others are not
    finite."""


def distance(
    made: Arrays, exact: Arrays, *, splits: Mapping[str, Dims], mesh: jax.sharding.Mesh | None
) -> Distance:
    """The distance of `made` from `exact`, both split as `splits` say; squares are made in fp32, so
    norms between 1e-18 and 1e18 are told apart."""

    def lengths(*trees: Arrays) -> jax.Array:
        return jnp.sqrt(squared_norm(trees, splits=splits, mesh=mesh))

    def over(tree: Arrays, length: jax.Array) -> Arrays:
        return {k: x / jnp.where(length == 0, 1.0, length) for k, x in tree.items()}

    size, true = lengths(made, exact)
    # The cosine from the chord between the directions: from norms it cancels where they differ.
    unit, true_unit = over(made, size), over(exact, true)
    apart = {k: made[k] - exact[k] for k in exact}
    lost, chord = lengths(apart, {k: unit[k] - true_unit[k] for k in exact})
    cosine = jnp.clip(1 - jnp.square(chord) / 2, -1, 1)
    cosine = jnp.where((size == 0) | (true == 0), jnp.where(lost == 0, 1.0, 0.0), cosine)
    finite = jnp.isfinite(size)
    known = finite & jnp.isfinite(true)
    return Distance(
        error=jnp.where(known, jnp.where(lost == 0, 0.0, lost / true), jnp.nan),
        cosine=jnp.where(known, cosine, jnp.nan),
        comparable=jnp.isfinite(true) & ((true > 0) | ~finite),
    )


def beyond(guard: Guard, found: Distance) -> jax.Array:
    """Whether either is on the wrong side of its bound, or not a number."""
    wrong = jnp.bool_(False)
    if guard.max_error is not None:
        wrong |= ~(found.error <= guard.max_error)
    if guard.min_cosine is not None:
        wrong |= ~(found.cosine >= guard.min_cosine)
    return wrong & found.comparable
