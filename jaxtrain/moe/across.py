"""Rows to the devices that have their experts, and back.

Each device has some of the experts, in order of their numbers. It sends every other one the rows of
that one's experts (`collectives/rows.py`), and has room from each for as many rows as may ever
come: nothing is dropped for the mesh's sake, and a device may be sent nothing, or everything. How
many rows of each expert come travels beside them. What the experts give comes back the same way.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxtrain.collectives.exchange import Exchange
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.rows import Parts
from jaxtrain.collectives.vary import vary
from jaxtrain.moe.rows import Plan, combine, places_of


class Sends(NamedTuple):
    """plan: of the rows that a device sends to each other one; its owners are the devices.
    sizes: rows for each expert, [devices, experts of a device]. begins: the first row for each
    device."""

    plan: Plan
    sizes: Int[Array, "devices experts"]
    begins: Int[Array, " devices"]


class Received(NamedTuple):
    """rows, `room` places for those of each device, of which `sizes` are taken by each expert's."""

    rows: Float[Array, "rows embed"]
    sizes: Int[Array, "devices experts"]
    parts: Parts


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


def send(rows: Float[Array, "sent embed"], sends: Sends, room: int, exchange: Exchange) -> Received:
    """Sends rows to the devices of their experts; returns those that this device receives."""
    axes = exchange.experts
    counts = vary(jnp.concatenate([sends.sizes, sends.begins[:, None]], axis=1), axes)
    received = lax.stop_gradient(Lax().all_to_all(counts, axes, 0, 0))
    sizes, begin_there = received[:, :-1], received[:, -1]
    parts = Parts(jnp.sum(sends.sizes, 1), sends.begins, jnp.sum(sizes, 1), begin_there)
    return Received(exchange.rows.there(rows, parts, room, axes), sizes, parts)


def bring_back(
    out: Float[Array, "rows embed"], sends: Sends, received: Received, exchange: Exchange
) -> Float[Array, "tokens k embed"]:
    """Sends the experts' outputs back; returns those of each token's choices."""
    sent = len(sends.plan.slots)
    back = exchange.rows.back(out, received.parts, sent, exchange.experts)
    return combine(back, sends.plan)


def pinned(x: jax.Array, dependency: jax.Array | None) -> jax.Array:
    """Returns x, which is not available before `dependency` is computed."""
    return x if dependency is None else lax.optimization_barrier((x, dependency))[0]
