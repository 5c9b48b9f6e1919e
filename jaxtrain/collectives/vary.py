"""What JAX's types know of a value inside shard_map: over which mesh axes it may differ."""

from __future__ import annotations

import jax
from jax import lax

Axes = tuple[str, ...]


def vary(x: jax.Array, axes: Axes) -> jax.Array:
    """`x` typed as varying over `axes` (nothing moves): inside the step every value varies."""
    present = jax.typeof(x).manual_axis_type.varying
    missing = tuple(a for a in axes if a not in present)
    return lax.pcast(x, missing, to="varying") if missing else x
