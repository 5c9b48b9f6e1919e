"""The loop over stacked layers, forward and backward written out.

Why by hand: in an ordinary differentiated scan a prefetched weight is part of the carry, so every
layer's full weights are kept for the backward pass (12x the memory in a trial). Here the residuals
are block inputs and the values that the remat policy names. Weights but the last layer's are
fetched again, one layer ahead of their use, and gradients are scattered one layer behind, so that
both hide behind a layer's arithmetic.
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

from jaxtrain.arrays import Arrays
from jaxtrain.collectives.vary import Index
from jaxtrain.nn.remat import named_input, remat
from jaxtrain.nn.tiles import TiledProducts
from jaxtrain.overlap.alongside import Call, alongside
from jaxtrain.quantization.weights import Weights, differentiated, standing_for

LeafGradients = dict[str, jax.Array | None]
"""Gradients of parameters, None for frozen ones."""
Stream = PyTree[Float[Array, "tokens _"]]
"""The residual stream, or its cotangent: this device's share. An array [tokens, embed], or a dict
of several, which all have cotangents."""

Body = Callable[[Weights, Stream, PyTree, Index], Stream]
"""(parameters of one layer as used, x, extras, layer number) -> x."""


@dataclass(frozen=True)
class LayerLoop:
    """Settings of the loop over layers.

    unroll: layers are unrolled into the program (True) or scanned. A scanned loop costs 1.3x on
      XLA:CPU and 1.07x on an H200; it keeps compile time flat in depth, and prefetches.
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
    """A stack of layers: x, a `Stream` -> x.

    body: function of a layer. fetch turns one layer's parameters into the weights that `body` uses,
    and scatter is its adjoint. frozen: names of parameters that are not differentiated. tiled: the
    weights whose gradients need no scatter; None if there are none. flops_per_byte: FLOPs of a
    device while its link carries one byte of weights, by which permutes of weights are tied to
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
        """Returns x after all layers."""
        return _run(self, params, x, extras, {})[0]

    def with_tables(
        self, params: Arrays, x: Stream, extras: PyTree, tables: Arrays
    ) -> tuple[Stream, Weights]:
        """Returns x after all layers, and `tables` fetched for use. A prefetching loop fetches them
        during the last layer, and scatters their gradients during its backward pass."""
        return _run(self, params, x, extras, tables)

    def forward_with_residuals(
        self, params: Arrays, x: Stream, extras: PyTree
    ) -> tuple[Stream, PyTree]:
        """Returns x after all layers, and what `backward` needs besides `params` and `extras`, a
        tree of arrays."""
        (y, _), (_, _, saved, _) = _forward(self, params, x, extras, {})
        return y, saved

    def side_by_side(self, compute: Call, communicate: Call) -> tuple[Any, Any]:
        """Runs both functions, neither waiting for the other, and returns both results."""
        if self.flops_per_byte is not None:
            return alongside(compute, communicate, flops_per_byte=self.flops_per_byte)
        (run, run_args), (move, move_args) = compute, communicate
        moved = move(*move_args)
        return run(*run_args), moved

    def backward(
        self, saved: PyTree, params: Arrays, dy: Stream, extras: PyTree
    ) -> tuple[Arrays, Stream]:
        """Gradients of `params` (without `frozen` ones) and of x, from y's gradient `dy`."""
        grads, dx, _ = _backward(self, (params, extras, saved, {}), dy, {})
        return grads, dx


def depth(params: Arrays) -> int:
    """Number of stacked layers: the size of dim 0 of every leaf."""
    return len(jax.tree.leaves(params)[0])


def _slice(params: Arrays, layer: Index) -> Arrays:
    return jax.tree.map(lambda p: lax.dynamic_index_in_dim(p, layer, 0, keepdims=False), params)


def pinned_slice(params: Arrays, layer: Index, x: Stream) -> tuple[Arrays, Stream]:
    """Returns a layer's shards, which wait for `x`, and x. So XLA cannot merge a backward fetch
    with the forward one (which would keep every layer's weights), or hoist it out of a loop over
    layers or microbatches."""
    return lax.optimization_barrier((_slice(params, layer), x))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(
    stack: Layers, params: Arrays, x: Stream, extras: PyTree, tables: Arrays
) -> tuple[Stream, Weights]:
    """The loop without a derivative: nothing is saved for a backward pass."""

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
    """Returns x, and the tables, whose fetch waits for x."""
    tables, x = lax.optimization_barrier((tables, x))
    return x, stack.fetch_tables(tables)


def _forward_with_residuals(
    stack: Layers, weights: Weights, x: Stream, extras: PyTree, layer: Index
) -> tuple[Stream, Saved]:
    """Returns the layer's output and its vector-Jacobian product, packed without weights and
    extras, which the backward pass has anyway."""
    tiles = {} if stack.tiled is None else stack.tiled.zeros(weights, x, extras)
    constant = {k: weights[k] for k in (*stack.frozen, *tiles)}
    moved = {k: differentiated(w) for k, w in weights.items() if k not in constant}

    def run(moved: Arrays, tiles: Arrays, x: Stream, extras: PyTree) -> Stream:
        body = stack.body if stack.tiled is None else stack.tiled.body(weights, tiles)
        used = {k: standing_for(weights[k], variable) for k, variable in moved.items()}
        return body({**used, **constant}, named_input(x), extras, layer)

    again = remat(run, stack.loop.remat, stack.loop.offload)
    y, vjp = jax.vjp(again, moved, tiles, x, extras)
    return y, pack_residuals(vjp, (weights, extras))


def pack_residuals(vjp: Callable[[Stream], PyTree], excluded: PyTree) -> Saved:
    """Packs a function of `jax.vjp`, a tree of residual arrays, without the arrays of the tree
    `excluded`: weights must not be kept for the backward pass."""
    leaves, tree = jax.tree.flatten(vjp)
    number = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(excluded))}
    places = tuple(number.get(id(leaf), -1) for leaf in leaves)
    residuals = [leaf for leaf, place in zip(leaves, places, strict=True) if place < 0]
    return Saved(residuals, tree, places)


@jax.tree_util.register_pytree_node_class
class Saved:
    """Residual arrays of one layer (stackable), and the static form of its backward function."""

    def __init__(self, residuals: list[Any], tree: PyTreeDef, places: tuple[int, ...]) -> None:
        self.residuals, self.tree, self.places = residuals, tree, places

    def tree_flatten(self) -> tuple[tuple[list[Any]], tuple[PyTreeDef, tuple[int, ...]]]:
        return (self.residuals,), (self.tree, self.places)

    @classmethod
    def tree_unflatten(
        cls, static: tuple[PyTreeDef, tuple[int, ...]], children: Sequence[Any]
    ) -> Saved:
        return cls(children[0], *static)

    def unpack(self, excluded: PyTree) -> Callable[[Stream], PyTree]:
        """Restores the vector-Jacobian product. excluded: a tree like the one that it was packed
        without, of equal values (weights that were fetched again)."""
        shared, residuals = jax.tree.leaves(excluded), iter(self.residuals)
        leaves = [shared[place] if place >= 0 else next(residuals) for place in self.places]
        return jax.tree.unflatten(self.tree, leaves)

    def pull_back(self, weights: Weights, extras: PyTree, dy: Stream) -> tuple[Made, Stream]:
        """Gradients of the weights and of x."""
        dw, tiles, dx, _ = self.unpack((weights, extras))(dy)
        return (dw, tiles), dx


Made = tuple[Arrays, Arrays]
"""Gradients of a layer's weights: those still to be scattered, and those in tiles already."""

LayerSave = tuple[Saved, Weights | None]
"""A layer's residuals, and its weights unless the backward pass fetches them again."""

LayerResiduals = tuple[Arrays, PyTree, PyTree, Arrays]
"""Parameters, extras, what layers keep (a list of `LayerSave`, or stacked; with prefetch the last
layer's is separate), and the tables."""


def _forward(
    stack: Layers,
    params: Arrays,
    x: Stream,
    extras: PyTree,
    tables: Arrays,
    keep_last: bool = False,
) -> tuple[tuple[Stream, Weights], LayerResiduals]:
    """Returns x after all layers, the tables as they are used, and what the backward pass needs.
    With prefetch the loop carries the next layer's weights, which are fetched during this layer.

    keep_last: a prefetching loop keeps the last layer's weights for a backward pass that follows at
    once. With many microbatches in flight it would keep as many layers' weights."""
    loop, layers, keep = stack.loop, depth(params), not stack.loop.reshard_after_forward

    def forward(
        x: Stream, weights: Weights, extras: PyTree, layer: Index
    ) -> tuple[Stream, LayerSave]:
        y, saved = _forward_with_residuals(stack, weights, x, extras, layer)
        return y, (saved, weights if keep else None)

    def fetched(layer: Index, x: Stream) -> tuple[Weights, Stream]:
        shards, x = pinned_slice(params, layer, x)
        return stack.fetch(shards), x

    def step(x: Stream, layer: Index) -> tuple[Stream, LayerSave]:
        weights, x = fetched(layer, x)
        return forward(x, weights, extras, layer)

    def ahead(
        carry: tuple[Stream, Weights], layer: Index
    ) -> tuple[tuple[Stream, Weights], LayerSave]:
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
    compute = (partial(forward, layer=layers - 1), (x, last, extras))  # static: no residual
    (x, (saved, _)), used = stack.side_by_side(compute, (stack.fetch_tables, (pinned,)))
    last_kept = (saved, last if keep or keep_last else None)
    return (x, used), (params, extras, (out, last_kept), tables)


def _backward(
    stack: Layers, residuals: LayerResiduals, dy: Stream, dtables: Weights
) -> tuple[Arrays, Stream, Arrays]:
    """Gradients of the parameters (without frozen ones), stacked, of x, and of the tables. From the
    last layer to the first: weights that were not kept are fetched again, the layer is pulled back,
    and its weights' gradients are scattered to the parameters' shards."""
    if stack.loop.prefetch and not stack.loop.unroll:
        return _backward_prefetched(stack, residuals, dy, dtables)
    params, extras, out, tables = residuals

    def step(dx: Stream, saved_layer: tuple[Index, LayerSave]) -> tuple[Stream, Arrays]:
        layer, (saved, weights) = saved_layer
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
    stack: Layers, residuals: LayerResiduals, dy: Stream, dtables: Weights
) -> tuple[Arrays, Stream, Arrays]:
    """Double-buffered: fetches run one layer ahead, reduce-scatters one layer behind."""
    params, extras, (out, (saved, weights)), tables = residuals
    layers, has_weights = depth(params), out[1] is not None
    if weights is None:
        shards, dy = pinned_slice(params, layers - 1, dy)
        weights = stack.fetch(shards)

    def pull_back(
        saved: Saved, weights: Weights, dx: Stream, previous: Index | None, scatter: Call
    ) -> tuple[tuple[Made, Stream], tuple[Arrays, Weights | None]]:
        """A layer's gradients; meanwhile others are scattered, and the weights of the layer
        `previous` fetched."""
        shards, (run, grads) = None, scatter
        if previous is not None:
            shards, dx = pinned_slice(params, previous, dx)

        def communicate(grads: Any, shards: Arrays | None) -> tuple[Arrays, Weights | None]:
            return run(*grads), None if shards is None else stack.fetch(shards)

        compute = (Saved.pull_back, (saved, weights, extras, dx))
        return stack.side_by_side(compute, (communicate, (grads, shards)))

    def step(
        carry: tuple[Stream, Any, Made], inputs: tuple[Index, Any]
    ) -> tuple[tuple[Stream, Any, Made], Any]:
        dx, fetched, pending = carry
        layer, (saved, own) = inputs
        previous = None if has_weights else jnp.maximum(layer - 1, 0)
        weights, scatter = own if has_weights else fetched, partial(scattered, stack, params=params)
        gradients, (done, fetched) = pull_back(saved, weights, dx, previous, (scatter, (pending,)))
        return (gradients[1], fetched, gradients[0]), done

    previous = None if has_weights or layers == 1 else layers - 2
    scatter = (stack.scatter_tables, (dtables,))
    (pending, dx), (of_tables, fetched) = pull_back(saved, weights, dy, previous, scatter)
    of_tables = like(of_tables, tables)
    if layers == 1:
        grads = jax.tree.map(lambda g: g[None], scattered(stack, pending, params))
        return grads, dx, of_tables
    turns = (jnp.arange(layers - 1), out)
    (dx, _, pending), grads = lax.scan(step, (dx, fetched, pending), turns, reverse=True)
    first = scattered(stack, pending, params)
    grads = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, grads)
    return grads, dx, of_tables


def scattered(stack: Layers, gradients: Made, params: Arrays) -> Arrays:
    """Gradients reduce-scattered to the parameters' shards, in the parameters' dtypes."""
    full, tiles = gradients
    grads = stack.scatter(full) if stack.tiled is None else stack.tiled.scatter(full, tiles)
    return like(grads, params)


def like(grads: Arrays, params: Arrays) -> Arrays:
    """Gradients cast to the dtypes of their parameters."""
    return {k: g.astype(params[k].dtype) for k, g in grads.items()}


def _run_backward(
    stack: Layers, residuals: LayerResiduals, cotangents: tuple[Stream, Weights]
) -> tuple[LeafGradients, Stream, None, LeafGradients]:
    grads, dx, of_tables = _backward(stack, residuals, *cotangents)
    params, _, _, tables = residuals
    return {k: grads.get(k) for k in params}, dx, None, {k: of_tables.get(k) for k in tables}


_run.defvjp(partial(_forward, keep_last=True), _run_backward)
