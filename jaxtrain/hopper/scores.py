"""Logits of a tile of `BLOCK` queries and keys, and the derivatives of its scores.

Called while Mosaic traces a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.attention.online_softmax import MASKED, AttentionMask, Scoring
from jaxtrain.hopper.functions import with_slopes
from jaxtrain.hopper.tiles import BLOCK, across, columns, down, rows
from jaxtrain.scores.function import LOWEST

PullBack = Callable[[jax.Array], tuple[jax.Array, ...]]
"""Gradients of a tile's products, and of the head's value for each query if the model learns it,
from those of logits."""


class RowInputs(NamedTuple):
    """Arrays that logits depend on besides queries and keys, in the memory of the device.

    starts [batch, seq]: where each token's document begins, None without documents. positions
    [batch, seq], in their documents, and head_values [heads]: of a function of scores, None without
    one.
    """

    starts: Any = None
    positions: Any = None
    head_values: Any = None

    @classmethod
    def of(cls, arrays: SimpleNamespace) -> RowInputs:
        """Returns those among the arrays of a kernel."""
        return cls(*(getattr(arrays, name) for name in cls._fields))

    def place(self, batch: jax.Array, head: jax.Array, query: jax.Array) -> TilePlace:
        """Returns the place of the tile of queries from `query` on, beside the first keys."""
        starts, positions = (
            None if array is None else rows(array.at[batch], query)
            for array in (self.starts, self.positions)
        )
        value = None if self.head_values is None else self.head_values[head]
        last = None if self.starts is None else self.starts[batch, query + BLOCK - 1]
        return TilePlace(query, jnp.int32(0), starts, last, positions, head=value)

    def beside(self, place: TilePlace, batch: jax.Array, key: jax.Array) -> TilePlace:
        """Returns the place of these queries and of the keys from `key` on."""
        if self.positions is None:
            return place._replace(key=key)
        return place._replace(key=key, key_positions=columns(self.positions.at[batch], key))

    def first_start(self, batch: jax.Array, query: jax.Array) -> jax.Array | None:
        """Returns where the document of a query begins."""
        return None if self.starts is None else self.starts[batch, query]


class TilePlace(NamedTuple):
    """Place of a tile: its first query and key. starts: of each query, where its document begins;
    last_start: of the last query, the greatest. positions, key_positions: of queries and keys in
    their documents. head: the function's value for the head. None where there are no documents, or
    no function."""

    query: jax.Array
    key: jax.Array
    starts: jax.Array | None = None
    last_start: jax.Array | None = None
    positions: jax.Array | None = None
    key_positions: jax.Array | None = None
    head: jax.Array | None = None


def tile_logits(
    products: jax.Array, place: TilePlace, scoring: Scoring
) -> tuple[jax.Array, PullBack]:
    """Returns the logits of a tile, MASKED where a query does not see a key, and the function that
    takes their gradients back."""
    scores, cap = products * scoring.scale, scoring.softcap
    if cap is not None:
        scores = cap * jnp.tanh(scores / cap)
    logits, pull = _changed(scores, place, scoring)

    def pull_back(gradients: jax.Array) -> tuple[jax.Array, ...]:
        of_scores, *of_head = pull(gradients)
        if cap is not None:
            of_scores = of_scores * (1 - jnp.square(scores / cap))
        return of_scores * scoring.scale, *(jnp.sum(x, axis=1) for x in of_head)

    return logits, pull_back


def _changed(
    scores: jax.Array, place: TilePlace, scoring: Scoring
) -> tuple[jax.Array, Callable[[jax.Array], tuple[jax.Array, ...]]]:
    mask, function = scoring.mask, scoring.function
    if function is None:
        if not mask.causal:
            return scores, lambda gradients: (gradients,)
        hidden = lambda: jnp.where(_visible(scores, place, mask), scores, MASKED)  # noqa: E731
        return lax.cond(whole(place, mask), lambda: scores, hidden), lambda gradients: (gradients,)
    positions, of_keys, head = place.positions, place.key_positions, place.head
    assert positions is not None and of_keys is not None and head is not None, "a kernel loads them"
    visible = _visible(scores, place, mask) if mask.causal else None
    queries, keys = across(positions, scores), down(of_keys, scores)
    if visible is not None:
        # A hidden key has the query's own position and a score of 1: there a function has a value
        # and a derivative. A NaN would pass through the mask into gradients.
        keys = jnp.where(visible, keys, queries)
    shown = scores if visible is None else jnp.where(visible, scores, 1.0)
    heads = lax.broadcast_in_dim(head, scores.shape, ())
    changed, *slopes = with_slopes(function, shown, heads, queries, keys)
    logits = jnp.maximum(changed, LOWEST)
    if visible is not None:
        logits = jnp.where(visible, logits, MASKED)
    above = changed > LOWEST  # elsewhere the logit is a constant
    return logits, lambda gradients: tuple(
        jnp.where(above, gradients * slope, 0.0) for slope in slopes
    )


def whole(place: TilePlace, mask: AttentionMask) -> jax.Array:
    """Returns whether a causal mask hides nothing in a tile."""
    nearest = place.query + mask.offset - (place.key + BLOCK - 1)
    seen = nearest >= 0
    if mask.window is not None:
        seen &= nearest + 2 * (BLOCK - 1) < mask.window
    if place.last_start is not None:
        seen &= place.last_start <= place.key
    return seen


def _distance(scores: jax.Array, place: TilePlace, mask: AttentionMask) -> jax.Array:
    """Returns the number of positions from each key to each query."""
    row, column = (lax.broadcasted_iota(jnp.int32, scores.shape, dim) for dim in (0, 1))
    return row - column + (place.query - place.key + mask.offset)


def _visible(scores: jax.Array, place: TilePlace, mask: AttentionMask) -> jax.Array:
    visible = mask.sees(_distance(scores, place, mask))
    if place.starts is not None:
        keys = lax.broadcasted_iota(jnp.int32, scores.shape, 1) + place.key
        visible &= keys >= across(place.starts, scores)
    return visible
