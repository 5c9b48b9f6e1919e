"""Codecs: fp32 rows as fewer bytes, and back.

What a codec makes is a uint8 array, scales and indices included, so that it travels in one
collective and as it is: the compiler widens or rewrites narrow floats, never bytes. Every codec
loses something; `compressed.py` carries what was lost over to the next step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Key, Shaped, UInt8

from jaxtrain.collectives.vary import Index
from jaxtrain.violations import count, flag, raise_violations, ratio

Numbers = Float32[Array, "rows size"]
Payload = UInt8[Array, "rows bytes"]


@runtime_checkable
class Codec(Protocol):
    """Encodes each row of a matrix by itself. A row with a number that is not finite is decoded to
    one that has such numbers too, so that a test of the result finds them.

    `key` is the same on all devices. `stream` is a number of the caller's, another for each
    encoding made with one key: rounding noise must not be the same on two devices.
    """

    def payload_bytes(self, size: int) -> int:
        """Bytes of one encoded row of `size` numbers."""
        ...

    def encode(self, x: Numbers, key: Key[Array, ""], stream: Index) -> Payload:
        """Each row as bytes = payload_bytes(size) of them."""
        ...

    def decode(self, payload: Payload, size: int, key: Key[Array, ""]) -> Numbers:
        """The rows of `size` numbers that were encoded, as far as the bytes tell."""
        ...

    def at(self, step: int) -> Codec:
        """The codec to use at step `step`, counted from 0. Steps of unequal codecs are compiled as
        separate programs."""
        ...


@dataclass(frozen=True)
class Int8:
    """Whole numbers from -127 to 127 times a scale for every `block` numbers, max|x| / 127
    (Dettmers et al. 2022, blockwise quantisation). Bytes: 1 + 4/block a number.

    stochastic: rounds up with the probability of the fraction, to 2^-16 (Alistarh et al. 2017,
      QSGD): unbiased, error under one scale. Else to nearest: biased, error up to half a scale.
    """

    block: int = 256
    stochastic: bool = True

    def __post_init__(self) -> None:
        raise_violations(count("block", self.block) + flag("stochastic", self.stochastic))

    def payload_bytes(self, size: int) -> int:
        return size + 4 * math.ceil(size / self.block)

    def encode(self, x: Numbers, key: Key[Array, ""], stream: Index) -> Payload:
        blocks = in_blocks(x, self.block)
        scale = greatest(blocks) / 127
        scaled = divide_by_scale(blocks, scale)
        if self.stochastic:
            bits = jax.random.bits(jax.random.fold_in(key, stream), scaled.shape, jnp.uint16)
            integers = jnp.floor(scaled + bits.astype(jnp.float32) / 2**16)
        else:
            integers = jnp.round(scaled)
        # Scales are rounded, denormal ones coarsely: the quotient may exceed 127.
        integers = jnp.clip(integers, -127, 127).astype(jnp.int8)
        return join_bytes(in_rows(integers, x.shape[1]), scale)

    def decode(self, payload: Payload, size: int, key: Key[Array, ""]) -> Numbers:
        integers = in_blocks(from_bytes(payload[:, :size], jnp.int8), self.block)
        scale = from_bytes(payload[:, size:], jnp.float32)
        return in_rows(integers.astype(jnp.float32) * scale[:, :, None], size)

    def at(self, step: int) -> Int8:
        return self


@dataclass(frozen=True)
class Fp8:
    """e4m3 floats (Micikevicius et al. 2022) times a scale for every `block` numbers, max|x| / 448:
    a relative error up to 1/16 over four decades, where `Int8` is finer near the block's maximum.
    Bytes: 1 + 4/block a number.
    """

    block: int = 256

    def __post_init__(self) -> None:
        raise_violations(count("block", self.block))

    def payload_bytes(self, size: int) -> int:
        return size + 4 * math.ceil(size / self.block)

    def encode(self, x: Numbers, key: Key[Array, ""], stream: Index) -> Payload:
        blocks = in_blocks(x, self.block)
        scale = greatest(blocks) / 448
        # e4m3fn has no infinity: beyond 448, where a denormal scale may put it, it would be NaN.
        floats = jnp.clip(divide_by_scale(blocks, scale), -448, 448).astype(jnp.float8_e4m3fn)
        return join_bytes(in_rows(floats, x.shape[1]), scale)

    def decode(self, payload: Payload, size: int, key: Key[Array, ""]) -> Numbers:
        floats = in_blocks(from_bytes(payload[:, :size], jnp.float8_e4m3fn), self.block)
        scale = from_bytes(payload[:, size:], jnp.float32)
        return in_rows(floats.astype(jnp.float32) * scale[:, :, None], size)

    def at(self, step: int) -> Fp8:
        return self


@dataclass(frozen=True)
class Sign:
    """One bit a number, times the mean |x| of every `block` numbers (Karimireddy et al. 2019,
    EF-SignSGD). The sign of zero is plus. Only with error feedback does it converge. Bytes: 1/8 +
    4/block a number.
    """

    block: int = 2048

    def __post_init__(self) -> None:
        raise_violations(count("block", self.block))

    def payload_bytes(self, size: int) -> int:
        return math.ceil(size / 8) + 4 * math.ceil(size / self.block)

    def encode(self, x: Numbers, key: Key[Array, ""], stream: Index) -> Payload:
        size = x.shape[1]
        blocks = in_blocks(x, self.block)
        # The last block may be short: its mean is that of the numbers it has.
        filled = np.minimum(self.block, size - self.block * np.arange(blocks.shape[1]))
        scale = (jnp.abs(blocks) / filled.astype(np.float32)[None, :, None]).sum(-1)
        # Bit b of byte i is of number b * bytes + i: the long dim stays last, and in registers.
        bits = jnp.pad(x < 0, ((0, 0), (0, -size % 8))).reshape(len(x), 8, -1)
        packed = (bits.astype(jnp.uint8) << _PLACES).sum(1, dtype=jnp.uint8)
        return join_bytes(packed, scale)

    def decode(self, payload: Payload, size: int, key: Key[Array, ""]) -> Numbers:
        packed = payload[:, None, : math.ceil(size / 8)]
        negative = ((packed >> _PLACES) & 1).reshape(len(payload), -1)[:, :size]
        scale = from_bytes(payload[:, math.ceil(size / 8) :], jnp.float32)[:, :, None]
        negative = in_blocks(negative, self.block)
        return in_rows(jnp.where(negative == 1, -scale, scale), size)

    def at(self, step: int) -> Sign:
        return self


_PLACES = np.arange(8, dtype=np.uint8)[None, :, None]


@dataclass(frozen=True)
class TopK:
    """The numbers of greatest magnitude, `density` of each row, in fp32 with their places; zero for
    the others (Aji & Heafield 2017; Lin et al. 2018, Deep Gradient Compression). Only with error
    feedback does it converge. Bytes: 8 * density a number.

    ramp: (step, density), ...: the densities before those steps, `density` from the last on. Lin
      et al. take 0.25, 0.0625, 0.015625 and 0.004 in the first four epochs, then 0.001. An
      encoding's size is of the program: each density is a program of its own, see `at`.
    """

    density: float = 0.01
    ramp: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        raise_violations(ratio("density", self.density) + _ramp_violations(self.ramp))

    def kept(self, size: int) -> int:
        """Number of entries of a row of `size` that are sent: at least one."""
        return max(1, round(self.density * size))

    def payload_bytes(self, size: int) -> int:
        return 8 * self.kept(size)

    def encode(self, x: Numbers, key: Key[Array, ""], stream: Index) -> Payload:
        _, places = lax.top_k(jnp.abs(x), self.kept(x.shape[1]))
        values = jnp.take_along_axis(x, places, axis=1)
        # Where NaN stands among magnitudes is the backend's affair.
        return join_bytes(values + not_finite(x), places)

    def decode(self, payload: Payload, size: int, key: Key[Array, ""]) -> Numbers:
        n, count = len(payload), self.kept(size)
        values = from_bytes(payload[:, : 4 * count], jnp.float32)
        places = from_bytes(payload[:, 4 * count :], jnp.int32)
        rows = np.arange(n)[:, None]
        zeros = jnp.zeros((n, size), jnp.float32)
        return zeros.at[rows, places].set(values, unique_indices=True)

    def at(self, step: int) -> TopK:
        return TopK(next((d for end, d in self.ramp if step < end), self.density))


def _ramp_violations(ramp: object) -> list[str]:
    if not isinstance(ramp, tuple) or not all(isinstance(x, tuple) and len(x) == 2 for x in ramp):
        return [
            f"ramp={ramp!r} must be a tuple of pairs (step, density); use for example "
            f"((1000, 0.25),), or () for none"
        ]
    violations = []
    for i, (step, density) in enumerate(ramp):
        violations += count(f"ramp[{i}][0]", step) + ratio(f"ramp[{i}][1]", density)
    steps = [step for step, _ in ramp]
    if not violations and sorted(set(steps)) != steps:
        increasing = sorted(set(steps))
        violations.append(f"the steps of ramp must grow and are {steps}; use {increasing}")
    return violations


LONGEST_STRETCH = 2**20
"""Rows are padded to whole stretches: a longer one would cost more than its leaf."""


@dataclass(frozen=True)
class RandomK:
    """One number of every 1/density consecutive ones, drawn anew from each key; zero for the others
    (Stich et al. 2018, random-k; one of each stretch, so that no permutation is needed). All rows
    and devices draw the same places, so that values alone travel and their sum has no more places
    than they. Not scaled up: error feedback makes up for what waits. Bytes: 4 * density a number.

    density: the share of elements that is sent.
    """

    density: float = 0.01

    def __post_init__(self) -> None:
        violations = ratio("density", self.density)
        if not violations and self.density * LONGEST_STRETCH < 1:
            violations.append(
                f"density={self.density!r} must be at least one in {LONGEST_STRETCH}; use for "
                f"example 0.01"
            )
        elif not violations and abs(self.density * self.stretch - 1) > 1e-6:
            violations.append(
                f"density={self.density!r} must be one in a whole number; "
                f"use {1 / self.stretch!r}, one in {self.stretch}"
            )
        raise_violations(violations)

    @property
    def stretch(self) -> int:
        return round(1 / self.density)

    def payload_bytes(self, size: int) -> int:
        return 4 * math.ceil(size / self.stretch)

    def _drawn(self, key: Key[Array, ""], size: int) -> Bool[Array, "1 stretches stretch"]:
        """Returns the mask of the numbers that are sent, one in each stretch."""
        stretches = math.ceil(size / self.stretch)
        places = jax.random.randint(key, (stretches,), 0, self.stretch)
        return (places[:, None] == np.arange(self.stretch)[None])[None]

    def encode(self, x: Numbers, key: Key[Array, ""], stream: Index) -> Payload:
        stretches = in_blocks(x, self.stretch)
        values = jnp.where(self._drawn(key, x.shape[1]), stretches, 0).sum(-1)
        return as_bytes(values + not_finite(x))

    def decode(self, payload: Payload, size: int, key: Key[Array, ""]) -> Numbers:
        values = from_bytes(payload, jnp.float32)[:, :, None]
        return in_rows(jnp.where(self._drawn(key, size), values, 0), size)

    def at(self, step: int) -> RandomK:
        return self


def in_blocks(x: Shaped[Array, "rows size"], block: int) -> Shaped[Array, "rows blocks {block}"]:
    """Each row in blocks, zeros after the last number."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % block))).reshape(len(x), -1, block)


def in_rows(blocks: Shaped[Array, "rows blocks block"], size: int) -> Shaped[Array, "rows {size}"]:
    """Inverse of `in_blocks`."""
    return blocks.reshape(len(blocks), -1)[:, :size]


def divide_by_scale(
    blocks: Float[Array, "rows blocks block"], scale: Float[Array, "rows blocks"]
) -> Float[Array, "rows blocks block"]:
    """Each block over its scale; over 1 where that is 0 or not a number."""
    return blocks / jnp.where(scale > 0, scale, 1)[:, :, None]


def greatest(blocks: Float[Array, "rows blocks block"]) -> Float[Array, "rows blocks"]:
    """max|x| of each block; NaN where one of its numbers is not finite."""
    # XLA:CPU's maximum passes over NaN (xla_cpu_enable_fast_min_max).
    return jnp.where(jnp.isfinite(blocks).all(-1), jnp.abs(blocks).max(-1), jnp.nan)


def not_finite(x: Float[Array, "rows size"]) -> Float[Array, "rows 1"]:
    """NaN for the rows of `x` that have a number that is not finite, 0 for the others."""
    return jnp.where(jnp.isfinite(x).all(1, keepdims=True), 0, jnp.nan).astype(x.dtype)


def as_bytes(x: Shaped[Array, "rows m"]) -> Payload:
    """The bytes of each row, m * itemsize of them."""
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(len(x), -1)


def from_bytes(payload: Payload, dtype: jax.typing.DTypeLike) -> Shaped[Array, "rows m"]:
    """Inverse of `as_bytes`."""
    width = jnp.dtype(dtype).itemsize
    shape = (*payload.shape[:1], -1, width)[: 2 + (width > 1)]
    return lax.bitcast_convert_type(payload.reshape(shape), dtype)


def join_bytes(*parts: Shaped[Array, "rows _"]) -> Payload:
    """The bytes of each row of the parts, one part after another."""
    return jnp.concatenate([as_bytes(part) for part in parts], axis=1)
