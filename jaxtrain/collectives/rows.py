"""Rows in other numbers for every pair of devices: what a mixture of experts sends.

Each device has rows for every other one, side by side in the order of the devices, and room for
`room` rows from each. They come to lie in `room` places for each sender, in the order of the
senders, the rest zeros; and may go back to where they came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxtrain.collectives.algorithm import Algorithm, all_to_all
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.vary import vary, varying_axes
from jaxtrain.mesh.axes import MeshAxes


class Parts(NamedTuple):
    """Rows to exchange with each other device: the number that go to it and the first of them; the
    number that come from it, and the first of them on that device."""

    going: Int[Array, " devices"]
    begins: Int[Array, " devices"]
    coming: Int[Array, " devices"]
    begin_there: Int[Array, " devices"]


class RowExchange(Protocol):
    """Exchange of such rows, inside `jax.shard_map`, over mesh axes `axes`."""

    @property
    def packed(self) -> bool:
        """True if a device's rows are contiguous before they are sent. Else the rows for each other
        device begin at a multiple of `room`, as `there` leaves them."""
        ...

    @property
    def permutes(self) -> bool:
        """True if rows travel by single permutes, which can be tied to products."""
        ...

    def there(
        self, rows: Float[Array, "sent embed"], parts: Parts, room: int, axes: MeshAxes
    ) -> Float[Array, "came embed"]:
        """Sends rows to the devices that they are for. Its adjoint is `back`."""
        ...

    def back(
        self, rows: Float[Array, "came embed"], parts: Parts, sent: int, axes: MeshAxes
    ) -> Float[Array, "sent embed"]:
        """Sends rows back to the `sent` places that they came from. Its adjoint is `there`."""
        ...


@dataclass(frozen=True)
class Padded:
    """An all-to-all of `room` rows for each pair of devices, whatever is in them: on every backend,
    and as many bytes as in the worst case.

    by: the algorithm of the all-to-all.
    """

    by: Algorithm = Lax()  # noqa: RUF009 (frozen)

    @property
    def permutes(self) -> bool:
        return isinstance(self.by, Recursive) or (isinstance(self.by, Ring) and self.by.unroll)

    @property
    def packed(self) -> bool:
        return False

    def there(
        self, rows: Float[Array, "sent embed"], parts: Parts, room: int, axes: MeshAxes
    ) -> Float[Array, "came embed"]:
        return all_to_all(rows, axes, 0, 0, self.by)

    def back(
        self, rows: Float[Array, "came embed"], parts: Parts, sent: int, axes: MeshAxes
    ) -> Float[Array, "sent embed"]:
        return all_to_all(rows, axes, 0, 0, self.by)


@dataclass(frozen=True)
class Ragged:
    """Just the rows that there are, by XLA's ragged all-to-all: for GPUs and TPUs, XLA:CPU has
    none. What is sent depends on what routers choose; the memory is the worst case's still."""

    @property
    def packed(self) -> bool:
        return True

    @property
    def permutes(self) -> bool:
        return False

    def there(
        self, rows: Float[Array, "sent embed"], parts: Parts, room: int, axes: MeshAxes
    ) -> Float[Array, "came embed"]:
        return _there(axes, room, vary(rows, axes), parts)

    def back(
        self, rows: Float[Array, "came embed"], parts: Parts, sent: int, axes: MeshAxes
    ) -> Float[Array, "sent embed"]:
        return _back(axes, sent, vary(rows, axes), parts)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _there(axes: MeshAxes, room: int, rows: jax.Array, parts: Parts) -> jax.Array:
    devices, device = len(parts.going), lax.axis_index(axes)
    places = jnp.full(devices, device * room, parts.begins.dtype)
    sizes = parts.going, places, parts.coming
    return _ragged(rows, devices * room, parts.begins, *sizes, axes)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _back(axes: MeshAxes, sent: int, rows: jax.Array, parts: Parts) -> jax.Array:
    devices = len(parts.going)
    begins = jnp.arange(devices, dtype=parts.begins.dtype) * (len(rows) // devices)
    sizes = parts.coming, parts.begin_there, parts.going
    return _ragged(rows, sent, begins, *sizes, axes)


def _ragged(
    rows: jax.Array,
    places: int,
    begins: jax.Array,
    sizes: jax.Array,
    begins_there: jax.Array,
    coming: jax.Array,
    axes: MeshAxes,
) -> jax.Array:
    """Returns `places` rows: those that `lax.ragged_all_to_all` brings at their offsets, else
    zeros. begins, sizes, begins_there, coming: its offsets and sizes, in its order."""
    offsets = begins, sizes, begins_there, coming
    all_axes = varying_axes(rows, *offsets)
    empty = vary(jnp.zeros((places, *rows.shape[1:]), rows.dtype), all_axes)
    varied = (vary(offset, all_axes) for offset in offsets)
    name = axes if len(axes) > 1 else axes[0]
    return lax.ragged_all_to_all(vary(rows, all_axes), empty, *varied, axis_name=name)


_there.defvjp(
    lambda axes, room, rows, parts: (_there(axes, room, rows, parts), (len(rows), parts)),
    lambda axes, room, saved, dy: (_back(axes, saved[0], vary(dy, axes), saved[1]), None),
)
_back.defvjp(
    lambda axes, sent, rows, parts: (
        _back(axes, sent, rows, parts),
        (len(rows) // len(parts.going), parts),
    ),
    lambda axes, sent, saved, dy: (_there(axes, saved[0], vary(dy, axes), saved[1]), None),
)
