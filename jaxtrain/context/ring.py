"""How keys and values come by, and the gradients' sums that go with them come home.

Devices stand in a ring of `groups` seats, `group` devices side by side in each. `Travelling`: each
hands on what came to it, so that at no time a device has more than its own and one other's.
`Gathered`: all have all from the start, and gradients are summed at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.named import all_gather, sum_scatter
from jaxtrain.collectives.ring import permute
from jaxtrain.collectives.vary import Index, MeshAxes
from jaxtrain.context.schemes import Slots


@dataclass(frozen=True)
class Seats:
    """The devices of `axes` as seats. chunks: each seat is two places of a line, one on its way up
    and one on its way back (`schemes.Chunks`), and what leaves the line's end begins it again."""

    axes: MeshAxes
    groups: int
    group: int
    chunks: bool

    def me(self) -> Index:
        """This device's seat."""
        return lax.axis_index(self.axes) // self.group

    @property
    def places(self) -> int:
        return 2 * self.groups if self.chunks else self.groups

    def moved(self, slots: Slots, by: int) -> Slots:
        """What every place has, `by` places on."""
        ways = range(len(slots))
        found: list[jax.Array | None] = [None for _ in ways]
        for of in ways:
            for to in ways:
                pairs = [
                    (seat, there)
                    for seat in range(self.groups)
                    for slot, there in [self._seat(self._place(of, seat) + by)]
                    if slot == to
                ]
                if pairs:
                    arrived = self._sent(slots[of], pairs)
                    before = found[to]
                    found[to] = arrived if before is None else before + arrived
        return tuple(x for x in found if x is not None)

    def _place(self, slot: int, seat: int) -> int:
        return self.places - 1 - seat if slot else seat

    def _seat(self, place: int) -> tuple[int, int]:
        """(slot, seat) of a place."""
        place %= self.places
        return (1, self.places - 1 - place) if place >= self.groups else (0, place)

    def _sent(self, x: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
        """From seat to seat; zeros where nothing arrives. What all seats keep is not sent."""
        if all(seat == there for seat, there in pairs):
            kept = [seat for seat, _ in pairs]
            here = jnp.isin(self.me(), jnp.array(kept))
            return jnp.where(here, x, jnp.zeros((), x.dtype))
        g = self.group
        each = [(a * g + i, b * g + i) for a, b in pairs for i in range(g)]
        return permute(x, self.axes, each)


class Transport(Protocol):
    """hop: from 1; own: what a device has, as its scheme lets it travel."""

    @property
    def seats(self) -> Seats: ...

    def begin(self, own: Slots) -> Any:
        """What brings the keys of the first hop."""
        ...

    def came(self, moving: Any, hop: Index, me: Index) -> Slots:
        """The keys of a hop."""
        ...

    def onward(self, moving: Any) -> Any:
        """What brings those of the hop after."""
        ...

    def no_sums(self, own: Slots) -> Any:
        """Before the first hop, of gradients like these."""
        ...

    def sums(self, moving: Any, hop: Index, me: Index) -> Slots:
        """What gradients of a hop's keys other devices have added up so far."""
        ...

    def put(self, moving: Any, sums: Slots, hop: Index, me: Index) -> Any:
        """With this device's added."""
        ...

    def home(self, own: Slots, moving: Any, hops: int) -> Slots:
        """All gradients of this device's keys: its own, and the others' after the last hop."""
        ...


@dataclass(frozen=True)
class Travelling:
    """Keys, and sums of their gradients, go from seat to seat."""

    seats: Seats

    def begin(self, own: Slots) -> Slots:
        return self.seats.moved(own, 1)

    def came(self, moving: Slots, hop: Index, me: Index) -> Slots:
        return moving

    def onward(self, moving: Slots) -> Slots:
        return self.seats.moved(moving, 1)

    def no_sums(self, own: Slots) -> Slots:
        return jax.tree.map(jnp.zeros_like, own)

    def sums(self, moving: Slots, hop: Index, me: Index) -> Slots:
        first = isinstance(hop, int) and hop == 1  # they are zeros, and need not travel
        return moving if first else self.seats.moved(moving, 1)

    def put(self, moving: Slots, sums: Slots, hop: Index, me: Index) -> Slots:
        return sums

    def home(self, own: Slots, moving: Slots, hops: int) -> Slots:
        returned = self.seats.moved(moving, -hops)
        return tuple(map(KEY_SUMS["key gradients"], own, returned))


@dataclass(frozen=True)
class Gathered:
    """Keys are gathered whole, and so are the sums of their gradients before they are scattered:
    of a seat one device."""

    seats: Seats

    def begin(self, own: Slots) -> jax.Array:
        """[places, ...]."""
        whole = all_gather(jnp.concatenate(own, axis=1)[None], self.seats.axes, 0, Lax())
        if not self.seats.chunks:
            return whole
        up, back = jnp.split(whole, 2, axis=2)
        return jnp.concatenate([up, jnp.flip(back, 0)])

    def came(self, moving: jax.Array, hop: Index, me: Index) -> Slots:
        at = lax.dynamic_index_in_dim
        return tuple(at(moving, place, keepdims=False) for place in self._places(hop, me))

    def onward(self, moving: jax.Array) -> jax.Array:
        return moving

    def no_sums(self, own: Slots) -> jax.Array:
        first = jnp.zeros_like(own[0])
        return jnp.broadcast_to(first[None], (self.seats.places, *first.shape))

    def sums(self, moving: jax.Array, hop: Index, me: Index) -> Slots:
        return self.came(moving, hop, me)

    def put(self, moving: jax.Array, sums: Slots, hop: Index, me: Index) -> jax.Array:
        for place, sum_ in zip(self._places(hop, me), sums, strict=True):
            moving = lax.dynamic_update_index_in_dim(moving, sum_, place, 0)
        return moving

    def home(self, own: Slots, moving: jax.Array, hops: int) -> Slots:
        if self.seats.chunks:
            up, back = jnp.split(moving, 2)
            moving = jnp.concatenate([up, jnp.flip(back, 0)], axis=2)
        (mine,) = sum_scatter("gathered key gradients", moving, self.seats.axes, 0, Lax())
        slots = jnp.split(mine, len(own), axis=1)
        return tuple(map(jnp.add, own, slots))

    def _places(self, hop: Index, me: Index) -> list[Index]:
        every = self.seats.places
        places = (me, every - 1 - me) if self.seats.chunks else (me,)
        return [(place - hop) % every for place in places]


KEY_SUMS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {"key gradients": jnp.add}
"""Reductions by name, as `named.SUM_SCATTERS`: gradients of keys and values, a device's own and
those that others have added up on their way."""
