"""Sums of gradients once a step: exact ones, or some of them compressed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.arrays import Leaves
from jaxtrain.compression.residuals import CodecState
from jaxtrain.compression.sums import CompressedSums
from jaxtrain.step.gradients import Reduction


class ExactSums(NamedTuple):
    """`Reduction.reduce_step`, without a state."""

    reduction: Reduction
    state_specs: Any = {}  # noqa: RUF012 (never changed)
    measured: Collection[str] = ()

    def __call__(
        self, grads: Leaves, state: CodecState, scale: jax.Array, count: jax.Array, key: jax.Array
    ) -> tuple[Leaves, CodecState, Leaves]:
        return self.reduction.reduce_step(grads), state, {}


class WithCompression(NamedTuple):
    """`ExactSums`, except for the leaves that a compressed reducer sums."""

    reduction: Reduction
    compressed: CompressedSums
    state_specs: Any

    @property
    def measured(self) -> Collection[str]:
        return self.compressed.parts if self.compressed.choice.measured else ()

    def __call__(
        self, grads: Leaves, state: CodecState, scale: jax.Array, count: jax.Array, key: jax.Array
    ) -> tuple[Leaves, CodecState, Leaves]:
        unit = scale * jnp.where(count > 0, count, 1.0)
        split = self.reduction.scatter_remaining(grads)
        compressible = {k: g for k, g in split.items() if k in self.compressed.parts}
        exactly = {k: g for k, g in split.items() if k not in self.compressed.parts}
        sums, state, exact = self.compressed.sum(compressible, state, unit, key)
        return sums | self.reduction.all_reduce(exactly), state, exact
