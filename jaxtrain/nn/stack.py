"""The loop over stacked layers, forward and backward written out.

Why by hand: in an ordinary differentiated scan a prefetched weight is part of the carry, so every
layer's full weights are kept for the backward pass (12x the memory in a trial). Here the residuals
are block inputs and what the remat policy names; weights but the last layer's are fetched again,
one layer ahead of their use, and gradients leave one layer behind, so that both hide behind a
layer's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import PyTreeDef
from jaxtyping import Array, Float, PyTree

from jaxtrain.collectives.vary import Index
from jaxtrain.nn.quantized.products import differentiated, standing_for
from jaxtrain.nn.remat import named_input, remat
from jaxtrain.nn.tiles import TiledProducts
from jaxtrain.overlap.alongside import Call, alongside

Arrays = dict[str, jax.Array]
Weights = dict[str, Any]
"""Of a layer as it uses them: arrays, and of matrices in 8 bits `QuantizedWeight`s."""
Stream = Float[Array, "tokens embed"]
"""The residual stream, or its cotangent: this device's share."""

Body = Callable[[Weights, Stream, PyTree, Index], Stream]
"""(parameters of one layer as used, x, extras, layer number) -> x."""


@dataclass(frozen=True)
class LayerLoop:
    """How the loop over layers runs.

    unroll: layers are unrolled into the program (True) or scanned. On XLA:CPU a scanned loop
      costs 1.3x; on accelerators scanning keeps compile time flat in depth.
    remat: a name of `remat.REMAT`.
    offload: which of the values that are saved for the backward pass wait for it in the host's
      memory, names of `remat.OFFLOAD`: less of the chip's memory, and each goes over the link to
      the host twice.
    prefetch: fetch the next layer's weights during this layer (scanned loops only).
    reshard_after_forward: fetch weights again in the backward pass (ZeRO-3; where a loop prefetches
      all but the last layer's, with which it begins) or keep them from the forward pass: less
      communication, the memory of all layers' weights.
    """

    unroll: bool = False
    remat: str = "full"
    offload: tuple[str, ...] = ()
    prefetch: bool = True
    reshard_after_forward: bool = True


@dataclass(frozen=True)
class Layers:
    """A stack of layers: x [tokens, embed] -> x.

    body: what a layer does. fetch turns one layer's parameters into what `body` uses, and scatter
    is its adjoint. frozen: names of parameters that are not differentiated. tiled: how some get
    gradients that need no scatter; None where there are none. flops_per_byte: what a device
    computes while its link carries a byte of weights, by which permutes of weights are tied to
    products of layers; None: the compiler alone orders them.

    Leaves of `params` are stacked on dim 0, as they rest; `extras` (positions, segment ids, keys)
    are not differentiated.
    """

    body: Body
    fetch: Callable[[Arrays], Weights]
    scatter: Callable[[Arrays], Arrays]
    loop: LayerLoop
    frozen: frozenset[str] = frozenset()
    tiled: TiledProducts | None = None
    flops_per_byte: float | None = None

    def __call__(self, params: Arrays, x: Stream, extras: PyTree) -> Stream:
        """x after all layers."""
        return _run(self, params, x, extras)

    def forward_with_residuals(
        self, params: Arrays, x: Stream, extras: PyTree
    ) -> tuple[Stream, PyTree]:
        """x after all layers, and what `backward` needs beside `params` and `extras`, a tree of
        arrays."""
        y, (_, _, saved) = _forward(self, params, x, extras)
        return y, saved

    def side_by_side(self, compute: Call, communicate: Call) -> tuple[Any, Any]:
        """The results of both, of which neither waits for the other."""
        if self.flops_per_byte is not None:
            return alongside(compute, communicate, flops_per_byte=self.flops_per_byte)
        (run, run_args), (move, move_args) = compute, communicate
        moved = move(*move_args)
        return run(*run_args), moved

    def backward(
        self, saved: PyTree, params: Arrays, dy: Stream, extras: PyTree
    ) -> tuple[Arrays, Stream]:
        """Gradients of `params` (but of `frozen` ones) and of x from that of y."""
        grads, dx, _ = _backward(self, (params, extras, saved), dy)
        return grads, dx


def depth(params: Arrays) -> int:
    """How many layers are stacked: the size of dim 0 of every leaf."""
    return len(jax.tree.leaves(params)[0])


def _slice(params: Arrays, layer: Index) -> Arrays:
    return jax.tree.map(lambda p: lax.dynamic_index_in_dim(p, layer, 0, keepdims=False), params)


def pinned_slice(params: Arrays, layer: Index, x: Stream) -> tuple[Arrays, Stream]:
    """A layer's shards, not before `x` exists, and x: keeps XLA from merging a backward fetch with
    the forward one (which would keep every layer's weights) or hoisting it out of a loop: of
    layers, or of microbatches."""
    return lax.optimization_barrier((_slice(params, layer), x))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(stack: Layers, params: Arrays, x: Stream, extras: PyTree) -> Stream:
    """The loop where no derivative is asked for: nothing is saved for a backward pass."""

    def step(x: Stream, layer: Index) -> tuple[Stream, None]:
        shards, x = pinned_slice(params, layer, x)
        return stack.body(stack.fetch(shards), x, extras, layer), None

    if stack.loop.unroll:
        for layer in range(depth(params)):
            x, _ = step(x, layer)
        return x
    return lax.scan(step, x, jnp.arange(depth(params)))[0]


def _forward_with_residuals(
    stack: Layers, weights: Weights, x: Stream, extras: PyTree, layer: Index
) -> tuple[Stream, Saved]:
    """The layer's output and its vector-Jacobian product as a pytree with holes in place of
    weights and extras, which the backward pass has anyway."""
    tiles = {} if stack.tiled is None else stack.tiled.zeros(weights, x, extras)
    held = {k: weights[k] for k in (*stack.frozen, *tiles)}
    moved = {k: differentiated(w) for k, w in weights.items() if k not in held}

    def run(moved: Arrays, tiles: Arrays, x: Stream, extras: PyTree) -> Stream:
        body = stack.body if stack.tiled is None else stack.tiled.body(weights, tiles)
        used = {k: standing_for(weights[k], by) for k, by in moved.items()}
        return body({**used, **held}, named_input(x), extras, layer)

    again = remat(run, stack.loop.remat, stack.loop.offload)
    y, vjp = jax.vjp(again, moved, tiles, x, extras)
    return y, pack_residuals(vjp, (weights, extras))


def pack_residuals(vjp: Callable[[Stream], PyTree], known: PyTree) -> Saved:
    """A function that `jax.vjp` has made, which is a tree of its residual arrays, without those of
    the tree `known`: weights must not be kept for the backward pass."""
    leaves, tree = jax.tree.flatten(vjp)
    number = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(known))}
    places = tuple(number.get(id(leaf), -1) for leaf in leaves)
    kept = [leaf for leaf, place in zip(leaves, places, strict=True) if place < 0]
    return Saved(kept, tree, places)


@jax.tree_util.register_pytree_node_class
class Saved:
    """Residual arrays of one layer (stackable), and the static form of its backward function."""

    def __init__(self, kept: list[Any], tree: PyTreeDef, places: tuple[int, ...]) -> None:
        self.kept, self.tree, self.places = kept, tree, places

    def tree_flatten(self) -> tuple[tuple[list[Any]], tuple[PyTreeDef, tuple[int, ...]]]:
        return (self.kept,), (self.tree, self.places)

    @classmethod
    def tree_unflatten(
        cls, static: tuple[PyTreeDef, tuple[int, ...]], children: Sequence[Any]
    ) -> Saved:
        return cls(children[0], *static)

    def unpack(self, known: PyTree) -> Callable[[Stream], PyTree]:
        """The vector-Jacobian product again. known: a tree like the one it was packed without, of
        the same values (weights that were fetched again)."""
        given, kept = jax.tree.leaves(known), iter(self.kept)
        leaves = [given[place] if place >= 0 else next(kept) for place in self.places]
        return jax.tree.unflatten(self.tree, leaves)

    def pull_back(self, weights: Weights, extras: PyTree, dy: Stream) -> tuple[Made, Stream]:
        """Gradients of the weights and of x."""
        dw, tiles, dx, _ = self.unpack((weights, extras))(dy)
        return (dw, tiles), dx


Made = tuple[Arrays, Arrays]
"""Gradients of weights: whole ones, to be scattered, and those that were when they were made."""

Kept = tuple[Saved, Weights | None]
"""Of a layer: its residuals, and its weights where the backward pass does not fetch them again."""

Residuals = tuple[Arrays, PyTree, PyTree]
"""Parameters, extras, and what layers keep: `Kept` of each in a list, or stacked; with prefetch the
last layer's is by itself."""


def _forward(
    stack: Layers, params: Arrays, x: Stream, extras: PyTree, keep_last: bool = False
) -> tuple[Stream, Residuals]:
    """x after all layers, and what the backward pass needs: with prefetch the loop carries the
    weights of the layer to come, fetched while this one is computed.

    keep_last: a prefetching loop keeps the last layer's weights, with which the backward pass
    begins. For where that follows at once: with many microbatches under way it would keep as many
    layers' weights."""
    loop, layers = stack.loop, depth(params)
    keep = not loop.reshard_after_forward

    def layer_step(
        x: Stream, weights: Weights, extras: PyTree, layer: Index
    ) -> tuple[Stream, Kept]:
        y, saved = _forward_with_residuals(stack, weights, x, extras, layer)
        return y, (saved, weights if keep else None)

    def fetched(layer: Index, x: Stream) -> tuple[Weights, Stream]:
        shards, x = pinned_slice(params, layer, x)
        return stack.fetch(shards), x

    if loop.unroll:
        out = []
        for layer in range(layers):
            weights, x = fetched(layer, x)
            x, saved = layer_step(x, weights, extras, layer)
            out.append(saved)
        return x, (params, extras, out)
    if not loop.prefetch:

        def step(x: Stream, layer: Index) -> tuple[jax.Array, Any]:
            weights, x = fetched(layer, x)
            return layer_step(x, weights, extras, layer)

        x, out = lax.scan(step, x, jnp.arange(layers))
        return x, (params, extras, out)

    def ahead(carry: tuple[Stream, Weights], layer: Index) -> tuple[tuple[Stream, Weights], Kept]:
        x, weights = carry
        shards, x = pinned_slice(params, layer + 1, x)
        compute = (layer_step, (x, weights, extras, layer))
        (x, saved), following = stack.side_by_side(compute, (stack.fetch, (shards,)))
        return (x, following), saved

    weights, x = fetched(0, x)
    (x, last), out = lax.scan(ahead, (x, weights), jnp.arange(layers - 1))
    x, (saved, _) = layer_step(x, last, extras, layers - 1)
    return x, (params, extras, (out, (saved, last if keep or keep_last else None)))


def _backward(stack: Layers, residuals: Residuals, dy: Stream) -> tuple[Arrays, Stream, None]:
    """Gradients of the parameters (but of frozen ones), stacked, and of x; None for the extras.
    Layers from the last to the first: weights fetched again where they were not kept, the layer
    pulled back, its weights' gradients scattered to where the parameters rest."""
    if stack.loop.unroll:
        return _backward_unrolled(stack, residuals, dy)
    if stack.loop.prefetch:
        return _backward_prefetched(stack, residuals, dy)
    params, extras, out = residuals

    def step(dx: Stream, at: tuple[Index, Kept]) -> tuple[Stream, Arrays]:
        layer, (saved, weights) = at
        if weights is None:
            shards, dx = pinned_slice(params, layer, dx)
            weights = stack.fetch(shards)
        dw, dx = saved.pull_back(weights, extras, dx)
        return dx, scattered(stack, dw, params)

    dx, grads = lax.scan(step, dy, (jnp.arange(depth(params)), out), reverse=True)
    return grads, dx, None


def _backward_unrolled(
    stack: Layers, residuals: Residuals, dx: Stream
) -> tuple[Arrays, Stream, None]:
    params, extras, out = residuals
    grads = []
    for layer in reversed(range(depth(params))):
        saved, weights = out[layer]
        if weights is None:
            shards, dx = pinned_slice(params, layer, dx)
            weights = stack.fetch(shards)
        dw, dx = saved.pull_back(weights, extras, dx)
        grads.append(scattered(stack, dw, params))
    return jax.tree.map(lambda *g: jnp.stack(g), *reversed(grads)), dx, None


def _backward_prefetched(
    stack: Layers, residuals: Residuals, dy: Stream
) -> tuple[Arrays, Stream, None]:
    """Double-buffered: fetches run one layer ahead, reduce-scatters one layer behind."""
    params, extras, (out, (saved, weights)) = residuals
    layers, kept = depth(params), out[1] is not None
    if weights is None:
        shards, dy = pinned_slice(params, layers - 1, dy)
        weights = stack.fetch(shards)

    def pull_back(
        saved: Saved, weights: Weights, dx: Stream, *, before: Index | None, pending: Made | None
    ) -> tuple[tuple[Made, Stream], tuple[Arrays | None, Weights | None]]:
        """A layer's gradients; meanwhile those that are pending are scattered, and the weights of
        the layer `before` fetched."""
        shards = None
        if before is not None:
            shards, dx = pinned_slice(params, before, dx)

        def communicate(pending: Made | None, shards: Arrays | None) -> tuple[Any, Any]:
            done = None if pending is None else scattered(stack, pending, params)
            return done, None if shards is None else stack.fetch(shards)

        compute = (Saved.pull_back, (saved, weights, extras, dx))
        return stack.side_by_side(compute, (communicate, (pending, shards)))

    def step(
        carry: tuple[Stream, Any, Made], at: tuple[Index, Any]
    ) -> tuple[tuple[Stream, Any, Made], Any]:
        dx, fetched, pending = carry
        layer, (saved, own) = at
        before = None if kept else jnp.maximum(layer - 1, 0)
        weights = own if kept else fetched
        made, (done, fetched) = pull_back(saved, weights, dx, before=before, pending=pending)
        return (made[1], fetched, made[0]), done

    before = None if kept or layers == 1 else layers - 2
    (pending, dx), (_, fetched) = pull_back(saved, weights, dy, before=before, pending=None)
    if layers == 1:
        return jax.tree.map(lambda g: g[None], scattered(stack, pending, params)), dx, None
    turns = (jnp.arange(layers - 1), out)
    (dx, _, pending), grads = lax.scan(step, (dx, fetched, pending), turns, reverse=True)
    first = scattered(stack, pending, params)
    grads = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, grads)
    return grads, dx, None


def scattered(stack: Layers, made: Made, params: Arrays) -> Arrays:
    """Gradients as parameters rest, in their dtypes."""
    whole, tiles = made
    grads = stack.scatter(whole) if stack.tiled is None else stack.tiled.scatter(whole, tiles)
    return like(grads, params)


def like(grads: Arrays, params: Arrays) -> Arrays:
    """Gradients cast to the dtypes of their parameters."""
    return {k: g.astype(params[k].dtype) for k, g in grads.items()}


def _run_backward(
    stack: Layers, residuals: Residuals, dy: Stream
) -> tuple[dict[str, jax.Array | None], Stream, None]:
    grads, dx, _ = _backward(stack, residuals, dy)
    return {k: grads.get(k) for k in residuals[0]}, dx, None


_run.defvjp(partial(_forward, keep_last=True), _run_backward)
