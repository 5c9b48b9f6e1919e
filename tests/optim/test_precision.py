"""The loss-scale state machine against a plain Python one, and skipping of steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.optim.precision import (
    LossScale,
    Precision,
    bf16,
    fp16,
    fp32,
    select_if_finite,
)


def simulate(policy: LossScale, finite: list[bool]) -> list[tuple[float, int]]:
    scale, good, out = policy.initial, 0, []
    for ok in finite:
        if not ok:
            scale, good = max(scale / policy.factor, policy.minimum), 0
        elif good + 1 == policy.window:
            scale, good = min(scale * policy.factor, policy.maximum), 0
        else:
            good += 1
        out.append((scale, good))
    return out


RANDOM = [bool(b) for b in np.random.default_rng(0).random(60) > 0.2]


@pytest.mark.parametrize(
    ("policy", "finite"),
    [
        (LossScale(initial=8.0, window=3), [True] * 10),
        (LossScale(initial=8.0, window=3), [False] * 6),
        (LossScale(initial=8.0, window=3), [True, True, False, True, True, True, False]),
        (LossScale(initial=8.0, window=2, maximum=16.0), [True] * 9),
        (LossScale(initial=8.0, window=1, factor=4.0, minimum=2.0), RANDOM),
        (LossScale(initial=2.0**15, window=4), RANDOM),
    ],
)
def test_loss_scale_follows_the_state_machine(policy: LossScale, finite: list[bool]) -> None:
    def step(state, ok):
        state = policy.update(state, ok)
        return state, state

    _, states = jax.lax.scan(step, policy.init(), jnp.array(finite))
    assert (states.scale.dtype, states.good_steps.dtype) == (jnp.float32, jnp.int32)
    found = list(zip(states.scale.tolist(), states.good_steps.tolist(), strict=True))
    assert found == simulate(policy, finite)


def test_defaults_are_the_published_ones() -> None:
    assert LossScale() == LossScale(2.0**15, 2000, 2.0, 1.0, 2.0**24)
    assert (fp32.compute, fp32.matmul, fp32.loss_scale) == (jnp.float32, "highest", None)
    assert (bf16.compute, bf16.matmul, bf16.loss_scale) == (jnp.bfloat16, "default", None)
    assert (fp16.compute, fp16.matmul, fp16.loss_scale) == (jnp.float16, "default", LossScale())
    assert all(p.params == p.reduce == jnp.float32 for p in (fp32, bf16, fp16))
    assert len({fp32, bf16, fp16, Precision()}) == 3


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_step_that_is_not_finite_changes_nothing(bad: float) -> None:
    old = {"w": jnp.arange(3.0), "count": jnp.int32(4)}

    @jax.jit
    def step(gradient):
        finite = jnp.isfinite(gradient)
        new = {"w": old["w"] - gradient, "count": old["count"] + 1}
        return select_if_finite(finite, new, old)

    kept = step(jnp.float32(bad))
    assert (kept["w"] == old["w"]).all() and kept["count"] == 4
    moved = step(jnp.float32(1.0))
    assert (moved["w"] == old["w"] - 1).all() and moved["count"] == 5


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Precision(compute=jnp.float16), ("loss_scale=LossScale()",)),
        (lambda: Precision(params=jnp.int32, matmul="best"), ("params=", "matmul='best'")),
        (lambda: LossScale(initial=0.0, window=0, factor=0.5), ("initial", "window", "factor")),
        (lambda: LossScale(initial=0.5), ("initial=0.5", "minimum=1.0")),
    ],
)
def test_bad_fields_are_refused_all_at_once(wrong, words) -> None:
    with pytest.raises(ValueError) as error:
        wrong()
    assert all(word in str(error.value) for word in words)
