"""Routing that is kept, and given to another run ("Routing Replay": Zheng et al. 2025, "Group
Sequence Policy Optimization", section 5.3).

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
    """What a `router` chose for the tokens of a batch, in their order, and by what numbers it
    compared experts (`Router.compared`)."""

    chosen: Int[np.ndarray, "tokens k"]
    compared: Float32[np.ndarray, "tokens experts"]
    router: Router

    def margins(self, others: Int[np.ndarray, "tokens k"]) -> Float[np.ndarray, " tokens"]:
        """By how much each token's experts were preferred to the `others` in their places, the most
        of them; 0 where they are the same. With groups of experts the most of two: by how much
        one of those that were open for the others was worth less than the least that is, and by how
        much experts were preferred among those; of all that may have been open the least."""
        groups, (_, k) = self.router.groups, others.shape
        if groups is None:
            return self._apart(self.chosen, others)
        worth = np.asarray(groups.worth(jnp.asarray(self.compared)))
        least = np.sort(worth, -1)[:, -groups.chosen]
        size, found = self.compared.shape[1] // groups.count, np.full(len(others), np.inf)
        for some in combinations(range(groups.count), groups.chosen):
            opened = np.isin(np.arange(groups.count), some)
            among = np.where(np.repeat(opened, size), self.compared, -np.inf)
            own = np.argsort(-among, axis=-1, kind="stable")[:, :k]
            below = np.maximum(least[:, None] - worth[:, opened], 0.0).max(-1)
            margin = np.maximum(self._apart(own, others), below)
            possible = np.isin(others // size, some).all(-1)
            found = np.where(possible, np.minimum(found, margin), found)
        return found

    def _apart(
        self, own: Int[np.ndarray, "tokens k"], others: Int[np.ndarray, "tokens k"]
    ) -> Float[np.ndarray, " tokens"]:
        pairs = (np.take_along_axis(self.compared, each, -1) for each in (own, others))
        return np.abs(np.subtract(*pairs)).max(-1)


@dataclass(frozen=True)
class Replay:
    """Of a mixture whose routing is kept. tokens: of a batch. per_token: experts of each, of
    `experts` that `router` compares."""

    router: Router
    tokens: int
    per_token: int
    experts: int

    @property
    def size(self) -> int:
        """Numbers of a layer's leaf."""
        return self.tokens * (self.per_token + self.experts)

    def value(self, chosen: Int[np.ndarray, "tokens k"]) -> Float32[np.ndarray, " n"]:
        """Of the leaf that gives tokens these experts."""
        rest = np.zeros((self.tokens, self.experts), np.float32)
        return np.concatenate([chosen.astype(np.float32), rest], axis=1).reshape(-1)

    def routing(self, gradient: Float32[np.ndarray, " n"]) -> Routing:
        """What came as the leaf's gradient."""
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
    """The logits, and the experts that tokens go through: those that `leaf` has at their places in
    the batch, or those `chosen`. With the logits' gradient comes the leaf's. counted: 1 on one of
    the devices that have the same tokens, 0 on the others."""
    k, experts = chosen.shape[1], logits.shape[1]
    rows = lax.stop_gradient(leaf).reshape(-1, k + experts)
    given = rows[places, :k].astype(chosen.dtype)
    seen = jnp.concatenate([chosen.astype(jnp.float32), compared], axis=1) * counted
    kept = jnp.zeros_like(rows).at[places].set(seen).reshape(-1)
    return _kept(logits, leaf, lax.stop_gradient(kept)), jnp.where(given == OWN, chosen, given)


@jax.custom_vjp
def _kept(
    logits: Float32[Array, "tokens experts"], leaf: Float32[Array, " n"], kept: Float32[Array, " n"]
) -> Float32[Array, "tokens experts"]:
    return logits


def _kept_backward(
    saved: tuple[jax.Array, jax.Array], dy: Float32[Array, "tokens experts"]
) -> tuple[jax.Array, jax.Array, None]:
    leaf, kept = saved
    return dy, vary(kept, varying_axes(leaf)), None


_kept.defvjp(lambda logits, leaf, kept: (logits, (leaf, kept)), _kept_backward)
