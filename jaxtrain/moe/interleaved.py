"""Chunks of tokens through experts on other devices: rows of some travel while others' are
multiplied.

During the products of a chunk, the rows of the next one go to their experts and the outputs of the
one before come back (`overlap.alongside`). A shared expert's products run in two halves: while the
first rows go, and while the last outputs come back. Of the chunks only their tokens are kept for
the backward pass, which is written out like the forward pass and sends a chunk's rows again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, PyTree

from jaxtrain.collectives.vary import vary, varying_axes
from jaxtrain.moe.across import Route, Trip, pinned
from jaxtrain.moe.rows import weighed_sum
from jaxtrain.overlap.alongside import Call, alongside

Stacked = Float[Array, "chunks tokens embed"]


@dataclass(frozen=True)
class Interleaved:
    """A mixture over chunks of tokens: while one chunk's rows travel, others are multiplied.

    multiply(rows, trip, leaves): sends received rows through the experts of this device; trip: how
    they came. shared(x, leaves): sends tokens through the shared expert; the field is None in a
    layer that has none. flops_per_byte: FLOPs that a device computes while its link carries one
    byte of rows.
    """

    route: Route
    multiply: Callable[[Any, Trip, PyTree], Any]
    shared: Callable[[Any, PyTree], Any] | None
    flops_per_byte: float

    def __call__(
        self,
        x: Stacked,
        shares: Float32[Array, "chunks tokens k"],
        chosen: Int[Array, "chunks tokens k"],
        leaves: PyTree,
    ) -> Stacked:
        """Returns the sum of each token's experts, weighted by its shares, and what the shared
        expert gives it; in the dtype of x. All floats of `leaves` are differentiated."""
        axes = varying_axes(x, shares, chosen, *jax.tree.leaves(leaves))
        inputs = jax.tree.map(lambda leaf: vary(leaf, axes), (x, shares, chosen, leaves))
        return _forward(self, *inputs)

    def beside(self, compute: Call, communicate: Call) -> tuple[Any, Any]:
        """Runs both functions; permutes of the second travel beside products of the first."""
        return alongside(compute, communicate, flops_per_byte=self.flops_per_byte)

    def through_shared(self, x: Stacked, leaves: PyTree) -> Stacked:
        """Returns what the shared expert gives the tokens of some chunks; zeros without one."""
        if self.shared is None:
            return jnp.zeros_like(x)
        return self.shared(x.reshape(-1, x.shape[-1]), leaves).reshape(x.shape)


class _Arrived(NamedTuple):
    """Rows of a chunk on the devices of their experts; in a backward pass with the gradients of
    what the experts give for them."""

    trip: Trip
    rows: jax.Array
    gradients: jax.Array | None = None


class _Leaving(NamedTuple):
    """What experts give for a chunk's rows; in a backward pass with the gradients of the rows."""

    trip: Trip
    out: jax.Array
    gradients: jax.Array | None = None


class _Pass(NamedTuple):
    """A forward or backward pass. tokens: arrays by chunk, x first.

    start(*tokens of a chunk) sends its rows. multiply(arrived, leaves) returns what is to be
    brought back, and gradients of the leaves. end(leaving, *tokens of the chunk) brings it back.
    shared(leaves, *tokens of some chunks): what the shared expert adds, and gradients.
    """

    tokens: tuple[jax.Array, ...]
    start: Callable[..., _Arrived]
    multiply: Callable[[_Arrived, PyTree], tuple[_Leaving, PyTree]]
    end: Callable[..., PyTree]
    shared: Callable[..., tuple[jax.Array, PyTree]]


def _run(chunks: Interleaved, leaves: PyTree, one: _Pass) -> tuple[jax.Array, Any, PyTree]:
    """Returns what the shared expert adds, the chunks' ends, and the leaves' gradients."""

    def of(which: Any) -> tuple[jax.Array, ...]:
        return tuple(array[which] for array in one.tokens)

    def communicate(following: Any, leaving: Any) -> tuple[Any, Any]:
        began = None if following is None else one.start(*following)
        return began, None if leaving is None else one.end(*leaving)

    count = len(one.tokens[0])
    halves = slice(-(-count // 2)), slice(-(-count // 2), count)
    compute, sent = (one.shared, (leaves, *of(halves[0]))), (communicate, (of(0), None))
    (added, sums), (arrived, _) = chunks.beside(compute, sent)
    leaving, ended = None, []
    for number in range(count):
        following = None
        if number + 1 < count:
            x, *others = of(number + 1)
            following = (pinned(x, arrived.rows), *others)
        sent = (communicate, (following, leaving))
        (left, grads), (began, done) = chunks.beside((one.multiply, (arrived, leaves)), sent)
        sums = jax.tree.map(jnp.add, sums, grads)
        leaving, arrived, ended = (left, *of(number)), began, [*ended, done]
    compute, sent = (one.shared, (leaves, *of(halves[1]))), (communicate, (None, leaving))
    (added_last, grads), (_, done) = chunks.beside(compute, sent)
    ends = jax.tree.map(lambda *parts: jnp.stack(parts), *ended[1:], done)
    return jnp.concatenate([added, added_last]), ends, jax.tree.map(jnp.add, sums, grads)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward(
    chunks: Interleaved, x: jax.Array, shares: jax.Array, chosen: jax.Array, leaves: PyTree
) -> jax.Array:
    route = chunks.route

    def start(x: Any, shares: Any, chosen: Any) -> _Arrived:
        trip = route.plan(chosen)
        return _Arrived(trip, route.there(x, trip))

    def multiply(arrived: _Arrived, leaves: PyTree) -> tuple[_Leaving, None]:
        return _Leaving(arrived.trip, chunks.multiply(arrived.rows, arrived.trip, leaves)), None

    def end(leaving: _Leaving, x: Any, shares: Any, chosen: Any) -> jax.Array:
        return weighed_sum(route.back(leaving.out, leaving.trip), shares)

    def shared(leaves: PyTree, x: Any, shares: Any, chosen: Any) -> tuple[jax.Array, None]:
        return chunks.through_shared(x, leaves), None

    one = _Pass((x, shares, chosen), start, multiply, end, shared)
    added, y, _ = _run(chunks, leaves, one)
    return y + added


def _backward(
    chunks: Interleaved, saved: tuple[Any, Any, Any, PyTree], dy: jax.Array
) -> tuple[Any, Any, None, PyTree]:
    # Behind a barrier, or a compiler would merge what is sent again with what was sent.
    (x, shares, chosen, leaves), dy = lax.optimization_barrier((saved, dy))
    route = chunks.route

    def start(x: Any, shares: Any, chosen: Any, dy: Any) -> _Arrived:
        """Sends a chunk's rows, and the gradients of its choices' outputs."""
        trip = route.plan(chosen)
        rows = route.there(x, trip)
        # Linear in the choices' outputs and in what is sent back, so that any values serve there.
        outputs = jnp.broadcast_to(x[:, None], (*chosen.shape, x.shape[-1]))
        (dchoices,) = _pull_back(lambda outputs: weighed_sum(outputs, shares), dy, outputs)
        (gradients,) = _pull_back(lambda out: route.back(out, trip), dchoices, rows)
        return _Arrived(trip, rows, gradients)

    def multiply(arrived: _Arrived, leaves: PyTree) -> tuple[_Leaving, PyTree]:
        run = lambda rows, leaves: chunks.multiply(rows, arrived.trip, leaves)  # noqa: E731
        out, pull_back = jax.vjp(run, arrived.rows, leaves)
        drows, grads = pull_back(arrived.gradients)
        return _Leaving(arrived.trip, out, drows), grads

    def end(leaving: _Leaving, x: Any, shares: Any, chosen: Any, dy: Any) -> tuple[Any, Any]:
        """Brings back the gradients of a chunk's tokens, and of their shares."""
        (dx,) = _pull_back(lambda x: route.there(x, leaving.trip), leaving.gradients, x)
        of_choices = route.back(leaving.out, leaving.trip)
        return dx, _pull_back(lambda shares: weighed_sum(of_choices, shares), dy, shares)[0]

    def shared(leaves: PyTree, x: Any, shares: Any, chosen: Any, dy: Any) -> tuple[Any, PyTree]:
        return _pull_back(chunks.through_shared, dy, x, leaves)

    one = _Pass((x, shares, chosen, dy), start, multiply, end, shared)
    added, (dx, dshares), grads = _run(chunks, leaves, one)
    return dx + added, dshares, None, grads


_forward.defvjp(lambda chunks, *inputs: (_forward(chunks, *inputs), inputs), _backward)


def _pull_back(function: Callable[..., Any], dy: Any, *arguments: Any) -> tuple[Any, ...]:
    return jax.vjp(function, *arguments)[1](dy)
