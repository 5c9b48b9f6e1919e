"""A function of scores as a user writes one, for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.scores import ScoreFunction


@dataclass(frozen=True)
class Fading(ScoreFunction):
    """Not a sum, defined for keys before their query alone, with a learned rate for each head."""

    trained: ClassVar[bool] = True

    def of_heads(self, heads: int) -> np.ndarray:
        return np.linspace(0.3, 0.9, heads, dtype=np.float32)

    def __call__(
        self, score: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array
    ) -> jax.Array:
        return score * jnp.exp(-head * jnp.sqrt((query - key).astype(jnp.float32) + 0.25))
