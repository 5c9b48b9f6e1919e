"""Rows to the devices that have their experts, and back.

Each device has some of the experts, in order of their numbers. It sends every other one the rows of
that one's experts (`collectives/rows.py`), and has room from each for as many rows as may ever
come: nothing is dropped for the mesh's sake, and a device may be sent nothing, or everything. How
many rows of each expert come travels beside them. What the experts give comes back the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.rows import Parts, RowExchange
from jaxtrain.collectives.vary import vary
from jaxtrain.mesh.axes import MeshAxes
from jaxtrain.moe.rows import Plan, combine, dispatch, places_of


class Sends(NamedTuple):
    """plan: of the rows that a device sends to each other one; its owners are the devices.
    sizes: rows for each expert, [devices, experts of a device]. begins: the first row for each
    device."""

    plan: Plan
    sizes: Int[Array, "devices experts"]
    begins: Int[Array, " devices"]


class Trip(NamedTuple):
    """Rows on their way to experts on other devices. plan: places of the rows that this device
    sends. sizes: how many rows come from each device for each expert of this one. parts: numbers
    and places of the rows exchanged with each device."""

    plan: Plan
    sizes: Int[Array, "devices experts"]
    parts: Parts


@dataclass(frozen=True)
class Route:
    """How rows reach experts on other devices of mesh axes `axes`, and come back.

    experts: number of them on all devices. room: places for the rows of each pair of devices.
    """

    axes: MeshAxes
    experts: int
    room: int
    rows: RowExchange

    def plan(self, chosen: Int[Array, "tokens k"]) -> Trip:
        """Plans the trip of tokens to their experts. Sends each device the number of rows that each
        of its experts gets."""
        devices, packed = lax.axis_size(self.axes), self.rows.packed
        sends = plan_sends(chosen, self.experts, devices, self.room, packed=packed)
        counts = vary(jnp.concatenate([sends.sizes, sends.begins[:, None]], axis=1), self.axes)
        received = lax.stop_gradient(Lax().all_to_all(counts, self.axes, 0, 0))
        sizes, begin_there = received[:, :-1], received[:, -1]
        parts = Parts(jnp.sum(sends.sizes, 1), sends.begins, jnp.sum(sizes, 1), begin_there)
        return Trip(sends.plan, sizes, parts)

    def there(self, x: Float[Array, "tokens embed"], trip: Trip) -> Float[Array, "rows embed"]:
        """Sends tokens to their experts; returns the rows that this device receives, `room` places
        for those of each device."""
        return self.rows.there(dispatch(x, trip.plan), trip.parts, self.room, self.axes)

    def back(self, out: Float[Array, "rows embed"], trip: Trip) -> Float[Array, "tokens k embed"]:
        """Sends the experts' outputs back; returns those of each token's choices."""
        sent = len(trip.plan.slots)
        return combine(self.rows.back(out, trip.parts, sent, self.axes), trip.plan)


def plan_sends(
    chosen: Int[Array, "tokens k"], experts: int, devices: int, room: int, *, packed: bool
) -> Sends:
    """Rows in the order of devices and of their experts, and within one of tokens. An expert of
    number `experts` is none. room: for each device's rows, which begin at multiples of it, unless
    they are `packed`."""
    of_slot = chosen.reshape(-1)
    order = jnp.argsort(of_slot, stable=True)
    sizes = jnp.sum(of_slot[:, None] == jnp.arange(experts)[None], axis=0)
    sizes = sizes.reshape(devices, experts // devices)
    ends = jnp.cumsum(jnp.sum(sizes, axis=1))
    first = ends - jnp.sum(sizes, axis=1)
    begins = first if packed else jnp.arange(devices) * room
    to = jnp.minimum(of_slot[order] // (experts // devices), devices - 1)
    rows = jnp.arange(chosen.size) - first[to] + begins[to]
    size = min(chosen.size, devices * room) if packed else devices * room
    slots, places = places_of(order, rows, of_slot[order] < experts, size, chosen.size)
    return Sends(Plan(slots, places.reshape(chosen.shape), jnp.arange(devices)), sizes, begins)


def experts_of_rows(sizes: Int[Array, "devices experts"], room: int) -> Int[Array, "rows 1"]:
    """Returns the local number of the expert of each received row, `room` rows from each device;
    the number of experts for unused rows."""
    ends = jnp.cumsum(sizes, axis=1)
    numbers = jnp.sum(jnp.arange(room)[None, :, None] >= ends[:, None, :], axis=-1)
    return numbers.reshape(-1, 1)


def pinned(x: jax.Array, dependency: jax.Array | None) -> jax.Array:
    """Returns x, which is not available before `dependency` is computed."""
    return x if dependency is None else lax.optimization_barrier((x, dependency))[0]
