"""Products x @ w of a layer in 8 bits, forward and backward written out.

Three products of 8-bit numbers with sums in fp32 (int32 of whole numbers), times both scales: y of
x and w, dx of dy and w, dw of x and dy. Scales are those of the moment, or of the steps before
(`delayed`). What follows from rounding has no derivative: gradients are
those of x @ w at what was rounded (straight-through, Bengio et al. 2013).

The backward pass keeps x as 8-bit numbers, on a device its own tokens alone: where others' are
needed for dw they are gathered again, a byte each, so that nothing of a collective matmul but its
outputs needs to be kept (Korthikanti et al. 2022, section 4.2.2). All that is gathered travels as
bytes: compilers widen or rewrite narrow floats. Sums travel in the dtypes that they have anyway.
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
from jaxtrain.nn.quantized.delayed import entry, quantized_by, scale_of, seen
from jaxtrain.nn.quantized.formats import E5M2, Format, Scaled, greatest_of_matrices
from jaxtrain.nn.quantized.recipe import Products
from jaxtrain.nn.remat import PRODUCT

Value = TypeVar("Value")
Outputs = tuple[Float[Array, "all_tokens _"], ...]
MOST_TERMS = (2**31 - 1) // 127**2
"""So many products of whole numbers int32 holds the sum of, however large they are."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("value", "stand_in", "scales", "seen"),
    meta_fields=("dtype", "ways"),
)
@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [k, columns] in 8 bits, in the place of the array of `dtype` that it was made of; or
    one for each expert, [experts, k, columns], each with a scale of its own.

    value: its numbers and scale. stand_in: what gets the gradient of that array: one of its shape
    and dtype; or a `Tiled` without `whole`, whose tile does; None where nobody asks. Its numbers
    are not read. Of delayed scaling, else None: scales, the matrix's leaf of them, whose gradient
    is what the products of a step see; seen, that of the array, on this device. ways: of experts',
    which no communicator multiplies by.
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

    def __getitem__(self, at: object) -> QuantizedWeight:
        if at is ...:
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
    """How the operands of a layer's products come together.

    products: what is rounded to what. dtype: of outputs and gradients. maxima: mesh axes whose
    devices hold parts of one x, over which its greatest magnitude is taken. tensor: those over
    which tokens are gathered before a column-split weight, and sums scattered after a row-split
    one; by: the algorithm of both.
    """

    products: Products
    dtype: DTypeLike
    maxima: MeshAxes = ()
    tensor: MeshAxes = ()
    by: Exact = Lax()  # noqa: RUF009 (frozen)

    @property
    def ring(self) -> Ring | None:
        """The ring that products are part of; None where they are by themselves."""
        return self.by if isinstance(self.by, Ring) and self.tensor else None


def scaled_alike(arrays: Sequence[Float[Array, ...]], form: Format, axes: MeshAxes) -> list[Scaled]:
    """Each array in `form`, each matrix of a stack with the scale of all its parts on the devices
    of `axes`: by one all-reduce of the greatest magnitudes of all."""
    scales = scales_alike([greatest_of_matrices(x) for x in arrays], form, axes)
    return [Scaled(form.numbers(x, scale), scale) for x, scale in zip(arrays, scales, strict=True)]


def scales_alike(
    greatest: Sequence[Float[Array, ...]], form: Format, axes: MeshAxes
) -> list[Float[Array, ...]]:
    """The scales of tensors of which devices of `axes` have parts with these greatest magnitudes,
    by one all-reduce."""
    found = jnp.concatenate([each.reshape(-1) for each in greatest])
    if axes:
        found = vary(lax.pmax(found, axes), varying_axes(found))
    ends = np.cumsum([each.size for each in greatest])
    parts = jnp.split(form.scale(found), ends[:-1])
    return [part.reshape(each.shape) for part, each in zip(parts, greatest, strict=True)]


def scaled_before(
    weight: Float[Array, "*stack k columns"], scales: Float[Array, "*stack 3*256"], form: Format
) -> QuantizedWeight:
    """A matrix in `form`, with the scale that its leaf of delayed scales has for it."""
    made, found = quantized_by(scale_of(scales, "w"), weight, form), greatest_of_matrices(weight)
    return QuantizedWeight(made, None, weight.dtype, seen=entry(found, form))


def differentiated(weight: Value) -> Value | jax.Array:
    """What a layer is differentiated by in the place of a weight: an array itself; of a quantised
    one a zero in its shape."""
    if not isinstance(weight, QuantizedWeight):
        return weight
    zero = jnp.zeros(weight.shape, weight.dtype)
    return vary(zero, varying_axes(weight.value.numbers))


def standing_for(weight: Any, by: Any) -> Any:
    """The weight as a layer is given it, `by` being what it is differentiated by."""
    return replace(weight, stand_in=by) if isinstance(weight, QuantizedWeight) else by


def cotangent(weight: Any) -> Any:
    """Of a cotangent of `standing_for` that of what stood there."""
    return weight.stand_in if isinstance(weight, QuantizedWeight) else weight


def as_sent(weight: Any) -> jax.Array:
    """A weight, or a part of one, as it travels."""
    return as_bytes(weight.value.numbers) if isinstance(weight, QuantizedWeight) else weight


def received(weight: Any, sent: jax.Array) -> Any:
    """What has come of `as_sent` of each device's part, as the weight it is."""
    if not isinstance(weight, QuantizedWeight):
        return sent
    numbers = lax.bitcast_convert_type(sent, weight.value.numbers.dtype)
    return replace(weight, value=Scaled(numbers, weight.value.scale))


def column(
    ways: Ways, x: Float[Array, "tokens k"], weights: tuple[QuantizedWeight, ...]
) -> Outputs:
    """x @ w for weights split by column, x this device's share of the tokens: what
    `Communicator.column` is."""
    return tuple(checkpoint_name(y, PRODUCT) for y in _column(ways, x, weights))


def row(
    ways: Ways, x: Float[Array, "all_tokens k"], weight: QuantizedWeight
) -> Float[Array, "tokens columns"]:
    """x @ w for a weight split by row, summed, of which the result is this device's share of the
    tokens: what `Communicator.row` is."""
    return checkpoint_name(_row(ways, x, weight), PRODUCT)


def product(x: Shaped[Array, "m k"], w: Scaled) -> Float[Array, "m n"]:
    """x @ w of 8-bit numbers, times w's scale, in fp32: as `product_of_numbers`."""
    return product_of_numbers(x, w.numbers) * w.scale


def product_of_numbers(x: Shaped[Array, "m k"], w: Shaped[Array, "k n"]) -> Float[Array, "m n"]:
    """x @ w of 8-bit numbers, in fp32.

    Of floats every term is exact in fp32, in which they are added; but for what Hopper's tensor
    cores, at the default precision, add of a forward product in fewer bits ("fast accumulation").
    Products with gradients ask for all. Of whole numbers the sums are exact, and rounded to fp32:
    in int32, and of more than `MOST_TERMS` by parts.
    """
    dims = (((1,), (0,)), ((), ()))
    if x.dtype != jnp.int8:
        precision = lax.Precision.HIGHEST if E5M2.dtype in (x.dtype, w.dtype) else None
        how: Any = dict(precision=precision, preferred_element_type=jnp.float32)
        return lax.dot_general(x, w, dims, **how)
    parts = [
        lax.dot_general(
            x[:, at : at + MOST_TERMS],
            w[at : at + MOST_TERMS],
            dims,
            preferred_element_type=jnp.int32,
        ).astype(jnp.float32)
        for at in range(0, max(x.shape[1], 1), MOST_TERMS)
    ]
    return sum(parts[1:], start=parts[0])


def as_bytes(numbers: Shaped[Array, ...]) -> UInt8[Array, ...]:
    """8-bit numbers as they travel."""
    return lax.bitcast_convert_type(numbers, jnp.uint8)


def _times(w: Scaled, scale: jax.Array) -> Scaled:
    """w, for a product with numbers that are meant times `scale`."""
    return Scaled(w.numbers, w.scale * scale)


def _transposed(w: Scaled) -> Scaled:
    return Scaled(w.numbers.T, w.scale)


def _gathered(
    ways: Ways, x: Scaled, weights: Sequence[Scaled]
) -> tuple[Outputs, Shaped[Array, "all_tokens k"]]:
    """Tokens of all devices times each weight, and the tokens' numbers."""
    dtype, kind = ways.dtype, x.numbers.dtype
    weights = tuple(_times(w, x.scale) for w in weights)
    if ways.ring is None:
        whole = _all_tokens(ways, x)
        return tuple(product(whole, w).astype(dtype) for w in weights), whole

    def of_bytes(tile: UInt8[Array, "tokens k"], w: Scaled) -> Float[Array, "tokens columns"]:
        return product(lax.bitcast_convert_type(tile, kind), w).astype(dtype)

    given = (as_bytes(x.numbers), weights, ways.tensor, ways.ring)
    outs, whole = gather_products(*given, product=of_bytes)
    return outs, lax.bitcast_convert_type(whole, kind)


def _all_tokens(ways: Ways, x: Scaled) -> Shaped[Array, "all_tokens k"]:
    """The numbers of the tokens of all devices."""
    if not ways.tensor:
        return x.numbers
    whole = all_gather(as_bytes(x.numbers), ways.tensor, 0, ways.by)
    return lax.bitcast_convert_type(whole, x.numbers.dtype)


def _scattered(
    ways: Ways, reduction: str, xs: Sequence[Scaled], weights: Sequence[Scaled]
) -> Float[Array, "tokens columns"]:
    """The sum of x @ w over the pairs and the devices, of which each gets its tokens, by the
    reduction of that name."""
    weights = tuple(_times(w, x.scale) for x, w in zip(xs, weights, strict=True))
    numbers = tuple(x.numbers for x in xs)
    if ways.ring is not None:
        check_divides(numbers[0], ways.tensor, 0)
        scatter = PRODUCT_SCATTERS[f"{reduction} matmul"]
        return scatter(numbers, weights, ways.tensor, ways.ring, ways.dtype, product=product)
    first, *others = (product(x, w) for x, w in zip(numbers, weights, strict=True))
    total = sum(others, start=first).astype(ways.dtype)
    return sum_scatter(reduction, total, ways.tensor, 0, ways.by)


def _input(ways: Ways, x: Float[Array, "_ k"], weight: QuantizedWeight) -> tuple[Scaled, Any]:
    """The input of a product with that weight (and with those of the same input), and what was seen
    of it for its delayed scale."""
    form = ways.products.forward
    if weight.scales is None:
        return scaled_alike([x], form, ways.maxima)[0], None
    return quantized_by(scale_of(weight.scales, "x"), x, form), seen(x, form)


def _output_gradients(
    ways: Ways, weights: Sequence[QuantizedWeight], dys: Sequence[Float[Array, ...]], of_x: Any
) -> tuple[list[Scaled], list[Any]]:
    """The gradients of the outputs of each weight, and the cotangent of its leaf of delayed
    scales."""
    form = ways.products.backward
    if weights[0].scales is None:
        return scaled_alike(dys, form, ways.maxima), [None for _ in weights]
    pairs = list(zip(weights, dys, strict=True))
    narrow = [quantized_by(scale_of(w.scales, "dy"), dy, form) for w, dy in pairs]
    found = [jnp.concatenate([of_x, w.seen, seen(dy, form)]) for w, dy in pairs]
    return narrow, [
        vary(each.astype(w.scales.dtype), varying_axes(w.scales))
        for w, each in zip(weights, found, strict=True)
    ]


def _gradient(weight: QuantizedWeight, x: Scaled, dy: Scaled, found: Any) -> QuantizedWeight:
    """The cotangent of a weight in whose place `kept` has been; found: that of its scales."""
    wanted, made = weight.stand_in, None
    if isinstance(wanted, Tiled):
        scale = x.scale * dy.scale

        def scaled(left: jax.Array, right: jax.Array) -> Float[Array, "m n"]:
            return product(left, Scaled(right, scale))

        made = wanted.gradient(x.numbers, dy.numbers, product=scaled)
    elif wanted is not None:
        made = product(x.numbers.T, _times(dy, x.scale)).astype(weight.dtype)
    return replace(weight, value=None, stand_in=made, scales=found, seen=None)


def kept(weight: QuantizedWeight) -> QuantizedWeight:
    """The weight for the backward pass: its stand-in without an array of that size."""
    stand_in = weight.stand_in
    if isinstance(stand_in, Tiled):
        return replace(weight, stand_in=replace(stand_in, tile=None))
    return weight if stand_in is None else replace(weight, stand_in=stand_in[:0])


# Remat policies do not look into a function with a derivative of its own: what they save of a
# product is its named output, whatever it is made of, and what they have made again is all of it.
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
    narrow, found = _output_gradients(ways, weights, dys, of_x)
    transposed = [_transposed(w.value) for w in weights]
    dx = _scattered(ways, "column gradients", narrow, transposed)
    whole = x
    if any(w.stand_in is not None for w in weights):
        # Not before the gradients are there: what is gathered is as large as all that is kept.
        numbers, narrow = lax.optimization_barrier((x.numbers, narrow))
        whole = Scaled(_all_tokens(ways, Scaled(numbers, x.scale)), x.scale)
    each = zip(weights, narrow, found, strict=True)
    return dx, tuple(_gradient(w, whole, dy, scales) for w, dy, scales in each)


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
    (narrow,), (found,) = _output_gradients(ways, [weight], [dy], of_x)
    (dx,), whole = _gathered(ways, narrow, [_transposed(weight.value)])
    return dx, _gradient(weight, x, Scaled(whole, narrow.scale), found)


_column.defvjp(_column_forward, _column_backward)
_row.defvjp(_row_forward, _row_backward)
