"""Softmax attention over one tile of the scores, and the sum of tiles: what kernels are built of.

Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Dao 2023, FlashAttention-2
(algorithms 1 and 2). A tile's queries are [n, group * block, head_dim] and its keys and values
[n, keys, head_dim], with n = rows * kv_heads and group = heads / kv_heads: queries that share keys
lie in one matmul. Matmuls and softmax accumulate in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

MASKED = -1e30
"""Logit of a hidden key: finite, so that a wholly hidden row of a tile makes no NaN."""


@dataclass(frozen=True)
class AttentionMask:
    """What a query sees by position alone: with `causal` no later key, with `window` w only keys
    i-w+1 .. i. Raises ValueError for a window below 1 or one that is not causal."""

    causal: bool = True
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} sees no key; use 1 or more, or None for all")
        if self.window is not None and not self.causal:
            raise ValueError(
                f"window={self.window} counts keys before the query and needs causal=True; "
                "set causal=True or window=None"
            )

    def visible(self, queries: Any, keys: Any) -> Any:
        """Boolean [q, k] of positions `queries` [q, 1] and `keys` [1, k]."""
        distance = queries - keys
        if not self.causal:
            return (distance >= 0) | (distance < 0)
        seen = distance >= 0
        return seen if self.window is None else seen & (distance < self.window)

    def tile(self, queries: range, keys: range) -> tuple[bool, bool]:
        """(some of the tile is visible, all of it is)."""
        least, most = queries[0] - keys[-1], queries[-1] - keys[0]
        if not self.causal:
            return True, True
        limit = most + 1 if self.window is None else self.window
        return most >= 0 and least < limit, least >= 0 and most < limit

    def keys(self, queries: range, seq: int) -> range:
        """The shortest run of keys that holds all that these queries see."""
        start = 0 if self.window is None else max(0, queries[0] - self.window + 1)
        return range(start, queries[-1] + 1 if self.causal else seq)


@dataclass(frozen=True)
class Scoring:
    """All that is static between q.k and its logit: softcap * tanh(scale * q.k / softcap), or
    scale * q.k without a softcap, hidden where the mask or the segments say so."""

    mask: AttentionMask
    scale: float
    softcap: float | None = None


class Partial(NamedTuple):
    """Softmax over some of the keys: weighted sum of values, largest logit, sum of exponentials.

    [.., queries, head_dim], [.., queries, 1], [.., queries, 1], fp32.
    """

    o: jax.Array
    largest: jax.Array
    total: jax.Array


class Queries(NamedTuple):
    """What the backward pass knows of each query, [.., queries, head_dim or 1]: the query, the
    cotangent of its output, its log-sum-exp, and delta = o . do."""

    q: jax.Array
    do: jax.Array
    lse: jax.Array
    delta: jax.Array


def forward_tile(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: Any, scoring: Scoring
) -> Partial:
    """visible: [1 or rows, block, keys], or None when the tile is seen whole."""
    logits = _hide(_scores(q, k, scoring), visible)
    largest = jnp.max(logits, axis=2, keepdims=True)
    weights = jnp.exp(logits - largest)
    total = jnp.sum(weights, axis=2, keepdims=True)
    return Partial(_dot(weights.astype(v.dtype), v, 2, 1), largest, total)


def merge(a: Partial, b: Partial) -> Partial:
    """The softmax over both sets of keys."""
    largest = jnp.maximum(a.largest, b.largest)
    # Rescale first: either part was summed against its own largest logit.
    left, right = jnp.exp(a.largest - largest), jnp.exp(b.largest - largest)
    return Partial(a.o * left + b.o * right, largest, a.total * left + b.total * right)


def normalise(found: Partial) -> tuple[jax.Array, jax.Array]:
    """The output, and the log-sum-exp of the logits [.., queries, 1]."""
    return found.o / found.total, found.largest + jnp.log(found.total)


def backward_tile(
    rows: Queries, k: jax.Array, v: jax.Array, visible: Any, scoring: Scoring
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq [n, queries, head_dim], and dk and dv as [n, head_dim, keys], of one tile, fp32.

    The gradients of keys come out transposed: XLA:CPU runs that matmul 2.5 times as fast as the
    one whose left side is a transposed tile.
    """
    scores = _scores(rows.q, k, scoring)
    weights = jnp.exp(_hide(scores, visible) - rows.lse)
    dscores = weights * (_dot(rows.do, v, 2, 2) - rows.delta)
    if scoring.softcap is not None:
        dscores = dscores * (1 - jnp.square(scores / scoring.softcap))
    dscores = (dscores * scoring.scale).astype(k.dtype)
    dv = _dot(rows.do, weights.astype(rows.do.dtype), 1, 1)
    return _dot(dscores, k, 2, 1), _dot(rows.q, dscores, 1, 1), dv


def _dot(a: jax.Array, b: jax.Array, dim_a: int, dim_b: int) -> jax.Array:
    dims = (((dim_a,), (dim_b,)), ((0,), (0,)))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _scores(q: jax.Array, k: jax.Array, scoring: Scoring) -> jax.Array:
    scores = _dot(q, k, 2, 2) * scoring.scale
    cap = scoring.softcap
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def _hide(scores: jax.Array, visible: Any) -> jax.Array:
    """scores [n, group * block, keys] where visible [1 or rows, block, keys]."""
    if visible is None:
        return scores
    (n, queries, keys), (rows, block, _) = scores.shape, visible.shape
    shape = (rows, n // rows, queries // block, block, keys)
    spread = jnp.broadcast_to(visible[:, None, None], shape)
    return jnp.where(spread.reshape(scores.shape), scores, MASKED)
