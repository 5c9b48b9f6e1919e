"""Products x @ w of a layer in 8 bits, forward and backward written out.

Three products of 8-bit numbers with sums in fp32 (int32 for integers), times both scales: y of x
and w, dx of dy and w, dw of x and dy. Scales are current ones, or come from the steps before
(`delayed`). Rounding has no derivative: gradients are those of x @ w at the rounded values
(straight-through, Bengio et al. 2013).

The backward pass keeps a device's own tokens of x as 8-bit numbers. It gathers those of other
devices again for dw, a byte each, so that of a collective matmul only the outputs are kept
(Korthikanti et al. 2022, section 4.2.2). All gathered numbers travel as bytes: compilers widen or
rewrite narrow floats. Sums travel in the dtypes that they have anyway.

An adapter's matrices stay in the compute dtype. What a product sends serves them too, so they
multiply the rounded x, and behind a row-split weight the rounded dy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped, UInt8

from jaxtrain.collectives.algorithm import check_divides
from jaxtrain.collectives.matmul import (
    PRODUCT_SCATTERS,
    Tiled,
    gather_products,
    wide_product,
)
from jaxtrain.collectives.named import all_gather, sum_scatter
from jaxtrain.collectives.vary import vary, varying_axes
from jaxtrain.quantization.delayed import quantized_by, scale_of, seen
from jaxtrain.quantization.formats import E5M2, Scaled
from jaxtrain.quantization.recipe import PRODUCT
from jaxtrain.quantization.weights import (
    Operands,
    QuantizedWeight,
    Ways,
    as_bytes,
    kept,
    scaled_alike,
)

Outputs = tuple[Float[Array, "all_tokens _"], ...]
ColumnWeight = QuantizedWeight | Float[Array, "k _"]
Factors = tuple[Float[Array, "k rank"], Float[Array, "rank columns"]]
MOST_TERMS = (2**31 - 1) // 127**2
"""Largest number of integer products whose sum always fits int32."""


def column(ways: Ways, x: Float[Array, "tokens k"], weights: tuple[ColumnWeight, ...]) -> Outputs:
    """`Communicator.column` in 8 bits: x @ w for weights split by column. x: this device's share of
    the tokens. weights: arrays among them come last, and multiply the rounded x."""
    narrow = [isinstance(w, QuantizedWeight) for w in weights]
    assert narrow == sorted(narrow, reverse=True), "arrays come behind matrices in 8 bits"
    return tuple(checkpoint_name(y, PRODUCT) for y in _column(ways, x, weights))


def row(
    ways: Ways,
    x: Float[Array, "all_tokens k"],
    weight: QuantizedWeight,
    adapter: Factors | None = None,
    adapter_scale: float = 1.0,
) -> Float[Array, "tokens columns"]:
    """`Communicator.row` in 8 bits: x @ w for a weight split by row, summed. The result is this
    device's share of the tokens. adapter: (a, b), whose x @ a * adapter_scale @ b is added before
    the sum, of the rounded x."""
    return checkpoint_name(_row(ways, adapter_scale, x, weight, adapter), PRODUCT)


def column_gradients(
    ways: Ways, x: Scaled, dys: Sequence[Scaled], tiled: Sequence[Tiled | None]
) -> tuple[Any, ...]:
    """`Communicator.column_gradients` in 8 bits, of a product's `Operands`."""
    tokens = Scaled(_all_tokens(ways, x), x.scale)
    pairs = zip(dys, tiled, strict=True)
    return tuple(_product_gradient(tokens, dy, tile, ways.dtype) for dy, tile in pairs)


def row_gradients(
    ways: Ways, x: Scaled, dy: Scaled, tiled: Tiled | None
) -> Float[Array, "k columns"] | Tiled:
    """`Communicator.row_gradients` in 8 bits, of a product's `Operands`."""
    tokens = Scaled(_all_tokens(ways, dy), dy.scale)
    return _product_gradient(x, tokens, tiled, ways.dtype)


def product(x: Shaped[Array, "m k"], w: Scaled) -> Float[Array, "m n"]:
    """x @ w in fp32, times w's scale; as `product_of_numbers`. Where only one has 8-bit numbers,
    they are widened to the other's dtype."""
    numbers = w.numbers
    if x.dtype.itemsize == numbers.dtype.itemsize == 1:
        return product_of_numbers(x, numbers) * w.scale
    dtype = max(x.dtype, numbers.dtype, key=lambda dtype: dtype.itemsize)
    wide = jnp.promote_types(dtype, jnp.float32)
    return wide_product(x.astype(dtype), numbers.astype(dtype), wide) * w.scale


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


def _gradient(weight: ColumnWeight, x: Scaled, dy: Scaled, dscales: Any = None) -> Any:
    """Cotangent of a weight that was saved by `kept`. dscales: that of its scales."""
    if not isinstance(weight, QuantizedWeight):
        return _product_gradient(x, dy, None, weight.dtype)
    stand_in, gradient = weight.stand_in, None
    if isinstance(stand_in, Operands):
        gradient = stand_in.holding(x, dy)
    elif stand_in is not None:
        tiled = stand_in if isinstance(stand_in, Tiled) else None
        gradient = _product_gradient(x, dy, tiled, weight.dtype)
    return replace(weight, value=None, stand_in=gradient, scales=dscales, seen=None)


def _product_gradient(
    x: Scaled, dy: Scaled, tiled: Tiled | None, dtype: DTypeLike
) -> Float[Array, "k columns"] | Tiled:
    """Returns x^T @ dy, or the tiling with its tile of that."""
    if tiled is None:
        return product(x.numbers.T, _times(dy, x.scale)).astype(dtype)
    scale = x.scale * dy.scale

    def scaled(left: jax.Array, right: jax.Array) -> Float[Array, "m n"]:
        return product(left, Scaled(right, scale))

    return tiled.gradient(x.numbers, dy.numbers, product=scaled)


def _is_later(weight: ColumnWeight) -> bool:
    """Returns True for a weight whose gradient is computed later."""
    return isinstance(weight, QuantizedWeight) and isinstance(weight.stand_in, Operands)


def _scaled(weight: ColumnWeight) -> Scaled:
    """A weight's numbers and scale."""
    return weight.value if isinstance(weight, QuantizedWeight) else _wide(weight)


def _wide(x: Float[Array, "m n"]) -> Scaled:
    """An array as it is, with scale 1."""
    return Scaled(x, jnp.float32(1.0))


# Remat policies do not look into a function with a custom derivative. Of a product they save only
# its named output; otherwise the product is recomputed completely.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _column_outputs(ways: Ways, x: Scaled, weights: tuple[Scaled, ...]) -> Outputs:
    return _gathered(ways, x, weights)[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row_output(
    ways: Ways, xs: tuple[Scaled, ...], weights: tuple[Scaled, ...]
) -> Float[Array, "tokens columns"]:
    return _scattered(ways, "row", xs, weights)


def _once_only(*_: Any) -> Any:
    raise AssertionError("products are differentiated by _column and _row")


_column_outputs.defvjp(_once_only, _once_only)
_row_output.defvjp(_once_only, _once_only)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _column(ways: Ways, x: Float[Array, "tokens k"], weights: tuple[ColumnWeight, ...]) -> Outputs:
    return _column_forward(ways, x, weights)[0]


def _column_forward(
    ways: Ways, x: Float[Array, "tokens k"], weights: tuple[Any, ...]
) -> tuple[Outputs, tuple[Scaled, Any, tuple[ColumnWeight, ...]]]:
    narrow, of_x = _input(ways, x, weights[0])
    outs = _column_outputs(ways, narrow, tuple(map(_scaled, weights)))
    return outs, (narrow, of_x, tuple(map(kept, weights)))


def _column_backward(
    ways: Ways, saved: tuple[Scaled, Any, tuple[ColumnWeight, ...]], dys: Outputs
) -> tuple[Float[Array, "tokens k"], tuple[ColumnWeight, ...]]:
    x, of_x, weights = saved
    quantised = [w for w in weights if isinstance(w, QuantizedWeight)]
    arrays = weights[len(quantised) :]
    rounded, of_scales = _output_gradients(ways, quantised, dys[: len(quantised)], of_x)
    gradients = [*rounded, *map(_wide, dys[len(quantised) :])]
    transposed = [_transposed(_scaled(w)) for w in weights]
    dx = _scattered(ways, "column gradients", gradients, transposed)
    tokens = x
    if arrays or any(w.stand_in is not None for w in quantised):
        # Wait for the gradients, since the gathered tokens take as much memory as all saved ones.
        numbers, gradients = lax.optimization_barrier((x.numbers, gradients))
        tokens = Scaled(_all_tokens(ways, Scaled(numbers, x.scale)), x.scale)
    operands = zip(weights, gradients, [*of_scales, *(None for _ in arrays)], strict=True)
    return dx, tuple(
        _gradient(w, x if _is_later(w) else tokens, dy, scales) for w, dy, scales in operands
    )


RowWeights = tuple[QuantizedWeight, Factors | None]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _row(
    ways: Ways,
    adapter_scale: float,
    x: Float[Array, "all_tokens k"],
    weight: QuantizedWeight,
    adapter: Factors | None,
) -> Float[Array, "tokens columns"]:
    return _row_forward(ways, adapter_scale, x, weight, adapter)[0]


def _row_forward(
    ways: Ways,
    adapter_scale: float,
    x: Float[Array, "all_tokens k"],
    weight: QuantizedWeight,
    adapter: Factors | None,
) -> tuple[Float[Array, "tokens columns"], tuple[Scaled, Any, Any, RowWeights]]:
    narrow, of_x = _input(ways, x, weight)
    xs, weights, z = [narrow], [weight.value], None
    if adapter is not None:
        a, b = adapter
        z = _adapter_input(narrow, a, adapter_scale)
        xs, weights = [*xs, _wide(z)], [*weights, _wide(b)]
    y = _row_output(ways, tuple(xs), tuple(weights))
    return y, (narrow, of_x, z, (kept(weight), adapter))


def _adapter_input(x: Scaled, a: Float[Array, "k rank"], scale: float) -> Float[Array, "_ rank"]:
    """Returns x @ a * scale, in a's dtype."""
    return (product(x.numbers, Scaled(a, x.scale)) * scale).astype(a.dtype)


def _row_backward(
    ways: Ways,
    adapter_scale: float,
    saved: tuple[Scaled, Any, Any, RowWeights],
    dy: Float[Array, "tokens columns"],
) -> tuple[Float[Array, "all_tokens k"], QuantizedWeight, Factors | None]:
    x, of_x, z, (weight, adapter) = saved
    (narrow,), (of_scales,) = _output_gradients(ways, [weight], [dy], of_x)
    b_transposed = [] if adapter is None else [_transposed(_wide(adapter[1]))]
    (dx, *dzs), tokens = _gathered(ways, narrow, [_transposed(weight.value), *b_transposed])
    dys, gradients = Scaled(tokens, narrow.scale), None
    if adapter is not None:
        a, b = adapter
        dz = _wide((dzs[0] * adapter_scale).astype(b.dtype))
        dx = (dx + product(dz.numbers, _transposed(_wide(a)))).astype(dx.dtype)
        gradients = _gradient(a, x, dz), _gradient(b, _wide(z), dys)
    dys = narrow if _is_later(weight) else dys
    return dx, _gradient(weight, x, dys, of_scales), gradients


_column.defvjp(_column_forward, _column_backward)
_row.defvjp(_row_forward, _row_backward)
