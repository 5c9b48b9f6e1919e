"""A backward pass in two: B computes the gradients of activations, W those of weight matrices.

Qi et al. 2023, "Zero bubble pipeline parallelism". The stage before waits only for the input's
gradient; the weights' gradients may fill idle time. W takes every matrix that a layer multiplies by
(`Communicator.column` and `row`), from a stash of each product's input x and its output's cotangent
dy, as they lie on the device. It gathers again what dW needs. B computes the gradients of all other
parameters.

dy comes from one backward pass: a zero t is added to each product's output, and its cotangent is
dy. Of y = x w + t and a loss L, dL/dt = dL/dy = dy; then dx = dy w^T is B's and dw = x^T dy W's.
Of a product in 8 bits, x and dy as it rounded them are the cotangent of what stands for its
weight's gradient (`quantization.weights.Operands`), and are stashed in 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PyTree

from jaxtrain.arrays import Arrays
from jaxtrain.collectives.matmul import Tiled
from jaxtrain.collectives.vary import Index
from jaxtrain.nn.communicator import Adapter, Communicator, Operand
from jaxtrain.nn.remat import named_input, remat
from jaxtrain.nn.stack import (
    Body,
    Layers,
    Saved,
    Stream,
    depth,
    like,
    pack_residuals,
    pinned_slice,
    scattered,
)
from jaxtrain.quantization.formats import Scaled
from jaxtrain.quantization.weights import (
    Operands,
    QuantizedWeight,
    Weights,
    differentiated,
    standing_for,
)

Carry = TypeVar("Carry")


AbstractArray = jax.ShapeDtypeStruct


class Product(NamedTuple):
    """x @ w for the weights of these names; `way` is the method of `Communicator`."""

    way: str
    weights: tuple[str, ...]


Inputs = dict[Product, jax.Array]
"""Product -> x."""

Stash = dict[Product, tuple[Operand, tuple[Operand, ...]]]
"""Product -> (x, the dy of each weight)."""


Taps = dict[Product, tuple[Any, ...]]
"""Product -> the zero that is added to each of its outputs; in 8 bits, the `Operands` of each of
its weights."""


class Tapped:
    """A communicator that adds `taps` to the outputs of products and records their inputs. Products
    in 8 bits are left as they are: their weights have the taps.

    names: of each matrix by its `identity`. All other operations are those of `comm`. shapes: each
    product, with the shape of its input, those of its outputs, and True if it is in 8 bits.
    """

    def __init__(self, comm: Communicator, names: dict[int, str], taps: Taps | None = None) -> None:
        self._comm, self._names, self._taps = comm, names, taps
        self.inputs: dict[Product, jax.Array] = {}
        self.shapes: list[tuple[Product, AbstractArray, tuple[AbstractArray, ...], bool]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def column(self, x: jax.Array, *weights: Any) -> tuple[jax.Array, ...]:
        return self._tap("column", x, weights, self._comm.column(x, *weights))

    def row(self, x: jax.Array, weight: Any, adapter: Adapter | None = None) -> jax.Array:
        return self._tap("row", x, (weight,), (self._comm.row(x, weight, adapter),))[0]

    def _tap(
        self, way: str, x: Stream, weights: tuple[Any, ...], ys: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        narrow = isinstance(weights[0], QuantizedWeight)  # arrays behind those are adapters
        alike = [w for w in weights if isinstance(w, QuantizedWeight) is narrow]
        tapped = [i for i, w in enumerate(alike) if identity(w) in self._names]
        product = Product(way, tuple(self._names[identity(weights[i])] for i in tapped))
        if not tapped:
            return ys
        self.shapes.append((product, _shape(x), tuple(_shape(ys[i]) for i in tapped), narrow))
        if narrow or self._taps is None or product not in self._taps:
            return ys
        self.inputs[product] = x
        taps = dict(zip(tapped, self._taps[product], strict=True))
        return tuple(y + taps[i] if i in taps else y for i, y in enumerate(ys))


@dataclass(frozen=True, eq=False)
class SplitLayers:
    """`layers` in three parts: `forward_with_residuals` is F, `backward` B, `weight_gradients` W.

    comm: the communicator of their body. body_of: the same body with another communicator. Their
    loop's `prefetch` is ignored, and the backward pass fetches weights again.
    """

    layers: Layers
    body_of: Callable[[Any], Body]
    comm: Communicator
    vary: Callable[[jax.Array], jax.Array] = field(default=lambda x: x)
    """Gives a zero the type of the program's values: varying over all axes of the shard_map."""

    def forward_with_residuals(
        self, params: Arrays, x: Stream, extras: PyTree
    ) -> tuple[Stream, PyTree]:
        """Returns x after all layers, and what `backward` needs besides `params` and `extras`."""

        def step(x: Stream, layer: Index) -> tuple[Stream, PyTree]:
            shards, x = pinned_slice(params, layer, x)
            return self._forward_with_residuals(self.layers.fetch(shards), x, extras, layer)

        return self._over_layers(step, x, depth(params))

    def backward(
        self, saved: PyTree, params: Arrays, dy: Stream, extras: PyTree
    ) -> tuple[Arrays, Stream, PyTree]:
        """B: returns the gradients of all leaves but the matrices, stacked; of x; and the stash."""

        def step(dx: Stream, layer: Index, entry: tuple[Saved, Inputs]) -> tuple[Stream, PyTree]:
            vjp, inputs = entry
            shards, dx = pinned_slice(params, layer, dx)
            dw, taps, dx, _ = vjp.unpack((self.layers.fetch(shards), extras))(dx)
            stash = {product: self._operands(product, inputs, taps) for product in taps}
            return dx, (like(self.layers.scatter(dw), params), stash)

        dx, results = self._over_layers(step, dy, depth(params), saved, reverse=True)
        if not self.layers.loop.unroll:
            return results[0], dx, results[1]
        grads, stash = zip(*results, strict=True)
        return _stack(grads), dx, list(stash)

    def weight_gradients(self, stash: PyTree, params: Arrays) -> Arrays:
        """W: returns the gradients of the matrices, stacked."""

        def step(carry: tuple[()], layer: Index, layer_stash: Stash) -> tuple[tuple[()], Arrays]:
            ways, grads = self._tiled(params), {}
            for (way, names), (x, dys) in layer_stash.items():
                tiled = [ways.get(name) for name in names]
                gradients = getattr(self.comm, f"{way}_gradients")(x, *dys, tiled=tiled)
                grads |= dict(zip(names, gradients, strict=True))
            tiles = {k: grads.pop(k) for k in ways if k in grads}
            return carry, scattered(self.layers, (grads, tiles), params)

        grads = self._over_layers(step, (), depth(params), stash)[1]
        return _stack(grads) if self.layers.loop.unroll else grads

    def _operands(
        self, product: Product, inputs: Inputs, taps: Taps
    ) -> tuple[Operand, tuple[Operand, ...]]:
        """Returns a product's entry of the stash, from the cotangents of its taps."""
        cotangents = taps[product]
        if product in inputs:
            return inputs[product], cotangents
        products, first = self.comm.quantized, cotangents[0]
        assert products is not None, "the input of a product in the compute dtype is recorded"
        dys = (Scaled(t.dy.astype(products.backward.dtype), t.scales[1]) for t in cotangents)
        return Scaled(first.x.astype(products.forward.dtype), first.scales[0]), tuple(dys)

    def _tiled(self, params: Arrays) -> dict[str, Tiled]:
        """Matrices whose gradients need no scatter, with their tilings. params: stacked."""
        tiled = self.layers.tiled
        return {} if tiled is None else tiled.ways({k: p[0] for k, p in params.items()})

    def _forward_with_residuals(
        self, weights: Weights, x: Stream, extras: PyTree, layer: Index
    ) -> tuple[Stream, tuple[Saved, Inputs]]:
        names = self._names(weights)
        taps = self._zeros(weights, x, extras)
        excluded = {name for product in taps for name in product.weights} | self.layers.frozen
        direct = {k: differentiated(w) for k, w in weights.items() if k not in excluded}

        def run(direct: Arrays, taps: Taps, x: Stream, extras: PyTree) -> tuple[Stream, Inputs]:
            comm = Tapped(self.comm, names, taps)
            variables = {**direct, **_operands_by_name(taps)}
            moved = {k: standing_for(weights[k], variable) for k, variable in variables.items()}
            y = self.body_of(comm)({**weights, **moved}, named_input(x), extras, layer)
            return y, comm.inputs

        body = remat(run, self.layers.loop.remat, self.layers.loop.offload)
        y, vjp, inputs = jax.vjp(body, direct, taps, x, extras, has_aux=True)
        return y, (pack_residuals(vjp, (weights, extras)), inputs)

    def _zeros(self, weights: Weights, x: Stream, extras: PyTree) -> Taps:
        """A zero for the output of every product whose matrices are used once in the layer, or in
        8 bits `Operands` for each of its weights. W would see only one of a matrix's two
        products."""
        products: list[Any] = []

        def run(weights: Weights, x: Stream) -> Stream:
            comm = Tapped(self.comm, self._names(weights))
            y = self.body_of(comm)(weights, x, extras, 0)
            products.extend(comm.shapes)
            return y

        jax.eval_shape(run, weights, x)
        used = [name for product, *_ in products for name in product.weights]
        return {
            product: self._operands_of(x, ys) if narrow else tuple(map(self._zero, ys))
            for product, x, ys, narrow in products
            if all(used.count(name) == 1 for name in product.weights)
        }

    def _zero(self, like: AbstractArray) -> jax.Array:
        return self.vary(jnp.zeros(like.shape, like.dtype))

    def _operands_of(self, x: AbstractArray, ys: Sequence[AbstractArray]) -> tuple[Operands, ...]:
        """Returns zeros in the shapes of those of a product's weights."""
        scales = self.vary(jnp.zeros(2, jnp.float32))
        return tuple(Operands(self._zero(x), self._zero(y), scales) for y in ys)

    def _names(self, weights: Weights) -> dict[int, str]:
        """The name of every matrix that W may take, by its `identity`."""
        frozen = self.layers.frozen
        return {identity(w): name for name, w in weights.items() if name not in frozen}

    def _over_layers(
        self,
        step: Callable[..., tuple[Carry, PyTree]],
        carry: Carry,
        count: int,
        *trees: PyTree,
        reverse: bool = False,
    ) -> tuple[Carry, PyTree]:
        """Runs `step(carry, layer, *trees[layer])` over all layers. Results and `trees` are lists
        in an unrolled loop, else stacked."""
        if not self.layers.loop.unroll:

            def turn(carry: Carry, inputs: tuple[PyTree, ...]) -> tuple[Carry, PyTree]:
                return step(carry, *inputs)

            return lax.scan(turn, carry, (jnp.arange(count), *trees), reverse=reverse)
        out: list[Any] = [None] * count
        for layer in reversed(range(count)) if reverse else range(count):
            carry, out[layer] = step(carry, layer, *(tree[layer] for tree in trees))
        return carry, out


def _shape(x: jax.Array) -> AbstractArray:
    return AbstractArray(x.shape, x.dtype)


def identity(weight: Any) -> int:
    """Returns the identity of a weight's array; in 8 bits, of its numbers, which it keeps when its
    scales are put beside it."""
    return id(weight.value.numbers if isinstance(weight, QuantizedWeight) else weight)


def _operands_by_name(taps: Taps) -> dict[str, Operands]:
    """Returns the `Operands` among the taps, by the names of their weights."""
    return {
        name: tap
        for product, entries in taps.items()
        for name, tap in zip(product.weights, entries, strict=True)
        if isinstance(tap, Operands)
    }


def _stack(layers: Sequence[Arrays]) -> Arrays:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
