"""Dropout whose mask is a function of (name, step, layer, row, position), whatever the mesh.

Srivastava et al. 2014. Each token's key is folded from the step's key, the name, the layer and the
token's global row and position, so a device makes the mask of its own tokens only and makes the
same one that any other mesh would.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxtrain.collectives.vary import Index
from jaxtrain.nn.param import named_key


class DropoutKeys(NamedTuple):
    """The step's key, and the global row and position of each token that is here."""

    key: Key[Array, ""]
    rows: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]


def dropout(
    x: Float[Array, "tokens embed"],
    rate: float,
    keys: DropoutKeys | None,
    *,
    name: str,
    layer: Index = 0,
) -> Float[Array, "tokens embed"]:
    """x with a share `rate` of its elements zeroed and the rest divided by 1 - rate.

    name, layer: of the place in the model, each with masks of its own. `keys=None` (evaluation) or
    `rate=0` returns x.
    """
    if keys is None or rate == 0.0:
        return x
    base = jax.random.fold_in(named_key(keys.key, name), layer)

    def keep(row: Int[Array, ""], position: Int[Array, ""]) -> Bool[Array, " embed"]:
        key = jax.random.fold_in(jax.random.fold_in(base, row), position)
        return jax.random.bernoulli(key, 1.0 - rate, x.shape[1:])

    mask = jax.vmap(keep)(keys.rows, keys.positions)
    return jnp.where(mask, x / (1.0 - rate), jnp.zeros((), x.dtype)).astype(x.dtype)
