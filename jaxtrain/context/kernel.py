"""Attention of a sequence that is cut over devices, with its derivative written out.

Partial results, of all keys that have come by so far, are merged by their log-sum-exp; gradients of
a tile are made from the log-sum-exp of all keys (Liu et al. 2023). While a tile is multiplied the
keys of the next are on their way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32, Int

from jaxtrain.attention.documents import (
    ScoreInputs,
    document_starts,
    documents_of,
    row_positions,
)
from jaxtrain.attention.fused import Attended, SavedAttention, cotangent_of
from jaxtrain.attention.online_softmax import MASKED, AttentionMask, Scoring
from jaxtrain.attention.tiling import full
from jaxtrain.collectives.ring import each_of
from jaxtrain.collectives.vary import Index, vary, varying_axes
from jaxtrain.context.ring import Transport
from jaxtrain.context.schemes import InSlots, Scheme
from jaxtrain.context.tiles import tile_kernel

Tokens = Float[Array, "batch tokens heads head_dim"]
KeyTokens = Float[Array, "batch tokens kv_heads head_dim"]
RowStarts = Int[Array, "batch seq"] | ScoreInputs
"""Of whole rows, in their natural order; the heads' values are those of this device's heads."""
Found = TypeVar("Found")


class Kept(NamedTuple):
    """Residuals of the backward pass, which also reads the cotangent of o. All but `starts` are of
    this device's tokens."""

    q: Tokens
    k: KeyTokens
    v: KeyTokens
    starts: RowStarts | None
    o: Tokens
    lse: Float32[Array, "batch tokens heads"]


@dataclass(frozen=True)
class Around:
    """One call of attention, as known before it is traced. scheme: the tiles that each device
    computes. transport: brings the keys of other devices. kernel: computes a tile. unroll: every
    hop is in the program; False makes a loop of them where a scheme's hops are alike."""

    scheme: Scheme
    transport: Transport
    kernel: Any
    scoring: Scoring
    unroll: bool = True

    def scored(self, mask: AttentionMask) -> Scoring:
        return replace(self.scoring, mask=mask)

    def located(
        self, starts: RowStarts | None, own: Tokens, of_tiles: Callable[[jax.Array], Any]
    ) -> Any:
        """Returns the document starts of a tile, and the inputs of a score function, as a kernel
        takes them. own: queries of this device. of_tiles: returns the parts of an array of whole
        rows that belong to the tile's queries and keys."""
        documents: Any = documents_of(starts)
        found = None if documents is None else of_tiles(documents)
        if not isinstance(starts, ScoreInputs):
            return found
        seq = own.shape[1] * self.scheme.order.groups
        rows = row_positions(documents, own.shape[0], seq)
        return ScoreInputs(found, starts.heads, of_tiles(rows))


def attend_around(
    call: Around, q: Tokens, k: KeyTokens, v: KeyTokens, starts: RowStarts | None
) -> Tokens:
    """Attention of this device's queries to the keys of all, inside a shard_map."""
    axes = varying_axes(*jax.tree.leaves((q, k, v, starts)))
    return _attend(call, *jax.tree.map(lambda x: vary(x, axes), (q, k, v, starts)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    call: Around, q: Tokens, k: KeyTokens, v: KeyTokens, starts: RowStarts | None
) -> Tokens:
    return _forward(call, q, k, v, starts)[0].astype(q.dtype)


def _attend_forward(
    call: Around, q: Tokens, k: KeyTokens, v: KeyTokens, starts: RowStarts | None
) -> tuple[Tokens, Kept]:
    o, lse = _forward(call, q, k, v, starts)
    o = checkpoint_name(o.astype(q.dtype), "attention_out")
    return o, Kept(q, k, v, starts, o, checkpoint_name(lse, "attention_lse"))


def _forward(
    call: Around, q: Tokens, k: KeyTokens, v: KeyTokens, starts: RowStarts | None
) -> Attended:
    scheme, transport = call.scheme, call.transport
    me = transport.seats.me()
    moving = transport.begin(scheme.slots(jnp.concatenate([k, v], axis=3)))
    queries, keys, values = (scheme.alone(x) for x in (q, k, v))
    scoring = call.scored(scheme.own)
    kernel = tile_kernel(call.kernel, queries, scoring, documents=documents_of(starts) is not None)
    own = kernel.forward(queries, keys, values, _own_starts(call, starts, q, me), scoring)
    (o, lse), moving = lax.optimization_barrier((own, moving))
    attended = scheme.together(o).astype(jnp.float32), scheme.together(lse)

    def tile(moving: Any, hop: Index) -> Attended:
        tiles = _Tiles(call, starts, hop, me, q)
        return tiles.forward(tiles.queries(q), transport.came(moving, hop, me))

    def step(carry: tuple[Attended, Any], hop: Index) -> tuple[Attended, Any]:
        # The next keys travel while these are multiplied: the barriers put each hop behind its
        # tiles. Without them a scheduler puts it behind the merge, which is too short to hide it.
        attended, moving = lax.optimization_barrier(carry)
        new, following = lax.optimization_barrier((tile(moving, hop), transport.onward(moving)))
        return scheme.merge(attended, new, hop, me), following

    if scheme.hops == 0:
        return attended
    attended, moving = _each_hop(call, step, (attended, moving), scheme.hops)
    attended, moving = lax.optimization_barrier((attended, moving))
    return scheme.merge(attended, tile(moving, scheme.hops), scheme.hops, me)


def _backward(
    call: Around, saved: Kept, do: Tokens
) -> tuple[Tokens, KeyTokens, KeyTokens, ScoreInputs | None]:
    scheme, transport = call.scheme, call.transport
    # Without it a compiler may reuse the forward pass' keys, and keep those of all devices.
    saved, do = lax.optimization_barrier((saved, do))
    q, k, v, starts, o, lse = saved
    me, kv = transport.seats.me(), jnp.concatenate([k, v], axis=3)
    moving = transport.begin(scheme.slots(kv))
    (of_own, own), moving = lax.optimization_barrier((_own_gradients(call, saved, do, me), moving))
    sums = transport.no_sums(own)

    def tile(moving: Any, hop: Index) -> tuple[jax.Array, ...]:
        tiles = _Tiles(call, starts, hop, me, q)
        rows = [tiles.queries(x) for x in (q, do, o, lse)]
        return tiles.backward(rows, transport.came(moving, hop, me))

    def added(stays: Stays, grads: Any, arrived: InSlots, hop: Index) -> tuple[Stays, InSlots]:
        of_queries, of_k, of_v, *of_heads = (dx.astype(jnp.float32) for dx in grads)
        of_keys = jnp.concatenate([of_k, of_v], axis=3)
        dq = scheme.add_queries(stays[0], of_queries, hop, me)
        of_heads = [x + dx for x, dx in zip(stays[1], of_heads, strict=True)]
        return (dq, of_heads), scheme.add_keys(arrived, of_keys, hop, me)

    def step(carry: Any, hop: Index) -> Any:
        stays, moving, sums = lax.optimization_barrier(carry)
        travelling = transport.onward(moving), transport.sums(sums, hop, me)
        grads, (following, arrived) = lax.optimization_barrier((tile(moving, hop), travelling))
        stays, arrived = added(stays, grads, arrived, hop)
        return stays, following, transport.put(sums, arrived, hop, me)

    if scheme.hops:
        last, carry = scheme.hops, (of_own, moving, sums)
        of_own, moving, sums = lax.optimization_barrier(_each_hop(call, step, carry, last))
        grads, arrived = lax.optimization_barrier(
            (tile(moving, last), transport.sums(sums, last, me))
        )
        of_own, arrived = added(of_own, grads, arrived, last)
        own = transport.home(own, transport.put(sums, arrived, last, me), last)
    dk, dv = jnp.split(scheme.joined(own), 2, axis=3)
    dq, of_heads = of_own
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), cotangent_of(of_heads)


Stays = tuple[jax.Array, list[jax.Array]]
"""Gradients that do not travel, fp32: of this device's queries, and of its heads' values if the
model learns them."""


def _own_starts(call: Around, starts: RowStarts | None, own: Tokens, me: Index) -> Any:
    """Returns the document starts of a device's own tokens, as a kernel takes them."""
    scheme = call.scheme

    def of_own(rows: jax.Array) -> Any:
        return scheme.alone(scheme.order.take(rows, me))

    located: Any = call.located(starts, own, of_own)
    if isinstance(located, ScoreInputs):
        own_positions: Any = located.positions
        return located._replace(positions=(own_positions, own_positions))
    return None if located is None else document_starts(located)


def _own_gradients(call: Around, saved: Kept, do: Tokens, me: Index) -> tuple[Stays, InSlots]:
    """Returns the gradients (fp32) of attention between a device's own queries and keys; those of
    keys and values are in the layout in which they travel."""
    scheme, scoring = call.scheme, call.scored(call.scheme.own)
    q, k, v, o, lse, do = (
        scheme.alone(x) for x in (saved.q, saved.k, saved.v, saved.o, saved.lse, do)
    )
    documents = documents_of(saved.starts) is not None
    kernel = tile_kernel(call.kernel, q, scoring, documents=documents)
    starts = _own_starts(call, saved.starts, saved.q, me)
    grads = kernel.backward(SavedAttention(q, k, v, starts, o, lse), do, scoring)
    dq, dk, dv = (scheme.together(dx).astype(jnp.float32) for dx in grads[:3])
    return (dq, [*grads[3:]]), scheme.slots(jnp.concatenate([dk, dv], axis=3))


@dataclass(frozen=True)
class _Tiles:
    """The tiles of one hop."""

    call: Around
    row_starts: RowStarts | None
    hop: Index
    me: Index
    own: Tokens

    @property
    def scoring(self) -> Scoring:
        return self.call.scored(self.call.scheme.mask(self.hop))

    @property
    def starts(self) -> Any:
        of_tiles = partial(self.call.scheme.starts, hop=self.hop, me=self.me)
        return self.call.located(self.row_starts, self.own, of_tiles)

    def queries(self, x: jax.Array) -> jax.Array:
        return self.call.scheme.queries(x, self.hop, self.me)

    def keys(self, slots: InSlots) -> tuple[jax.Array, jax.Array]:
        """Keys and values."""
        k, v = jnp.split(self.call.scheme.keys(slots, self.hop, self.me), 2, axis=3)
        return k, v

    def kernel(self, q: jax.Array) -> Any:
        documents = documents_of(self.row_starts) is not None
        return tile_kernel(self.call.kernel, q, self.scoring, documents=documents)

    def forward(self, q: jax.Array, came: InSlots) -> Attended:
        """A device that needs no keys of this hop has seen none."""

        def run(q: jax.Array, came: InSlots) -> Attended:
            o, lse = self.kernel(q).forward(q, *self.keys(came), self.starts, self.scoring)
            return o, self._without_hidden(lse, MASKED)

        def nothing(q: jax.Array, came: InSlots) -> Attended:
            return full(q.shape, 0.0, q).astype(q.dtype), full(q.shape[:3], MASKED, q)

        return self._where_needed(run, nothing, q, came)

    def backward(self, rows: list[jax.Array], came: InSlots) -> tuple[jax.Array, ...]:
        """Returns the gradients of the tiles' queries, keys and values."""

        def run(rows: list[jax.Array], came: InSlots) -> tuple[jax.Array, ...]:
            q, do, o, lse = rows
            # An infinite sum of exponentials: no weight on any key.
            saved = SavedAttention(
                q, *self.keys(came), self.starts, o, self._without_hidden(lse, -MASKED)
            )
            return self.kernel(q).backward(saved, do, self.scoring)

        def nothing(rows: list[jax.Array], came: InSlots) -> tuple[jax.Array, ...]:
            like, function = [rows[0], *self.keys(came)], self.call.scoring.function
            if isinstance(self.row_starts, ScoreInputs) and function is not None:
                like += [self.row_starts.heads] * function.trained
            return tuple(full(x.shape, 0.0, x).astype(x.dtype) for x in like)

        return self._where_needed(run, nothing, rows, came)

    def _where_needed(
        self, run: Callable[..., Found], nothing: Callable[..., Found], *operands: Any
    ) -> Found:
        """Runs `run` where this hop is needed. Devices may differ: no branch has a collective."""
        needed = self.call.scheme.needed(self.hop, self.me)
        return run(*operands) if needed is True else lax.cond(needed, run, nothing, *operands)

    def _without_hidden(self, lse: jax.Array, value: float) -> jax.Array:
        hidden = self.call.scheme.hidden(self.hop, self.me)
        if hidden is False:
            return lse
        first, second = jnp.split(lse, 2)
        return jnp.concatenate([jnp.where(hidden, value, first), second])


def _each_hop(call: Around, step: Callable[[Any, Index], Any], carry: Any, hops: int) -> Any:
    """carry = step(carry, hop) for all hops but the last."""
    looped = not call.unroll and call.scheme.own.window is None
    if not looped or hops < 4:
        for hop in range(1, hops):
            carry = step(carry, hop)
        return carry

    # A loop of permutes could run beside other collectives on CPU: see `collectives/order.py`.
    def act(hop: Index, carry: Any) -> Any:
        return step(carry, hop)

    return lax.platform_dependent(
        step(carry, 1),
        cpu=partial(each_of, range(2, hops), act),
        default=partial(lax.fori_loop, 2, hops, act),
    )


_attend.defvjp(_attend_forward, _backward)
