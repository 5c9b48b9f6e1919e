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
Gradients = dict[str, jax.Array | None]
"""Gradients of parameters, None of those that are frozen."""
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
    products of layers; None: the compiler alone orders them. fetch_tables and scatter_tables: as
    fetch and scatter, for parameters that are used next.

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
    fetch_tables: Callable[[Arrays], Weights] = lambda tables: tables
    scatter_tables: Callable[[Arrays], Arrays] = lambda grads: grads

    def __call__(self, params: Arrays, x: Stream, extras: PyTree) -> Stream:
        """x after all layers."""
        return _run(self, params, x, extras, {})[0]

    def with_tables(
        self, params: Arrays, x: Stream, extras: PyTree, tables: Arrays
    ) -> tuple[Stream, Weights]:
        """x after all layers, and `tables` as they are used next: in a prefetching loop fetched
        while the last layer is computed, their gradients scattered while it is pulled back."""
        return _run(self, params, x, extras, tables)

    def forward_with_residuals(
        self, params: Arrays, x: Stream, extras: PyTree
    ) -> tuple[Stream, PyTree]:
        """x after all layers, and what `backward` needs beside `params` and `extras`, a tree of
        arrays."""
        (y, _), (_, _, saved, _) = _forward(self, params, x, extras, {})
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
        grads, dx, _ = _backward(self, (params, extras, saved, {}), dy, {})
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
def _run(
    stack: Layers, params: Arrays, x: Stream, extras: PyTree, tables: Arrays
) -> tuple[Stream, Weights]:
    """The loop where no derivative is asked for: nothing is saved for a backward pass."""

    def step(x: Stream, layer: Index) -> tuple[Stream, None]:
        shards, x = pinned_slice(params, layer, x)
        return stack.body(stack.fetch(shards), x, extras, layer), None

    if stack.loop.unroll:
        for layer in range(depth(params)):
            x, _ = step(x, layer)
    else:
        x, _ = lax.scan(step, x, jnp.arange(depth(params)))
    return _with_tables(stack, tables, x)


def _with_tables(stack: Layers, tables: Arrays, x: Stream) -> tuple[Stream, Weights]:
    """x, and the tables fetched not before it exists."""
    tables, x = lax.optimization_barrier((tables, x))
    return x, stack.fetch_tables(tables)


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

Residuals = tuple[Arrays, PyTree, PyTree, Arrays]
"""Parameters, extras, what layers keep (`Kept` of each in a list, or stacked, with prefetch the
last layer's by itself), and the tables."""


def _forward(
    stack: Layers,
    params: Arrays,
    x: Stream,
    extras: PyTree,
    tables: Arrays,
    keep_last: bool = False,
) -> tuple[tuple[Stream, Weights], Residuals]:
    """x after all layers with the tables as they are used, and what the backward pass needs: with
    prefetch the loop carries the weights of the layer to come, fetched while this one is computed.

    keep_last: a prefetching loop keeps the last layer's weights for the backward pass, which
    follows at once: with many microbatches under way it would keep as many layers' weights."""
    loop, layers, keep = stack.loop, depth(params), not stack.loop.reshard_after_forward

    def forward(x: Stream, weights: Weights, extras: PyTree, layer: Index) -> tuple[Stream, Kept]:
        y, saved = _forward_with_residuals(stack, weights, x, extras, layer)
        return y, (saved, weights if keep else None)

    def fetched(layer: Index, x: Stream) -> tuple[Weights, Stream]:
        shards, x = pinned_slice(params, layer, x)
        return stack.fetch(shards), x

    def step(x: Stream, layer: Index) -> tuple[Stream, Kept]:
        weights, x = fetched(layer, x)
        return forward(x, weights, extras, layer)

    def ahead(carry: tuple[Stream, Weights], layer: Index) -> tuple[tuple[Stream, Weights], Kept]:
        x, weights = carry
        shards, x = pinned_slice(params, layer + 1, x)
        compute = (forward, (x, weights, extras, layer))
        (x, saved), following = stack.side_by_side(compute, (stack.fetch, (shards,)))
        return (x, following), saved

    if loop.unroll:
        out = []
        for layer in range(layers):
            x, saved = step(x, layer)
            out.append(saved)
        return _with_tables(stack, tables, x), (params, extras, out, tables)
    if not loop.prefetch:
        x, out = lax.scan(step, x, jnp.arange(layers))
        return _with_tables(stack, tables, x), (params, extras, out, tables)
    weights, x = fetched(0, x)
    (x, last), out = lax.scan(ahead, (x, weights), jnp.arange(layers - 1))
    pinned, x = lax.optimization_barrier((tables, x))
    compute = (forward, (x, last, extras, layers - 1))
    (x, (saved, _)), used = stack.side_by_side(compute, (stack.fetch_tables, (pinned,)))
    kept = (saved, last if keep or keep_last else None)
    return (x, used), (params, extras, (out, kept), tables)


def _backward(
    stack: Layers, residuals: Residuals, dy: Stream, dtables: Weights
) -> tuple[Arrays, Stream, Arrays]:
    """Gradients of the parameters (but of frozen ones), stacked, of x, and of the tables. Layers
    from the last to the first: weights fetched again where they were not kept, the layer pulled
    back, its weights' gradients scattered to where the parameters rest."""
    if stack.loop.prefetch and not stack.loop.unroll:
        return _backward_prefetched(stack, residuals, dy, dtables)
    params, extras, out, tables = residuals

    def step(dx: Stream, at: tuple[Index, Kept]) -> tuple[Stream, Arrays]:
        layer, (saved, weights) = at
        if weights is None:
            shards, dx = pinned_slice(params, layer, dx)
            weights = stack.fetch(shards)
        dw, dx = saved.pull_back(weights, extras, dx)
        return dx, scattered(stack, dw, params)

    of_tables = like(stack.scatter_tables(dtables), tables)
    if not stack.loop.unroll:
        dx, grads = lax.scan(step, dy, (jnp.arange(depth(params)), out), reverse=True)
        return grads, dx, of_tables
    dx, by_layer = dy, []
    for layer in reversed(range(depth(params))):
        dx, grads = step(dx, (layer, out[layer]))
        by_layer.append(grads)
    return jax.tree.map(lambda *g: jnp.stack(g), *reversed(by_layer)), dx, of_tables


def _backward_prefetched(
    stack: Layers, residuals: Residuals, dy: Stream, dtables: Weights
) -> tuple[Arrays, Stream, Arrays]:
    """Double-buffered: fetches run one layer ahead, reduce-scatters one layer behind."""
    params, extras, (out, (saved, weights)), tables = residuals
    layers, kept = depth(params), out[1] is not None
    if weights is None:
        shards, dy = pinned_slice(params, layers - 1, dy)
        weights = stack.fetch(shards)

    def pull_back(
        saved: Saved, weights: Weights, dx: Stream, before: Index | None, scatter: Call
    ) -> tuple[tuple[Made, Stream], tuple[Arrays, Weights | None]]:
        """A layer's gradients; meanwhile others are scattered, and the weights of the layer
        `before` fetched."""
        shards, (run, grads) = None, scatter
        if before is not None:
            shards, dx = pinned_slice(params, before, dx)

        def communicate(grads: Any, shards: Arrays | None) -> tuple[Arrays, Weights | None]:
            return run(*grads), None if shards is None else stack.fetch(shards)

        compute = (Saved.pull_back, (saved, weights, extras, dx))
        return stack.side_by_side(compute, (communicate, (grads, shards)))

    def step(
        carry: tuple[Stream, Any, Made], at: tuple[Index, Any]
    ) -> tuple[tuple[Stream, Any, Made], Any]:
        dx, fetched, pending = carry
        layer, (saved, own) = at
        before = None if kept else jnp.maximum(layer - 1, 0)
        weights, scatter = own if kept else fetched, partial(scattered, stack, params=params)
        made, (done, fetched) = pull_back(saved, weights, dx, before, (scatter, (pending,)))
        return (made[1], fetched, made[0]), done

    before = None if kept or layers == 1 else layers - 2
    scatter = (stack.scatter_tables, (dtables,))
    (pending, dx), (of_tables, fetched) = pull_back(saved, weights, dy, before, scatter)
    of_tables = like(of_tables, tables)
    if layers == 1:
        grads = jax.tree.map(lambda g: g[None], scattered(stack, pending, params))
        return grads, dx, of_tables
    turns = (jnp.arange(layers - 1), out)
    (dx, _, pending), grads = lax.scan(step, (dx, fetched, pending), turns, reverse=True)
    first = scattered(stack, pending, params)
    grads = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, grads)
    return grads, dx, of_tables


def scattered(stack: Layers, made: Made, params: Arrays) -> Arrays:
    """Gradients as parameters rest, in their dtypes."""
    whole, tiles = made
    grads = stack.scatter(whole) if stack.tiled is None else stack.tiled.scatter(whole, tiles)
    return like(grads, params)


def like(grads: Arrays, params: Arrays) -> Arrays:
    """Gradients cast to the dtypes of their parameters."""
    return {k: g.astype(params[k].dtype) for k, g in grads.items()}


def _run_backward(
    stack: Layers, residuals: Residuals, cotangents: tuple[Stream, Weights]
) -> tuple[Gradients, Stream, None, Gradients]:
    grads, dx, of_tables = _backward(stack, residuals, *cotangents)
    params, _, _, tables = residuals
    return {k: grads.get(k) for k in params}, dx, None, {k: of_tables.get(k) for k in tables}


_run.defvjp(partial(_forward, keep_last=True), _run_backward)
