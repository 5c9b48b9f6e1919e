"""Dropout whose mask is a function of (name, step, layer, row, position), whatever the mesh.

Srivastava et al. 2014. Each token's key is folded from the step's key, the name, the layer and the
token's global row and position, so a device makes the mask of its own tokens only and makes the
same one that any other mesh would.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.nn.param import named_key


class DropoutKeys(NamedTuple):
    """The step's key, and the global row and position of each local token [tokens]."""

    key: jax.Array
    rows: jax.Array
    positions: jax.Array


def dropout(
    x: jax.Array, rate: float, keys: DropoutKeys | None, *, name: str, layer: Any = 0
) -> jax.Array:
    """x [tokens, embed] with a share `rate` of its elements zeroed and the rest scaled up.

    `keys=None` (evaluation) or `rate=0` returns x.
    """
    if keys is None or rate == 0.0:
        return x
    base = jax.random.fold_in(named_key(keys.key, name), layer)

    def keep(row: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(base, row), position)
        return jax.random.bernoulli(key, 1.0 - rate, x.shape[1:])

    mask = jax.vmap(keep)(keys.rows, keys.positions)
    return jnp.where(mask, x / (1.0 - rate), jnp.zeros((), x.dtype)).astype(x.dtype)
