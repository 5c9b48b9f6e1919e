"""Products x @ w of a layer in 8 bits, forward and backward written out.

Three products of 8-bit numbers with sums in fp32 (int32 of whole numbers), times both scales: y of
x and w, dx of dy and w, dw of x and dy. What follows from rounding has no derivative: gradients are
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
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
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
from jaxtrain.nn.quantized.formats import (
    E4M3,
    E5M2,
    INT8,
    Format,
    Scaled,
    greatest_magnitude,
)
from jaxtrain.nn.remat import PRODUCT

Value = TypeVar("Value")
Outputs = tuple[Float[Array, "all_tokens _"], ...]
MOST_TERMS = (2**31 - 1) // 127**2
"""So many products of whole numbers int32 holds the sum of, however large they are."""


@dataclass(frozen=True)
class Fp8Products:
    """Products in 8-bit floats: activations and weights as e4m3, the gradients of outputs as e5m2
    (Micikevicius et al. 2022), each tensor with one scale from its greatest magnitude of the
    moment, a power of two (`formats.Format.scale`)."""

    rate: ClassVar[str] = "fp8"
    """Of `mesh.hardware.Chip`'s rates, that of such products."""

    @property
    def forward(self) -> Format:
        """Of x and w."""
        return E4M3

    @property
    def backward(self) -> Format:
        """Of dy."""
        return E5M2


@dataclass(frozen=True)
class Int8Products:
    """Products of whole numbers from -127 to 127, each tensor with one scale, its greatest
    magnitude / 127, rounded to nearest; dy as x and w, so that all three products are of 8 bits
    (as AQT trains: Abdolrashidi et al. 2021, "Pareto-optimal quantized ResNet is mostly 4-bit")."""

    rate: ClassVar[str] = "int8"
    """Of `mesh.hardware.Chip`'s rates, that of such products."""

    @property
    def forward(self) -> Format:
        """Of x and w."""
        return INT8

    @property
    def backward(self) -> Format:
        """Of dy."""
        return INT8


Products = Fp8Products | Int8Products


@partial(
    jax.tree_util.register_dataclass, data_fields=("value", "stand_in"), meta_fields=("dtype",)
)
@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix [k, columns] in 8 bits, in the place of the array of `dtype` that it was made of.

    value: its numbers and scale. stand_in: what gets the gradient of that array: one of its shape
    and dtype; or a `Tiled` without `whole`, whose tile does; None where nobody asks. Its numbers
    are not read.
    """

    value: PyTree  # a Scaled, or what JAX puts in its place
    stand_in: PyTree
    dtype: DTypeLike

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
    """Each array in `form`, with the scale of all its parts on the devices of `axes`: by one
    all-reduce of the greatest magnitudes of all."""
    found = jnp.stack([greatest_magnitude(x) for x in arrays])
    if axes:
        found = vary(lax.pmax(found, axes), varying_axes(found))
    scales = form.scale(found)
    return [Scaled(form.numbers(x, scale), scale) for x, scale in zip(arrays, scales, strict=True)]


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
    """x @ w of 8-bit numbers, times w's scale, in fp32.

    Of floats every term is exact in fp32, in which they are added. Of whole numbers the sums are
    exact, and rounded to fp32: in int32, and of more than `MOST_TERMS` by parts.
    """
    dims = (((1,), (0,)), ((), ()))
    if x.dtype != jnp.int8:
        total = lax.dot_general(x, w.numbers, dims, preferred_element_type=jnp.float32)
        return total * w.scale
    parts = [
        lax.dot_general(
            x[:, at : at + MOST_TERMS],
            w.numbers[at : at + MOST_TERMS],
            dims,
            preferred_element_type=jnp.int32,
        ).astype(jnp.float32)
        for at in range(0, max(x.shape[1], 1), MOST_TERMS)
    ]
    return sum(parts[1:], start=parts[0]) * w.scale


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


def _gradient(weight: QuantizedWeight, x: Scaled, dy: Scaled) -> QuantizedWeight:
    """The cotangent of a weight in whose place `_kept` has been."""
    wanted, made = weight.stand_in, None
    if isinstance(wanted, Tiled):
        scale = x.scale * dy.scale

        def scaled(left: jax.Array, right: jax.Array) -> Float[Array, "m n"]:
            return product(left, Scaled(right, scale))

        made = wanted.gradient(x.numbers, dy.numbers, product=scaled)
    elif wanted is not None:
        made = product(x.numbers.T, _times(dy, x.scale)).astype(weight.dtype)
    return replace(weight, value=None, stand_in=made)


def _kept(weight: QuantizedWeight) -> QuantizedWeight:
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
) -> tuple[Outputs, tuple[Scaled, tuple[QuantizedWeight, ...]]]:
    (narrow,) = scaled_alike([x], ways.products.forward, ways.maxima)
    outs = _column_outputs(ways, narrow, tuple(w.value for w in weights))
    return outs, (narrow, tuple(map(_kept, weights)))


def _column_backward(
    ways: Ways, saved: tuple[Scaled, tuple[QuantizedWeight, ...]], dys: Outputs
) -> tuple[Float[Array, "tokens k"], tuple[QuantizedWeight, ...]]:
    x, weights = saved
    narrow = scaled_alike(dys, ways.products.backward, ways.maxima)
    transposed = [_transposed(w.value) for w in weights]
    dx = _scattered(ways, "column gradients", narrow, transposed)
    if all(w.stand_in is None for w in weights):
        return dx, tuple(replace(w, value=None) for w in weights)
    # Not before the gradients are there: what is gathered is as large as all that is kept.
    numbers, narrow = lax.optimization_barrier((x.numbers, narrow))
    whole = Scaled(_all_tokens(ways, Scaled(numbers, x.scale)), x.scale)
    return dx, tuple(_gradient(w, whole, dy) for w, dy in zip(weights, narrow, strict=True))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row(
    ways: Ways, x: Float[Array, "all_tokens k"], weight: QuantizedWeight
) -> Float[Array, "tokens columns"]:
    return _row_forward(ways, x, weight)[0]


def _row_forward(
    ways: Ways, x: Float[Array, "all_tokens k"], weight: QuantizedWeight
) -> tuple[Float[Array, "tokens columns"], tuple[Scaled, QuantizedWeight]]:
    (narrow,) = scaled_alike([x], ways.products.forward, ways.maxima)
    return _row_output(ways, narrow, weight.value), (narrow, _kept(weight))


def _row_backward(
    ways: Ways, saved: tuple[Scaled, QuantizedWeight], dy: Float[Array, "tokens columns"]
) -> tuple[Float[Array, "all_tokens k"], QuantizedWeight]:
    x, weight = saved
    (narrow,) = scaled_alike([dy], ways.products.backward, ways.maxima)
    (dx,), whole = _gathered(ways, narrow, [_transposed(weight.value)])
    return dx, _gradient(weight, x, Scaled(whole, narrow.scale))


_column.defvjp(_column_forward, _column_backward)
_row.defvjp(_row_forward, _row_backward)
