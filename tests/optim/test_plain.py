"""Optax's own transformations as optimizers: which of them mix the numbers of a leaf, by the law
itself; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.optim.plain import Optax, mixing
from jaxtrain.optim.rate import ScaledRate, rate_fn, rate_violations

LAYERS, SHAPE = 3, (4, 6)

MADE: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(0.1),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "lion": lambda: optax.lion(0.1),
    "nadam": lambda: optax.nadam(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1, centered=True),
    "clipped by value": lambda: optax.chain(optax.clip(0.5), optax.sgd(0.1)),
    "two groups": lambda: optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, lambda tree: dict.fromkeys(tree, "a")
    ),
    "lamb": lambda: optax.lamb(0.1),
    "lars": lambda: optax.lars(0.1),
    "clipped by block": lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "normalised": lambda: optax.chain(optax.scale_by_trust_ratio(), optax.sgd(0.1)),
    "muon": lambda: optax.contrib.muon(
        0.1, muon_weight_dimension_numbers=lambda tree: dict.fromkeys(tree, _MUON)
    ),
}
_MUON = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
MIXED = {"lamb", "lars", "clipped by block", "normalised"}


def stacked_and_apart(transform: optax.GradientTransformation) -> tuple[Any, Any]:
    """The third parameters of a stack of layers of very different size, and of the layers apart."""
    rng = np.random.default_rng(0)
    scale = np.array([0.01, 1.0, 100.0]).reshape(LAYERS, 1, 1)
    first, *grads = (jnp.asarray(rng.normal(size=(LAYERS, *SHAPE)) * scale) for _ in range(4))

    def trained(apart: Callable[[jax.Array], dict[str, jax.Array]]) -> dict[str, jax.Array]:
        params = apart(first)
        state = transform.init(params)
        for g in grads:
            updates, state = transform.update(apart(g), state, params)
            params = optax.apply_updates(params, updates)
        return params

    stack = trained(lambda x: {"all": x})["all"]
    layers = trained(lambda x: {str(i): x[i] for i in range(LAYERS)})
    return stack, jnp.stack([layers[str(i)] for i in range(LAYERS)])


@pytest.mark.parametrize("name", [name for name in MADE if name != "muon"])
def test_what_mixes_is_what_a_stack_changes(name: str) -> None:
    """The jaxpr says it of each as the numbers do."""
    transform = MADE[name]()
    stack, apart = stacked_and_apart(transform)
    changed = not np.allclose(stack, apart, rtol=1e-5, atol=1e-7)
    params = {"all": jax.ShapeDtypeStruct((LAYERS, *SHAPE), jnp.float32)}
    state = jax.eval_shape(transform.init, params)
    assert bool(mixing(transform, params, state)) == changed == (name in MIXED)


def test_products_of_matrices_mix() -> None:
    """In a loop, within a jit: wherever they stand."""
    transform = MADE["muon"]()
    params = {"all": jax.ShapeDtypeStruct((LAYERS, *SHAPE), jnp.float32)}
    found = mixing(transform, params, jax.eval_shape(transform.init, params))
    assert "dot_general" in found and found == sorted(set(found))


def test_a_sum_of_scalars_and_a_rounding_mix_nothing() -> None:
    def update(grads: Any, state: Any, params: Any = None) -> Any:
        rounded = jax.tree.map(lambda g: jax.lax.reduce_precision(g, 8, 7) * state.sum(), grads)
        return rounded, state

    transform = optax.GradientTransformation(lambda params: jnp.zeros(()), update)
    params = {"a": jnp.ones((2, 3))}
    assert mixing(transform, params, transform.init(params)) == []


def adam() -> optax.GradientTransformation:
    return optax.adam(0.1)


def test_it_is_the_transformation_it_was_given() -> None:
    grads, params = {"a": jnp.full(3, 0.5)}, {"a": jnp.arange(3.0)}
    expected, _ = adam().update(grads, adam().init(params), params)
    for given in (adam, adam()):
        optimizer = Optax(given)
        assert optimizer.violations(1) == [] and optimizer == Optax(given)
        made = optimizer.build({"a": ("embed",)}, steps=1, batch=1)
        updates, _ = made.update(grads, made.init(params), params)
        np.testing.assert_array_equal(updates["a"], expected["a"])


def broken() -> optax.GradientTransformation:
    raise KeyError("rate")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (broken, r"optimizer=broken failed \(KeyError: 'rate'\); mend it"),
        (lambda: 3, r"optimizer=<lambda> gives 3; return an optax transformation"),
        (lambda: optax.adamw, r"gives <function adamw"),
    ],
)
def test_a_function_that_gives_none_is_told(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Optax(given).build({}, steps=1, batch=1)


def test_an_update_that_asks_for_more_is_told() -> None:
    plateau = Optax(optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()))
    made = plateau.build({"a": ("embed",)}, steps=1, batch=1)
    params = {"a": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"'value'; a step gives .* gradients, state and param"):
        made.update(params, made.init(params), params)


# A function of the step as a learning rate.


def half_each(step: jax.Array) -> jax.Array:
    return 0.5**step


def test_a_function_of_the_step_is_the_rate() -> None:
    for schedule in (half_each, optax.exponential_decay(1.0, 1, 0.5)):
        assert rate_violations(schedule, 4) == []
        rate = rate_fn(schedule, steps=4, batch=8)
        found = jax.jit(jax.vmap(rate))(jnp.arange(6))
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, [1, 0.5, 0.25, 0.125, 0.0625, 0.03125], rtol=1e-6)
        scaled = rate_fn(ScaledRate(schedule, reference_batch=2), steps=4, batch=8)
        np.testing.assert_allclose(scaled(jnp.int32(1)), 1.0, rtol=1e-6)  # sqrt(4) x 0.5
    constant = rate_fn(lambda step: 0.25, steps=4, batch=8)
    assert constant(jnp.int32(3)) == 0.25 and constant(0).dtype == jnp.float32


def branching(step: Any) -> float:
    return 0.1 if step < 10 else 0.01


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (branching, r"learning_rate=branching cannot be traced \(TracerBool.*jnp.where for `if`"),
        (lambda: 0.1, r"learning_rate=<lambda> cannot be traced \(TypeError: .*0 positional"),
        (lambda step: jnp.ones(3) * step, r"gives .*\(3,\).* of a step; .* is one number"),
        (lambda step: {"rate": step}, r"gives .* of a step; a learning rate is one number"),
        (lambda step: step > 3, r"gives .*bool.* of a step"),
    ],
)
def test_a_function_that_gives_no_rate_is_told(function: Any, said: str) -> None:
    for value in (function, ScaledRate(function, reference_batch=2)):
        with pytest.raises(ValueError, match=said):
            rate_fn(value, steps=4, batch=8)
