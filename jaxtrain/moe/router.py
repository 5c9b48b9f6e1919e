"""Routers: which experts a token goes through, and the share that each has in its output.

Logits are fp32 whatever the precision of other products: it is little work, and rounding moves
tokens. Of equal experts that of the lower number is chosen. A choice has no gradient; a share has.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int

from jaxtrain.violations import at_least, count, flag, positive

Logits = Float32[Array, "tokens experts"]
Scores = Float32[Array, "tokens experts"]
"""Of each expert for each token, the larger the likelier."""
Chosen = Int[Array, "tokens k"]
Shares = Float32[Array, "tokens k"]


@dataclass(frozen=True)
class Groups:
    """Experts lie in groups of one size, such as those of a node, and a token goes to few of them
    (DeepSeek-AI 2024, "DeepSeek-V2", section 2.2.2, and "DeepSeek-V3", section 2.1.2).

    count: of groups. chosen: groups that a token's experts may be of. best: a group counts as much
    as so many of its best scores together: 1 in DeepSeek-V2, 2 in V3.
    """

    count: int
    chosen: int
    best: int = 1

    def violations(self, experts: int, per_token: int) -> list[str]:
        """Returns the violations for so many experts, and so many of them for a token."""
        violations = [v for n in ("count", "chosen", "best") for v in count(n, getattr(self, n))]
        if violations:
            return violations
        if experts % self.count:
            return [f"count={self.count} does not divide experts={experts}; use a divisor of it"]
        size = experts // self.count
        if self.chosen > self.count:
            violations.append(
                f"chosen={self.chosen} of count={self.count} groups; use at most that"
            )
        if self.best > size:
            violations.append(f"best={self.best} of {size} experts in a group; use at most {size}")
        if self.chosen * size < per_token:
            violations.append(
                f"chosen={self.chosen} groups of {size} experts are fewer than experts_per_token="
                f"{per_token}; use chosen={-(-per_token // size)} or more"
            )
        return violations

    def open(self, scores: Scores) -> jax.Array:
        """[tokens, experts]: whether an expert's group is one of the token's."""
        best = lax.top_k(self.worth(scores), self.chosen)[1]
        among = jax.nn.one_hot(best, self.count, dtype=jnp.bool_)
        return jnp.repeat(among.any(axis=1), scores.shape[1] // self.count, axis=1)

    def worth(self, scores: Scores) -> Float32[Array, "tokens groups"]:
        """Returns the worth of each group for each token: the groups with the most are open."""
        grouped = scores.reshape(len(scores), self.count, -1)
        return jnp.sum(lax.top_k(grouped, self.best)[0], axis=-1)


@dataclass(frozen=True)
class Router:
    """Base of routers, which choose the `k` experts with the largest scores.

    renormalise: the shares of the chosen are divided by their sum; else they are their scores, and
    with one expert a token its router learns. scale: what shares are multiplied by. bias: a number
    of each expert is added to its scores where they are compared, and not to its share; it has no
    gradient (`Balance.bias_rate` moves it). groups: of experts, None for one.
    """

    renormalise: bool = True
    scale: float = 1.0
    bias: bool = False
    groups: Groups | None = None

    def violations(self, experts: int, per_token: int) -> list[str]:
        """Returns the violations for so many experts, and so many of them for a token."""
        violations = flag("renormalise", self.renormalise) + flag("bias", self.bias)
        violations += positive("scale", self.scale)
        if self.groups is not None:
            violations += [f"groups.{v}" for v in self.groups.violations(experts, per_token)]
        return violations

    def scores(self, logits: Logits) -> Scores:
        raise NotImplementedError

    def probabilities(self, logits: Logits) -> Scores:
        """Scores that sum to 1: what balance is judged by."""
        raise NotImplementedError

    def choose(
        self, logits: Logits, bias: Float32[Array, " experts"] | None, k: int
    ) -> Int[Array, "tokens {k}"]:
        """Each token's experts, the likeliest first."""
        compared = self.compared(logits, bias)
        if self.groups is not None:
            compared = jnp.where(self.groups.open(compared), compared, -jnp.inf)
        return lax.top_k(compared, k)[1]

    def compared(self, logits: Logits, bias: Float32[Array, " experts"] | None) -> Scores:
        """By what experts are compared: logits where nothing is added to scores, which rise with
        them, and no groups add some up. Without a gradient."""
        logits = lax.stop_gradient(logits)
        if bias is None and self.groups is None:
            return logits
        scores = self.scores(logits)
        return scores if bias is None else scores + lax.stop_gradient(bias)[None]

    def shares(self, logits: Logits, chosen: Chosen) -> Shares:
        """Returns the shares of the chosen experts in the token's output."""
        scores = jnp.take_along_axis(self.scores(logits), chosen, axis=1)
        if self.renormalise:
            # By the largest first: the square of a small sum would be zero in its derivative.
            largest = lax.stop_gradient(jnp.max(scores, axis=1, keepdims=True))
            scores = scores / jnp.maximum(largest, jnp.finfo(scores.dtype).tiny)
            scores = scores / jnp.maximum(jnp.sum(scores, axis=1, keepdims=True), 1.0)
        return scores * self.scale


@dataclass(frozen=True)
class SoftmaxRouter(Router):
    """Scores are a softmax over all experts (Shazeer et al. 2017). Renormalised, as Mixtral's are
    (Jiang et al. 2024), shares are a softmax over the chosen; not so, and with one expert a token,
    it is Switch Transformer's router (Fedus et al. 2022)."""

    def scores(self, logits: Logits) -> Scores:
        return jax.nn.softmax(logits, axis=-1)

    def probabilities(self, logits: Logits) -> Scores:
        return self.scores(logits)

    def shares(self, logits: Logits, chosen: Chosen) -> Shares:
        if not self.renormalise:
            return super().shares(logits, chosen)
        # A softmax over the k largest logits is that over all, its k largest divided by their sum.
        shares = jax.nn.softmax(jnp.take_along_axis(logits, chosen, axis=1), axis=-1)
        return shares if self.scale == 1.0 else shares * self.scale


@dataclass(frozen=True)
class SigmoidRouter(Router):
    """Scores are sigmoids, each of its own expert alone (DeepSeek-AI 2024, "DeepSeek-V3")."""

    def scores(self, logits: Logits) -> Scores:
        return jax.nn.sigmoid(logits)

    def probabilities(self, logits: Logits) -> Scores:
        return jax.nn.softmax(jax.nn.log_sigmoid(logits), axis=-1)

    def shares(self, logits: Logits, chosen: Chosen) -> Shares:
        if not self.renormalise:
            return super().shares(logits, chosen)
        # Of logarithms: sigmoids of low logits are zero, and have a sum that nothing divides by.
        of_chosen = jax.nn.log_sigmoid(jnp.take_along_axis(logits, chosen, axis=1))
        return jax.nn.softmax(of_chosen, axis=-1) * self.scale


@dataclass(frozen=True)
class Capacity:
    """An expert takes so many tokens of a group and no more; those that come later are dropped by
    it, and have what is left of their experts (Lepikhin et al. 2021, "GShard"; Fedus et al. 2022).
    All first choices of a group come before its second ones, and tokens in their order; padding
    takes no place. So a token may lose its second choice to a later token's first.

    factor: of what each expert would take if loads were even. routing_group: tokens that compete,
    which follow one another; at most those of a device's microbatch, on whatever mesh, so that what
    is dropped is the same on each.
    """

    factor: float = 1.25
    routing_group: int = 256

    def violations(self) -> list[str]:
        return positive("factor", self.factor) + count("routing_group", self.routing_group)

    def rows(self, experts: int, k: int) -> int:
        """Returns the most tokens of a group that one expert takes."""
        even = self.factor * self.routing_group * k / experts
        return min(max(-int(-even // 1), 1), self.routing_group)

    def of_group(self, experts: int, k: int) -> tuple[int, int]:
        """Returns the tokens of a group, and the most of them that one expert takes."""
        return self.routing_group, self.rows(experts, k)

    def fits(
        self, chosen: Chosen, experts: int, real: Bool[Array, " tokens"] | None = None
    ) -> Bool[Array, "tokens k"]:
        """Returns True where an expert has room for a token. real: False for padding, which has no
        room anywhere; None for no padding. Raises ValueError if groups do not divide the tokens."""
        tokens, k = chosen.shape
        if tokens % self.routing_group:
            raise ValueError(
                f"capacity.routing_group={self.routing_group} does not divide the {tokens} tokens "
                "of a device's microbatch; use a divisor of them"
            )
        if real is not None:
            chosen = jnp.where(real[:, None], chosen, experts)  # of no expert
        queues = chosen.reshape(-1, self.routing_group, k).swapaxes(1, 2)
        queues = queues.reshape(-1, k * self.routing_group)
        choices = jax.nn.one_hot(queues, experts, dtype=jnp.int32)
        earlier = jnp.sum((jnp.cumsum(choices, axis=1) - choices) * choices, axis=-1)
        fits = (earlier < self.rows(experts, k)).reshape(-1, k, self.routing_group)
        fits = fits.swapaxes(1, 2).reshape(tokens, k)
        return fits if real is None else fits & real[:, None]


@dataclass(frozen=True)
class Balance:
    """Balancing and statistics of experts' loads: each layer's loads, dropped choices and router
    entropy are added to the metrics.

    loss_weight: of the load-balancing loss of each layer, experts * sum_e f_e P_e, where f_e is the
    part of a microbatch's choices that fall on expert e and P_e its mean probability; 1 where loads
    are even (Fedus et al. 2022, section 2.2; Lepikhin et al. 2021). z_loss_weight: of the mean of
    logsumexp(logits)^2 (Zoph et al. 2022, "ST-MoE"). Both are means over tokens as the loss is,
    weighted like it, and no part of the metric `loss`. bias_rate: by how much a router's bias goes
    down for experts above the mean load of a step, and up for those below (Wang et al. 2024,
    "Auxiliary-loss-free load balancing"); for routers with bias=True.
    """

    loss_weight: float = 0.0
    z_loss_weight: float = 0.0
    bias_rate: float = 0.0

    def violations(self, router: Router) -> list[str]:
        names = ("loss_weight", "z_loss_weight", "bias_rate")
        violations = [v for name in names for v in at_least(name, getattr(self, name), 0)]
        if not violations and self.bias_rate and not router.bias:
            violations.append(
                f"bias_rate={self.bias_rate} moves a router's bias; give it bias=True"
            )
        return violations
