"""Parameters with logical axis names, initialised from keys by name."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


def named_key(key: jax.Array, name: str) -> jax.Array:
    """A key that depends on `name` and nothing else: not on order, device or mesh."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


@dataclass(frozen=True)
class Initialisation:
    """Distribution of initial weights: normal with one standard deviation, or by fan-in.

    std: of all matrices; None means fan_in ** -0.5 (LeCun et al. 1998).
    embedding_std: of the embedding tables; None means `std` (or 1 / sqrt(embed)).
    scale_residual: divide the std of matrices that write to the residual stream by sqrt(2 layers)
      (Radford et al. 2019).
    """

    std: float | None = 0.02
    embedding_std: float | None = None
    scale_residual: bool = True

    def matrix_std(self, fan_in: int, *, layers: int, residual: bool = False) -> float:
        std = fan_in**-0.5 if self.std is None else self.std
        return std * (2 * layers) ** -0.5 if residual and self.scale_residual else std

    def table_std(self, embed: int) -> float:
        if self.embedding_std is not None:
            return self.embedding_std
        return embed**-0.5 if self.std is None else self.std


def normal(
    key: jax.Array, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], *, std: float
) -> nnx.Param:
    """A parameter drawn from N(0, std^2), in fp32."""
    return nnx.Param(jax.random.normal(named_key(key, name), shape, jnp.float32) * std, axes=axes)


def constant(value: float, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    """A parameter that starts at one value: norm scales at 1, biases at 0."""
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes)
