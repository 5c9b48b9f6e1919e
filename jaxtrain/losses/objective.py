"""Objectives, which a model sums from its head in place of its own loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import jax
from jaxtyping import Array, Float

from jaxtrain.losses.cross_entropy import HeadConfig, LossSums
from jaxtrain.nn.communicator import Communicator


class Objective(Protocol):
    """`losses.preferences.DPO` and `losses.token_scores.TokenScores` are objectives."""

    def sums(
        self,
        comm: Communicator,
        x: Float[Array, "tokens embed"],
        head: Float[Array, "vocab embed"],
        batch: Mapping[str, jax.Array],
        config: HeadConfig,
    ) -> LossSums:
        """Returns a device's shares of the sums over its rows of a batch. x, head: as of
        `losses.cross_entropy`."""
        ...
