"""Recursive doubling and binomial trees: about log2(n) steps, for messages so small that the
latency of a step costs more than its bytes (Thakur, Rabenseifner & Gropp 2005; Bruck et al. 1997).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from jaxtrain.collectives.algorithm import only_on
from jaxtrain.collectives.ring import permute, shift
from jaxtrain.collectives.vary import vary, varying_axes
from jaxtrain.mesh.axes import MeshAxes


@dataclass(frozen=True)
class Recursive:
    """Collectives in ceil(log2 n) steps, each to a partner twice as far; an `Algorithm`.

    all_gather, reduce_scatter: doubling and halving, with no copies but of what is sent and what
    arrives; Bruck's where n is no power of two; bandwidth-optimal both. all_reduce: doubling, whole
    buffers, two steps more where n is no power of two. all_to_all: Bruck's, half the buffer a
    step. broadcast, reduce, scatter, gather: binomial trees.
    """

    def all_gather(self, x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
        n = lax.axis_size(axes)
        return (_bruck_gather if n & (n - 1) else _doubling_gather)(x, axes, dim)

    def reduce_scatter(self, x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
        n = lax.axis_size(axes)
        return (_bruck_scatter if n & (n - 1) else _halving_scatter)(x, axes, dim)

    def all_reduce(self, x: jax.Array, axes: MeshAxes) -> jax.Array:
        # Recursive doubling: after step k device i holds the sum over the 2^(k+1) devices whose
        # numbers differ from its own in the lowest k + 1 bits; partners are i and i xor 2^k.
        n, me = lax.axis_size(axes), lax.axis_index(axes)
        total = x
        inner = 1 << (n.bit_length() - 1)
        extra = [(inner + i, i) for i in range(n - inner)]
        if extra:  # the devices beyond a power of two hand theirs in, and get the sum at the end
            total += permute(total, axes, extra)
        for distance in _powers(inner):
            pairs = [(i, i ^ distance) for i in range(inner)]
            total += permute(total, axes, pairs)
        if extra:
            returned = permute(total, axes, [(b, a) for a, b in extra])
            total = jnp.where(me < inner, total, returned)
        return total

    def all_to_all(self, x: jax.Array, axes: MeshAxes, split: int, concat: int) -> jax.Array:
        # A piece that is for the device d further on takes the hops 2^k of d's binary digits: in
        # step k all pieces whose digit k is 1 travel 2^k devices (Bruck et al. 1997).
        n, me = lax.axis_size(axes), lax.axis_index(axes)
        pieces = tiles(x, n, split)
        pieces = jnp.roll(pieces, -me, axis=0)  # entry d is for the device d further on
        for distance in _powers(n):
            chosen = jnp.array([d for d in range(n) if d & distance])
            pieces = pieces.at[chosen].set(shift(pieces[chosen], axes, distance))
        # Entry d came from the device d before: in order of the senders, from 0.
        pieces = jnp.roll(jnp.flip(pieces, 0), me + 1, axis=0)
        pieces = jnp.moveaxis(pieces, 1, split + 1)
        return join_tiles(jnp.moveaxis(pieces, concat + 1, 1), concat)

    def broadcast(self, x: jax.Array, axes: MeshAxes, root: int) -> jax.Array:
        n = lax.axis_size(axes)
        rank = (lax.axis_index(axes) - root) % n
        for distance in _powers(n):
            pairs = [(root + r, root + r + distance) for r in range(min(distance, n - distance))]
            arrived = permute(x, axes, pairs)
            x = jnp.where((rank >= distance) & (rank < 2 * distance), arrived, x)
        return x

    def reduce(self, x: jax.Array, axes: MeshAxes, root: int) -> jax.Array:
        n = lax.axis_size(axes)
        total = x
        for distance in reversed(_powers(n)):
            pairs = [(root + r + distance, root + r) for r in range(min(distance, n - distance))]
            total += permute(total, axes, pairs)
        return only_on(root, total, axes)

    def scatter(self, x: jax.Array, axes: MeshAxes, dim: int, root: int) -> jax.Array:
        n = lax.axis_size(axes)
        rank = (lax.axis_index(axes) - root) % n
        steps = _powers(n)
        stack = jnp.roll(tiles(x, n, dim), -root, axis=0)  # by rank, the root's own first
        stack = jnp.pad(stack, [(0, (1 << len(steps)) - n)] + [(0, 0)] * (stack.ndim - 1))
        for distance in reversed(steps):
            arrived = permute(stack[distance:], axes, _tree_pairs(n, root, distance))
            stack = jnp.where(rank % (2 * distance) == distance, arrived, stack[:distance])
        return jnp.moveaxis(stack[0], 0, dim)

    def gather(self, x: jax.Array, axes: MeshAxes, dim: int, root: int) -> jax.Array:
        n = lax.axis_size(axes)
        stack = jnp.moveaxis(x, dim, 0)[None]
        for distance in _powers(n):
            pairs = [(b, a) for a, b in _tree_pairs(n, root, distance)]
            stack = jnp.concatenate([stack, permute(stack, axes, pairs)])
        return only_on(root, join_tiles(jnp.roll(stack[:n], root, axis=0), dim), axes)


def _doubling_gather(x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
    # After step k device i has the 2^(k+1) tiles whose numbers differ from its own in the lowest
    # k + 1 bits; they lie side by side, at their place in the result.
    n, me, size = lax.axis_size(axes), lax.axis_index(axes), x.shape[dim]
    shape = [*x.shape[:dim], n * size, *x.shape[dim + 1 :]]
    out = vary(lax.empty(tuple(shape), x.dtype), varying_axes(x))
    out = lax.dynamic_update_slice_in_dim(out, x, me * size, dim)
    for distance in _powers(n):
        first = me // distance * distance
        sent = lax.dynamic_slice_in_dim(out, first * size, distance * size, dim)
        arrived = permute(sent, axes, [(i, i ^ distance) for i in range(n)])
        out = lax.dynamic_update_slice_in_dim(out, arrived, (first ^ distance) * size, dim)
    return out


def _halving_scatter(x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
    # _doubling_gather run backwards.
    n, me = lax.axis_size(axes), lax.axis_index(axes)
    for distance in reversed(_powers(n)):
        half = x.shape[dim] // 2
        side = me // distance % 2
        sent = lax.dynamic_slice_in_dim(x, (1 - side) * half, half, dim)
        own = lax.dynamic_slice_in_dim(x, side * half, half, dim)
        x = own + permute(sent, axes, [(i, i ^ distance) for i in range(n)])
    return x


def _bruck_gather(x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
    # Bruck et al. 1997: a device with m tiles gets min(m, n - m) from the device m further on, so
    # m doubles in each step: ceil(log2 n) steps, (n - 1)/n of the result's bytes.
    n = lax.axis_size(axes)
    stack = jnp.moveaxis(x, dim, 0)[None]  # tiles me, me + 1, ...
    while len(stack) < n:
        stack = jnp.concatenate([stack, shift(stack[: n - len(stack)], axes, -len(stack))])
    return join_tiles(jnp.roll(stack, lax.axis_index(axes), axis=0), dim)


def _bruck_scatter(x: jax.Array, axes: MeshAxes, dim: int) -> jax.Array:
    # _bruck_gather run backwards: what was received is sent back, and added to what it came from.
    n = lax.axis_size(axes)
    sums = jnp.roll(tiles(x, n, dim), -lax.axis_index(axes), axis=0)
    for distance in reversed(_powers(n)):
        back = shift(sums[distance:], axes, distance)
        # Padded, not added in place: XLA:CPU of jax 0.11 crashes on that.
        padding = [(0, distance - len(back))] + [(0, 0)] * (back.ndim - 1)
        sums = sums[:distance] + jnp.pad(back, padding)
    return jnp.moveaxis(sums[0], 0, dim)


def _powers(n: int) -> list[int]:
    """1, 2, 4, ... below n."""
    return [1 << k for k in range((n - 1).bit_length())]


def _tree_pairs(n: int, root: int, distance: int) -> list[tuple[int, int]]:
    """(parent, child) of a binomial tree's level, in device numbers."""
    return [
        ((root + r) % n, (root + r + distance) % n) for r in range(0, n - distance, 2 * distance)
    ]


def tiles(x: jax.Array, n: int, dim: int) -> Shaped[Array, "{n} size *rest"]:
    """The n tiles of `dim`, that dim in front of all others."""
    front = jnp.moveaxis(x, dim, 0)
    return front.reshape(n, len(front) // n, *front.shape[1:])


def join_tiles(stack: Shaped[Array, "n size *inner"], dim: int) -> jax.Array:
    """Inverse of `tiles`."""
    n, size, *inner = stack.shape
    return jnp.moveaxis(stack.reshape(n * size, *inner), 0, dim)
