"""The feed-forward layer of a block, gated or not, and its activations."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx

from jaxtrain.models.adapters import column, row
from jaxtrain.moe.layer import Activation
from jaxtrain.nn.communicator import Communicator
from jaxtrain.nn.param import constant, normal
from jaxtrain.transformer.place import Place, add_bias

KINKED: tuple[Activation, ...] = (
    *(jax.nn.relu, jax.nn.relu6, jax.nn.leaky_relu, jax.nn.selu),
    *(jax.nn.hard_tanh, jax.nn.hard_sigmoid, jax.nn.hard_silu),
)
"""Activations whose derivative jumps: what rounds to the other side of the jump has another
gradient, of any size."""


def gelu_tanh(x: jax.Array) -> jax.Array:
    """GELU by its tanh approximation, as GPT-2 uses it (Hendrycks & Gimpel 2016)."""
    return jax.nn.gelu(x, approximate=True)


def gelu_exact(x: jax.Array) -> jax.Array:
    """GELU by the error function."""
    return jax.nn.gelu(x, approximate=False)


def silu(x: jax.Array) -> jax.Array:
    """x * sigmoid(x)."""
    return x * jax.nn.sigmoid(x)


@dataclass(frozen=True)
class MlpConfig:
    """activation(x gate) * (x up) when gated (SwiGLU; Shazeer 2020), else activation(x up).

    hidden: width between the products. bias: whether each product adds one.
    activation: of the gate, or of the only product. gated: whether there is one.
    """

    hidden: int
    activation: Activation = silu
    gated: bool = True
    bias: bool = False


class Mlp(nnx.Module):
    def __init__(self, config: MlpConfig, place: Place, *, key: jax.Array) -> None:
        self.config = config
        embed, hidden = place.embed, config.hidden
        std = place.init.matrix_std(embed, layers=place.layers)
        if config.gated:
            self.gate = normal(key, "gate", (embed, hidden), ("embed", "mlp"), std=std)
        self.up = normal(key, "up", (embed, hidden), ("embed", "mlp"), std=std)
        std = place.init.matrix_std(hidden, layers=place.layers, residual=True)
        self.down = normal(key, "down", (hidden, embed), ("mlp", "embed"), std=std)
        if config.bias:
            if config.gated:
                self.gate_bias = constant(0.0, (hidden,), ("mlp",))
            self.up_bias = constant(0.0, (hidden,), ("mlp",))
            self.down_bias = constant(0.0, (embed,), ("embed",))

    def __call__(self, x: jax.Array, comm: Communicator) -> jax.Array:
        """x [tokens share, embed] -> same shape."""
        config, names = self.config, ("gate", "up") if self.config.gated else ("up",)
        hidden = column(comm, self, names, x)
        if config.bias:
            biases = (getattr(self, f"{name}_bias")[...] for name in names)
            hidden = [add_bias(h, b) for h, b in zip(hidden, biases, strict=True)]
        h = config.activation(hidden[0])
        out = row(comm, self, "down", h * hidden[1] if config.gated else h)
        return add_bias(out, self.down_bias[...]) if config.bias else out
