"""A function of scores: what a subclass has, and how attention calls it.

Whatever splits heads and rows over devices, a function gets values of the model's heads and
positions in a document, so a run is the same on every mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

LOWEST = -5e29
"""Least changed score: finite, and above that of a hidden key."""
HeadValues = Shaped[Array, "heads ..."]
"""Entries of `ScoreFunction.of_heads` of the heads that one call sees."""


@dataclass(frozen=True)
class ScoreFunction:
    """Base of functions of a score. A subclass is a frozen dataclass with `__call__`, and with
    `of_heads` if it needs more than the number of a head. trained: True if the model learns the
    values of `of_heads`, as its leaf `attention.score_values`."""

    trained: ClassVar[bool] = False

    def of_heads(self, heads: int) -> np.ndarray:
        """Returns values for each head of the model, [heads, ...]: here the head's number. Those
        that are learned start so."""
        return np.arange(heads, dtype=np.int32)

    def __call__(
        self, score: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array
    ) -> jax.Array:
        """Returns the changed score of a query and a key; all are scalars of JAX.

        score: scale * q.k, with the softcap if there is one, fp32. head: its entry of `of_heads`.
        query, key: positions in their document, int32. In causal attention key <= query.
        """
        raise NotImplementedError("define __call__(self, score, head, query, key)")


class ScoreTile(NamedTuple):
    """Inputs of a function in a tile: positions, and values of heads. Queries that read one key
    head lie side by side, as in `attention.online_softmax`. causal: no later key is seen,
    of those either whose tile is dropped whole."""

    function: ScoreFunction
    queries: Int[Array, "rows block"]
    keys: Int[Array, "rows keys"]
    heads: Shaped[Array, "kv_heads group ..."]
    causal: bool

    def changed(
        self,
        scores: Float32[Array, "n queries keys"],
        visible: Bool[Array, "_ block keys"] | None,
    ) -> Float32[Array, "n queries keys"]:
        """Returns the changed scores. n = rows * kv_heads, queries = group * block.

        visible: which keys each query sees, None where it is all of them. For hidden ones the
        function gets a score of 1 at the query's own position, where it has a value and a
        derivative: a NaN would pass through the mask into gradients. Scores of -inf become
        `LOWEST`.
        """
        (rows, block), (kv_heads, group) = self.queries.shape, self.heads.shape[:2]
        shape = (rows, kv_heads, group, block, scores.shape[2])
        queries = self.queries[:, :, None]
        keys = jnp.broadcast_to(self.keys[:, None], (rows, block, self.keys.shape[1]))
        keys = jnp.minimum(keys, queries) if self.causal else keys
        scores = scores.reshape(shape)
        if visible is not None:
            keys = jnp.where(visible, keys, queries)
            scores = jnp.where(visible[:, None, None], scores, 1.0)
        of_row = jax.vmap(jax.vmap(self.function, (0, None, None, 0)), (0, None, 0, 0))
        of_heads = jax.vmap(jax.vmap(of_row, (0, 0, None, None)), (0, 0, None, None))
        of_rows = jax.vmap(of_heads, (0, None, 0, 0))
        out = of_rows(scores, self.heads, self.queries, keys).astype(jnp.float32)
        return jnp.maximum(out, LOWEST).reshape(rows * kv_heads, group * block, -1)


def changed(
    scores: Float32[Array, "n queries keys"],
    visible: Bool[Array, "_ block keys"] | None,
    tile: ScoreTile | None,
) -> tuple[Float32[Array, "n queries keys"], Callable[[jax.Array], tuple[jax.Array, ...]]]:
    """Returns a tile's changed scores, and the function that takes their gradient to those of
    scores, and of the heads' values if the model learns them. tile: None without a function."""
    if tile is None:
        return scores, lambda dscores: (dscores,)
    if tile.function.trained:
        run = lambda s, heads: tile._replace(heads=heads).changed(s, visible)  # noqa: E731
        return jax.vjp(run, scores, tile.heads)
    return jax.vjp(lambda s: tile.changed(s, visible), scores)


def dense(
    function: ScoreFunction,
    scores: Float[Array, "batch kv_heads group queries keys"],
    heads: HeadValues,
    positions: tuple[Int[Array, "_ queries"], Int[Array, "_ keys"]],
    visible: Bool[Array, "_ queries keys"],
) -> Float[Array, "batch kv_heads group queries keys"]:
    """Returns the changed scores of all queries and keys."""
    batch, kv_heads, group, queries, keys = scores.shape
    of_q, of_k = (jnp.broadcast_to(x, (batch, x.shape[1])) for x in positions)
    folded = heads.reshape(kv_heads, group, *heads.shape[1:])
    tile = ScoreTile(function, of_q, of_k, folded, causal=False)
    flat = scores.reshape(batch * kv_heads, group * queries, keys)
    return tile.changed(flat, visible).reshape(scores.shape)
