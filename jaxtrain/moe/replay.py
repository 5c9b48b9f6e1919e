"""Routing that is recorded, and replayed by another run ("Routing Replay": Zheng et al. 2025,
"Group Sequence Policy Optimization", section 5.3).

Beside a router may lie a leaf, `router_replay`, of which no optimizer knows. Its value has for each
token of a batch the experts that it is to go through, the likeliest first, or OWN where its router
chooses; shares are of the router's own logits in either case. As its gradient comes what the router
chose, and the numbers by which experts were compared. Each token is on one device that counts and
in one microbatch, so sums over those, and over stages, add zeros to it: it arrives as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from jaxtrain.collectives.vary import vary, varying_axes
from jaxtrain.moe.router import Router

OWN = -1
"""In the place of experts: those that the router chooses."""


class Routing(NamedTuple):
    """Choices of a `router` for the tokens of a batch, in their order, and the numbers by which it
    compared experts (`Router.compared`)."""

    chosen: Int[np.ndarray, "tokens k"]
    compared: Float32[np.ndarray, "tokens experts"]
    router: Router

    def margins(self, other: Int[np.ndarray, "tokens k"]) -> Float[np.ndarray, " tokens"]:
        """Returns the margin by which each token's experts were preferred to those of `other`.

        It is the largest difference in the compared numbers; 0 if the experts are equal. With
        groups of experts, every set of groups that `other` may have opened is considered. The
        margin of a set is the larger of two: how far its groups lie below the least open group, and
        how far `other` lies below the best experts within the set. The least margin of all sets
        counts.
        """
        groups, (_, k) = self.router.groups, other.shape
        if groups is None:
            return self._apart(self.chosen, other)
        worth = np.asarray(groups.worth(jnp.asarray(self.compared)))
        least = np.sort(worth, -1)[:, -groups.chosen]
        size, result = self.compared.shape[1] // groups.count, np.full(len(other), np.inf)
        for some in combinations(range(groups.count), groups.chosen):
            opened = np.isin(np.arange(groups.count), some)
            among = np.where(np.repeat(opened, size), self.compared, -np.inf)
            own = np.argsort(-among, axis=-1, kind="stable")[:, :k]
            below = np.maximum(least[:, None] - worth[:, opened], 0.0).max(-1)
            margin = np.maximum(self._apart(own, other), below)
            possible = np.isin(other // size, some).all(-1)
            result = np.where(possible, np.minimum(result, margin), result)
        return result

    def _apart(
        self, own: Int[np.ndarray, "tokens k"], other: Int[np.ndarray, "tokens k"]
    ) -> Float[np.ndarray, " tokens"]:
        pairs = (np.take_along_axis(self.compared, chosen, -1) for chosen in (own, other))
        return np.abs(np.subtract(*pairs)).max(-1)


@dataclass(frozen=True)
class Replay:
    """Sizes and router of a mixture whose routing is recorded. tokens: of a batch. per_token:
    experts of each token, of `experts` that `router` compares."""

    router: Router
    tokens: int
    per_token: int
    experts: int

    @property
    def size(self) -> int:
        """Numbers of a layer's leaf."""
        return self.tokens * (self.per_token + self.experts)

    def value(self, chosen: Int[np.ndarray, "tokens k"]) -> Float32[np.ndarray, " n"]:
        """Returns the value of the leaf that makes tokens use these experts."""
        unused = np.zeros((self.tokens, self.experts), np.float32)
        return np.concatenate([chosen.astype(np.float32), unused], axis=1).reshape(-1)

    def routing(self, gradient: Float32[np.ndarray, " n"]) -> Routing:
        """Returns the routing that arrived as the leaf's gradient."""
        rows = gradient.reshape(self.tokens, -1)
        chosen = rows[:, : self.per_token].astype(int)
        return Routing(chosen, rows[:, self.per_token :], self.router)


def replayed(
    logits: Float32[Array, "tokens experts"],
    chosen: Int[Array, "tokens k"],
    compared: Float32[Array, "tokens experts"],
    leaf: Float32[Array, " n"],
    places: Int[Array, " tokens"],
    counted: Float32[Array, ""] | float,
) -> tuple[Float32[Array, "tokens experts"], Int[Array, "tokens k"]]:
    """Returns the logits, and the experts that tokens go through: those in `leaf` at their places
    in the batch, else those `chosen`. The gradient of the logits also sends the leaf's, the
    routing. counted: 1 on one of the devices that have the same tokens, 0 on the others."""
    k, experts = chosen.shape[1], logits.shape[1]
    rows = lax.stop_gradient(leaf).reshape(-1, k + experts)
    stored = rows[places, :k].astype(chosen.dtype)
    routing = jnp.concatenate([chosen.astype(jnp.float32), compared], axis=1) * counted
    record = jnp.zeros_like(rows).at[places].set(routing).reshape(-1)
    experts_used = jnp.where(stored == OWN, chosen, stored)
    return _recorded(logits, leaf, lax.stop_gradient(record)), experts_used


@jax.custom_vjp
def _recorded(
    logits: Float32[Array, "tokens experts"],
    leaf: Float32[Array, " n"],
    record: Float32[Array, " n"],
) -> Float32[Array, "tokens experts"]:
    return logits


def _recorded_backward(
    saved: tuple[jax.Array, jax.Array], dy: Float32[Array, "tokens experts"]
) -> tuple[jax.Array, jax.Array, None]:
    leaf, record = saved
    return dy, vary(record, varying_axes(leaf)), None


_recorded.defvjp(lambda logits, leaf, record: (logits, (leaf, record)), _recorded_backward)
