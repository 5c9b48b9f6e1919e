"""Attention over all visible tiles of one chunk: which tiles there are, and the loops over them.

q is [n, group, seq, head_dim], k and v [n, seq, head_dim], with n = rows * kv_heads and
group = heads / kv_heads the queries that share a key. A few tiles are
written out, cut to the mask; many are a scan over equal tiles, ordered by query block. Either way
tiles that the mask hides whole are not in the list, which is made when the program is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32, Shaped

from jaxtrain.attention.documents import TwoStarts
from jaxtrain.attention.online_softmax import (
    MASKED,
    Partial,
    Queries,
    Scoring,
    Visible,
    backward_tile,
    forward_tile,
    merge,
    normalise,
)
from jaxtrain.collectives.vary import Index, vary, varying_axes
from jaxtrain.scores.function import ScoreTile

UNROLLED_TILES = 8
"""Up to so many tiles are written out: more would cost compile time for no speed."""

ArrayTuple = tuple[jax.Array, ...]
Carry = TypeVar("Carry")
Fetched = TypeVar("Fetched")


TwoPlaces = tuple[Int[Array, "rows _"], ...]


class Places(NamedTuple):
    """Of the queries and keys of a tile: starts of their documents, and positions; () for none."""

    starts: TwoPlaces
    positions: TwoPlaces


class Tiling(NamedTuple):
    """Tiles of query_block x key_block over the seq x seq scores; `starts`: the first position of
    the document of each query, and of each key; None where a row is one. positions, heads: where
    scores have a function, the positions of queries and keys and the values of heads."""

    query_block: int
    key_block: int
    seq: int
    scoring: Scoring
    starts: TwoStarts | None
    positions: TwoStarts | None = None
    heads: Shaped[Array, "kv_heads group ..."] | None = None

    @property
    def may_be_blind(self) -> bool:
        """True if the mask hides every key from some query."""
        mask = self.scoring.mask
        return mask.window is not None and mask.offset >= mask.window

    def trimmed(self) -> list[tuple[range, list[range]]]:
        """Returns blocks of queries, each with the runs of keys it sees: tiles of unequal sizes,
        cut to the mask, for programs that list all of them."""
        blocks, size = [], self.key_block
        for start in range(0, self.seq, self.query_block):
            queries = range(start, min(start + self.query_block, self.seq))
            keys = self.scoring.mask.keys(queries, self.seq)
            blocks.append((queries, [keys[i : i + size] for i in range(0, len(keys), size)]))
        return blocks

    def unrolled(self) -> bool:
        return sum(len(runs) for _, runs in self.trimmed()) <= UNROLLED_TILES

    def equal(self) -> list[tuple[int, int]]:
        """Starts (query, key) of the visible tiles of a regular grid, query blocks in order."""
        starts = []
        for a in range(0, self.seq, self.query_block):
            queries = range(a, min(a + self.query_block, self.seq))
            for b in range(0, self.seq, self.key_block):
                keys = range(b, min(b + self.key_block, self.seq))
                if self.scoring.mask.tile(queries, keys)[0]:
                    starts.append((a, b))
        return starts

    def pairs(self) -> int:
        """(query, key) pairs of one sequence that are multiplied, hidden ones of its tiles too."""
        if self.unrolled():
            tiles = ((queries, run) for queries, runs in self.trimmed() for run in runs)
            return sum(len(queries) * len(run) for queries, run in tiles)
        return len(self.equal()) * self.query_block * self.key_block

    def places_of(self, a: Index, queries: int, b: Index, keys: int) -> Places:
        """Starts and positions of the queries and of the keys of a tile, which begin at `a` and
        `b`."""

        def both(of: TwoStarts | None) -> TwoPlaces:
            return () if of is None else (_take(of[0], a, queries), _take(of[1], b, keys))

        return Places(both(self.starts), both(self.positions))

    def scored(self, places: Places) -> ScoreTile | None:
        """What the function of scores is given in a tile; None if there is none."""
        function = self.scoring.function
        if self.heads is None or function is None:
            return None
        queries, keys = places.positions
        return ScoreTile(function, queries, keys, self.heads, self.scoring.mask.causal)

    def visible(
        self,
        at_q: Int[Array, " queries"],
        at_k: Int[Array, " keys"],
        starts: TwoPlaces,
    ) -> Visible:
        """Returns the mask of queries and keys, from their positions and document starts."""
        # Padded keys lie behind all real queries; only a causal mask hides them by itself.
        mask = self.scoring.mask.visible(at_q[:, None], at_k[None]) & (at_k < self.seq)[None]
        if not starts:
            return mask[None]
        of_q, of_k = starts
        return mask[None] & (of_q[:, :, None] == of_k[:, None, :])

    def written_out(
        self, queries: range, keys: range
    ) -> tuple[Visible | None, Scoring, ScoreTile | None]:
        """The last arguments of a tile that is written out: `visible`, None where the mask hides
        nothing of it, and those of its scores."""
        places = self.places_of(queries.start, len(queries), keys.start, len(keys))
        at = self.scored(places)
        if self.starts is None and self.scoring.mask.tile(queries, keys)[1]:
            return None, self.scoring, at
        # Compared where it is used: on CPU a stored mask of bytes is slower to read than to make.
        at_q, at_k = (x.start + jnp.arange(len(x)) for x in (queries, keys))
        return self.visible(at_q, at_k, places.starts), self.scoring, at

    def in_scan(
        self, a: Index, b: Index, places: Places
    ) -> tuple[Visible, Scoring, ScoreTile | None]:
        """The same of a tile of the grid, which begins at `a` and `b`."""
        at_q, at_k = a + jnp.arange(self.query_block), b + jnp.arange(self.key_block)
        visible, at = self.visible(at_q, at_k, places.starts), self.scored(places)
        if at is not None:  # the function gets no padded query: of a score of 0 it may know nothing
            visible = visible & (at_q < self.seq)[None, :, None]
        return visible, self.scoring, at

    def padded(self) -> Tiling:
        """The same with starts and positions lengthened to whole blocks of queries and of keys."""
        longest = max(-(-self.seq // size) * size for size in (self.query_block, self.key_block))

        both = partial(jax.tree.map, lambda x: _pad(x, longest, 1))
        return self._replace(starts=both(self.starts), positions=both(self.positions))


def forward(
    tiling: Tiling,
    q: Float[Array, "n group seq head_dim"],
    k: Float[Array, "n seq head_dim"],
    v: Float[Array, "n seq head_dim"],
) -> tuple[Float32[Array, "n group seq head_dim"], Float32[Array, "n group seq 1"]]:
    """Returns the attention's output, and the log-sum-exp of each query's logits."""
    if not tiling.unrolled():
        return _forward_scan(tiling, q, k, v)
    outs = []
    for queries, runs in tiling.trimmed():
        rows, parts = _rows(q, queries.start, len(queries)), []
        for run in runs:
            tile = _take(k, run.start, len(run)), _take(v, run.start, len(run))
            parts.append(forward_tile(rows, *tile, *tiling.written_out(queries, run)))
        output = normalise(reduce(merge, parts or [_blind(rows)]))
        outs.append([x.reshape(*q.shape[:2], len(queries), -1) for x in output])
    o, lse = (jnp.concatenate(x, axis=2) for x in zip(*outs, strict=True))
    return o, lse


def backward(
    tiling: Tiling,
    rows: Queries,
    k: Float[Array, "n seq head_dim"],
    v: Float[Array, "n seq head_dim"],
) -> tuple[jax.Array, ...]:
    """Returns dq [n, group, seq, head_dim], and dk and dv transposed [n, head_dim, seq]
    (`backward_tile` says why), of all tiles; and the gradient of the heads' values if they are
    learned."""
    if not tiling.unrolled():
        return _backward_scan(tiling, rows, k, v)
    dqs, dks, dvs, of_heads = [], [], [], []
    for queries, runs in tiling.trimmed():
        block, parts = Queries(*(_rows(x, queries.start, len(queries)) for x in rows)), []
        for run in runs:
            tile = _take(k, run.start, len(run)), _take(v, run.start, len(run))
            dq, dk, dv, *dheads = backward_tile(block, *tile, *tiling.written_out(queries, run))
            around = ((0, 0), (0, 0), (run.start, tiling.seq - run.stop))
            parts.append(dq)
            dks.append(jnp.pad(dk, around))
            dvs.append(jnp.pad(dv, around))
            of_heads.append(dheads)
        dq = reduce(jnp.add, parts or [full(block.q.shape, 0.0, block.q)])
        dqs.append(dq.reshape(*rows.q.shape[:2], len(queries), -1))
    learned = [reduce(jnp.add, tiles) for tiles in zip(*of_heads, strict=True)]
    return jnp.concatenate(dqs, axis=2), reduce(jnp.add, dks), reduce(jnp.add, dvs), *learned


def _forward_scan(
    tiling: Tiling,
    q: Float[Array, "n group seq head_dim"],
    k: Float[Array, "n seq head_dim"],
    v: Float[Array, "n seq head_dim"],
) -> tuple[Float32[Array, "n group seq head_dim"], Float32[Array, "n group seq 1"]]:
    """`forward` as one loop over the visible tiles of a regular grid."""
    size_q, size_k = tiling.query_block, tiling.key_block
    tiling, q = tiling.padded(), _pad(q, size_q, 2)
    k, v = _pad(k, size_k, 1), _pad(v, size_k, 1)
    rows = _rows(q, 0, size_q)
    empty = Partial(
        full(rows.shape, 0.0, q),
        full((*rows.shape[:2], 1), MASKED, q),
        full((*rows.shape[:2], 1), 0.0, q),
    )

    def fetch(turn: Int32[Array, " 3"]) -> Places:
        return tiling.places_of(turn[0], size_q, turn[1], size_k)

    def body(
        carry: tuple[jax.Array, jax.Array, Partial], turn: Int32[Array, " 3"], places: Places
    ) -> tuple[jax.Array, jax.Array, Partial]:
        o, lse, partial = carry
        a, b, first = turn
        started = [jnp.where(first == 1, x, y) for x, y in zip(empty, partial, strict=True)]
        tile = _take(k, b, size_k), _take(v, b, size_k)
        new = forward_tile(_rows(q, a, size_q), *tile, *tiling.in_scan(a, b, places))
        partial = merge(Partial(*started), new)
        # Written in every turn; the last turn of a query block writes its result.
        output, total = normalise(partial)
        return _put(o, output, a), _put(lse, total, a), partial

    o = full(q.shape, 0.0, q) if tiling.may_be_blind else q.astype(jnp.float32)
    carry = o, full((*q.shape[:3], 1), MASKED, q), empty
    o, lse, _ = fetching_scan(body, carry, fetch, _turns(tiling))
    return o[:, :, : tiling.seq], lse[:, :, : tiling.seq]


def _backward_scan(
    tiling: Tiling,
    rows: Queries,
    k: Float[Array, "n seq head_dim"],
    v: Float[Array, "n seq head_dim"],
) -> tuple[jax.Array, ...]:
    """`backward` as one loop over the visible tiles of a regular grid."""
    size_q, size_k, seq = tiling.query_block, tiling.key_block, tiling.seq
    # A padded query has an infinite sum of exponentials: no weight on any key.
    pads = (0.0, 0.0, -MASKED, 0.0)
    rows = Queries(*(_pad(x, size_q, 2, pad) for x, pad in zip(rows, pads, strict=True)))
    tiling, k, v = tiling.padded(), _pad(k, size_k, 1), _pad(v, size_k, 1)

    def fetch(turn: Int32[Array, " 3"]) -> tuple[ArrayTuple, Places]:
        statistics = tuple(_rows(x, turn[0], size_q) for x in (rows.lse, rows.delta))
        return statistics, tiling.places_of(turn[0], size_q, turn[1], size_k)

    def body(
        carry: tuple[jax.Array, ...],
        turn: Int32[Array, " 3"],
        fetched: tuple[ArrayTuple, Places],
    ) -> tuple[jax.Array, ...]:
        dq, dk, dv, total, *dheads = carry
        (a, b, first), ((lse, delta), places) = turn, fetched
        block = Queries(_rows(rows.q, a, size_q), _rows(rows.do, a, size_q), lse, delta)
        tile = _take(k, b, size_k), _take(v, b, size_k)
        new, *parts = backward_tile(block, *tile, *tiling.in_scan(a, b, places))
        total = jnp.where(first == 1, 0.0, total) + new
        dk, dv = (_add(x, part, b) for x, part in zip((dk, dv), parts[:2], strict=True))
        dheads = [x + part for x, part in zip(dheads, parts[2:], strict=True)]
        return _put(dq, total, a), dk, dv, total, *dheads

    n, keys, d = k.shape
    like, block = rows.q, _rows(rows.q, 0, size_q)
    sums = [full((n, d, keys), 0.0, like) for _ in range(2)]
    dq = full(like.shape, 0.0, like) if tiling.may_be_blind else like.astype(jnp.float32)
    function, heads = tiling.scoring.function, tiling.heads
    learned = [heads] if heads is not None and function is not None and function.trained else []
    carry = dq, *sums, full(block.shape, 0.0, like), *(full(x.shape, 0.0, like) for x in learned)
    dq, dk, dv, _, *dheads = fetching_scan(body, carry, fetch, _turns(tiling))
    return dq[:, :, :seq], dk[:, :, :seq], dv[:, :, :seq], *dheads


def _blind(rows: Float[Array, "n queries head_dim"]) -> Partial:
    """Returns the result of queries that see no key."""
    shape = (*rows.shape[:2], 1)
    return Partial(full(rows.shape, 0.0, rows), full(shape, MASKED, rows), full(shape, 1.0, rows))


def _turns(tiling: Tiling) -> Int32[Array, "tiles 3"]:
    """Query start, key start, and 1 for the first tile of a query block, of each tile."""
    starts = np.array(tiling.equal(), np.int32)
    first = np.diff(starts[:, 0], prepend=-1) != 0
    return jnp.asarray(np.column_stack([starts, first]))


def fetching_scan(
    body: Callable[[Carry, jax.Array, Fetched], Carry],
    carry: Carry,
    fetch: Callable[[jax.Array], Fetched],
    turns: Int[Array, "turns ..."],
) -> Carry:
    """carry = body(carry, turn, fetch(turn)) for each of `turns`; fetched one turn early.

    XLA:CPU fuses a slice at a computed place into the elementwise work that reads it, which then
    works out the place again for every element: 9 times slower. What a loop carries is stored.
    """

    def step(
        both: tuple[Carry, Fetched], turn: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[Carry, Fetched], None]:
        (carry, fetched), (now, later) = both, turn
        return (body(carry, now, fetched), fetch(later)), None

    both = carry, fetch(turns[0])
    (carry, _), _ = lax.scan(step, both, (turns, jnp.roll(turns, -1, axis=0)))
    return carry


def full(shape: tuple[int, ...], value: float, like: jax.Array) -> Float32[Array, " ..."]:
    """`value` everywhere, fp32, varying over the mesh axes that `like` does: a constant varies over
    none, and a loop must carry one type."""
    return vary(jnp.full(shape, value, jnp.float32), varying_axes(like))


def _take(x: jax.Array, start: Index, size: int, dim: int = 1) -> jax.Array:
    """`size` entries of a dim from `start` on."""
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=dim)
    return lax.dynamic_slice_in_dim(x, start, size, axis=dim)


def _add(
    x: Float32[Array, "n head_dim keys"], part: Float32[Array, "n head_dim block"], start: Index
) -> Float32[Array, "n head_dim keys"]:
    """`part` added to the keys of x from `start` on."""
    total = _take(x, start, part.shape[2], dim=2) + part
    return lax.dynamic_update_slice_in_dim(x, total, start, axis=2)


def _rows(x: Float[Array, "n group seq d"], start: Index, size: int) -> Float[Array, "n queries d"]:
    """`size` positions from `start` on, those of a group in a row: group * size queries."""
    return _take(x, start, size, dim=2).reshape(x.shape[0], -1, x.shape[3])


def _put(
    x: Float[Array, "n group seq d"], rows: Float[Array, "n queries d"], start: Index
) -> Float[Array, "n group seq d"]:
    """Inverse of `_rows`, into `x`."""
    rows = rows.reshape(*x.shape[:2], -1, x.shape[3])
    return lax.dynamic_update_slice_in_dim(x, rows, start, axis=2)


def _pad(x: jax.Array, block: int, dim: int, value: float = 0) -> jax.Array:
    """`dim` lengthened to a multiple of `block`."""
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, -x.shape[dim] % block)
    return jnp.pad(x, widths, constant_values=value)
