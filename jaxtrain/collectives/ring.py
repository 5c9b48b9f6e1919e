"""Rings: collectives made of `ppermute`s between neighbours, bandwidth-optimal (Patarasuk & Yuan
2009; Chan et al. 2007, section 4).

On n devices a chain of hops goes right and, with two directions, another goes left, each about
half as long: the same bytes in half the steps, over both directions of every link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Shaped

from jaxtrain.collectives.algorithm import only_on
from jaxtrain.collectives.vary import Index, vary, varying_axes
from jaxtrain.mesh.axes import MeshAxes
from jaxtrain.violations import flag, raise_violations

RIGHT, LEFT = 1, -1
INT32_MAX = 2**31 - 1
"""JAX counts elements in int32: beyond it an offset along a dim would wrap."""

Chain = tuple[int, int]
"""(RIGHT or LEFT, hops)."""

Moving = dict[int, jax.Array]
"""RIGHT or LEFT -> what this device sends that way next."""

Placed = tuple[jax.Array, Moving]
"""The result so far, with the tiles that have come in their places; and what moves on."""

Carry = TypeVar("Carry")
Hop = Callable[[Carry, int, Index], Carry]
"""(carry, RIGHT or LEFT, number of the hop from 1) -> carry."""


@dataclass(frozen=True)
class Ring:
    """Collectives by neighbour exchange; an `Algorithm`.

    directions: 1 sends to the right only, 2 both ways at once.
    unroll: every hop is in the program, so that a scheduler can overlap each with what is beside
      it; False makes a loop of them, whose program does not grow with n (but for CPU, where a loop
      could run beside other collectives: see `order.py`). Only all_to_all sends other bytes then:
      a loop's buffer cannot shrink, so a device sends (n-1)^2/n times its buffer (half of that in
      two directions) instead of (n-1)/n.
    """

    directions: int = 2
    unroll: bool = True

    def __post_init__(self) -> None:
        violations = flag("unroll", self.unroll)
        if type(self.directions) is not int or self.directions not in (1, 2):
            violations.append(f"directions={self.directions!r} must be 1 or 2; use 2, both ways")
        raise_violations(violations)

    def chains(self, n: int) -> list[Chain]:
        """The chains by which n - 1 others are reached, none of them empty."""
        right = n - 1 if self.directions == 1 else n // 2
        return [(way, hops) for way, hops in ((RIGHT, right), (LEFT, n - 1 - right)) if hops]

    def travel(self, chains: list[Chain], hop: Hop[Carry], carry: Carry) -> Carry:
        """The loop of every collective here: carry = hop(carry, way, number of the hop from 1),
        over all hops of all chains. Chains of both directions go side by side, a hop of each in
        turn, as long as each lasts."""
        done = 0
        for _, hops in sorted(chains, key=lambda chain: chain[1]):
            running = [way for way, length in chains if length > done]

            def together(h: Index, carry: Carry, running: list[int] = running) -> Carry:
                for way in running:
                    carry = hop(carry, way, h)
                return carry

            hop_numbers = range(done + 1, hops + 1)
            if self.unroll:
                carry = each_of(hop_numbers, together, carry)
            elif hops > done:
                carry = lax.platform_dependent(
                    carry,
                    cpu=partial(each_of, hop_numbers, together),
                    default=partial(lax.fori_loop, done + 1, hops + 1, together),
                )
            done = hops
        return carry

    def all_gather(self, x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
        # Each device hands on what came last; what arrives with hop h from the left is the tile of
        # device me - h, from the right that of me + h.
        n, me = lax.axis_size(axes), lax.axis_index(axes)
        chains = self.chains(n)

        def hop(carry: Placed, way: int, h: Index) -> Placed:
            out, moving = carry
            arrived = shift(moving[way], axes, way)
            return put(out, arrived, me - way * h, n, dim), moving | {way: arrived}

        return self.travel(chains, hop, (room_for(x, axes, dim), {w: x for w, _ in chains}))[0]

    def reduce_scatter(self, x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
        # In one direction: device i sends the partial sum of tile i - h to its right neighbour in
        # hop h = 1 .. n - 1, s <- arrived + tile[i - h - 1], so that tile j ends on device j with
        # the terms of all n, after n - 1 hops of 1/n of the bytes.
        n, me = lax.axis_size(axes), lax.axis_index(axes)
        chains = self.chains(n)
        length = dict(chains)

        def tile(number: Index) -> jax.Array:
            return take(x, number, n, dim)

        def hop(sums: Moving, way: int, h: Index) -> Moving:
            # What started `hops` devices before its owner gathers a tile at each it passes.
            arrived = shift(sums[way], axes, way)
            return sums | {way: arrived + tile(me + way * (length[way] - h))}

        started = {way: tile(me + way * hops) for way, hops in chains}
        sums = self.travel([(way, hops - 1) for way, hops in chains], hop, started)
        return sum((shift(sums[w], axes, w) for w, _ in chains), start=tile(me))

    def all_reduce(self, x: jax.Array, axes: MeshAxes) -> jax.Array:
        # Sums scattered, then gathered: 2 (n - 1)/n of the bytes leave each device, and no
        # algorithm sends fewer (Patarasuk & Yuan 2009).
        flat, restore = flatten_padded(x, lax.axis_size(axes))
        return restore(self.all_gather(self.reduce_scatter(flat, axes, 0), axes, 0))

    def broadcast(self, x: jax.Array, axes: MeshAxes, root: int) -> jax.Array:
        flat, restore = flatten_padded(x, lax.axis_size(axes))
        return restore(self.all_gather(self.scatter(flat, axes, 0, root), axes, 0))

    def reduce(self, x: jax.Array, axes: MeshAxes, root: int) -> jax.Array:
        flat, restore = flatten_padded(x, lax.axis_size(axes))
        return restore(self.gather(self.reduce_scatter(flat, axes, 0), axes, 0, root))

    def scatter(self, x: jax.Array, axes: MeshAxes, dim: int, root: int) -> jax.Array:
        n, me = lax.axis_size(axes), lax.axis_index(axes)
        chains = self.chains(n)
        length = dict(chains)

        def hop(moving: Moving, way: int, h: Index) -> Moving:
            # The root sends the farthest tile first; after the last hop each holds its own.
            leaving = take(x, root + way * (length[way] - h + 1), n, dim)
            leaving = jnp.where(me == root, leaving, moving[way])
            pairs = [(root + way * d, root + way * (d + 1)) for d in range(length[way])]
            return moving | {way: permute(leaving, axes, pairs)}

        own = take(x, root, n, dim)
        moving = self.travel(chains, hop, {way: own for way, _ in chains})
        for way, hops in chains:
            distance = (way * (me - root)) % n
            own = jnp.where((distance > 0) & (distance <= hops), moving[way], own)
        return own

    def gather(self, x: jax.Array, axes: MeshAxes, dim: int, root: int) -> jax.Array:
        n = lax.axis_size(axes)
        chains = self.chains(n)
        length = dict(chains)

        def hop(carry: Placed, way: int, h: Index) -> Placed:
            out, moving = carry
            pairs = [(root - way * (d + 1), root - way * d) for d in range(length[way])]
            arrived = permute(moving[way], axes, pairs)
            return put(out, arrived, root - way * h, n, dim), moving | {way: arrived}

        out, _ = self.travel(chains, hop, (room_for(x, axes, dim), {w: x for w, _ in chains}))
        return only_on(root, out, axes)

    def all_to_all(self, x: jax.Array, axes: MeshAxes, split: int, concat: int) -> jax.Array:
        n, me = lax.axis_size(axes), lax.axis_index(axes)
        chains = self.chains(n)
        out = room_for(take(x, me, n, split), axes, concat)

        def direct(out: jax.Array, way: int, h: Index) -> jax.Array:
            assert isinstance(h, int), "unrolled hops have numbers"
            arrived = shift(take(x, me + way * h, n, split), axes, way * h)
            return put(out, arrived, me - way * h, n, concat)

        if self.unroll:
            return self.travel(chains, direct, out)

        def forwarded(carry: Placed, way: int, h: Index) -> Placed:
            out, moving = carry
            arrived = shift(moving[way], axes, way)
            own = lax.dynamic_index_in_dim(arrived, h - 1, 0, keepdims=False)
            return put(out, own, me - way * h, n, concat), moving | {way: arrived}

        leaving = {
            way: jnp.stack([take(x, me + way * h, n, split) for h in range(1, hops + 1)])
            for way, hops in chains
        }
        return self.travel(chains, forwarded, (out, leaving))[0]


def each_of(numbers: range, act: Callable[[Index, Carry], Carry], carry: Carry) -> Carry:
    """carry = act(number, carry) for each of the numbers."""
    for number in numbers:
        carry = act(number, carry)
    return carry


def shift(x: jax.Array, axes: MeshAxes, distance: int) -> jax.Array:
    """Sends `x` `distance` devices to the right: device i receives the `x` of device i - distance,
    modulo the number of devices."""
    return permute(x, axes, [(i, i + distance) for i in range(lax.axis_size(axes))])


def permute(x: jax.Array, axes: MeshAxes, pairs: list[tuple[int, int]]) -> jax.Array:
    """`lax.ppermute` of (sender, receiver) pairs, device numbers modulo n; zeros where nothing
    arrives.

    ppermute counts along the axes in the mesh's order, whatever order it is given; every other
    collective, and `axis_index`, in the order given.
    """
    order = sorted(axes, key=jax.sharding.get_abstract_mesh().axis_names.index)
    ids = np.arange(lax.axis_size(axes)).reshape([lax.axis_size(a) for a in order])
    ids = ids.transpose([order.index(a) for a in axes]).reshape(-1)
    return lax.ppermute(
        x, tuple(order), [(int(ids[a % ids.size]), int(ids[b % ids.size])) for a, b in pairs]
    )


def take(x: jax.Array, number: Index, n: int, dim: int) -> jax.Array:
    """Returns tile `number` (modulo n) of the n tiles of `dim`."""
    size = x.shape[dim] // n
    if x.shape[dim] <= INT32_MAX:
        return lax.dynamic_slice_in_dim(x, number % n * size, size, dim)
    return lax.dynamic_index_in_dim(_tiles(x, n, dim), number % n, dim, keepdims=False)


def put(out: jax.Array, tile: jax.Array, number: Index, n: int, dim: int) -> jax.Array:
    """Returns `out` with `tile` as its tile `number` (modulo n) of n along `dim`."""
    if out.shape[dim] <= INT32_MAX:
        return lax.dynamic_update_slice_in_dim(out, tile, number % n * tile.shape[dim], dim)
    tiles = lax.dynamic_update_index_in_dim(_tiles(out, n, dim), tile, number % n, dim)
    return tiles.reshape(out.shape)


def _tiles(x: jax.Array, n: int, dim: int) -> jax.Array:
    """`dim` as [n tiles, size of a tile]: a tile's number fits where its offset does not."""
    return x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])


def room_for(tile: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
    """Zeros for n tiles along `dim`, this device's own in its place."""
    n = lax.axis_size(axes)
    shape = (*tile.shape[:dim], n * tile.shape[dim], *tile.shape[dim + 1 :])
    return put(
        vary(jnp.zeros(shape, tile.dtype), varying_axes(tile)), tile, lax.axis_index(axes), n, dim
    )


def flatten_padded(
    x: jax.Array, n: int
) -> tuple[Shaped[Array, " padded"], Callable[[jax.Array], jax.Array]]:
    """`x` as one dim, padded with zeros to a multiple of n; and the way back."""
    flat = jnp.pad(x.reshape(-1), (0, -x.size % n))
    return flat, lambda flat: flat[: x.size].reshape(x.shape)
