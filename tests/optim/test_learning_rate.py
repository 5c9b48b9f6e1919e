"""Schedules against optax's and closed forms, at every step of a run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.optim.rate import (
    ScaledRate,
    linear_scaling,
    rate_fn,
    square_root_scaling,
)
from jaxtrain.optim.schedule import (
    Constant,
    InverseSqrt,
    WarmupCosine,
    WarmupLinear,
    WarmupStableDecay,
    cosine_decay,
    linear_decay,
)

STEPS = 40


def warmed(peak: float, warmup: int, after: optax.Schedule) -> optax.Schedule:
    """optax's linear warm-up, from the first of warmup + 1 equal parts."""
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rise, after], [warmup])


def cooled(peak: float, warmup: int, decay: int, end: float) -> optax.Schedule:
    """optax's warm-up, plateau, and a straight line down."""
    stable, fall = optax.constant_schedule(peak), optax.linear_schedule(peak, end, decay)
    return optax.join_schedules([warmed(peak, warmup, stable), fall], [STEPS - decay])


def noam(step: int) -> float:
    """Vaswani et al. 2017, eq. 3, with 8 warm-up steps, scaled to a peak of 2."""
    s = step + 1
    return 2.0 * 8**0.5 * min(s**-0.5, s * 8**-1.5)


def hagele(step: int) -> float:
    """Haegele et al. 2024: the last 10 of 40 steps fall as 1 - sqrt."""
    return 3.0 * (1 - (max(step - 30, 0) / 10) ** 0.5)


TABLE = {
    "constant": (Constant(2.0), optax.constant_schedule(2.0)),
    "constant, warmed": (Constant(2.0, warmup=7), warmed(2.0, 7, optax.constant_schedule(2.0))),
    "cosine": (
        WarmupCosine(2.0, warmup=8),
        optax.warmup_cosine_decay_schedule(2.0 / 9, 2.0, 8, STEPS, 0.2),
    ),
    "cosine, no warm-up": (
        WarmupCosine(2.0, final_fraction=0.0),
        optax.cosine_decay_schedule(2.0, STEPS),
    ),
    "linear": (
        WarmupLinear(2.0, warmup=8, final_fraction=0.25),
        warmed(2.0, 8, optax.linear_schedule(2.0, 0.5, STEPS - 8)),
    ),
    "all warm-up": (
        WarmupLinear(2.0, warmup=STEPS),
        warmed(2.0, STEPS, optax.constant_schedule(2.0)),
    ),
    "wsd, linear": (
        WarmupStableDecay(3.0, decay=10, warmup=5, final_fraction=0.1, shape=linear_decay),
        cooled(3.0, 5, 10, 0.3),
    ),
    "wsd, no plateau": (
        WarmupStableDecay(3.0, decay=35, warmup=5, final_fraction=0.1, shape=cosine_decay),
        optax.warmup_cosine_decay_schedule(0.5, 3.0, 5, STEPS, 0.3),
    ),
    "wsd, 1 - sqrt": (WarmupStableDecay(3.0, decay=10), hagele),
    "wsd, no decay": (WarmupStableDecay(3.0, decay=0, warmup=5), Constant(3.0, warmup=5).build(40)),
    "inverse sqrt": (InverseSqrt(2.0, warmup=7), noam),
}


@pytest.mark.parametrize("case", TABLE)
def test_rate_at_every_step(case: str) -> None:
    schedule, expected = TABLE[case]
    steps = jnp.arange(STEPS)
    found = jax.vmap(schedule.build(STEPS))(steps)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, [float(expected(int(s))) for s in steps], rtol=2e-5)
    assert (found > 0).all(), "a step at rate 0 is wasted"


@pytest.mark.parametrize("case", TABLE)
def test_rate_holds_its_last_value_after_the_end(case: str) -> None:
    rate = TABLE[case][0].build(STEPS)
    assert rate(STEPS) == rate(STEPS + 1) == rate(10 * STEPS)


@pytest.mark.parametrize("rule", [linear_scaling, square_root_scaling])
@pytest.mark.parametrize("schedule", [0.5, WarmupCosine(0.5, warmup=3)], ids=str)
def test_scaled_rate(schedule, rule) -> None:
    plain = rate_fn(schedule, steps=STEPS, batch=512)
    scaled = rate_fn(ScaledRate(schedule, reference_batch=32, rule=rule), steps=STEPS, batch=512)
    same = rate_fn(ScaledRate(schedule, reference_batch=512, rule=rule), steps=STEPS, batch=512)
    factor = {linear_scaling: 16.0, square_root_scaling: 4.0}[rule]
    for step in (0, 3, 20, STEPS - 1):
        np.testing.assert_allclose(scaled(step), factor * plain(step), rtol=1e-6)
        assert same(step) == plain(step)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: WarmupCosine(-1.0, warmup=-2), ("peak=-1.0", "warmup=-2")),
        (lambda: WarmupCosine(1.0, final_fraction=1.5), ("final_fraction=1.5",)),
        (lambda: WarmupLinear(float("nan"), warmup=True), ("peak=nan", "warmup=True")),
        (lambda: WarmupStableDecay(0.0, decay=-1), ("peak=0.0", "decay=-1")),
        (lambda: Constant(1.0, warmup=2.5), ("warmup=2.5",)),
        (lambda: InverseSqrt(float("inf"), warmup=1), ("peak=inf",)),
        (
            lambda: ScaledRate("x", reference_batch=0, rule="linear"),
            ("schedule='x'", "reference_batch=0", "rule='linear'"),
        ),
        (lambda: WarmupStableDecay(1.0, decay=30, warmup=20).build(STEPS), ("steps=50",)),
        (lambda: WarmupCosine(1.0, warmup=41).build(STEPS), ("warmup=41", "steps=40")),
        (lambda: Constant(1.0).build(0), ("steps=0",)),
        (
            lambda: rate_fn(ScaledRate(Constant(1.0, warmup=9), 4), steps=3, batch=0),
            ("warmup=9", "batch=0"),
        ),
        (lambda: rate_fn(0.1, steps=0, batch=0), ("steps=0", "batch=0")),
    ],
)
def test_bad_values_are_refused_all_at_once(wrong, words) -> None:
    with pytest.raises(ValueError) as error:
        wrong()
    assert all(word in str(error.value) for word in words)
