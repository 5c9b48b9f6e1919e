"""B and W together are the backward pass, and B makes no product of a matrix's gradient."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.nn.local import Local
from jaxtrain.nn.split import SplitLayers
from jaxtrain.nn.stack import LayerLoop, Layers
from jaxtrain.quantization import Fp8Products, Int8Products
from jaxtrain.quantization.recipe import Products

TOKENS, EMBED, HIDDEN, LAYERS = 6, 8, 12, 3
SHAPES = {
    "left": (EMBED, HIDDEN),
    "right": (EMBED, HIDDEN),
    "down": (HIDDEN, EMBED),
    "twice": (EMBED, EMBED),
    "apart": (EMBED, EMBED),
    "scale": (EMBED,),
}
MATRICES = {"left", "right", "down"}
"""Those that a layer gives the communicator once, as they are."""


def body_of(comm: Any) -> Any:
    def body(p: Any, x: jax.Array, extras: Any, layer: Any) -> jax.Array:
        left, right = comm.column(x * p["scale"][None], p["left"], p["right"])
        x = x + comm.row(jnp.tanh(left) * right, p["down"])
        x = x + comm.row(jnp.sin(comm.row(x, p["twice"])), p["twice"])
        return x + jnp.tanh(x @ p["apart"]) * extras[layer]

    return body


def problem() -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    keys = iter(jax.random.split(jax.random.key(0), 9))
    params = {k: jax.random.normal(next(keys), (LAYERS, *s)) * 0.4 for k, s in SHAPES.items()}
    x, dy = (jax.random.normal(next(keys), (TOKENS, EMBED)) for _ in range(2))
    return params, x, dy, jnp.arange(1.0, LAYERS + 1)


def layers(loop: LayerLoop) -> SplitLayers:
    whole = Layers(body_of(Local()), lambda p: p, lambda g: g, loop)
    return SplitLayers(whole, body_of, Local())


QUICK = ((True, "full"), (False, "none"), (False, "dots"))


@pytest.mark.parametrize(
    ("unroll", "remat"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for case in itertools.product((True, False), ("none", "dots", "full"))
    ],
)
def test_both_make_what_the_derivative_is(unroll: bool, remat: str) -> None:
    params, x, dy, extras = problem()
    split = layers(LayerLoop(unroll=unroll, remat=remat))

    def plain(params: Any, x: jax.Array) -> jax.Array:
        for layer in range(LAYERS):
            x = body_of(Local())(jax.tree.map(lambda p, i=layer: p[i], params), x, extras, layer)
        return x

    expected_y, pull_back = jax.vjp(plain, params, x)
    expected, expected_dx = pull_back(dy)
    y, saved = split.forward_with_residuals(params, x, extras)
    grads, dx, stash = split.backward(saved, params, dy, extras)
    weights = split.weight_gradients(stash, params)
    assert weights.keys() == MATRICES and grads.keys() == SHAPES.keys() - MATRICES
    np.testing.assert_allclose(y, expected_y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, expected_dx, rtol=1e-4, atol=1e-4)
    for name, gradient in {**grads, **weights}.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("products", [Fp8Products(), Int8Products()], ids=lambda p: p.rate)
@pytest.mark.parametrize(
    ("unroll", "remat"), [(False, "dots"), pytest.param(True, "full", marks=pytest.mark.slow)]
)
def test_both_make_what_the_derivative_in_8_bits_is(
    unroll: bool, remat: str, products: Products
) -> None:
    """And the stash has 8-bit numbers, an input once for all weights that it is multiplied by."""
    params, x, dy, extras = problem()
    comm = Local(quantized=products, products=frozenset({*MATRICES, "twice"}))
    loop = LayerLoop(unroll=unroll, remat=remat)
    fetch, scatter = (lambda p: comm.fetch(p, "")), (lambda g: comm.scatter(g, ""))
    split = SplitLayers(Layers(body_of(comm), fetch, scatter, loop), body_of, comm)
    expected_y, pull_back = jax.vjp(lambda p, x: split.layers(p, x, extras), params, x)
    expected, expected_dx = pull_back(dy)
    y, saved = split.forward_with_residuals(params, x, extras)
    grads, dx, stash = split.backward(saved, params, dy, extras)
    weights = split.weight_gradients(stash, params)
    assert weights.keys() == MATRICES and grads.keys() == SHAPES.keys() - MATRICES
    made = {**grads, **weights, "y": y, "dx": dx}
    for name, right in {**expected, "y": expected_y, "dx": expected_dx}.items():
        error = np.abs(made[name] - right).max()
        assert error < 1e-5 * np.abs(right).max(), name
    numbers = [leaf for leaf in jax.tree.leaves(stash) if leaf.dtype != jnp.float32]
    kinds = {products.forward.dtype, products.backward.dtype}
    assert {leaf.dtype.name for leaf in numbers} == kinds
    of_a_layer = TOKENS * (EMBED + 2 * HIDDEN) + TOKENS * (HIDDEN + EMBED)
    assert sum(leaf.nbytes for leaf in numbers) == LAYERS * of_a_layer


def matmuls(function: Any, *arguments: Any) -> int:
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return text.count(" dot(") + text.count("__onednn$matmul") + text.count("custom-call(")


def test_b_and_w_do_each_product_once() -> None:
    """Together as many as the whole backward pass, W those of its matrices."""
    params, x, dy, extras = problem()
    loop = LayerLoop(unroll=True, remat="none")
    split = layers(loop)
    _, saved = split.forward_with_residuals(params, x, extras)
    leaves, tree = jax.tree.flatten(saved)

    def backward(leaves: Any, params: Any, dy: jax.Array) -> Any:
        return split.backward(jax.tree.unflatten(tree, leaves), params, dy, extras)

    _, _, stash = backward(leaves, params, dy)
    of_b = matmuls(backward, leaves, params, dy)
    of_w = matmuls(split.weight_gradients, stash, params)
    forward = lambda p, x: split.layers(p, x, extras)  # noqa: E731
    of_all = matmuls(lambda p, x, dy: jax.vjp(forward, p, x)[1](dy), params, x, dy)
    of_forward = matmuls(forward, params, x)
    assert of_w == LAYERS * len(MATRICES)
    assert of_b + of_w == of_all - of_forward


def test_what_is_saved_holds_no_weight() -> None:
    params, x, _, extras = problem()
    split = layers(LayerLoop(unroll=True, remat="none"))
    _, saved = split.forward_with_residuals(params, x, extras)
    shapes = {tuple(leaf.shape) for leaf in jax.tree.leaves(saved)}
    assert shapes and shapes.isdisjoint(SHAPES[name] for name in MATRICES)
