"""Rotary position embedding (Su et al. 2021, RoFormer), in the half-split convention of Llama.

Pair i of a head is dims (i, i + head_dim/2), turned by position * frequency_i with frequency_i =
theta ** (-2i / head_dim). Tables are computed once and serve q and k of every layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, Int

Frequencies = Float64[np.ndarray, " pairs"]
"""Radians per position of each pair of dims."""


@runtime_checkable
class RopeScaling(Protocol):
    """Changes the frequencies so that a longer context is read."""

    def scaled(self, frequencies: Frequencies) -> Frequencies: ...


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al. 2023): every frequency divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"factor={self.factor} would shorten the context; use 1 or more")

    def scaled(self, frequencies: Frequencies) -> Frequencies:
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: wavelengths above original_seq / `low_freq_factor` are stretched by `factor`,
    those below original_seq / `high_freq_factor` kept, and between them the two are blended.
    original_seq: the sequence length of the first training."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_seq: int = 8192

    def __post_init__(self) -> None:
        problems = []
        if self.factor < 1:
            problems.append(f"factor={self.factor} would shorten the context; use 1 or more")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            problems.append(
                f"low_freq_factor={self.low_freq_factor} must be above 0 and below "
                f"high_freq_factor={self.high_freq_factor}; Llama 3.1 has 1 and 4"
            )
        if self.original_seq < 1:
            problems.append(f"original_seq={self.original_seq} must be 1 or more")
        if problems:
            raise ValueError("; ".join(problems))

    def scaled(self, frequencies: Frequencies) -> Frequencies:
        turns = self.original_seq * frequencies / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class Rope:
    """theta: base of the wavelengths, 10000 in RoFormer, 500000 in Llama 3.

    scaling: for sequences longer than those of the first training, None for none.
    """

    theta: float = 10000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.theta <= 1:
            raise ValueError(f"theta={self.theta} must be above 1; RoFormer has 10000")

    def frequencies(self, head_dim: int) -> Frequencies:
        """Radians per position of each of the head_dim / 2 pairs. Raises ValueError where head_dim
        is odd."""
        if head_dim % 2:
            raise ValueError(
                f"rotary embedding turns pairs of dims and head_dim={head_dim} is odd; "
                f"use {head_dim - 1} or {head_dim + 1}"
            )
        found = self.theta ** (-np.arange(0, head_dim, 2) / head_dim)
        return found if self.scaling is None else self.scaling.scaled(found)


Table = Float32[Array, "batch seq pairs"]


def tables(rope: Rope, positions: Int[Array, "batch seq"], head_dim: int) -> tuple[Table, Table]:
    """(cos, sin) of the angles by which each pair is turned at each position.

    A batch of 1 serves all rows. Angles are fp32 products, good to position * 6e-8 radians.
    """
    frequencies = jnp.asarray(rope.frequencies(head_dim), jnp.float32)
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies[None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    cos: Float32[Array, "#batch seq head_dim//2"],
    sin: Float32[Array, "#batch seq head_dim//2"],
) -> Float[Array, "batch seq heads head_dim"]:
    """x turned by the tables; computed in fp32, x's dtype back.

    A rotation: norms are kept, and q.k depends on the difference of positions only.
    """
    # (a, b) -> (a cos t - b sin t, b cos t + a sin t) for the pair (a, b) and t = position * freq.
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
