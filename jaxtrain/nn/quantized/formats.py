"""Formats of 8 bits: how an array becomes such numbers and one scale, and back.

A scale is of a whole tensor, from the greatest magnitude in it ("current" scaling, per tensor):
number * scale is about x, and nothing lies beyond the largest number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Shaped

SMALLEST_SCALE = 2.0**-126
"""fp32's least number that no platform takes for zero: of less a scale's inverse would be none."""


@dataclass(frozen=True)
class Format:
    """A type of numbers.

    dtype: NumPy's name of it. largest: the greatest finite one.
    """

    dtype: str
    largest: float

    @property
    def whole(self) -> bool:
        """Whether its numbers are whole ones."""
        return self.dtype.startswith("int")

    def scale(self, greatest: Float32[Array, "*n"]) -> Float32[Array, "*n"]:
        """What numbers of a tensor are multiplied by, from its `greatest` magnitude.

        Of floats the least power of two that keeps all of them within the largest. A float has the
        same relative error at every scale, so a power of two costs a binade of range at the most;
        it makes scaling, and unscaling a product, exact, and 8-bit numbers of a tensor and of twice
        it the same. Of whole numbers that would double the error, and it is greatest / largest
        (Jacob et al. 2018). 1 for a tensor of zeros; infinite for one that has a number that is not
        finite, so that all that is made of it is none.
        """
        if self.whole:
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
        """The numbers nearest to x / scale, of two as near the even one. scale: one, or one for
        each of x's first dims."""
        shrunk = x.astype(jnp.float32) / along(scale, x)
        return (jnp.round(shrunk) if self.whole else shrunk).astype(self.dtype)


E4M3 = Format("float8_e4m3fn", 448.0)
"""Four bits of exponent and three of fraction: a relative error up to 1/16."""
E5M2 = Format("float8_e5m2", 57344.0)
"""Five and two: more range, which gradients need, and a relative error up to 1/8."""
INT8 = Format("int8", 127.0)
"""-127 to 127: an error up to half a scale, whatever the number."""


@partial(jax.tree_util.register_dataclass, data_fields=("numbers", "scale"), meta_fields=())
@dataclass(frozen=True)
class Scaled:
    """An array of 8-bit `numbers` that are meant times `scale`, a scalar in fp32, or one for each
    matrix of a stack."""

    numbers: jax.Array
    scale: jax.Array


def along(scale: Float32[Array, "*m"], x: Shaped[Array, "*n"]) -> Float32[Array, ...]:
    """The scales of x's first dims, to multiply all of it by; one of all of x as it is."""
    return scale if not scale.ndim else scale.reshape(*scale.shape, *(1,) * (x.ndim - scale.ndim))


def greatest_of_matrices(x: Float[Array, "*stack m n"]) -> Float32[Array, "*stack"]:
    """`greatest_magnitude` of each matrix of a stack."""
    return _greatest(x, (-2, -1))


def greatest_magnitude(x: Float[Array, "*n"]) -> Float32[Array, ""]:
    """max|x|, 0 of an empty array; infinite where a number is not finite, NaN too: a maximum passes
    over NaN on XLA:CPU, and on the way between devices may do so elsewhere."""
    return _greatest(x, None)


def _greatest(x: jax.Array, axis: tuple[int, ...] | None) -> jax.Array:
    known = jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.inf)
    return jnp.max(known, axis=axis, initial=0.0).astype(jnp.float32)


def quantize(x: Float[Array, "*n"], form: Format) -> Scaled:
    """x in `form`, scaled by its own greatest magnitude."""
    scale = form.scale(greatest_magnitude(x))
    return Scaled(form.numbers(x, scale), scale)


def dequantize(x: Scaled) -> Float32[Array, ...]:
    """numbers * scale in fp32."""
    return x.numbers.astype(jnp.float32) * along(x.scale, x.numbers)
