"""AdamW, SGD and Lion: each number of a parameter moves by its own gradient alone.

So they run unchanged on stacked leaves and on shards, with no communication.
"""

from __future__ import annotations

from dataclasses import dataclass

import optax

from jaxtrain.optim.leaves import AxesTree, LeafMask, check_axes, decoupled_decay, matrices
from jaxtrain.optim.rate import Rate, rate_fields, rate_fn, rate_violations
from jaxtrain.violations import at_least, fraction, positive, raise_violations


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, alg. 2).

    Defaults are those of Brown et al. 2020 (GPT-3, app. B). State: two numbers a parameter.

    learning_rate: a number, a schedule, a function of the step, or one of them scaled with the
    batch (`ScaledRate`). b1, b2:
    decay of the means of gradients and of their squares. eps: added to the root of the second
    mean. weight_decay: what a step takes off a parameter, as a share of it, times the learning
    rate. decay: which leaves it applies to.
    """

    learning_rate: Rate
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    decay: LeafMask = matrices

    def __post_init__(self) -> None:
        violations = rate_fields(self.learning_rate)
        violations += at_least("weight_decay", self.weight_decay, 0) + positive("eps", self.eps)
        raise_violations(violations + fraction("b1", self.b1) + fraction("b2", self.b2))

    def violations(self, steps: int) -> list[str]:
        return rate_violations(self.learning_rate, steps)

    def build(self, axes: AxesTree, *, steps: int, batch: int) -> optax.GradientTransformation:
        transform = optax.chain(
            optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.eps),
            decoupled_decay(self.weight_decay, self.decay, axes),
            optax.scale_by_learning_rate(rate_fn(self.learning_rate, steps=steps, batch=batch)),
        )
        return check_axes(transform, axes)


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with heavy-ball or Nesterov momentum (Sutskever et al. 2013).

    Weight decay is the L2 penalty's gradient, added before the momentum. Defaults: He et al. 2016
    (ResNet). State: one number a parameter; none with momentum=0.

    learning_rate: a number, a schedule, a function of the step, or one of them scaled with the
    batch (`ScaledRate`).
    weight_decay: the penalty's coefficient. decay: which leaves it applies to. nesterov: take
    the momentum one step ahead.
    momentum: how much of the last step's direction is kept.
    """

    learning_rate: Rate
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    decay: LeafMask = matrices

    def __post_init__(self) -> None:
        violations = rate_fields(self.learning_rate) + fraction("momentum", self.momentum)
        violations += at_least("weight_decay", self.weight_decay, 0)
        if self.nesterov and self.momentum == 0:
            violations.append(
                "nesterov=True looks ahead along a momentum and momentum=0 is none; "
                "use momentum=0.9 or nesterov=False"
            )
        raise_violations(violations)

    def violations(self, steps: int) -> list[str]:
        return rate_violations(self.learning_rate, steps)

    def build(self, axes: AxesTree, *, steps: int, batch: int) -> optax.GradientTransformation:
        trace = optax.trace(decay=self.momentum, nesterov=self.nesterov)
        transform = optax.chain(
            decoupled_decay(self.weight_decay, self.decay, axes),
            trace if self.momentum else optax.identity(),
            optax.scale_by_learning_rate(rate_fn(self.learning_rate, steps=steps, batch=batch)),
        )
        return check_axes(transform, axes)


@dataclass(frozen=True)
class Lion:
    """The sign of an interpolated momentum (Chen et al. 2023, alg. 2, whose b1 and b2 these are).

    Its section 5 advises rates 3 to 10 times smaller and decay as much larger than AdamW's: the
    default decay is ten times ours. State: one number a parameter.

    learning_rate: a number, a schedule, a function of the step, or one of them scaled with the
    batch (`ScaledRate`).
    weight_decay: decoupled, times the learning rate. decay: which leaves it applies to.
    b1, b2: how much of the momentum is in the sign, and how much of it is kept.
    """

    learning_rate: Rate
    weight_decay: float = 1.0
    b1: float = 0.9
    b2: float = 0.99
    decay: LeafMask = matrices

    def __post_init__(self) -> None:
        violations = rate_fields(self.learning_rate)
        violations += at_least("weight_decay", self.weight_decay, 0)
        raise_violations(violations + fraction("b1", self.b1) + fraction("b2", self.b2))

    def violations(self, steps: int) -> list[str]:
        return rate_violations(self.learning_rate, steps)

    def build(self, axes: AxesTree, *, steps: int, batch: int) -> optax.GradientTransformation:
        transform = optax.chain(
            optax.scale_by_lion(b1=self.b1, b2=self.b2),
            decoupled_decay(self.weight_decay, self.decay, axes),
            optax.scale_by_learning_rate(rate_fn(self.learning_rate, steps=steps, batch=batch)),
        )
        return check_axes(transform, axes)
