"""Transport of keys and values between devices, and of the sums of their gradients back.

Devices form a ring of `groups` seats, with `group` adjacent devices in each. `Travelling`: each
seat passes on what it received, so a device never has more than its own keys and those of one
other. `Gathered`: every device has all keys from the start, and gradients are summed at the end.
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
from jaxtrain.collectives.vary import Index
from jaxtrain.context.schemes import InSlots
from jaxtrain.mesh.axes import MeshAxes


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

    def moved(self, slots: InSlots, distance: int) -> InSlots:
        """Moves the content of every place by `distance` places."""
        numbers = range(len(slots))
        sums: list[jax.Array | None] = [None for _ in numbers]
        for source in numbers:
            for target in numbers:
                pairs = [
                    (seat, receiver)
                    for seat in range(self.groups)
                    for slot, receiver in [self._seat(self._place(source, seat) + distance)]
                    if slot == target
                ]
                if pairs:
                    arrived = self._sent(slots[source], pairs)
                    earlier = sums[target]
                    sums[target] = arrived if earlier is None else earlier + arrived
        return tuple(x for x in sums if x is not None)

    def _place(self, slot: int, seat: int) -> int:
        return self.places - 1 - seat if slot else seat

    def _seat(self, place: int) -> tuple[int, int]:
        """(slot, seat) of a place."""
        place %= self.places
        return (1, self.places - 1 - place) if place >= self.groups else (0, place)

    def _sent(self, x: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
        """Sends `x` from seat to seat; seats that receive nothing get zeros. Nothing is sent if all
        seats keep theirs."""
        if all(seat == receiver for seat, receiver in pairs):
            seats = [seat for seat, _ in pairs]
            keeps = jnp.isin(self.me(), jnp.array(seats))
            return jnp.where(keeps, x, jnp.zeros((), x.dtype))
        g = self.group
        devices = [(a * g + i, b * g + i) for a, b in pairs for i in range(g)]
        return permute(x, self.axes, devices)


class Transport(Protocol):
    """hop: from 1; own: what a device has, as its scheme lets it travel."""

    @property
    def seats(self) -> Seats: ...

    def begin(self, own: InSlots) -> Any:
        """Starts the transport of the first hop's keys."""
        ...

    def came(self, moving: Any, hop: Index, me: Index) -> InSlots:
        """The keys of a hop."""
        ...

    def onward(self, moving: Any) -> Any:
        """Starts the transport of the next hop's keys."""
        ...

    def no_sums(self, own: InSlots) -> Any:
        """Before the first hop, of gradients like these."""
        ...

    def sums(self, moving: Any, hop: Index, me: Index) -> InSlots:
        """Returns the gradients of a hop's keys that other devices have summed so far."""
        ...

    def put(self, moving: Any, sums: InSlots, hop: Index, me: Index) -> Any:
        """With this device's added."""
        ...

    def home(self, own: InSlots, moving: Any, hops: int) -> InSlots:
        """Returns all gradients of this device's keys: its own plus those of the other devices
        after the last hop."""
        ...


@dataclass(frozen=True)
class Travelling:
    """Keys, and sums of their gradients, go from seat to seat."""

    seats: Seats

    def begin(self, own: InSlots) -> InSlots:
        return self.seats.moved(own, 1)

    def came(self, moving: InSlots, hop: Index, me: Index) -> InSlots:
        return moving

    def onward(self, moving: InSlots) -> InSlots:
        return self.seats.moved(moving, 1)

    def no_sums(self, own: InSlots) -> InSlots:
        return jax.tree.map(jnp.zeros_like, own)

    def sums(self, moving: InSlots, hop: Index, me: Index) -> InSlots:
        first = isinstance(hop, int) and hop == 1  # they are zeros, and need not travel
        return moving if first else self.seats.moved(moving, 1)

    def put(self, moving: InSlots, sums: InSlots, hop: Index, me: Index) -> InSlots:
        return sums

    def home(self, own: InSlots, moving: InSlots, hops: int) -> InSlots:
        returned = self.seats.moved(moving, -hops)
        return tuple(map(KEY_SUMS["key gradients"], own, returned))


@dataclass(frozen=True)
class Gathered:
    """Gathers the keys of all seats at once; sums of gradients are kept for all seats, and are
    scattered at the end. A seat is one device here."""

    seats: Seats

    def begin(self, own: InSlots) -> jax.Array:
        """Returns the keys of all places, [places, ...]."""
        gathered = all_gather(jnp.concatenate(own, axis=1)[None], self.seats.axes, 0, Lax())
        if not self.seats.chunks:
            return gathered
        up, back = jnp.split(gathered, 2, axis=2)
        return jnp.concatenate([up, jnp.flip(back, 0)])

    def came(self, moving: jax.Array, hop: Index, me: Index) -> InSlots:
        take = lax.dynamic_index_in_dim
        return tuple(take(moving, place, keepdims=False) for place in self._places(hop, me))

    def onward(self, moving: jax.Array) -> jax.Array:
        return moving

    def no_sums(self, own: InSlots) -> jax.Array:
        first = jnp.zeros_like(own[0])
        return jnp.broadcast_to(first[None], (self.seats.places, *first.shape))

    def sums(self, moving: jax.Array, hop: Index, me: Index) -> InSlots:
        return self.came(moving, hop, me)

    def put(self, moving: jax.Array, sums: InSlots, hop: Index, me: Index) -> jax.Array:
        for place, sum_ in zip(self._places(hop, me), sums, strict=True):
            moving = lax.dynamic_update_index_in_dim(moving, sum_, place, 0)
        return moving

    def home(self, own: InSlots, moving: jax.Array, hops: int) -> InSlots:
        if self.seats.chunks:
            up, back = jnp.split(moving, 2)
            moving = jnp.concatenate([up, jnp.flip(back, 0)], axis=2)
        (total,) = sum_scatter("gathered key gradients", moving, self.seats.axes, 0, Lax())
        slots = jnp.split(total, len(own), axis=1)
        return tuple(map(jnp.add, own, slots))

    def _places(self, hop: Index, me: Index) -> list[Index]:
        every = self.seats.places
        places = (me, every - 1 - me) if self.seats.chunks else (me,)
        return [(place - hop) % every for place in places]


KEY_SUMS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {"key gradients": jnp.add}
"""Reductions by name, as `named.SUM_SCATTERS`: gradients of keys and values, a device's own and
those that others have added up on their way."""
