"""Packed documents, as attention kernels are told of them: where each token's document starts.

A row holds documents one behind the other. `starts` [batch, seq] says of every position which is
the first of its document: two tokens are of one document where their starts are equal, and a causal
query at i sees the keys from starts[i] to i. So it is an id and a bound in one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

Starts = Int[Array, "batch seq"]
TwoStarts = tuple[Starts, Starts]
"""Those of queries and of keys, where they are of different places of a row: numbers that say which
are of one document, and no place of either."""


def document_starts(segments: Int[Array, "batch seq"]) -> Starts:
    """Returns the first position of each position's document, a run of equal `segments`. Padding,
    segment 0, is a document too."""
    positions = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return _running_max(jnp.where(begins, positions, 0))


def _running_max(x: Int[Array, "batch seq"]) -> Int[Array, "batch seq"]:
    """Returns the running maximum. Long rows are done block by block: the TPUs' compiler needs half
    a minute for a running maximum of 131,072."""
    batch, seq = x.shape
    if seq <= LONG or seq % BLOCK:
        return lax.cummax(x, axis=1)
    within = lax.cummax(x.reshape(batch, seq // BLOCK, BLOCK), axis=2)
    previous = lax.cummax(within[:, :-1, -1], axis=1)
    previous = jnp.pad(previous, ((0, 0), (1, 0)))  # no position is below 0
    return jnp.maximum(within, previous[:, :, None]).reshape(batch, seq)


LONG, BLOCK = 8192, 512
"""Tokens."""


class Documents(NamedTuple):
    """Documents as a table with room for some, all rows' one behind the other.

    lengths in tokens, 0 where there is no document. firsts: the token of the whole batch with which
    each begins, the number of tokens where there is none, and once more at the end. number: of each
    token, which document it is of. count: of documents; of more than there is room for the
    last are missing.
    """

    lengths: Int[Array, " room"]
    firsts: Int[Array, " room+1"]
    number: Int[Array, "batch seq"]
    count: Int[Array, ""]


def table(starts: Starts, room: int) -> Documents:
    """The documents of `starts`, up to `room` of them."""
    batch, seq = starts.shape
    begins = (starts == jnp.arange(seq, dtype=jnp.int32)[None]).reshape(-1)
    number = jnp.cumsum(begins, dtype=jnp.int32) - 1
    # What there is no room for is written beyond the end, and so not at all.
    to = jnp.where(begins, number, room + 1)
    tokens = jnp.arange(batch * seq, dtype=jnp.int32)
    firsts = jnp.full(room + 1, batch * seq, jnp.int32).at[to].set(tokens, mode="drop")
    return Documents(firsts[1:] - firsts[:-1], firsts, number.reshape(starts.shape), number[-1] + 1)
