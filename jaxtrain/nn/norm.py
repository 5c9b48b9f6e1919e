"""RMSNorm (Zhang & Sennrich 2019) and LayerNorm (Ba et al. 2016), computed in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32

from jaxtrain.nn.param import constant


@dataclass(frozen=True)
class RMSNorm:
    """x / rms(x) * scale. `unit_offset`: the scale is stored less one (Gemma).

    eps: added to the mean square.
    """

    eps: float = 1e-5
    unit_offset: bool = False


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean) / std * scale + bias; `bias=False` leaves the bias out.

    eps: added to the variance.
    bias: whether there is one.
    """

    eps: float = 1e-5
    bias: bool = True


NormConfig = RMSNorm | LayerNorm


class Norm(nnx.Module):
    """Normalises the last dim, of size `size`, whose logical axis is `axis`."""

    def __init__(self, config: NormConfig, size: int, *, axis: str = "embed") -> None:
        self.config = config
        offset = isinstance(config, RMSNorm) and config.unit_offset
        self.scale = constant(0.0 if offset else 1.0, (size,), (axis,))
        if isinstance(config, LayerNorm) and config.bias:
            self.bias = constant(0.0, (size,), (axis,))

    def __call__(self, x: Float[Array, "... size"]) -> Float[Array, "... size"]:
        dtype, config = x.dtype, self.config
        x = x.astype(jnp.float32)
        if isinstance(config, LayerNorm):
            x = x - x.mean(-1, keepdims=True)
        y = self.scaled(x, jnp.mean(x * x, -1, keepdims=True))
        if isinstance(config, LayerNorm) and config.bias:
            y = y + jnp.expand_dims(self.bias[...].astype(jnp.float32), range(y.ndim - 1))
        return y.astype(dtype)

    def scaled(
        self, x: Float32[Array, "... part"], mean_square: Float32[Array, "... 1"]
    ) -> Float32[Array, "... part"]:
        """x / rms times the scale. x may be one device's part of the last dim: then the mean square
        is that of all parts."""
        scale = self.scale[...].astype(jnp.float32)
        if isinstance(self.config, RMSNorm) and self.config.unit_offset:
            scale = scale + 1
        y = x * lax.rsqrt(mean_square + self.config.eps)
        return y * jnp.expand_dims(scale, range(y.ndim - 1))
