"""Tokens traded for heads: of a group of devices each has all tokens of some heads, or some tokens
of all heads (Jacobs et al. 2023, DeepSpeed-Ulysses).

What is traded is [batch, tokens, heads, ...]; a device's number in its group is its place among the
tokens and among the heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.attention.documents import ScoreInputs
from jaxtrain.collectives.algorithm import all_to_all
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.ring import permute, put, take
from jaxtrain.collectives.vary import vary, varying_axes
from jaxtrain.mesh.axes import MeshAxes

TOKENS, HEADS = 1, 2
"""Dims."""


def to_heads(arrays: tuple[jax.Array, ...], axes: MeshAxes, group: int) -> tuple[jax.Array, ...]:
    """[batch, tokens, heads, d] -> [batch, tokens * group, heads / group, d] of each, all by one
    all-to-all within every `group` devices of `axes` that are side by side."""
    apart = [x.reshape(*x.shape[:2], group, -1, x.shape[3]) for x in arrays]
    together = jnp.concatenate(apart, axis=3)
    traded = _trade(together, axes, group, HEADS, TOKENS)[:, :, 0]
    return tuple(jnp.split(traded, np.cumsum([x.shape[3] for x in apart])[:-1], axis=HEADS))


def of_traded_heads(starts: Any, axes: MeshAxes, group: int) -> Any:
    """Returns the starts of whole rows with the values of the heads that a device has after
    `to_heads`, where scores have a function."""
    if not isinstance(starts, ScoreInputs):
        return starts
    me = lax.axis_index(axes) % group
    return starts._replace(heads=take(starts.heads, me, group, 0))


def to_tokens(x: jax.Array, axes: MeshAxes, group: int) -> jax.Array:
    """The way back: [batch, tokens, heads, d] -> [batch, tokens / group, heads * group, d]."""
    return _trade(x, axes, group, TOKENS, HEADS)


def _trade(x: jax.Array, axes: MeshAxes, group: int, split: int, concat: int) -> jax.Array:
    if group == lax.axis_size(axes):
        return all_to_all(x, axes, split, concat, Lax())
    return _grouped(vary(x, axes), axes, group, split, concat)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _grouped(x: jax.Array, axes: MeshAxes, group: int, split: int, concat: int) -> jax.Array:
    """Returns an all-to-all within groups of devices. It is made of one permute for each distance,
    since types and the planner know permutes already."""
    n, me = lax.axis_size(axes), lax.axis_index(axes) % group
    own = take(x, me, group, split)
    shape = list(own.shape)
    shape[concat] *= group
    out = put(vary(jnp.zeros(shape, x.dtype), varying_axes(x)), own, me, group, concat)
    for far in range(1, group):
        pairs = [(i, i // group * group + (i + far) % group) for i in range(n)]
        arrived = permute(take(x, me + far, group, split), axes, pairs)
        out = put(out, arrived, me - far, group, concat)
    return out


_grouped.defvjp(
    lambda x, axes, group, split, concat: (_grouped(x, axes, group, split, concat), None),
    lambda axes, group, split, concat, _, dy: (_grouped(dy, axes, group, concat, split),),
)
