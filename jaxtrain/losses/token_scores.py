"""The loss of each token, and whether its target is the likeliest, as one sum: an objective."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxtrain.losses.cross_entropy import HeadConfig, LossSums, settings, token_losses
from jaxtrain.nn.communicator import Communicator

MARKS = "marks"
"""Field of a batch, [rows, seq]: what a target counts if it is the likeliest id."""


class TokenScores:
    """An objective whose value is the sum of weight * loss and of mark * likeliest over tokens. Its
    derivatives with respect to weights and marks are what is known of each token; with respect to
    the model it has none."""

    def sums(
        self,
        comm: Communicator,
        x: Float[Array, "tokens embed"],
        head: Float[Array, "vocab embed"],
        batch: Mapping[str, jax.Array],
        config: HeadConfig,
    ) -> LossSums:
        """Returns this device's share of that sum, as `loss`, and of the weights."""
        targets, rows = batch["targets"].reshape(-1), batch["targets"].shape[0]
        weights, marks = (batch[name].reshape(-1) for name in ("weights", MARKS))
        x, head = comm.all_tokens(lax.stop_gradient(x)), lax.stop_gradient(head)
        scores = token_losses(settings(comm, config, targets, rows), x, head, targets)
        total = jnp.sum(weights * scores.losses + jnp.where(scores.likeliest, marks, 0.0))
        return LossSums(total / comm.vocab_ways(), jnp.sum(weights) / comm.vocab_ways())
