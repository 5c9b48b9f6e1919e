"""Attention by tiles with an online softmax: the seq x seq scores never exist.

Rabe & Staats 2021, "Self-attention does not need O(n^2) memory"; Dao et al. 2022, FlashAttention.
The backward pass keeps (q, k, v, o, lse) and computes the weights of each tile again. Tiles that
the mask hides whole are never computed; which these are is known when the program is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from jaxtrain.attention.documents import Located, ScoreInputs, documents_of
from jaxtrain.attention.fused import Attended, Keys, Query, SavedAttention, attend
from jaxtrain.attention.online_softmax import Queries, Scoring
from jaxtrain.attention.tiling import ArrayTuple, Tiling, backward, fetching_scan, forward, full
from jaxtrain.collectives.vary import Index


@dataclass(frozen=True)
class Blockwise:
    """A kernel: softmax(q k^T) v by tiles of query_block x key_block, in memory linear in seq.

    Costs 7 matmuls of the visible tiles, 2 forward and 5 backward. Runs anywhere, inside
    `jax.shard_map` with `check_vma` True and False too. Has no forward-mode derivative.
    query_block, key_block: a tile's rows and columns; the last of each may be smaller.
    chunk_bytes: batch rows and heads are taken a chunk at a time, as many as keep a tile of scores
    within this, so that it stays in a CPU's cache; None takes all at once, as accelerators want
      and as functions of scores do.
    """

    query_block: int = 128
    key_block: int = 512
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        sizes = {n: getattr(self, n) for n in ("query_block", "key_block", "chunk_bytes")}
        low = [f"{n}={size}" for n, size in sizes.items() if size is not None and size < 1]
        if low:
            raise ValueError(f"Blockwise takes sizes of 1 or more; raise {', '.join(low)}")

    def refusals(self, q: Query, scoring: Scoring, *, documents: bool, between: bool) -> list[str]:
        return []

    def __call__(self, q: Query, k: Keys, v: Keys, starts: Located, scoring: Scoring) -> Attended:
        return attend(self, q, k, v, starts, scoring)

    def forward(self, q: Query, k: Keys, v: Keys, starts: Located, scoring: Scoring) -> Attended:
        """The output and the log-sum-exp of each query's logits, chunk by chunk."""
        heads = starts.heads if isinstance(starts, ScoreInputs) else None

        def chunk(ahead: ArrayTuple, q: Query, _: jax.Array, k: Keys, v: Keys) -> ArrayTuple:
            tiling = _tiling(self, scoring, k, ahead, heads)
            rows = _fold_queries(q, k.shape[2])
            o, lse = forward(tiling, rows, _fold_keys(k), _fold_keys(v))
            return _unfold(o, q.shape).astype(q.dtype), _unfold(lse, (*q.shape[:3], 1))

        # The output is written over a copy of q: a buffer made of constants would be made, and
        # held, from the start of the program on, for all layers at once.
        written = (q, full((*q.shape[:3], 1), 0.0, q))
        ahead = _fetched_early(starts, q)
        o, lse = _over_chunks(
            self._chunked(starts), chunk, written=written, read=(k, v), ahead=ahead
        )
        return o, lse[..., 0]

    def backward(self, saved: SavedAttention, do: Query, scoring: Scoring) -> ArrayTuple:
        """Gradients of q, k and v, chunk by chunk: each tile's weights are made again
        (`online_softmax.backward_tile` has the equations); and of heads' values that are
        learned."""
        q, k, v, starts, o, lse = saved
        heads = starts.heads if isinstance(starts, ScoreInputs) else None

        def chunk(ahead: ArrayTuple, q: Query, v: Keys, k: Keys, o: Query, do: Query) -> ArrayTuple:
            lse, *others = ahead
            tiling = _tiling(self, scoring, k, tuple(others), heads)
            delta = jnp.sum(do.astype(jnp.float32) * o.astype(jnp.float32), axis=-1, keepdims=True)
            rows = Queries(*(_fold_queries(x, k.shape[2]) for x in (q, do, lse, delta)))
            dq, dk, dv, *of_heads = backward(tiling, rows, _fold_keys(k), _fold_keys(v))
            of_heads = [dx.reshape(-1, *dx.shape[2:]) for dx in of_heads]
            dk, dv = (_unfold(dx.swapaxes(1, 2), k.shape).astype(k.dtype) for dx in (dk, dv))
            return _unfold(dq, q.shape).astype(q.dtype), dk, dv, *of_heads

        # Each chunk's gradients are written over its own inputs: no further buffers. dk goes over
        # v, which it depends on: dv does not, and written there would make XLA copy v each turn.
        ahead = (lse[..., None], *_fetched_early(starts, q))
        written, read = (q, v, k), (o, do)
        return _over_chunks(self._chunked(starts), chunk, written=written, read=read, ahead=ahead)

    def _chunked(self, starts: Located) -> Blockwise:
        """The same, all at once where scores have a function: a chunk has not all heads' values."""
        return replace(self, chunk_bytes=None) if isinstance(starts, ScoreInputs) else self


def _tiling(
    blocks: Blockwise, scoring: Scoring, k: Keys, ahead: ArrayTuple, heads: jax.Array | None
) -> Tiling:
    """The tiles of a chunk with keys k. ahead: its part of `_fetched_early`. heads: values for the
    function of scores."""
    seq = k.shape[1]
    sizes = min(blocks.query_block, seq), min(blocks.key_block, seq)
    documents, of_scores = (ahead, ()) if heads is None else (ahead[:-2], ahead[-2:])
    tiling = Tiling(*sizes, seq, scoring, (documents[0], documents[-1]) if documents else None)
    if heads is None:
        return tiling
    of_q, of_k = of_scores
    folded = heads.reshape(k.shape[2], -1, *heads.shape[1:])
    return tiling._replace(positions=(of_q, of_k), heads=folded)


def _fetched_early(starts: Located, q: Query) -> ArrayTuple:
    """Document starts of queries, and of keys where they are others; and positions of both where
    scores have a function."""
    documents = documents_of(starts)
    if documents is None:
        documents = ()
    elif not isinstance(documents, tuple):
        documents = (documents,)
    of_scores = starts.places(*q.shape[:2]) if isinstance(starts, ScoreInputs) else ()
    return (*documents, *of_scores)


def chunk_shape(
    blocks: Blockwise, *, batch: int, seq: int, heads: int, kv_heads: int
) -> tuple[int, int]:
    """(batch rows, kv heads) of one chunk; they divide `batch` and `kv_heads`."""
    if blocks.chunk_bytes is None:
        return batch, kv_heads
    tile = min(blocks.query_block, seq) * min(blocks.key_block, seq)
    fit = max(1, blocks.chunk_bytes // (4 * tile * (heads // kv_heads)))
    if fit < kv_heads:
        return 1, _divisor(kv_heads, fit)
    return _divisor(batch, fit // kv_heads), kv_heads


def _divisor(n: int, most: int) -> int:
    """The largest divisor of n that is no larger than `most`."""
    return max(d for d in range(1, n + 1) if n % d == 0 and d <= most)


def _over_chunks(
    blocks: Blockwise,
    chunk: Callable[..., ArrayTuple],
    *,
    written: ArrayTuple,
    read: ArrayTuple,
    ahead: ArrayTuple,
) -> ArrayTuple:
    """`chunk(ahead, *written, *read)` for every chunk of batch rows and heads, its results put over
    `written`: so that a tile of scores fits into a cache, whatever the batch.

    Arrays are [batch, seq] or [batch, seq, heads or kv_heads, ..]; `ahead` are those that enter
    elementwise work, see `fetching_scan`.
    """
    batch, seq, heads = written[0].shape[:3]
    kv_heads = min(x.shape[2] for x in (*written, *read))
    rows, part = chunk_shape(blocks, batch=batch, seq=seq, heads=heads, kv_heads=kv_heads)
    across = kv_heads // part
    count = batch // rows * across
    if count == 1:
        return chunk(ahead, *written, *read)

    def corner(x: jax.Array, i: jax.Array) -> list[Index]:
        """First index of chunk `i` of x, in each dim."""
        head = i % across * (x.shape[2] // across) if x.ndim > 2 else 0
        return [i // across * rows, 0, head, 0][: x.ndim]

    def take(x: jax.Array, i: jax.Array) -> jax.Array:
        split = (x.shape[2] // across, *x.shape[3:]) if x.ndim > 2 else ()
        return lax.dynamic_slice(x, corner(x, i), (rows, seq, *split))

    def body(written: ArrayTuple, i: jax.Array, ahead: ArrayTuple) -> ArrayTuple:
        results = chunk(ahead, *(take(x, i) for x in (*written, *read)))
        pairs = zip(written, results, strict=True)
        return tuple(lax.dynamic_update_slice(x, y, corner(x, i)) for x, y in pairs)

    fetch = lambda i: tuple(take(x, i) for x in ahead)  # noqa: E731
    return fetching_scan(body, written, fetch, jnp.arange(count))


def _fold_queries(
    x: Shaped[Array, "rows seq heads d"], kv_heads: int
) -> Shaped[Array, "rows*{kv_heads} heads//{kv_heads} seq d"]:
    """Returns queries with the heads that share a key head next to each other, and heads before
    the sequence, as batched matmuls need them."""
    rows, seq, heads, size = x.shape
    return x.swapaxes(1, 2).reshape(rows * kv_heads, heads // kv_heads, seq, size)


def _fold_keys(
    x: Shaped[Array, "rows seq kv_heads d"],
) -> Shaped[Array, "rows*kv_heads seq d"]:
    """Returns keys or values with heads before the sequence."""
    rows, seq, heads, size = x.shape
    return x.swapaxes(1, 2).reshape(rows * heads, seq, size)


def _unfold(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverts `_fold_queries` and `_fold_keys`. shape: of the result, [rows, seq, heads, ...]."""
    rows, seq, heads, *inner = shape
    return x.reshape(rows, heads, seq, *inner).swapaxes(1, 2)
