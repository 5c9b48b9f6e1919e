"""Weights in 8 bits as a layer holds and sends them, and the scales that tensors have together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree, Shaped, UInt8

from jaxtrain.collectives.choice import Exact
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.matmul import Tiled
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.vary import vary, varying_axes
from jaxtrain.mesh.axes import MeshAxes
from jaxtrain.quantization.delayed import entry, quantized_by, scale_of
from jaxtrain.quantization.formats import Format, Scaled, greatest_of_matrices
from jaxtrain.quantization.recipe import Products

Value = TypeVar("Value")
Weights = dict[str, Any]
"""Weights of a layer by name, as it uses them: arrays, and `QuantizedWeight`s for matrices in 8
bits."""


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
    an array of its shape and dtype, a `Tiled` without `whole`, whose tile receives it, or
    `Operands`, from which it is computed later; None without a gradient. With delayed scaling, else
    None: scales, the matrix's leaf of them, whose gradient is what a step's products see; seen, the
    local array's own scale. ways: for experts' matrices, by which no communicator multiplies.
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


@partial(jax.tree_util.register_dataclass, data_fields=("x", "dy", "scales"), meta_fields=())
@dataclass(frozen=True)
class Operands:
    """What a weight's gradient is computed from, as it lies on a device before it is gathered.

    x, dy: 8-bit numbers of the product's input and of its output's gradient, in the compute dtype:
      a cotangent has the dtype of its variable, which holds each of these numbers exactly.
    scales: of x and of dy.
    """

    x: PyTree
    dy: PyTree
    scales: PyTree

    def holding(self, x: Scaled, dy: Scaled) -> Operands:
        """Returns those of a product, in the dtypes of these."""
        scales = vary(jnp.stack([x.scale, dy.scale]), varying_axes(self.scales))
        numbers = x.numbers.astype(self.x.dtype), dy.numbers.astype(self.dy.dtype)
        return Operands(*numbers, scales)


def scaled_alike(arrays: Sequence[Float[Array, ...]], form: Format, axes: MeshAxes) -> list[Scaled]:
    """Returns each array in `form`. Each matrix of a stack has one scale for its parts on the
    devices of `axes`. One all-reduce serves all arrays."""
    scales = scales_alike([greatest_of_matrices(x) for x in arrays], form, axes)
    return [Scaled(form.numbers(x, scale), scale) for x, scale in zip(arrays, scales, strict=True)]


def scales_alike(
    greatest: Sequence[Float[Array, ...]], form: Format, axes: MeshAxes
) -> list[Float[Array, ...]]:
    """Returns the scales of tensors whose parts are on the devices of `axes`, equal on all of
    these. greatest: the greatest magnitudes of this device's parts, an array for each tensor. One
    all-reduce serves all tensors."""
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


def kept(weight: Value) -> Value:
    """The weight that is saved for the backward pass, without a stand-in array of its size."""
    if not isinstance(weight, QuantizedWeight):
        return weight
    if isinstance(weight.stand_in, Tiled):
        return replace(weight, stand_in=replace(weight.stand_in, tile=None))
    return replace(weight, stand_in=jax.tree.map(lambda leaf: leaf[:0], weight.stand_in))


def as_bytes(numbers: Shaped[Array, ...]) -> UInt8[Array, ...]:
    """8-bit numbers as the bytes that are sent."""
    return lax.bitcast_convert_type(numbers, jnp.uint8)
