"""Softmax attention over one tile of the scores, and the sum of tiles: what kernels are built of.

Milakov & Gimelshein 2018, "Online normalizer calculation for softmax"; Dao 2023, FlashAttention-2
(algorithms 1 and 2). A tile's queries are [n, queries, head_dim] and its keys and values
[n, keys, head_dim], with n = rows * kv_heads: queries = group * block, group = heads / kv_heads, so
that the queries which share keys lie in one matmul. Matmuls and softmax accumulate in fp32.

Of logits s_j = q . k_j over some of the keys a tile knows m = max_j s_j, l = sum_j exp(s_j - m) and
o = sum_j exp(s_j - m) v_j (`Partial`). Two sets of keys are merged by

    m = max(m1, m2),  l = l1 exp(m1 - m) + l2 exp(m2 - m),  o = o1 exp(m1 - m) + o2 exp(m2 - m)

and over all keys the output is o / l, and the log-sum-exp m + log l.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

from jaxtrain.scores.function import ScoreFunction, ScoreTile, changed

MASKED = -1e30
"""Logit of a hidden key: finite, so that a wholly hidden row of a tile makes no NaN."""


@dataclass(frozen=True)
class AttentionMask:
    """Mask by position alone.

    causal: a query sees no later key. window: query i sees only keys i-window+1 .. i.
    offset: positions from the first key to the first query, if they are at different places of a
    row. Raises ValueError for a window below 1 or one that is not causal.
    """

    causal: bool = True
    window: int | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} sees no key; use 1 or more, or None for all")
        if self.window is not None and not self.causal:
            raise ValueError(
                f"window={self.window} counts keys before the query and needs causal=True; "
                "set causal=True or window=None"
            )

    def visible(
        self, queries: Int[Array, "queries 1"], keys: Int[Array, "1 keys"]
    ) -> Bool[Array, "queries keys"]:
        """Returns the mask of queries and keys with these numbers."""
        return self.sees(queries - keys + self.offset if self.offset else queries - keys)

    def sees(self, distance: Int[Array, ...]) -> Bool[Array, ...]:
        """Returns the mask of queries and keys that are so many positions apart."""
        if not self.causal:
            return (distance >= 0) | (distance < 0)
        visible = distance >= 0
        return visible if self.window is None else visible & (distance < self.window)

    def tile(self, queries: range, keys: range) -> tuple[bool, bool]:
        """Returns whether any score of a tile is visible, and whether all are."""
        least, most = (a + self.offset for a in (queries[0] - keys[-1], queries[-1] - keys[0]))
        if not self.causal:
            return True, True
        limit = most + 1 if self.window is None else self.window
        return most >= 0 and least < limit, least >= 0 and most < limit

    def keys(self, queries: range, seq: int) -> range:
        """The shortest run of keys that holds all that these queries see."""
        first, last = queries[0] + self.offset, queries[-1] + self.offset
        start = 0 if self.window is None else max(0, first - self.window + 1)
        return range(start, min(last + 1, seq) if self.causal else seq)


@dataclass(frozen=True)
class Scoring:
    """Static part of a logit: softcap * tanh(scale * q.k / softcap), or scale * q.k without a
    softcap, and `function` of that if there is one, where the mask and the documents let a query
    see a key. A kernel is then given `ScoreInputs` in the place of starts."""

    mask: AttentionMask
    scale: float
    softcap: float | None = None
    function: ScoreFunction | None = None


class Partial(NamedTuple):
    """Softmax over some of the keys: weighted sum of values, largest logit, sum of exponentials."""

    o: Float32[Array, "n queries head_dim"]
    largest: Float32[Array, "n queries 1"]
    total: Float32[Array, "n queries 1"]


Visible = Bool[Array, "rows block keys"]
"""Which keys each query of a tile sees; rows: those of the batch, or 1 where all see the same."""


class Queries(NamedTuple):
    """Inputs of the backward pass for each query: the query, the cotangent of its output, its
    log-sum-exp, and delta = o . do. Shapes: [n, queries, ..] in a tile, [n, group, seq, ..] in a
    chunk."""

    q: Float[Array, "... head_dim"]
    do: Float[Array, "... head_dim"]
    lse: Float32[Array, "... 1"]
    delta: Float32[Array, "... 1"]


def forward_tile(
    q: Float[Array, "n queries head_dim"],
    k: Float[Array, "n keys head_dim"],
    v: Float[Array, "n keys head_dim"],
    visible: Visible | None,
    scoring: Scoring,
    at: ScoreTile | None = None,
) -> Partial:
    """The softmax of a tile's queries over its keys alone. `visible`: which keys each query sees,
    None where it is all of them. at: where the tile is, if scores have a function."""
    scores = _scores(q, k, scoring)
    logits = _hide(scores if at is None else at.changed(scores, visible), visible)
    largest = jnp.max(logits, axis=2, keepdims=True)
    weights = jnp.exp(logits - largest)
    total = jnp.sum(weights, axis=2, keepdims=True)
    return Partial(_dot(weights.astype(v.dtype), v, 2, 1), largest, total)


def merge(a: Partial, b: Partial) -> Partial:
    """The softmax over two sets of keys together, from that over each."""
    largest = jnp.maximum(a.largest, b.largest)
    # Rescale first: either part was summed against its own largest logit.
    left, right = jnp.exp(a.largest - largest), jnp.exp(b.largest - largest)
    return Partial(a.o * left + b.o * right, largest, a.total * left + b.total * right)


def normalise(
    partial: Partial,
) -> tuple[Float32[Array, "n queries head_dim"], Float32[Array, "n queries 1"]]:
    """Returns the output, and the log-sum-exp of the logits."""
    return partial.o / partial.total, partial.largest + jnp.log(partial.total)


def backward_tile(
    rows: Queries,
    k: Float[Array, "n keys head_dim"],
    v: Float[Array, "n keys head_dim"],
    visible: Visible | None,
    scoring: Scoring,
    at: ScoreTile | None = None,
) -> tuple[jax.Array, ...]:
    """dq [n, queries, head_dim], and dk and dv transposed [n, head_dim, keys], of one tile: its
    part of sums over all tiles; all fp32. at: as in `forward_tile`. If the model learns the values
    of its heads, then also their gradient, of their shape.

    The gradients of keys come out transposed: XLA:CPU runs that matmul 2.5 times as fast as the
    one whose left side is a transposed tile.
    """
    # Dao 2023, algorithm 2: with the weights p_ij = exp(s_ij - lse_i) made again,
    #   dv_j = sum_i p_ij do_i,  dp_ij = do_i . v_j,  ds_ij = p_ij (dp_ij - delta_i),
    #   dq_i = scale sum_j ds_ij k_j,  dk_j = scale sum_i ds_ij q_i;
    # delta_i = sum_j p_ij dp_ij = o_i . do_i comes of the softmax's denominator. A softcap c puts
    # the derivative of its tanh, 1 - (s_ij / c)^2, to ds_ij. A function of s_ij is pulled back.
    scores = _scores(rows.q, k, scoring)
    logits, pull_back = changed(scores, visible, at)
    weights = jnp.exp(_hide(logits, visible) - rows.lse)
    dscores, *of_heads = pull_back(weights * (_dot(rows.do, v, 2, 2) - rows.delta))
    if scoring.softcap is not None:
        dscores = dscores * (1 - jnp.square(scores / scoring.softcap))
    dscores = (dscores * scoring.scale).astype(k.dtype)
    dv = _dot(rows.do, weights.astype(rows.do.dtype), 1, 1)
    return _dot(dscores, k, 2, 1), _dot(rows.q, dscores, 1, 1), dv, *of_heads


def _dot(
    a: Float[Array, "n _ _"], b: Float[Array, "n _ _"], dim_a: int, dim_b: int
) -> Float32[Array, "n _ _"]:
    """a @ b for each of n, contracted over these dims, in fp32."""
    dims = (((dim_a,), (dim_b,)), ((0,), (0,)))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _scores(
    q: Float[Array, "n queries head_dim"], k: Float[Array, "n keys head_dim"], scoring: Scoring
) -> Float32[Array, "n queries keys"]:
    scores = _dot(q, k, 2, 2) * scoring.scale
    cap = scoring.softcap
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def _hide(
    scores: Float32[Array, "n queries keys"], visible: Visible | None
) -> Float32[Array, "n queries keys"]:
    """`scores` of the keys that are seen, MASKED of the others."""
    if visible is None:
        return scores
    (n, queries, keys), (rows, block, _) = scores.shape, visible.shape
    shape = (rows, n // rows, queries // block, block, keys)
    spread = jnp.broadcast_to(visible[:, None, None], shape)
    return jnp.where(spread.reshape(scores.shape), scores, MASKED)
