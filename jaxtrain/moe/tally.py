"""Statistics of routers in a step, and auxiliary losses from them.

A router may have a leaf `router_tally` that no optimizer updates. Its gradient is the statistics of
a microbatch's choices, so they are summed as gradients are: over microbatches, stages and devices,
in any order and number. Its value is the factor of the step's loss before differentiation: the
gradients of auxiliary losses are multiplied by it and added at the logits, so that they need no
sum.

Let w_t be the weight of a token t in the loss, W their sum, p_te the router's probabilities and f_e
the part of all choices that fall on expert e. Then W times the load-balancing loss is
experts * sum_t w_t sum_e f_e p_te, a sum over each device's own tokens once f_e is known. So only
one sum of `experts` numbers is sent.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from jaxtrain.collectives.exchange import Exchange
from jaxtrain.collectives.named import sum_over
from jaxtrain.collectives.vary import vary, varying_axes
from jaxtrain.moe.router import Balance, Router

BESIDE_LOADS = ("dropped", "entropy", "balance", "z")
"""What a tally has behind the load of each expert, sums over tokens by their weights."""


def tally_size(experts: int) -> int:
    """Numbers in a tally."""
    return experts + len(BESIDE_LOADS)


def watched_logits(
    logits: Float32[Array, "tokens experts"],
    tally: Float32[Array, " numbers"],
    chosen: Int[Array, "tokens k"],
    dropped: Float32[Array, " tokens"],
    weights: Float32[Array, " tokens"],
    router: Router,
    balance: Balance,
    exchange: Exchange,
) -> Float32[Array, "tokens experts"]:
    """Returns the logits. Their gradient gets the auxiliary losses' gradient added, and the tally's
    gradient is the statistics. dropped: choices of each token for which no expert has room."""
    experts = logits.shape[1]
    weights = weights * exchange.counted
    kinds = jax.nn.one_hot(chosen, experts, dtype=jnp.float32)
    loads = jnp.sum(weights[:, None, None] * kinds, axis=(0, 1))
    shares = jnp.zeros_like(loads)
    if balance.loss_weight:
        # Zero on devices that do not count, whose weights are zero too.
        everywhere = sum_over("expert loads", loads, exchange.tokens)
        shares = everywhere / jnp.maximum(jnp.sum(everywhere), 1e-20)

    def penalties(logits: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        p = router.probabilities(logits)
        even = experts * jnp.sum(weights[:, None] * lax.stop_gradient(shares)[None] * p)
        z = jnp.sum(weights * jax.nn.logsumexp(logits, axis=-1) ** 2)
        return balance.loss_weight * even + balance.z_loss_weight * z, (even, z)

    still = lax.stop_gradient(logits)
    pull, (even, z) = jax.grad(penalties, has_aux=True)(still)
    p = router.probabilities(still)
    entropy = -jnp.sum(weights[:, None] * p * jnp.log(jnp.maximum(p, 1e-30)))
    totals = jnp.stack([jnp.sum(weights * dropped), entropy, even, z])
    statistics = lax.stop_gradient(jnp.concatenate([loads, totals]))
    return _watched(logits, tally, pull, statistics)


@jax.custom_vjp
def _watched(
    logits: Float[Array, "tokens experts"],
    tally: Float[Array, " numbers"],
    pull: Float[Array, "tokens experts"],
    statistics: Float[Array, " numbers"],
) -> Float[Array, "tokens experts"]:
    return logits


def _watched_forward(
    logits: Float[Array, "tokens experts"],
    tally: Float[Array, " numbers"],
    pull: Float[Array, "tokens experts"],
    statistics: Float[Array, " numbers"],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return logits, (tally, pull, statistics)


def _watched_backward(
    saved: tuple[jax.Array, ...], dy: Float[Array, "tokens experts"]
) -> tuple[jax.Array, jax.Array, None, None]:
    tally, pull, statistics = saved
    return dy + tally[0] * pull, vary(statistics, varying_axes(tally)), None, None


_watched.defvjp(_watched_forward, _watched_backward)
