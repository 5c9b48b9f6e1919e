"""Law: an update of stacked leaves equals the same optax optimizer on unstacked 2-D matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.mesh.sharding import dims, fsdp, named_sharding, tensor
from jaxtrain.optim.distributed import OnMesh
from jaxtrain.optim.optimizer import (
    ELEMENTWISE,
    SGD,
    SHARDED,
    Adafactor,
    AdamW,
    Lamb,
    Lars,
    Lion,
    Muon,
    everything,
    hidden_matrices,
    state_axes,
)
from jaxtrain.optim.rate import ScaledRate, linear_scaling
from jaxtrain.optim.schedule import WarmupCosine
from jaxtrain.program.collectives import collectives

STEPS = 5
QUICK = {"xla_backend_optimization_level": 0}
"""Compile time is what these tests cost."""


class Leaf(NamedTuple):
    """A stacked leaf, and by hand what its slices are: `flat` is the shape of one layer's."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    stacked: int
    flat: tuple[int, ...]
    group: str


LEAVES = {
    "table": Leaf(("vocab", "embed"), (16, 8), 0, (16, 8), "adam"),
    "final": Leaf(("embed",), (8,), 0, (8,), "adam"),
    "query": Leaf(("layers", "embed", "heads", "head_dim"), (2, 8, 4, 3), 1, (8, 12), "muon"),
    "output": Leaf(("layers", "heads", "head_dim", "embed"), (2, 4, 3, 8), 1, (12, 8), "muon"),
    "experts": Leaf(("layers", "experts", "mlp", "embed"), (2, 2, 16, 8), 2, (16, 8), "muon"),
    "router": Leaf(("layers", "embed", "experts"), (2, 8, 2), 1, (8, 2), "muon"),
    "bias": Leaf(("layers", "heads", "head_dim"), (2, 4, 3), 1, (12,), "adam"),
    "scale": Leaf(("layers",), (2,), 1, (), "adam"),
}
OUTSIDE = ("table", "final")


def nested(of: Callable[[str], Any]) -> dict[str, Any]:
    """A tree of parameters: some leaves at the root, the stacked ones in a block."""
    tree = {name: of(name) for name in OUTSIDE}
    return {**tree, "block": {name: of(name) for name in LEAVES if name not in OUTSIDE}}


AXES = nested(lambda name: LEAVES[name].axes)


def random_tree(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    draw = {name: rng.normal(size=leaf.shape) for name, leaf in LEAVES.items()}
    # Layers of very different size, so that a norm over the stack cannot pass for one layer's.
    for name, leaf in LEAVES.items():
        if leaf.stacked:
            draw[name] *= np.array([0.1, 30.0]).reshape(2, *[1] * (len(leaf.shape) - 1))
    return nested(lambda name: jnp.asarray(draw[name], jnp.float32))


def unstack(tree: dict[str, Any]) -> dict[str, list[jax.Array]]:
    flat = {**tree, **tree["block"]}
    return {
        name: list(np.asarray(flat[name]).reshape(-1, *leaf.flat)) for name, leaf in LEAVES.items()
    }


def per_slice(of: Callable[[Leaf], Any]) -> dict[str, list[Any]]:
    """A tree like `unstack`'s with one value for each leaf."""
    return {
        name: [of(leaf)] * int(np.prod(leaf.shape[: leaf.stacked], dtype=int))
        for name, leaf in LEAVES.items()
    }


def is_matrix(leaf: Leaf) -> bool:
    return len(leaf.flat) == 2


RATE = WarmupCosine(0.05, warmup=2)
RATE_FN = RATE.build(STEPS)
DECAYED = per_slice(is_matrix)


def trusted(mask: Any) -> optax.GradientTransformation:
    return optax.masked(optax.scale_by_trust_ratio(), mask)


def reference_muon(rms: float | None, decay: float = 0.1) -> optax.GradientTransformation:
    """optax's Muon on the matrices named so by hand; not its own Adam, which is a Nadam."""
    transforms = {
        "muon": optax.contrib.muon(RATE_FN, weight_decay=decay, consistent_rms=rms),
        "adam": optax.adamw(
            RATE_FN,
            b2=0.95,
            weight_decay=decay,
            mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim == 2, params),
        ),
    }
    return optax.partition(transforms, per_slice(lambda leaf: leaf.group))


CASES = {
    "adamw": (AdamW(RATE), optax.adamw(RATE_FN, b2=0.95, weight_decay=0.1, mask=DECAYED)),
    "adamw, all decayed": (
        AdamW(RATE, weight_decay=0.3, decay=everything),
        optax.adamw(RATE_FN, b2=0.95, weight_decay=0.3),
    ),
    "adamw, embeddings not decayed": (
        AdamW(RATE, decay=hidden_matrices),
        optax.adamw(
            RATE_FN,
            b2=0.95,
            weight_decay=0.1,
            mask=per_slice(lambda leaf: leaf.group == "muon"),
        ),
    ),
    "sgd": (
        SGD(RATE, weight_decay=0.1),
        optax.chain(optax.add_decayed_weights(0.1, DECAYED), optax.sgd(RATE_FN, momentum=0.9)),
    ),
    "sgd, nesterov": (
        SGD(RATE, nesterov=True, weight_decay=0.0),
        optax.sgd(RATE_FN, momentum=0.9, nesterov=True),
    ),
    "sgd, plain": (SGD(RATE, momentum=0.0, weight_decay=0.0), optax.sgd(RATE_FN)),
    "lion": (Lion(RATE), optax.lion(RATE_FN, weight_decay=1.0, mask=DECAYED)),
    "lamb": (
        Lamb(RATE),
        optax.chain(
            optax.scale_by_adam(eps=1e-6),
            optax.add_decayed_weights(0.01, DECAYED),
            trusted(DECAYED),
            optax.scale_by_learning_rate(RATE_FN),
        ),
    ),
    "lamb, all adapted": (
        Lamb(RATE, adapt=everything),
        optax.lamb(RATE_FN, weight_decay=0.01, mask=DECAYED),
    ),
    "lars": (
        Lars(RATE),
        optax.lars(RATE_FN, weight_decay=5e-4, weight_decay_mask=DECAYED, trust_ratio_mask=DECAYED),
    ),
    "lars, all adapted, nesterov": (
        Lars(RATE, adapt=everything, decay=everything, nesterov=True),
        optax.lars(RATE_FN, weight_decay=5e-4, nesterov=True),
    ),
    "adafactor": (
        Adafactor(RATE, min_dim_size_to_factor=4),
        optax.adafactor(RATE_FN, min_dim_size_to_factor=4),
    ),
    "adafactor, momentum and decay": (
        Adafactor(RATE, min_dim_size_to_factor=4, momentum=0.9, weight_decay=0.1),
        optax.adafactor(
            RATE_FN,
            min_dim_size_to_factor=4,
            momentum=0.9,
            weight_decay_rate=lambda step: 0.1 * RATE_FN(step),
            weight_decay_mask=DECAYED,
        ),
    ),
    "adafactor, unfactored, absolute, unclipped": (
        Adafactor(RATE, relative=False, clipping_threshold=None),
        optax.adafactor(RATE_FN, multiply_by_parameter_scale=False, clipping_threshold=None),
    ),
    "adafactor, clipped to a tenth": (
        Adafactor(RATE, min_dim_size_to_factor=4, clipping_threshold=0.1),
        optax.adafactor(RATE_FN, min_dim_size_to_factor=4, clipping_threshold=0.1),
    ),
    "muon": (Muon(RATE), reference_muon(rms=0.2)),
    "muon, as Jordan scales": (
        Muon(RATE, rms=None, weight_decay=0.3),
        reference_muon(rms=None, decay=0.3),
    ),
}


def run(transform: optax.GradientTransformation, params: Any, grads: list[Any]) -> Any:
    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(params: Any, state: Any, grad: Any) -> Any:
        updates, state = transform.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(transform.init, compiler_options=QUICK)(params)
    for grad in grads:
        params, state = step(params, state, grad)
    return params, state


def assert_close(found: Any, expected: Any, *, atol: float) -> None:
    """Each slice within `atol` of the size of its own largest number."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol * np.abs(b).max()),
        found,
        expected,
    )


SLOW = {"lamb, all adapted", "lars, all adapted, nesterov"}
VARIANTS = [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES]


@pytest.mark.parametrize("case", VARIANTS)
def test_stacked_update_equals_the_unstacked_one(case: str) -> None:
    ours, reference = CASES[case]
    params, grads = random_tree(0), [random_tree(seed) for seed in (1, 2, 3)]
    found, _ = run(ours.build(AXES, steps=STEPS, batch=8), params, grads)
    expected, _ = run(reference, unstack(params), [unstack(g) for g in grads])
    assert_close(unstack(found), expected, atol=2e-5 if case.startswith("muon") else 2e-6)


@pytest.mark.parametrize("optimizer", [Lamb(0.1), Lars(0.1)], ids=["lamb", "lars"])
def test_layers_of_zeros_and_layers_without_gradients_are_finite(optimizer: Any) -> None:
    """A trust ratio is 1 where there is no weight or no update to speak of: a layer without either
    stays, and one of zeros begins to move."""
    axes = {"w": ("layers", "embed", "mlp")}
    params = {"w": jnp.stack([jnp.eye(3), jnp.zeros((3, 3)), jnp.zeros((3, 3))])}
    grads = {"w": jnp.stack([jnp.zeros((3, 3)), jnp.eye(3), jnp.zeros((3, 3))])}
    transform = replace(optimizer, weight_decay=0.0).build(axes, steps=3, batch=1)
    moved = transform.update(grads, transform.init(params), params)[0]["w"]
    assert not moved[0].any() and not moved[2].any()
    np.testing.assert_allclose(moved[1], -0.1 * np.eye(3), rtol=1e-5)


OPTIMIZERS = {
    "adamw": AdamW(RATE),
    "sgd": SGD(RATE),
    "lion": Lion(RATE),
    "lamb": Lamb(RATE),
    "lars": Lars(RATE),
    "adafactor": Adafactor(RATE, min_dim_size_to_factor=4),
    "muon": Muon(RATE),
}
RULES = (fsdp() | tensor()).params
SIZES = {"fsdp": 4, "tensor": 2}


def sharding_of(mesh: jax.sharding.Mesh, axes: Any) -> Any:
    return jax.tree.map(
        lambda names: named_sharding(mesh, dims(names, RULES, sizes=SIZES)),
        axes,
        is_leaf=lambda node: type(node) is tuple,
    )


def sharding_of_state(mesh: jax.sharding.Mesh, abstract: Any) -> Any:
    """Moments rest as their parameter does, along the dims they keep."""
    splits = jax.tree.map(
        lambda names: dims(names, RULES, sizes=SIZES),
        AXES,
        is_leaf=lambda node: type(node) is tuple,
    )
    found = jax.tree.structure(abstract).flatten_up_to(state_axes(abstract, AXES, splits))
    return jax.tree.structure(abstract).unflatten([named_sharding(mesh, each) for each in found])


SENT = {
    "lamb": {"all-reduce"},
    "lars": {"all-reduce"},
    "adafactor": {"all-reduce"},
    "muon": {"all-to-all"},
}
"""Elementwise updates send nothing; statistics are all-reduced, matrices exchanged."""


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("stated", [True, False], ids=["stated", "partitioned"])
def test_sharded_update_equals_the_unsharded_one(name: str, stated: bool) -> None:
    transform = OPTIMIZERS[name].build(AXES, steps=STEPS, batch=8)
    params, grads = random_tree(0), [random_tree(seed) for seed in (1, 2)]
    expected, expected_state = run(transform, params, grads)

    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    if stated and isinstance(OPTIMIZERS[name], SHARDED):
        shards = OnMesh(mesh, lambda names: dims(names, RULES, sizes=SIZES), SIZES)
        transform = OPTIMIZERS[name].build(AXES, steps=STEPS, batch=8, shards=shards)
    at_rest = sharding_of(mesh, AXES)
    in_state = sharding_of_state(mesh, jax.eval_shape(transform.init, params))

    def step(params: Any, state: Any, grad: Any) -> Any:
        updates, state = transform.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    place = jax.device_put(params, at_rest)
    state = jax.jit(transform.init, out_shardings=in_state)(place)
    compiled = jax.jit(step, out_shardings=(at_rest, in_state)).lower(place, state, place).compile()
    for grad in grads:
        place, state = compiled(place, state, jax.device_put(grad, at_rest))
    assert not place["block"]["query"].sharding.is_fully_replicated
    atol = 1e-4 if name == "muon" else 2e-6
    assert_close(unstack(jax.device_get(place)), unstack(expected), atol=atol)
    assert_close(jax.device_get(state), jax.device_get(expected_state), atol=2e-6)
    if stated or isinstance(OPTIMIZERS[name], ELEMENTWISE):
        found = {each.kind for each in collectives(compiled.as_text()) if each.group_size > 1}
        assert found == SENT.get(name, set())


def test_state_axes_of_adafactor_and_muon() -> None:
    factored = OPTIMIZERS["adafactor"].build(AXES, steps=STEPS, batch=8)
    abstract = jax.eval_shape(factored.init, random_tree(0))
    state = state_axes(abstract, AXES)[0]
    assert state.count == ()
    assert state.rows["block"]["query"] == ("layers", "embed")
    assert state.columns["block"]["query"] == ("layers", "heads", "head_dim")
    assert state.rows["block"]["output"] == ("layers", "heads", "head_dim")
    assert state.columns["block"]["experts"] == ("layers", "experts", "embed")
    assert state.full["block"]["router"] == ("layers", "embed", "experts")
    assert state.full["block"]["bias"] == ("layers", "heads", "head_dim")
    assert len(jax.tree.leaves(abstract[0])) == 1 + sum(
        2 if len(leaf.flat) == 2 and min(leaf.flat) >= 4 else 1 for leaf in LEAVES.values()
    )

    muon = jax.eval_shape(OPTIMIZERS["muon"].build(AXES, steps=STEPS, batch=8).init, random_tree(0))
    inner = state_axes(muon, AXES).inner_states
    assert inner["muon"].inner_state[0].momentum["block"]["router"] == (
        "layers",
        "embed",
        "experts",
    )
    assert inner["adam"].inner_state[0].nu["table"] == ("vocab", "embed")


def test_state_that_fits_no_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trace.*shape \(3,\)"):
        state_axes({"trace": jnp.zeros(3)}, AXES)


def test_axes_that_disagree_with_shapes_are_all_listed() -> None:
    wrong = {**AXES, "table": ("vocab",), "final": ("layers", "embed")}
    with pytest.raises(ValueError, match=r"(?s)final.*table has shape \(16, 8\)") as error:
        AdamW(RATE).build(wrong, steps=STEPS, batch=8).init(random_tree(0))
    assert "block" not in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: AdamW(RATE, b1=1.0, eps=0.0, weight_decay=-1), ("b1=1.0", "eps=0.0", "decay=-1")),
        (lambda: AdamW("fast"), ("learning_rate='fast'",)),
        (lambda: AdamW(-1e-3, b2=2.0), ("learning_rate=-0.001", "b2=2.0")),
        (lambda: SGD(RATE, momentum=0.0, nesterov=True), ("nesterov=True", "momentum=0.9")),
        (lambda: Lion(RATE, b1=-0.1, b2=1.5), ("b1=-0.1", "b2=1.5")),
        (lambda: Lamb(RATE, eps=-1.0, b2=1.0), ("eps=-1.0", "b2=1.0")),
        (lambda: Lars(RATE, trust_coefficient=0.0), ("trust_coefficient=0.0",)),
        (
            lambda: Adafactor(RATE, clipping_threshold=0.0, min_dim_size_to_factor=0),
            ("clipping_threshold=0.0", "min_dim_size_to_factor=0"),
        ),
        (
            lambda: Muon(RATE, rms=0.0, newton_schulz_steps=0, coefficients=(1.0,), dtype=int),
            ("rms=0.0", "newton_schulz_steps=0", "coefficients=(1.0,)", "dtype="),
        ),
    ],
)
def test_bad_fields_are_refused_all_at_once(wrong: Callable[[], Any], words: tuple[str]) -> None:
    with pytest.raises(ValueError) as error:
        wrong()
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_run_shorter_than_the_warmup_is_refused(name: str) -> None:
    optimizer = replace(OPTIMIZERS[name], learning_rate=WarmupCosine(1.0, warmup=9))
    assert len(optimizer.violations(5)) == 1
    with pytest.raises(ValueError, match=r"warmup=9 .*steps=5"):
        optimizer.build(AXES, steps=5, batch=8)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_batch_reaches_the_learning_rate(name: str) -> None:
    with pytest.raises(ValueError, match="batch=0"):
        OPTIMIZERS[name].build(AXES, steps=STEPS, batch=0)


def test_rate_is_scaled_with_the_batch() -> None:
    axes, ones = {"w": ("embed",)}, {"w": jnp.ones(2)}
    rate = ScaledRate(0.01, reference_batch=4, rule=linear_scaling)
    transform = SGD(rate).build(axes, steps=STEPS, batch=12)
    updates, _ = transform.update(ones, transform.init(ones), ones)
    np.testing.assert_allclose(updates["w"], -0.03, rtol=1e-6)


def test_optimizers_are_values() -> None:
    assert AdamW(RATE) == AdamW(WarmupCosine(0.05, warmup=2))
    assert len({hash(optimizer) for optimizer in OPTIMIZERS.values()}) == len(OPTIMIZERS)
