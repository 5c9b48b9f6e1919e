"""Pure functions of gradients and weights around the update: norm, clipping, moving average."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PyTree

Tree = TypeVar("Tree")


def clip_by_global_norm(grads: Tree, norm: Float[Array, ""], max_norm: float | None) -> Tree:
    """Returns `grads` scaled to a global norm of at most `max_norm` (Pascanu et al. 2013, alg. 1);
    as they are with None.

    `norm` is their global norm, computed by the caller, who logs it as well. Below `max_norm` the
    bits are unchanged. Raises ValueError unless max_norm > 0.
    """
    if max_norm is None:
        return grads
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be above 0; use 1.0, or leave clipping out")
    factor = max_norm / jnp.maximum(norm.astype(jnp.float32), max_norm)
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)


def warmed_decay(decay: float, step: jax.typing.ArrayLike) -> Float32[Array, ""]:
    """min(decay, (1 + step) / (10 + step)): a young average forgets its start sooner.

    TensorFlow's ExponentialMovingAverage with `num_updates`.
    """
    now = jnp.asarray(step, jnp.float32)
    return jnp.minimum(decay, (1.0 + now) / (10.0 + now))


def ema_update(
    ema: Tree, params: PyTree, decay: float, step: jax.typing.ArrayLike, *, warmup: bool = False
) -> Tree:
    """Returns decay x ema + (1 - decay) x params, computed in fp32, in the dtype of `ema`.

    Polyak & Juditsky 1992 as an exponential average. `step` counts updates from 0 and matters only
    with `warmup`, which replaces the decay by `warmed_decay`. Non-floating leaves are taken from
    `params`. Raises ValueError unless 0 <= decay < 1.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay={decay} must lie in [0, 1); use for example decay=0.999")
    factor = warmed_decay(decay, step) if warmup else jnp.float32(decay)

    def blend(old: jax.Array, new: jax.Array) -> jax.Array:
        if not jnp.issubdtype(old.dtype, jnp.floating):
            return new
        mixed = factor * old.astype(jnp.float32) + (1.0 - factor) * new.astype(jnp.float32)
        return mixed.astype(old.dtype)

    return jax.tree.map(blend, ema, params)
