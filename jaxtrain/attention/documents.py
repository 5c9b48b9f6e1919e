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

from jaxtrain.scores.function import HeadValues

Starts = Int[Array, "batch seq"]
TwoStarts = tuple[Starts, Starts]
"""Those of queries and of keys, where they are of different places of a row: numbers that say which
are of one document, and no place of either."""


class ScoreInputs(NamedTuple):
    """What a kernel is given in the place of document starts where scores have a function.

    starts: the document starts. heads: entries of `of_heads` of this call's heads. positions: in
    their document, of queries and of keys; None where the rows are whole, which `places` counts.
    """

    starts: Starts | TwoStarts | None
    heads: HeadValues
    positions: TwoStarts | None = None

    def places(self, batch: int, seq: int) -> TwoStarts:
        """Returns the positions of queries and keys, [batch, seq] each."""
        if self.positions is not None:
            return self.positions
        assert not isinstance(self.starts, tuple), "parts of rows come with their positions"
        positions = row_positions(self.starts, batch, seq)
        return positions, positions


Located = Starts | TwoStarts | ScoreInputs | None
"""A kernel's fourth argument, which says where tokens are: document starts, None where a row is one
document, and with them what a function of scores needs."""


def documents_of(starts: Located) -> Starts | TwoStarts | None:
    """Returns the document starts among a kernel's inputs."""
    return starts.starts if isinstance(starts, ScoreInputs) else starts


def row_positions(starts: Starts | None, batch: int, seq: int) -> Int[Array, "batch seq"]:
    """Returns the position in its document of each token of whole rows."""
    positions = jnp.arange(seq, dtype=jnp.int32)[None]
    return jnp.broadcast_to(positions, (batch, seq)) if starts is None else positions - starts


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
    """Documents of all rows, one behind the other.

    lengths: in tokens, 0 beyond the last document. firsts: the token of the whole batch with which
    each begins, the number of tokens beyond the last one. number: of each token, which document it
    is of. position: of each token, in its document.
    """

    lengths: Int[Array, " tokens"]
    firsts: Int[Array, " tokens"]
    number: Int[Array, "batch seq"]
    position: Int[Array, "batch seq"]


class Group(NamedTuple):
    """Documents of some lengths, as a table with room for some of them.

    lengths, firsts: as in `Documents`; firsts ends with the number of tokens once more. slot: of
    each token, which entry its document is, `room` where it is in none. count: of documents, those
    without an entry too.
    """

    lengths: Int[Array, " room"]
    firsts: Int[Array, " room+1"]
    slot: Int[Array, "batch seq"]
    count: Int[Array, ""]


def table(starts: Starts) -> Documents:
    """Returns the documents of `starts`."""
    batch, seq = starts.shape
    position = jnp.arange(seq, dtype=jnp.int32)[None] - starts
    begins = (position == 0).reshape(-1)
    number, tokens = jnp.cumsum(begins, dtype=jnp.int32) - 1, begins.size
    # What does not begin a document is written beyond the end, and so not at all.
    to = jnp.where(begins, number, tokens + 1)
    every = jnp.arange(tokens, dtype=jnp.int32)
    firsts = jnp.full(tokens + 1, tokens, jnp.int32).at[to].set(every, mode="drop")
    lengths = firsts[1:] - firsts[:-1]
    return Documents(lengths, firsts[:-1], number.reshape(batch, seq), position)


def group(documents: Documents, above: int, longest: int, room: int) -> Group:
    """Returns the documents of more than `above` and at most `longest` tokens, the first `room` of
    them in the table."""
    lengths, tokens = documents.lengths, documents.lengths.size
    belongs = (lengths > above) & (lengths <= longest)
    ranks = jnp.cumsum(belongs, dtype=jnp.int32) - 1
    slots = jnp.where(belongs & (ranks < room), ranks, room)

    def entries(values: Array, size: int, beyond: int) -> Array:
        return jnp.full(size, beyond, jnp.int32).at[slots].set(values, mode="drop")

    firsts = jnp.append(entries(documents.firsts, room, tokens), jnp.int32(tokens))
    of_token = slots[documents.number]
    return Group(entries(lengths, room, 0), firsts, of_token, ranks[-1] + 1)
