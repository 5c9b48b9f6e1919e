"""Arguments that all parts of a block are built with, and facts that all blocks of a forward pass
share."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.attention.rotary.rope import Rope
from jaxtrain.moe.layer import TokenFacts
from jaxtrain.nn.dropout import DropoutKeys
from jaxtrain.nn.param import Initialisation


class Context(NamedTuple):
    """Facts that all blocks of a forward pass share; arrays only, none differentiated.

    positions [rows, seq]. starts [rows, seq of a complete row]: the first position of each
    position's document, or None. ropes: (cos, sin) of each of `Place.ropes`. keys: dropout's, None
    in evaluation. index: tokens already in the caches (generation). facts: of [rows * seq] tokens,
    for layers of experts.
    """

    positions: jax.Array
    starts: jax.Array | None
    ropes: tuple[tuple[jax.Array, jax.Array], ...]
    keys: DropoutKeys | None
    index: jax.Array | None = None
    facts: TokenFacts = TokenFacts()


class Place(NamedTuple):
    """Static facts with which a block is built."""

    embed: int
    layers: int
    init: Initialisation
    ropes: tuple[tuple[Rope, int], ...]
    """The distinct (rotary embedding, head_dim) of the model, in the order of `Context.ropes`."""
    kernel: Any
    """Attention kernel, None lets the platform choose."""


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """[tokens, dim] + [dim] in the dtype of y; the gradient of `bias` is summed in fp32."""
    return (y.astype(jnp.float32) + bias.astype(jnp.float32)[None]).astype(y.dtype)
