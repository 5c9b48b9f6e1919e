"""Formats of 8 bits: conversion of an array to 8-bit numbers with one scale, and back.

The scale of a whole tensor comes from its greatest magnitude ("current" scaling, per tensor):
number * scale is about x, and no number exceeds the largest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

SMALLEST_SCALE = 2.0**-126
"""fp32's least number that no platform flushes to zero; a scale below it has no finite inverse."""


@dataclass(frozen=True)
class Format:
    """A type of numbers.

    dtype: its NumPy name. largest: its greatest finite number.
    """

    dtype: str
    largest: float

    @property
    def is_integer(self) -> bool:
        """True for an integer type."""
        return self.dtype.startswith("int")

    def scale(self, greatest: Float32[Array, "*n"]) -> Float32[Array, "*n"]:
        """Scale of a tensor's numbers, from its `greatest` magnitude.

        For floats: the least power of two that keeps all numbers within the largest. A float has
        the same relative error at every scale, so a power of two costs at most a binade of range.
        It makes scaling, and unscaling a product, exact, and gives a tensor and twice it the same
        8-bit numbers. For integers that would double the error; they take greatest / largest (Jacob
        et al. 2018). 1 for a tensor of zeros; infinite if `greatest` is not finite, so that all
        results are not finite.
        """
        if self.is_integer:
            scale = greatest / self.largest
        else:
            top, high = jnp.frexp(jnp.float32(self.largest))
            part, exponent = jnp.frexp(greatest)
            exponent = exponent - high + (part > top)
            scale = jnp.ldexp(jnp.ones_like(greatest), jnp.maximum(exponent, -126))
        scale = jnp.maximum(scale, SMALLEST_SCALE)
        scale = jnp.where(greatest > 0, scale, 1.0)
        return jnp.where(jnp.isfinite(greatest), scale, jnp.inf)

    def numbers(self, x: Float[Array, "*n"], scale: Float32[Array, "*m"]) -> Shaped[Array, "*n"]:
        """Rounds x / scale to the nearest number, ties to even. scale: one, or one for each of x's
        first dims."""
        shrunk = x.astype(jnp.float32) / along(scale, x)
        return (jnp.round(shrunk) if self.is_integer else shrunk).astype(self.dtype)


E4M3 = Format("float8_e4m3fn", 448.0)
"""Four bits of exponent and three of fraction: a relative error up to 1/16."""
E5M2 = Format("float8_e5m2", 57344.0)
"""Five and two: more range, which gradients need, and a relative error up to 1/8."""
INT8 = Format("int8", 127.0)
"""-127 to 127: an error up to half a scale, whatever the number."""


@partial(jax.tree_util.register_dataclass, data_fields=("numbers", "scale"), meta_fields=())
@dataclass(frozen=True)
class Scaled:
    """8-bit `numbers` that stand for numbers * scale. scale: an fp32 scalar, or one for each matrix
    of a stack."""

    numbers: jax.Array
    scale: jax.Array


def along(scale: Float32[Array, "*m"], x: Shaped[Array, "*n"]) -> Float32[Array, ...]:
    """Broadcasts scales of x's first dims to x's number of dims; a scalar scale stays as it is."""
    return scale if not scale.ndim else scale.reshape(*scale.shape, *(1,) * (x.ndim - scale.ndim))


def greatest_of_matrices(x: Float[Array, "*stack m n"]) -> Float32[Array, "*stack"]:
    """`greatest_magnitude` of each matrix of a stack."""
    return _greatest(x, (-2, -1))


def greatest_magnitude(x: Float[Array, "*n"]) -> Float32[Array, ""]:
    """max|x|; 0 for an empty array, infinite if a number is not finite. NaN becomes infinite since
    a maximum skips NaN on XLA:CPU, and perhaps elsewhere between devices."""
    return _greatest(x, None)


def _greatest(x: jax.Array, axis: tuple[int, ...] | None) -> jax.Array:
    magnitudes = jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf)
    return jnp.max(magnitudes, axis=axis, initial=0.0).astype(jnp.float32)


def quantize(x: Float[Array, "*n"], form: Format) -> Scaled:
    """x in `form`, scaled by its own greatest magnitude."""
    scale = form.scale(greatest_magnitude(x))
    return Scaled(form.numbers(x, scale), scale)


def dequantize(x: Scaled) -> Float32[Array, ...]:
    """numbers * scale in fp32."""
    return x.numbers.astype(jnp.float32) * along(x.scale, x.numbers)
