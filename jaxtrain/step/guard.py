"""Distance of compressed sums from the exact ones, and the guard that bounds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.arrays import Leaves
from jaxtrain.compression.compressed import Compressed, Guard
from jaxtrain.compression.sums import Choice
from jaxtrain.mesh.axes import Dims
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.gradients import squared_norm
from jaxtrain.step.state import TrainState

Compare = Callable[[Leaves, Leaves, TrainState], tuple[Leaves, dict[str, jax.Array]]]


def make_compare(assembly: Assembly, mesh: jax.sharding.Mesh, choice: Choice) -> Compare:
    """(mean gradients, exact ones where measured, previous state) -> (guard state, metrics), for
    steps of a compressed reducer. guard state: `tripped` of the new residuals.

    metrics: `compressed`, 1 if any of the step's sums were; in a measured step `reducer_error`,
    |compressed - exact| / |exact| over all compressed leaves, and `reducer_cosine`; with a guard
    `guard_tripped`, the step (counted from 0) whose sample was beyond its bounds, or -1.
    """
    reducer = assembly.experiment.execution.reducer
    if not isinstance(reducer, Compressed):
        return lambda grads, exact, state: ({}, {})
    guard = reducer.guard
    acts = any(part.takes(choice.codec) for part in assembly.parts.values())
    splits = {k: assembly.places[k].optimizer for k in assembly.parts}

    def compare(
        grads: Leaves, exact: Leaves, state: TrainState
    ) -> tuple[Leaves, dict[str, jax.Array]]:
        tripped = state.residuals["tripped"]
        metrics = {"compressed": jnp.float32(acts)}
        if guard is not None and choice.measured and acts:
            sums = {k: grads[k] for k in exact}
            measured = distance(sums, exact, splits=splits, mesh=mesh)
            metrics |= {"reducer_error": measured.error, "reducer_cosine": measured.cosine}
            tripped = jnp.where(beyond(guard, measured) & (tripped < 0), state.step, tripped)
        if guard is not None:
            metrics["guard_tripped"] = tripped.astype(jnp.float32)
        return {"tripped": tripped}, metrics

    return compare


class Distance(NamedTuple):
    """Distance of compressed sums from exact ones, all leaves as one vector. NaN if either is not
    finite; error 0 and cosine 1 between zero vectors."""

    error: jax.Array
    """|compressed - exact| / |exact|."""
    cosine: jax.Array
    comparable: jax.Array
    """True if the exact sums can serve as a reference: finite, and not all zero unless the
    compressed ones are not finite."""


def distance(
    compressed: Leaves, exact: Leaves, *, splits: Mapping[str, Dims], mesh: jax.sharding.Mesh | None
) -> Distance:
    """Returns the distance of `compressed` from `exact`, both split by `splits`. Squares are in
    fp32, so norms between 1e-18 and 1e18 are distinguished."""

    def lengths(*trees: Leaves) -> jax.Array:
        return jnp.sqrt(squared_norm(trees, splits=splits, mesh=mesh))

    def over(tree: Leaves, length: jax.Array) -> Leaves:
        return {k: x / jnp.where(length == 0, 1.0, length) for k, x in tree.items()}

    size, true = lengths(compressed, exact)
    # The cosine comes from the chord between the directions: from norms it would cancel.
    unit, true_unit = over(compressed, size), over(exact, true)
    apart = {k: compressed[k] - exact[k] for k in exact}
    lost, chord = lengths(apart, {k: unit[k] - true_unit[k] for k in exact})
    cosine = jnp.clip(1 - jnp.square(chord) / 2, -1, 1)
    cosine = jnp.where((size == 0) | (true == 0), jnp.where(lost == 0, 1.0, 0.0), cosine)
    finite = jnp.isfinite(size)
    valid = finite & jnp.isfinite(true)
    return Distance(
        error=jnp.where(valid, jnp.where(lost == 0, 0.0, lost / true), jnp.nan),
        cosine=jnp.where(valid, cosine, jnp.nan),
        comparable=jnp.isfinite(true) & ((true > 0) | ~finite),
    )


def beyond(guard: Guard, measured: Distance) -> jax.Array:
    """True if the error or the cosine is beyond its bound, or is not a number."""
    wrong = jnp.bool_(False)
    if guard.max_error is not None:
        wrong |= ~(measured.error <= guard.max_error)
    if guard.min_cosine is not None:
        wrong |= ~(measured.cosine >= guard.min_cosine)
    return wrong & measured.comparable
