"""Products x @ w of a layer in 8 bits, forward and backward written out.

Three products of 8-bit numbers with sums in fp32 (int32 for integers), times both scales: y of x
and w, dx of dy and w, dw of x and dy. Scales are current ones, or come from the steps before
(`delayed`). Rounding has no derivative: gradients are those of x @ w at the rounded values
(straight-through, Bengio et al. 2013).

The backward pass keeps a device's own tokens of x as 8-bit numbers. It gathers those of other
devices again for dw, a byte each, so that of a collective matmul only the outputs are kept
(Korthikanti et al. 2022, section 4.2.2). All gathered numbers travel as bytes: compilers widen or
rewrite narrow floats. Sums travel in the dtypes that they have anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree, Shaped, UInt8

from jaxtrain.collectives.algorithm import check_divides
from jaxtrain.collectives.choice import Exact
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.matmul import PRODUCT_SCATTERS, Tiled, gather_products
from jaxtrain.collectives.named import all_gather, sum_scatter
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.vary import MeshAxes, vary, varying_axes
from jaxtrain.quantization.delayed import entry, quantized_by, scale_of, seen
from jaxtrain.quantization.formats import E5M2, Format, Scaled, greatest_of_matrices
from jaxtrain.quantization.recipe import PRODUCT, Products

Value = TypeVar("Value")
Outputs = tuple[Float[Array, "all_tokens _"], ...]
MOST_TERMS = (2**31 - 1) // 127**2
"""Largest number of integer products whose sum always fits int32."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("value", "stand_in", "scales", "seen"),
    meta_fields=("dtype", "ways"),
)
@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [k, columns] in 8 bits, in place of its array of `dtype`; or one for each expert,
    [experts, k, columns], each with its own scale.

    value: its numbers and scale. stand_in: receives the gradient of that array, and is never read:
    an array of its shape and dtype, or a `Tiled` without `whole`, whose tile receives it; None
    without a gradient. With delayed scaling, else None: scales, the matrix's leaf of them, whose
    gradient is what a step's products see; seen, the local array's own scale. ways: for experts'
    matrices, by which no communicator multiplies.
    """

    value: PyTree  # a Scaled, or what JAX puts in its place
    stand_in: PyTree
    dtype: DTypeLike
    scales: PyTree = None
    seen: PyTree = None
    ways: Ways | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.numbers.shape

    @property
    def ndim(self) -> int:
        return self.value.numbers.ndim

    def __getitem__(self, index: object) -> QuantizedWeight:
        if index is ...:
            return self
        return self.__jax_array__()

    def __jax_array__(self) -> Any:
        raise ValueError(
            f"a matrix {list(self.shape)} is read that precision.products holds in 8 bits, for "
            "describe() has it among the products: give it to Communicator.column or row alone, "
            "or use products=None"
        )


@dataclass(frozen=True)
class Ways:
    """Settings of a layer's products in 8 bits.

    products: formats and scaling. dtype: of outputs and gradients. maxima: mesh axes whose devices
    hold parts of one x, over which its greatest magnitude is taken. tensor: mesh axes over which
    tokens are gathered before a column-split weight, and sums scattered after a row-split one. by:
    the algorithm of both.
    """

    products: Products
    dtype: DTypeLike
    maxima: MeshAxes = ()
    tensor: MeshAxes = ()
    by: Exact = Lax()  # noqa: RUF009 (frozen)

    @property
    def ring(self) -> Ring | None:
        """The ring that overlaps with products; None if the collectives run apart from them."""
        return self.by if isinstance(self.by, Ring) and self.tensor else None


def scaled_alike(arrays: Sequence[Float[Array, ...]], form: Format, axes: MeshAxes) -> list[Scaled]:
    """Returns each array in `form`. Each matrix of a stack has one scale for its parts on the
    devices of `axes`. One all-reduce serves all arrays."""
    scales = scales_alike([greatest_of_matrices(x) for x in arrays], form, axes)
    return [Scaled(form.numbers(x, scale), scale) for x, scale in zip(arrays, scales, strict=True)]


def scales_alike(
    greatest: Sequence[Float[Array, ...]], form: Format, axes: MeshAxes
) -> list[Float[Array, ...]]:
    """Scales of tensors whose parts on the devices of `axes` have these greatest magnitudes, by one
    all-reduce."""
    magnitudes = jnp.concatenate([array.reshape(-1) for array in greatest])
    if axes:
        magnitudes = vary(lax.pmax(magnitudes, axes), varying_axes(magnitudes))
    ends = np.cumsum([array.size for array in greatest])
    parts = jnp.split(form.scale(magnitudes), ends[:-1])
    return [part.reshape(array.shape) for part, array in zip(parts, greatest, strict=True)]


def scaled_before(
    weight: Float[Array, "*stack k columns"], scales: Float[Array, "*stack 3*256"], form: Format
) -> QuantizedWeight:
    """Returns a matrix in `form`, with the scale of its leaf of delayed scales."""
    value, top = quantized_by(scale_of(scales, "w"), weight, form), greatest_of_matrices(weight)
    return QuantizedWeight(value, None, weight.dtype, seen=entry(top, form))


def differentiated(weight: Value) -> Value | jax.Array:
    """The variable by which a layer is differentiated for a weight: an array itself, or a zero of
    the shape of a quantised weight."""
    if not isinstance(weight, QuantizedWeight):
        return weight
    zero = jnp.zeros(weight.shape, weight.dtype)
    return vary(zero, varying_axes(weight.value.numbers))


def standing_for(weight: Any, variable: Any) -> Any:
    """The weight that a layer uses when it is differentiated by `variable`."""
    return replace(weight, stand_in=variable) if isinstance(weight, QuantizedWeight) else variable


def cotangent(weight: Any) -> Any:
    """Gradient of the full-precision weight, from the cotangent of `standing_for`'s result."""
    return weight.stand_in if isinstance(weight, QuantizedWeight) else weight


def as_sent(weight: Any) -> jax.Array:
    """Array that is sent for a weight, or for a part of one."""
    return as_bytes(weight.value.numbers) if isinstance(weight, QuantizedWeight) else weight


def received(weight: Any, sent: jax.Array) -> Any:
    """Returns the weight whose `as_sent` arrived from all devices as `sent`."""
    if not isinstance(weight, QuantizedWeight):
        return sent
    numbers = lax.bitcast_convert_type(sent, weight.value.numbers.dtype)
    return replace(weight, value=Scaled(numbers, weight.value.scale))


def column(
    ways: Ways, x: Float[Array, "tokens k"], weights: tuple[QuantizedWeight, ...]
) -> Outputs:
    """`Communicator.column` in 8 bits: x @ w for weights split by column. x: this device's share of
    the tokens."""
    return tuple(checkpoint_name(y, PRODUCT) for y in _column(ways, x, weights))


def row(
    ways: Ways, x: Float[Array, "all_tokens k"], weight: QuantizedWeight
) -> Float[Array, "tokens columns"]:
    """`Communicator.row` in 8 bits: x @ w for a weight split by row, summed. The result is this
    device's share of the tokens."""
    return checkpoint_name(_row(ways, x, weight), PRODUCT)


def product(x: Shaped[Array, "m k"], w: Scaled) -> Float[Array, "m n"]:
    """x @ w of 8-bit numbers, times w's scale, in fp32; as `product_of_numbers`."""
    return product_of_numbers(x, w.numbers) * w.scale


def product_of_numbers(x: Shaped[Array, "m k"], w: Shaped[Array, "k n"]) -> Float[Array, "m n"]:
    """x @ w of 8-bit numbers, in fp32.

    Every term of floats is exact in fp32, in which terms are added, except in forward products on
    Hopper: its tensor cores add them in fewer bits ("fast accumulation") at the default precision.
    Products with gradients ask for full precision. Integer sums are exact and then rounded to fp32:
    in int32, and in several parts beyond `MOST_TERMS`.
    """
    dims = (((1,), (0,)), ((), ()))
    if x.dtype != jnp.int8:
        precision = lax.Precision.HIGHEST if E5M2.dtype in (x.dtype, w.dtype) else None
        options: Any = dict(precision=precision, preferred_element_type=jnp.float32)
        return lax.dot_general(x, w, dims, **options)
    parts = [
        lax.dot_general(
            x[:, start : start + MOST_TERMS],
            w[start : start + MOST_TERMS],
            dims,
            preferred_element_type=jnp.int32,
        ).astype(jnp.float32)
        for start in range(0, max(x.shape[1], 1), MOST_TERMS)
    ]
    return sum(parts[1:], start=parts[0])


def as_bytes(numbers: Shaped[Array, ...]) -> UInt8[Array, ...]:
    """8-bit numbers as the bytes that are sent."""
    return lax.bitcast_convert_type(numbers, jnp.uint8)


def _times(w: Scaled, scale: jax.Array) -> Scaled:
    """w with its scale times `scale`, for a product with numbers that have that scale."""
    return Scaled(w.numbers, w.scale * scale)


def _transposed(w: Scaled) -> Scaled:
    return Scaled(w.numbers.T, w.scale)


def _gathered(
    ways: Ways, x: Scaled, weights: Sequence[Scaled]
) -> tuple[Outputs, Shaped[Array, "all_tokens k"]]:
    """Returns the tokens of all devices times each weight, and the tokens' numbers."""
    dtype, kind = ways.dtype, x.numbers.dtype
    weights = tuple(_times(w, x.scale) for w in weights)
    if ways.ring is None:
        tokens = _all_tokens(ways, x)
        return tuple(product(tokens, w).astype(dtype) for w in weights), tokens

    def of_bytes(tile: UInt8[Array, "tokens k"], w: Scaled) -> Float[Array, "tokens columns"]:
        return product(lax.bitcast_convert_type(tile, kind), w).astype(dtype)

    arguments = (as_bytes(x.numbers), weights, ways.tensor, ways.ring)
    outs, tokens = gather_products(*arguments, product=of_bytes)
    return outs, lax.bitcast_convert_type(tokens, kind)


def _all_tokens(ways: Ways, x: Scaled) -> Shaped[Array, "all_tokens k"]:
    """Gathers the numbers of the tokens of all devices."""
    if not ways.tensor:
        return x.numbers
    tokens = all_gather(as_bytes(x.numbers), ways.tensor, 0, ways.by)
    return lax.bitcast_convert_type(tokens, x.numbers.dtype)


def _scattered(
    ways: Ways, reduction: str, xs: Sequence[Scaled], weights: Sequence[Scaled]
) -> Float[Array, "tokens columns"]:
    """Sum of x @ w over the pairs and the devices, each device keeping its tokens. `reduction` is
    the registered name of the sum."""
    weights = tuple(_times(w, x.scale) for x, w in zip(xs, weights, strict=True))
    numbers = tuple(x.numbers for x in xs)
    if ways.ring is not None:
        check_divides(numbers[0], ways.tensor, 0)
        scatter = PRODUCT_SCATTERS[f"{reduction} matmul"]
        return scatter(numbers, weights, ways.tensor, ways.ring, ways.dtype, product=product)
    first, *later = (product(x, w) for x, w in zip(numbers, weights, strict=True))
    total = sum(later, start=first).astype(ways.dtype)
    return sum_scatter(reduction, total, ways.tensor, 0, ways.by)


def _input(ways: Ways, x: Float[Array, "_ k"], weight: QuantizedWeight) -> tuple[Scaled, Any]:
    """Returns the input of a product with that weight (and others of the same input), and what its
    delayed scale sees of it."""
    form = ways.products.forward
    if weight.scales is None:
        return scaled_alike([x], form, ways.maxima)[0], None
    return quantized_by(scale_of(weight.scales, "x"), x, form), seen(x, form)


def _output_gradients(
    ways: Ways, weights: Sequence[QuantizedWeight], dys: Sequence[Float[Array, ...]], of_x: Any
) -> tuple[list[Scaled], list[Any]]:
    """Returns the gradients of the outputs of each weight, and the cotangents of the leaves of
    delayed scales."""
    form = ways.products.backward
    if weights[0].scales is None:
        return scaled_alike(dys, form, ways.maxima), [None for _ in weights]
    pairs = list(zip(weights, dys, strict=True))
    narrow = [quantized_by(scale_of(w.scales, "dy"), dy, form) for w, dy in pairs]
    cotangents = [jnp.concatenate([of_x, w.seen, seen(dy, form)]) for w, dy in pairs]
    return narrow, [
        vary(scales.astype(w.scales.dtype), varying_axes(w.scales))
        for w, scales in zip(weights, cotangents, strict=True)
    ]


def _gradient(weight: QuantizedWeight, x: Scaled, dy: Scaled, dscales: Any) -> QuantizedWeight:
    """Cotangent of a weight that was saved by `kept`. dscales: that of its scales."""
    stand_in, gradient = weight.stand_in, None
    if isinstance(stand_in, Tiled):
        scale = x.scale * dy.scale

        def scaled(left: jax.Array, right: jax.Array) -> Float[Array, "m n"]:
            return product(left, Scaled(right, scale))

        gradient = stand_in.gradient(x.numbers, dy.numbers, product=scaled)
    elif stand_in is not None:
        gradient = product(x.numbers.T, _times(dy, x.scale)).astype(weight.dtype)
    return replace(weight, value=None, stand_in=gradient, scales=dscales, seen=None)


def kept(weight: QuantizedWeight) -> QuantizedWeight:
    """The weight that is saved for the backward pass, without a stand-in array of its size."""
    stand_in = weight.stand_in
    if isinstance(stand_in, Tiled):
        return replace(weight, stand_in=replace(stand_in, tile=None))
    return weight if stand_in is None else replace(weight, stand_in=stand_in[:0])


# Remat policies do not look into a function with a custom derivative. Of a product they save only
# its named output; otherwise the product is recomputed completely.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _column_outputs(ways: Ways, x: Scaled, weights: tuple[Scaled, ...]) -> Outputs:
    return _gathered(ways, x, weights)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row_output(ways: Ways, x: Scaled, weight: Scaled) -> Float[Array, "tokens columns"]:
    return _scattered(ways, "row", [x], [weight])


def _once_only(*_: Any) -> Any:
    raise AssertionError("products are differentiated by _column and _row")


_column_outputs.defvjp(_once_only, _once_only)
_row_output.defvjp(_once_only, _once_only)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _column(
    ways: Ways, x: Float[Array, "tokens k"], weights: tuple[QuantizedWeight, ...]
) -> Outputs:
    return _column_forward(ways, x, weights)[0]


def _column_forward(
    ways: Ways, x: Float[Array, "tokens k"], weights: tuple[QuantizedWeight, ...]
) -> tuple[Outputs, tuple[Scaled, Any, tuple[QuantizedWeight, ...]]]:
    narrow, of_x = _input(ways, x, weights[0])
    outs = _column_outputs(ways, narrow, tuple(w.value for w in weights))
    return outs, (narrow, of_x, tuple(map(kept, weights)))


def _column_backward(
    ways: Ways, saved: tuple[Scaled, Any, tuple[QuantizedWeight, ...]], dys: Outputs
) -> tuple[Float[Array, "tokens k"], tuple[QuantizedWeight, ...]]:
    x, of_x, weights = saved
    narrow, of_scales = _output_gradients(ways, weights, dys, of_x)
    transposed = [_transposed(w.value) for w in weights]
    dx = _scattered(ways, "column gradients", narrow, transposed)
    tokens = x
    if any(w.stand_in is not None for w in weights):
        # Wait for the gradients, since the gathered tokens take as much memory as all saved ones.
        numbers, narrow = lax.optimization_barrier((x.numbers, narrow))
        tokens = Scaled(_all_tokens(ways, Scaled(numbers, x.scale)), x.scale)
    operands = zip(weights, narrow, of_scales, strict=True)
    return dx, tuple(_gradient(w, tokens, dy, scales) for w, dy, scales in operands)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row(
    ways: Ways, x: Float[Array, "all_tokens k"], weight: QuantizedWeight
) -> Float[Array, "tokens columns"]:
    return _row_forward(ways, x, weight)[0]


def _row_forward(
    ways: Ways, x: Float[Array, "all_tokens k"], weight: QuantizedWeight
) -> tuple[Float[Array, "tokens columns"], tuple[Scaled, Any, QuantizedWeight]]:
    narrow, of_x = _input(ways, x, weight)
    return _row_output(ways, narrow, weight.value), (narrow, of_x, kept(weight))


def _row_backward(
    ways: Ways, saved: tuple[Scaled, Any, QuantizedWeight], dy: Float[Array, "tokens columns"]
) -> tuple[Float[Array, "all_tokens k"], QuantizedWeight]:
    x, of_x, weight = saved
    (narrow,), (of_scales,) = _output_gradients(ways, [weight], [dy], of_x)
    (dx,), tokens = _gathered(ways, narrow, [_transposed(weight.value)])
    return dx, _gradient(weight, x, Scaled(tokens, narrow.scale), of_scales)


_column.defvjp(_column_forward, _column_backward)
_row.defvjp(_row_forward, _row_backward)
