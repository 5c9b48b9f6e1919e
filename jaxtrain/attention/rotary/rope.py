"""Rotary position embedding (Su et al. 2021, RoFormer), in the half-split convention of Llama.

Pair i of a head is dims (i, i + head_dim/2), turned by position * frequency_i with frequency_i =
theta ** (-2i / head_dim), possibly changed by a `RopeScaling`. Tables are computed once and serve q
and k of every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from jaxtrain.attention.rotary.scaling import (
    DynamicNtk,
    LongRope,
    RopeScaling,
    ScaledFrequencies,
    Seq,
)


@dataclass(frozen=True)
class Rope:
    """theta: base of the wavelengths, 10000 in RoFormer, 500000 in Llama 3.

    scaling: for sequences longer than those of the first training, None for none.
    partial_rotary_factor: the share of a head's dims that are turned, the first ones (GPT-NeoX:
    Black et al. 2022); the others are left as they are.
    """

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        problems = []
        if self.theta <= 1:
            problems.append(f"theta={self.theta} must be above 1; RoFormer has 10000")
        if not 0 < self.partial_rotary_factor <= 1:
            problems.append(
                f"partial_rotary_factor={self.partial_rotary_factor} is no share of a head's dims; "
                "use one above 0, up to 1"
            )
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def attention_scaling(self) -> float:
        """Factor of cos and sin."""
        return 1.0 if self.scaling is None else self.scaling.attention_scaling

    @property
    def switch(self) -> int | None:
        """Length beyond which all positions of a sequence are turned by other frequencies; None if
        there is no such length."""
        return self.scaling.original_seq if isinstance(self.scaling, LongRope) else None

    def turned_dims(self, head_dim: int) -> int:
        """Number of dims of a head that are turned."""
        return int(head_dim * self.partial_rotary_factor)

    def frequencies(self, head_dim: int, seq: Seq) -> ScaledFrequencies:
        """Radians per position of each pair of dims, in a sequence of `seq` tokens. Raises
        ValueError on `violations`."""
        if problems := self.violations(head_dim):
            raise ValueError("; ".join(problems))
        dims = self.turned_dims(head_dim)
        unscaled = self.theta ** (-np.arange(0, dims, 2) / dims)
        return unscaled if self.scaling is None else self.scaling.scaled(unscaled, self.theta, seq)

    def violations(self, head_dim: int) -> list[str]:
        """Reasons why heads of this size cannot be turned."""
        dims = self.turned_dims(head_dim)
        if dims % 2 or dims == 0:
            near = f"use {' or '.join(map(str, sorted({max(dims - 1, 2), dims + 1})))}"
            if dims != head_dim:
                near = "use a head_dim, or a partial_rotary_factor, that makes an even number"
            return [
                f"rotary embedding turns pairs of dims, and of head_dim={head_dim} it would turn "
                f"{dims}; {near}"
            ]
        if isinstance(self.scaling, DynamicNtk | LongRope):
            return self.scaling.unfit(dims // 2)
        return []


RotaryTable = Float32[Array, "batch seq pairs"]


def tables(
    rope: Rope, positions: Int[Array, "batch seq"], head_dim: int, seq: Seq
) -> tuple[RotaryTable, RotaryTable]:
    """(cos, sin) of the angles by which each pair is turned at each position of sequences of `seq`
    tokens, times `rope.attention_scaling`.

    A batch of 1 serves all rows. Angles are fp32 products, good to position * 6e-8 radians.
    """
    frequencies = jnp.asarray(rope.frequencies(head_dim, seq), jnp.float32)
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies[None, None]
    scale = rope.attention_scaling
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    cos: Float32[Array, "#batch seq pairs"],
    sin: Float32[Array, "#batch seq pairs"],
) -> Float[Array, "batch seq heads head_dim"]:
    """Returns x turned by the tables, in x's dtype; dims beyond the tables' pairs stay unchanged.
    Computed in fp32.

    A rotation: norms are kept where tables are not scaled, and q.k depends on the difference of
    positions only.
    """
    dims = 2 * cos.shape[-1]
    if dims == x.shape[-1]:
        return _turned(x, cos, sin)
    return jnp.concatenate([_turned(x[..., :dims], cos, sin), x[..., dims:]], axis=-1)


def _turned(
    x: Float[Array, "batch seq heads dims"],
    cos: Float32[Array, "#batch seq dims//2"],
    sin: Float32[Array, "#batch seq dims//2"],
) -> Float[Array, "batch seq heads dims"]:
    # (a, b) -> (a cos t - b sin t, b cos t + a sin t) for the pair (a, b) and t = position * freq.
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
