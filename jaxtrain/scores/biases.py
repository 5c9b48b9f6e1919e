"""Biases of scores by the distance between query and key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.scores.function import ScoreFunction
from jaxtrain.violations import count, raise_violations


@dataclass(frozen=True)
class Alibi(ScoreFunction):
    """Attention with linear biases (Press et al. 2022): a score falls by its head's slope for each
    token between query and key. Needs no other positions: `AttentionConfig(rope=None)`."""

    def of_heads(self, heads: int) -> np.ndarray:
        """Returns the slopes, fp32 [heads]: 2 ** (-8 i / n) for i = 1 .. n, n the largest power of
        two up to `heads`; further heads have every other slope of 2n heads."""
        power = 2 ** int(math.log2(heads))
        slopes = 2.0 ** (-8 / power * np.arange(1, power + 1))
        between = 2.0 ** (-4 / power * np.arange(1, 2 * power, 2))
        return np.concatenate([slopes, between])[:heads].astype(np.float32)

    def __call__(
        self, score: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array
    ) -> jax.Array:
        return score - head * jnp.abs(query - key)


@dataclass(frozen=True)
class RelativeBias(ScoreFunction):
    """A learned bias for each head and bucket of distances (Raffel et al. 2020, T5), for causal
    attention. Half of the buckets are distances of their own from 0 on, the others widen with the
    logarithm up to `max_distance`, from which on all are one. Biases start at zero.

    buckets, max_distance: as above. Raises ValueError for less than 2 buckets, and where they leave
      no wide one.
    """

    buckets: int = 32
    max_distance: int = 128
    trained: ClassVar[bool] = True

    def __post_init__(self) -> None:
        raise_violations(count("buckets", self.buckets, 2))
        raise_violations(count("max_distance", self.max_distance, 1))
        if self.max_distance <= self.buckets // 2:
            raise ValueError(
                f"RelativeBias has buckets={self.buckets} and max_distance={self.max_distance}: it "
                f"needs a distance above half of the buckets; use max_distance={2 * self.buckets}"
            )

    def of_heads(self, heads: int) -> np.ndarray:
        return np.zeros((heads, self.buckets), np.float32)

    def __call__(
        self, score: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array
    ) -> jax.Array:
        narrow = self.buckets // 2
        distance = jnp.maximum(query - key, 0)
        octaves = jnp.log(jnp.maximum(distance, narrow).astype(jnp.float32) / narrow)
        share = octaves / math.log(self.max_distance / narrow)
        wide = narrow + (share * (self.buckets - narrow)).astype(jnp.int32)
        bucket = jnp.where(distance < narrow, distance, jnp.minimum(wide, self.buckets - 1))
        return score + head[bucket]
