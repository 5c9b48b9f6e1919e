"""Learning rates over the steps of a run.

Steps count updates from 0. A warm-up of w steps goes through peak x (1 .. w) / (w + 1), so that
no step is wasted at rate 0, and step w is the first at the peak. Rates hold their last value after
the last step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxtrain.violations import at_least, count, positive, raise_violations

RateFn = Callable[[jax.typing.ArrayLike], Float32[Array, ""]]
"""From a step, a whole number, to the learning rate."""

DecayShape = Callable[[jax.Array], jax.Array]
"""From progress in [0, 1] to what is left of the rate, 1 at 0 and 0 at 1."""


def linear_decay(progress: Float32[Array, " ..."]) -> Float32[Array, " ..."]:
    return 1.0 - progress


def cosine_decay(progress: Float32[Array, " ..."]) -> Float32[Array, " ..."]:
    """Loshchilov & Hutter 2017 (SGDR), without restarts."""
    return 0.5 * (1.0 + jnp.cos(jnp.pi * progress))


def one_minus_sqrt(progress: Float32[Array, " ..."]) -> Float32[Array, " ..."]:
    """The cooldown that Haegele et al. 2024 found better than the linear one."""
    return 1.0 - jnp.sqrt(progress)


@runtime_checkable
class RateSchedule(Protocol):
    """A frozen value that builds a learning rate for a run of `steps` updates."""

    def violations(self, steps: int) -> list[str]:
        """Returns the reasons why this schedule does not fit a run of `steps` updates; [] if it
        fits."""
        ...

    def build(self, steps: int) -> RateFn:
        """The rate as a function of the step; raises ValueError with all violations."""
        ...


def _fits(steps: int, **spans: int) -> list[str]:
    """The named spans, one after the other, must fit into the run."""
    violations = count("steps", steps, 1)
    if not violations and sum(spans.values()) > steps:
        spent = " + ".join(f"{name}={span}" for name, span in spans.items())
        violations.append(
            f"{spent} is longer than the run of steps={steps}; "
            f"use steps={sum(spans.values())} or more, or a shorter {next(iter(spans))}"
        )
    return violations


def _peak_fields(peak: object, warmup: object, final_fraction: object) -> list[str]:
    violations = positive("peak", peak) + count("warmup", warmup, 0)
    violations += at_least("final_fraction", final_fraction, 0)
    number = isinstance(final_fraction, int | float)
    if not violations and number and final_fraction > 1:
        violations.append(
            f"final_fraction={final_fraction} is of the peak and must not exceed 1; use 0.1"
        )
    return violations


def _warm_then_decay(
    *, peak: float, warmup: int, start: int, steps: int, final_fraction: float, shape: DecayShape
) -> RateFn:
    """Warm-up, then the peak up to step `start`, then `shape` from there to the end."""

    def rate(step: jax.typing.ArrayLike) -> Float32[Array, " ..."]:
        now = jnp.minimum(jnp.asarray(step, jnp.float32), steps)
        progress = jnp.maximum(now - start, 0.0) / max(steps - start, 1)
        decayed = final_fraction + (1.0 - final_fraction) * shape(progress)
        return peak * jnp.where(now < warmup, (now + 1.0) / (warmup + 1.0), decayed)

    return rate


@dataclass(frozen=True)
class Constant:
    """`peak` throughout, after an optional warm-up.

    peak: the learning rate. warmup: steps before it: the rate rises by peak / (warmup + 1) in each.
    """

    peak: float
    warmup: int = 0

    def __post_init__(self) -> None:
        raise_violations(_peak_fields(self.peak, self.warmup, final_fraction=1.0))

    def violations(self, steps: int) -> list[str]:
        return _fits(steps, warmup=self.warmup)

    def build(self, steps: int) -> RateFn:
        raise_violations(self.violations(steps))
        return _warm_then_decay(
            peak=self.peak,
            warmup=self.warmup,
            start=steps,
            steps=steps,
            final_fraction=1.0,
            shape=linear_decay,
        )


@dataclass(frozen=True)
class WarmupCosine:
    """Cosine from `peak` to `final_fraction` of it at the end (0.1: Brown et al. 2020, app. B).

    warmup: steps before the peak: the rate rises by peak / (warmup + 1) in each.
    """

    peak: float
    warmup: int = 0
    final_fraction: float = 0.1

    def __post_init__(self) -> None:
        raise_violations(_peak_fields(self.peak, self.warmup, self.final_fraction))

    def violations(self, steps: int) -> list[str]:
        return _fits(steps, warmup=self.warmup)

    def build(self, steps: int) -> RateFn:
        raise_violations(self.violations(steps))
        return _warm_then_decay(
            peak=self.peak,
            warmup=self.warmup,
            start=self.warmup,
            steps=steps,
            final_fraction=self.final_fraction,
            shape=cosine_decay,
        )


@dataclass(frozen=True)
class WarmupLinear:
    """A straight line from `peak` to `final_fraction` of it at the end (0: Devlin et al. 2019).

    warmup: steps before the peak: the rate rises by peak / (warmup + 1) in each.
    """

    peak: float
    warmup: int = 0
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        raise_violations(_peak_fields(self.peak, self.warmup, self.final_fraction))

    def violations(self, steps: int) -> list[str]:
        return _fits(steps, warmup=self.warmup)

    def build(self, steps: int) -> RateFn:
        raise_violations(self.violations(steps))
        return _warm_then_decay(
            peak=self.peak,
            warmup=self.warmup,
            start=self.warmup,
            steps=steps,
            final_fraction=self.final_fraction,
            shape=linear_decay,
        )


@dataclass(frozen=True)
class WarmupStableDecay:
    """The peak up to the last `decay` steps, then a cooldown (WSD: Hu et al. 2024, MiniCPM).

    warmup: steps before the peak: the rate rises by peak / (warmup + 1) in each. final_fraction:
    of the peak, what is left at the end. shape: of the cooldown, from progress in [0, 1] to what
    is left of the fall: `one_minus_sqrt`, `linear_decay`, `cosine_decay`.
    """

    peak: float
    decay: int
    warmup: int = 0
    final_fraction: float = 0.0
    shape: DecayShape = one_minus_sqrt

    def __post_init__(self) -> None:
        violations = _peak_fields(self.peak, self.warmup, self.final_fraction)
        raise_violations(violations + count("decay", self.decay, 0))

    def violations(self, steps: int) -> list[str]:
        return _fits(steps, warmup=self.warmup, decay=self.decay)

    def build(self, steps: int) -> RateFn:
        raise_violations(self.violations(steps))
        return _warm_then_decay(
            peak=self.peak,
            warmup=self.warmup,
            start=steps - self.decay,
            steps=steps,
            final_fraction=self.final_fraction,
            shape=self.shape,
        )


@dataclass(frozen=True)
class InverseSqrt:
    """peak x sqrt((warmup + 1) / (step + 1)) after the warm-up (Vaswani et al. 2017, eq. 3).

    Their formula, min(s^-1/2, s w^-3/2) with s from 1 and w warm-up steps, scaled to `peak`, is
    this one with `warmup=w - 1`.

    warmup: steps before the peak, and the scale of the fall.
    """

    peak: float
    warmup: int

    def __post_init__(self) -> None:
        raise_violations(_peak_fields(self.peak, self.warmup, final_fraction=0.0))

    def violations(self, steps: int) -> list[str]:
        return _fits(steps, warmup=self.warmup)

    def build(self, steps: int) -> RateFn:
        raise_violations(self.violations(steps))

        def rate(step: jax.typing.ArrayLike) -> Float32[Array, " ..."]:
            now = jnp.minimum(jnp.asarray(step, jnp.float32), steps) + 1.0
            turn = self.warmup + 1.0
            return self.peak * jnp.minimum(now / turn, jnp.sqrt(turn / now))

        return rate
