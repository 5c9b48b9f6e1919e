"""The learning rate an optimizer holds: a number, a schedule, a function of the step, or one of
them scaled with the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxtrain.optim.schedule import Constant, RateFn, RateSchedule
from jaxtrain.violations import count, positive, raise_violations


def linear_scaling(ratio: float) -> float:
    """Goyal et al. 2017: k times the batch, k times the rate (SGD)."""
    return ratio


def square_root_scaling(ratio: float) -> float:
    """Malladi et al. 2022: k times the batch, sqrt(k) times the rate (adaptive methods)."""
    return ratio**0.5


@dataclass(frozen=True)
class ScaledRate:
    """`schedule` (a number, a schedule or a function of the step) as tuned at `reference_batch`,
    scaled by `rule` to the batch that is run.

    `reference_batch` is in the unit of the experiment's batch.
    """

    schedule: float | RateSchedule | RateFn
    reference_batch: int
    rule: Callable[[float], float] = square_root_scaling

    def __post_init__(self) -> None:
        violations = count("reference_batch", self.reference_batch, 1)
        if not callable(self.rule):
            violations.append(
                f"rule={self.rule!r} must be a function; use linear_scaling or square_root_scaling"
            )
        raise_violations(violations + rate_fields(self.schedule, name="schedule"))

    def factor(self, batch: int) -> float:
        return self.rule(batch / self.reference_batch)


Rate = float | RateSchedule | ScaledRate | RateFn
"""What an optimizer's `learning_rate` may be: a function is of the step, counted from 0 without
those that were skipped, as optax's schedules are."""


def rate_fields(value: object, *, name: str = "learning_rate") -> list[str]:
    """Returns the violations of a learning rate that hold in every run."""
    if isinstance(value, (RateSchedule, ScaledRate)):
        return []
    if isinstance(value, (int, float)):
        return positive(name, value)
    if callable(value) and not isinstance(value, type):
        return []
    return [
        f"{name}={value!r} must be a number, a schedule or a function of the step; use for example "
        "WarmupCosine(3e-4)"
    ]


def rate_violations(value: Rate, steps: int) -> list[str]:
    """Returns the violations of a learning rate in a run of `steps`."""
    if isinstance(value, ScaledRate):
        value = value.schedule
    if isinstance(value, RateSchedule):
        return value.violations(steps)
    return count("steps", steps, 1) + (_function_violations(value) if callable(value) else [])


def _function_violations(function: RateFn) -> list[str]:
    """Returns the violations of a function of the step, which is traced: its step has no value."""
    name = getattr(function, "__name__", repr(function))
    try:
        rate = jax.eval_shape(function, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:  # whatever the user's function raises
        message = (str(error) or type(error).__name__).splitlines()[0]
        return [
            f"learning_rate={name} cannot be traced ({type(error).__name__}: {message}); write it "
            "with jax.numpy, jnp.where for `if`"
        ]
    if getattr(rate, "shape", None) == () and jnp.issubdtype(rate.dtype, jnp.number):
        return []
    return [f"learning_rate={name} gives {rate} of a step; a learning rate is one number"]


def rate_fn(value: Rate, *, steps: int, batch: int) -> RateFn:
    """The learning rate of a run as a function of the step; ValueError with all violations."""
    raise_violations(rate_violations(value, steps) + count("batch", batch, 1))
    factor = 1.0
    if isinstance(value, ScaledRate):
        factor, value = value.factor(batch), value.schedule
    unscaled = _unscaled(value, steps)
    return unscaled if factor == 1.0 else lambda step: factor * unscaled(step)


def _unscaled(value: float | RateSchedule | RateFn, steps: int) -> RateFn:
    if isinstance(value, RateSchedule):
        return value.build(steps)
    if not callable(value):
        return Constant(float(value)).build(steps)
    return lambda step: jnp.asarray(value(step), jnp.float32)


def injected_rate(state: PyTree) -> jax.Array | None:
    """Returns the learning rate in an optax state, as `optax.inject_hyperparams` writes it; None if
    there is none or more than one."""
    rates = [
        node.hyperparams["learning_rate"]
        for node in jax.tree.leaves(state, is_leaf=_holds_rate)
        if _holds_rate(node)
    ]
    return rates[0] if len(rates) == 1 and jnp.ndim(rates[0]) == 0 else None


def _holds_rate(node: object) -> bool:
    return "learning_rate" in getattr(node, "hyperparams", {})
