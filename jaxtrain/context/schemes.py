"""Tiles that a device computes in each hop: which of its queries attend to which arrived keys.

There are three schemes; the mask and the order choose one. `Blocks`: all queries and all keys of a
device, for contiguous order, and for attention that is not masked by position. `Pairs`: causal
attention in zig-zag order. `Chunks`: windows in zig-zag order. A scheme divides a device's arrays,
[batch, tokens, ..], into tiles side by side in the batch, with which the kernel is called, and adds
the results up. A device's number here is the number of its group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxtrain.attention.fused import Attended
from jaxtrain.attention.online_softmax import MASKED, AttentionMask
from jaxtrain.collectives.vary import Index
from jaxtrain.context.order import Order
from jaxtrain.context.tiles import merged

InSlots = tuple[jax.Array, ...]
"""What travels: keys, values, or sums of their gradients, [batch, tokens, ..], in one piece or in
two chunks, each on a way of its own."""
When = Bool[Array, ""] | bool


class Scheme(Protocol):
    """hop: of how many devices (`Chunks`: chunks) before its own the keys are that a device has."""

    @property
    def order(self) -> Order: ...

    @property
    def hops(self) -> int:
        """The number of hops after which no device needs further keys."""
        ...

    @property
    def own(self) -> AttentionMask:
        """The mask between a device's queries and its own keys, in the layout of `alone`."""
        ...

    def alone(self, x: jax.Array) -> jax.Array:
        """Returns a device's array in the layout in which it attends to itself."""
        ...

    def together(self, x: jax.Array) -> jax.Array:
        """Inverse of `alone`."""
        ...

    def slots(self, x: jax.Array) -> InSlots:
        """Returns a device's array in the layout in which it travels."""
        ...

    def joined(self, slots: InSlots) -> jax.Array:
        """Inverse of `slots`."""
        ...

    def mask(self, hop: Index) -> AttentionMask:
        """Mask of the tiles of a hop, by the numbers of queries and keys in them."""
        ...

    def needed(self, hop: Index, me: Index) -> When:
        """True if device `me` computes anything in this hop."""
        ...

    def hidden(self, hop: Index, me: Index) -> When:
        """True if the first of two tiles does not exist: its result is dropped."""
        ...

    def queries(self, x: jax.Array, hop: Index, me: Index) -> jax.Array:
        """Returns the part of a device's array that the tiles have as queries."""
        ...

    def keys(self, slots: InSlots, hop: Index, me: Index) -> jax.Array:
        """Returns the part of the arrived slots that the tiles have as keys."""
        ...

    def merge(self, so_far: Attended, new: Attended, hop: Index, me: Index) -> Attended:
        """A device's attention with that of the tiles."""
        ...

    def add_queries(self, to: jax.Array, dx: jax.Array, hop: Index, me: Index) -> jax.Array:
        """Adjoint of `queries`, added."""
        ...

    def add_keys(self, to: InSlots, dx: jax.Array, hop: Index, me: Index) -> InSlots:
        """Adjoint of `keys`, added."""
        ...

    def starts(self, row: jax.Array, hop: Index, me: Index) -> tuple[jax.Array, jax.Array]:
        """Document starts of the tiles' queries and keys, from those of unsplit rows."""
        ...


def scheme(mask: AttentionMask, order: Order, local: int) -> Scheme:
    """The way of this mask in this order, with `local` tokens on a device (of a group, together).
    A window as long as the row is none."""
    if mask.window is not None and mask.window >= order.groups * local:
        mask = AttentionMask(mask.causal)
    if not order.zigzag or not mask.causal:
        return Blocks(mask, order, local)
    return Pairs(order) if mask.window is None else Chunks(mask.window, order, local)


class _InOrder:
    """A device's tokens are in the order of their positions: it attends to itself as if there was
    nothing else; and they travel in one piece."""

    def alone(self, x: jax.Array) -> jax.Array:
        return x

    def together(self, x: jax.Array) -> jax.Array:
        return x

    def slots(self, x: jax.Array) -> InSlots:
        return (x,)

    def joined(self, slots: InSlots) -> jax.Array:
        return slots[0]


@dataclass(frozen=True)
class Blocks(_InOrder):
    """A device's queries meet all keys of another, `hop` devices before it; where attention is
    causal, if there is such a device."""

    own: AttentionMask
    order: Order
    local: int

    @property
    def hops(self) -> int:
        far, window = self.order.groups - 1, self.own.window
        return far if window is None else min(far, _reach(window, self.local))

    def mask(self, hop: Index) -> AttentionMask:
        if self.own.window is None:
            return AttentionMask(causal=False)
        assert isinstance(hop, int), "hops of a window are written out"
        return AttentionMask(True, self.own.window, hop * self.local)

    def needed(self, hop: Index, me: Index) -> When:
        return hop <= me if self.own.causal else True

    def hidden(self, hop: Index, me: Index) -> When:
        return False

    def queries(self, x: jax.Array, hop: Index, me: Index) -> jax.Array:
        return x

    def keys(self, slots: InSlots, hop: Index, me: Index) -> jax.Array:
        return slots[0]

    def merge(self, so_far: Attended, new: Attended, hop: Index, me: Index) -> Attended:
        return merged(so_far, new)

    def add_queries(self, to: jax.Array, dx: jax.Array, hop: Index, me: Index) -> jax.Array:
        return to + dx

    def add_keys(self, to: InSlots, dx: jax.Array, hop: Index, me: Index) -> InSlots:
        return (to[0] + dx,)

    def starts(self, row: jax.Array, hop: Index, me: Index) -> tuple[jax.Array, jax.Array]:
        return self.order.take(row, me), self.order.take(row, (me - hop) % self.order.groups)


@dataclass(frozen=True)
class Pairs(_InOrder):
    """Causal attention in zig-zag order: chunks 1 and 2 of a device are i and 2n-1-i, those of the
    keys' device j = i - hop (mod n) are j and 2n-1-j.

    Queries 2 see all keys 1. Where j < i queries 1 see all keys 1, too; else queries 2 see all keys
    2. So each device multiplies two whole tiles in each hop, one chosen by a select: none is masked
    but by documents, and nobody waits. With its own, three tiles of which two are causal, a device
    computes 2n + 1 of the 4n tiles that it would without a mask.
    """

    order: Order

    own = AttentionMask()

    @property
    def hops(self) -> int:
        return self.order.groups - 1

    def mask(self, hop: Index) -> AttentionMask:
        return AttentionMask(causal=False)

    def needed(self, hop: Index, me: Index) -> When:
        return True

    def hidden(self, hop: Index, me: Index) -> When:
        return False

    def _early(self, hop: Index, me: Index) -> Bool[Array, ""]:
        """True if the keys' device precedes this one: its first chunk then precedes both chunks."""
        return jnp.asarray(hop <= me)

    def queries(self, x: jax.Array, hop: Index, me: Index) -> jax.Array:
        first, second = _halves(x)
        return jnp.concatenate([jnp.where(self._early(hop, me), first, second), second])

    def keys(self, slots: InSlots, hop: Index, me: Index) -> jax.Array:
        first, second = _halves(slots[0])
        return jnp.concatenate([jnp.where(self._early(hop, me), first, second), first])

    def merge(self, so_far: Attended, new: Attended, hop: Index, me: Index) -> Attended:
        early = self._early(hop, me)
        firsts, seconds = zip(*map(_halves, so_far), strict=True)
        chosen, always = zip(*(jnp.split(x, 2) for x in new), strict=True)
        seconds = merged(seconds, always)
        o, lse = (jnp.where(early, a, b) for a, b in zip(firsts, seconds, strict=True))
        into = merged((o, lse), chosen)
        o, lse = (
            jnp.concatenate([jnp.where(early, x, a), jnp.where(early, b, x)], axis=1)
            for x, a, b in zip(into, firsts, seconds, strict=True)
        )
        return o, lse

    def add_queries(self, to: jax.Array, dx: jax.Array, hop: Index, me: Index) -> jax.Array:
        chosen, always = jnp.split(dx, 2)
        first, second = self._apart(chosen, hop, me)
        return to + jnp.concatenate([first, second + always], axis=1)

    def add_keys(self, to: InSlots, dx: jax.Array, hop: Index, me: Index) -> InSlots:
        chosen, always = jnp.split(dx, 2)
        first, second = self._apart(chosen, hop, me)
        return (to[0] + jnp.concatenate([first + always, second], axis=1),)

    def _apart(self, x: jax.Array, hop: Index, me: Index) -> tuple[jax.Array, jax.Array]:
        early, zero = self._early(hop, me), jnp.zeros((), x.dtype)
        return jnp.where(early, x, zero), jnp.where(early, zero, x)

    def starts(self, row: jax.Array, hop: Index, me: Index) -> tuple[jax.Array, jax.Array]:
        of_keys = self.order.take(row, (me - hop) % self.order.groups)
        own = self.order.take(row, me)
        return self.queries(own, hop, me), self.keys((of_keys,), hop, me)


@dataclass(frozen=True)
class Chunks:
    """A window in zig-zag order. The 2n chunks of a row stand in a line, each device in two of its
    places; in hop h the keys of a place are those of the chunk h before. Past half of the line the
    first chunks of all devices have seen their last."""

    window: int
    order: Order
    local: int

    @property
    def size(self) -> int:
        """Tokens of a chunk."""
        return self.local // 2

    @property
    def hops(self) -> int:
        return min(2 * self.order.groups - 1, _reach(self.window, self.size))

    @property
    def own(self) -> AttentionMask:
        return AttentionMask(True, self.window)

    def alone(self, x: jax.Array) -> jax.Array:
        return jnp.concatenate(_halves(x))

    def together(self, x: jax.Array) -> jax.Array:
        return jnp.concatenate(jnp.split(x, 2), axis=1)

    def slots(self, x: jax.Array) -> InSlots:
        return _halves(x)

    def joined(self, slots: InSlots) -> jax.Array:
        return jnp.concatenate(slots, axis=1)

    def mask(self, hop: Index) -> AttentionMask:
        assert isinstance(hop, int), "hops of a window are written out"
        return AttentionMask(True, self.window, hop * self.size)

    def both(self, hop: Index) -> bool:
        """True if the first chunk of any device has a chunk `hop` chunks before it."""
        return int(hop) < self.order.groups

    def needed(self, hop: Index, me: Index) -> When:
        return True if self.both(hop) else hop <= 2 * self.order.groups - 1 - me

    def hidden(self, hop: Index, me: Index) -> When:
        return hop > me if self.both(hop) else False

    def queries(self, x: jax.Array, hop: Index, me: Index) -> jax.Array:
        return self.keys(_halves(x), hop, me)

    def keys(self, slots: InSlots, hop: Index, me: Index) -> jax.Array:
        return jnp.concatenate(slots) if self.both(hop) else slots[1]

    def merge(self, so_far: Attended, new: Attended, hop: Index, me: Index) -> Attended:
        o, lse = (jnp.concatenate(self._tiles(x, hop), axis=1) for x in new)
        if not self.both(hop):
            lse = lse.at[:, : self.size].set(MASKED)
        return merged(so_far, (o, lse))

    def add_queries(self, to: jax.Array, dx: jax.Array, hop: Index, me: Index) -> jax.Array:
        return to + jnp.concatenate(self._tiles(dx, hop), axis=1)

    def add_keys(self, to: InSlots, dx: jax.Array, hop: Index, me: Index) -> InSlots:
        first, second = self._tiles(dx, hop)
        return to[0] + first, to[1] + second

    def _tiles(self, x: jax.Array, hop: Index) -> tuple[jax.Array, jax.Array]:
        if self.both(hop):
            first, second = jnp.split(x, 2)
            return first, second
        return jnp.zeros_like(x), x

    def starts(self, row: jax.Array, hop: Index, me: Index) -> tuple[jax.Array, jax.Array]:
        chunks = 2 * self.order.groups
        numbers = (me, chunks - 1 - me)
        queries = tuple(self.order.chunk(row, number) for number in numbers)
        keys = tuple(self.order.chunk(row, (number - hop) % chunks) for number in numbers)
        return self.keys(queries, hop, me), self.keys(keys, hop, me)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two chunks of what a device has."""
    first, second = jnp.split(x, 2, axis=1)
    return first, second


def _reach(window: int, size: int) -> int:
    """Number of earlier pieces of `size` tokens that the first query of a piece sees into."""
    return -(-(window - 1) // size)
