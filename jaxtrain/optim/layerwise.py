"""LAMB and LARS: one trust ratio |parameter| / |update| for each layer's tensor.

A ratio is of one layer, never of a stack; heads side by side in one tensor share theirs.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from jaxtrain.optim.leaves import (
    AxesTree,
    LeafMask,
    check_axes,
    decoupled_decay,
    matrices,
)
from jaxtrain.optim.rate import Rate, rate_fields, rate_fn, rate_violations
from jaxtrain.optim.shards import WHOLE, Shards, squares_of_layers
from jaxtrain.violations import at_least, fraction, positive, raise_violations


def scale_by_trust_ratio(
    axes: AxesTree, *, where: LeafMask, coefficient: float, shards: Shards
) -> optax.GradientTransformation:
    """Each layer's update times coefficient |parameter| / |update|; 1 where either norm is 0.

    Law: equals `optax.scale_by_trust_ratio` on the unstacked leaves. Those outside `where` pass
    unchanged.
    """

    def scale(updates: PyTree, params: PyTree) -> PyTree:
        flat, treedef = jax.tree.flatten(updates)
        names, weights = treedef.flatten_up_to(axes), treedef.flatten_up_to(params)
        chosen = [i for i, n in enumerate(names) if where(n)]
        squares = [squares_of_layers(x[i], names[i]) for x in (weights, flat) for i in chosen]
        norms = [jnp.sqrt(total) for total in shards.sums(squares)]
        both = zip(norms[: len(chosen)], norms[len(chosen) :], strict=True)
        for i, (weight, update) in zip(chosen, both, strict=True):
            ratio = coefficient * weight / update
            flat[i] = flat[i] * jnp.where((weight == 0) | (update == 0), 1.0, ratio)
        return treedef.unflatten(flat)

    return optax.stateless(scale)


@dataclass(frozen=True)
class Lamb:
    """Adam scaled by layer (You et al. 2020, alg. 2, with its eps and decay).

    As its authors' code does, norms and biases are neither decayed nor scaled: `decay`, `adapt`.
    State: two numbers a parameter.

    learning_rate: a number, a schedule, a function of the step, or one of them scaled with the
    batch (`ScaledRate`).
    weight_decay: added to Adam's direction before it is scaled. b1, b2, eps: of Adam, as in
    `AdamW`.
    """

    learning_rate: Rate
    weight_decay: float = 0.01
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    decay: LeafMask = matrices
    adapt: LeafMask = matrices

    def __post_init__(self) -> None:
        violations = rate_fields(self.learning_rate)
        violations += at_least("weight_decay", self.weight_decay, 0) + positive("eps", self.eps)
        raise_violations(violations + fraction("b1", self.b1) + fraction("b2", self.b2))

    def violations(self, steps: int) -> list[str]:
        return rate_violations(self.learning_rate, steps)

    def build(
        self, axes: AxesTree, *, steps: int, batch: int, shards: Shards = WHOLE
    ) -> optax.GradientTransformation:
        transform = optax.chain(
            optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.eps),
            decoupled_decay(self.weight_decay, self.decay, axes),
            scale_by_trust_ratio(axes, where=self.adapt, coefficient=1.0, shards=shards),
            optax.scale_by_learning_rate(rate_fn(self.learning_rate, steps=steps, batch=batch)),
        )
        return check_axes(transform, axes)


@dataclass(frozen=True)
class Lars:
    """Momentum SGD scaled by layer (You et al. 2017, alg. 1, with its coefficients).

    Norms and biases are neither decayed nor scaled. State: one number a parameter.

    learning_rate: a number, a schedule, a function of the step, or one of them scaled with the
    batch (`ScaledRate`).
    weight_decay: added to the gradient before it is scaled. momentum: of the scaled gradients;
    nesterov: taken one step ahead. trust_coefficient: of the scale, the ratio of the norms of a
    layer's parameters and gradients. decay, adapt: which leaves are decayed and scaled.
    """

    learning_rate: Rate
    weight_decay: float = 5e-4
    momentum: float = 0.9
    nesterov: bool = False
    trust_coefficient: float = 0.001
    decay: LeafMask = matrices
    adapt: LeafMask = matrices

    def __post_init__(self) -> None:
        violations = rate_fields(self.learning_rate) + fraction("momentum", self.momentum)
        violations += at_least("weight_decay", self.weight_decay, 0)
        raise_violations(violations + positive("trust_coefficient", self.trust_coefficient))

    def violations(self, steps: int) -> list[str]:
        return rate_violations(self.learning_rate, steps)

    def build(
        self, axes: AxesTree, *, steps: int, batch: int, shards: Shards = WHOLE
    ) -> optax.GradientTransformation:
        transform = optax.chain(
            decoupled_decay(self.weight_decay, self.decay, axes),
            scale_by_trust_ratio(
                axes, where=self.adapt, coefficient=self.trust_coefficient, shards=shards
            ),
            optax.scale_by_learning_rate(rate_fn(self.learning_rate, steps=steps, batch=batch)),
            optax.trace(decay=self.momentum, nesterov=self.nesterov),
        )
        return check_axes(transform, axes)
