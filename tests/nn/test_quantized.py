"""Numbers of 8 bits and their products against NumPy and ml_dtypes; their errors by closed form."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxtrain.nn.communicator import Adapter
from jaxtrain.nn.local import Local
from jaxtrain.nn.remat import REMAT, remat
from jaxtrain.quantization import Fp8Products, Int8Products
from jaxtrain.quantization.formats import (
    E4M3,
    E5M2,
    INT8,
    Format,
    Scaled,
    dequantize,
    quantize,
)
from jaxtrain.quantization.products import (
    MOST_TERMS,
    column,
    product,
    product_of_numbers,
    row,
)
from jaxtrain.quantization.weights import QuantizedWeight, Ways, differentiated, standing_for

FORMATS = (E4M3, E5M2, INT8)
PRODUCTS = (Fp8Products(), Int8Products())
TYPES = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
}
TOKENS, K, COLUMNS = 12, 16, 20


def drawn(*shape, seed=0, spread=1.0):
    """Normal numbers of several magnitudes, as float32."""
    random = np.random.default_rng(seed)
    wide = random.normal(size=shape) * np.exp(spread * random.normal(size=shape))
    return wide.astype(np.float32)


def expected_scale(x, form):
    """In Python's own numbers: the largest magnitude over the format's, of floats the least power
    of two that is no less."""
    greatest = float(np.abs(x).max())
    if form == INT8:
        return greatest / 127
    scale = 2.0 ** math.floor(math.log2(greatest / form.largest) - 1)
    while greatest / scale > form.largest:
        scale *= 2
    return scale


def reference(x, form):
    """(numbers in fp64, scale): cast by ml_dtypes, or rounded by NumPy."""
    scale = expected_scale(x, form)
    shrunk = (x.astype(np.float64) / scale).astype(np.float32)
    kind = TYPES[form.dtype]
    numbers = np.rint(shrunk).astype(kind) if form == INT8 else shrunk.astype(kind)
    return numbers.astype(np.float64), scale


@pytest.mark.parametrize("size", [1.0, 448.0, 449.0, 3e-30, 1e30])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.dtype)
def test_numbers_are_those_of_another_library(form: Format, size: float) -> None:
    x = drawn(64, 33) * np.float32(size)
    found = quantize(jnp.asarray(x), form)
    numbers, scale = reference(x, form)
    assert float(found.scale) == pytest.approx(scale, rel=1e-6 if form == INT8 else 0)
    assert found.numbers.dtype == TYPES[form.dtype]
    np.testing.assert_array_equal(np.asarray(found.numbers).astype(np.float64), numbers)
    assert np.abs(numbers).max() <= form.largest
    assert np.abs(numbers).max() > form.largest / 2, "half of the range would be left"


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.dtype)
def test_a_tensor_of_zeros_stays_and_one_with_no_number_is_none(form: Format) -> None:
    zeros = quantize(jnp.zeros((2, 3)), form)
    assert float(zeros.scale) == 1.0 and not dequantize(zeros).any()
    for bad in (np.nan, np.inf, -np.inf):
        found = quantize(jnp.asarray([1.0, bad, 2.0]), form)
        assert not np.isfinite(dequantize(found)).any(), "a skipped step is known by it"


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.dtype)
def test_a_tensor_of_the_least_numbers_has_a_scale_with_an_inverse(form: Format) -> None:
    """Beyond it what is left of the range is less; no number is lost to an infinite one."""
    x = jnp.asarray([2.0**-120, -(2.0**-121), 0.0], jnp.float32)
    found = quantize(x, form)
    assert float(found.scale) >= 2.0**-126
    np.testing.assert_allclose(dequantize(found), x, atol=2.0**-126)


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.dtype)
def test_twice_a_tensor_has_the_same_numbers(form: Format) -> None:
    x = jnp.asarray(drawn(32, 32))
    once, twice = quantize(x, form), quantize(2 * x, form)
    np.testing.assert_array_equal(once.numbers, twice.numbers)
    assert float(twice.scale) == 2 * float(once.scale)


def quantised(products, *weights):
    """Weights as layers use them, by the communicator of one device."""
    names = [f"w{i}" for i in range(len(weights))]
    comm = Local(jnp.float32, quantized=products, products=frozenset(names))
    made = comm.fetch(dict(zip(names, map(jnp.asarray, weights), strict=True)), "")
    return comm, tuple(made[name] for name in names)


def value(pair):
    numbers, scale = pair
    return numbers * scale


@pytest.mark.parametrize("products", PRODUCTS, ids=lambda p: type(p).__name__)
def test_products_and_their_gradients_are_those_of_the_rounded_operands(products) -> None:
    """All three products, in fp64 of what ml_dtypes and NumPy round: y, dx and dw, of two weights
    split by column and of one split by row."""
    x, w, v = drawn(TOKENS, K), drawn(K, COLUMNS, seed=1), 3 * drawn(K, 8, seed=2)
    dys = (1e-3 * drawn(TOKENS, COLUMNS, seed=3), 50 * drawn(TOKENS, 8, seed=4))
    comm, weights = quantised(products, w, v)
    moved = tuple(map(differentiated, weights))

    def columns(x, moved):
        used = (standing_for(q, m) for q, m in zip(weights, moved, strict=True))
        return comm.column(x, *used)

    def one_row(x, moved):
        return comm.row(x, standing_for(weights[0], moved[0]))

    rounded = [value(reference(each, products.forward)) for each in (x, w, v)]
    gradients = [value(reference(dy, products.backward)) for dy in dys]
    ys, back = jax.vjp(columns, jnp.asarray(x), moved)
    dx, dws = back(tuple(map(jnp.asarray, dys)))
    wanted = [rounded[0] @ rounded[1], rounded[0] @ rounded[2]]
    wanted += [gradients[0] @ rounded[1].T + gradients[1] @ rounded[2].T]
    wanted += [rounded[0].T @ dy for dy in gradients]
    for found, right in zip((*ys, dx, *dws), wanted, strict=True):
        assert np.abs(found - right).max() < 1e-5 * np.abs(right).max()
    y, back = jax.vjp(one_row, jnp.asarray(x), moved)
    dx, (dw, dv) = back(jnp.asarray(dys[0]))
    wanted = [wanted[0], gradients[0] @ rounded[1].T, wanted[3]]
    for found, right in zip((y, dx, dw), wanted, strict=True):
        assert np.abs(found - right).max() < 1e-5 * np.abs(right).max()
    assert not dv.any()


@pytest.mark.parametrize("products", PRODUCTS, ids=lambda p: type(p).__name__)
def test_adapters_multiply_the_rounded_operands(products) -> None:
    """In fp64 of what NumPy rounds, A and B themselves not. By column x alone is rounded for A; by
    row also dy, of which gradients of A and B are made."""
    x, w, a = drawn(TOKENS, K), drawn(K, COLUMNS, seed=1), drawn(K, 3, seed=2)
    b, scale = drawn(3, COLUMNS, seed=3), 0.375
    dy, dz = 1e-3 * drawn(TOKENS, COLUMNS, seed=4), 20 * drawn(TOKENS, 3, seed=5)
    comm, (weight,) = quantised(products, w)
    rx, rw = (value(reference(each, products.forward)) for each in (x, w))
    rdy = value(reference(dy, products.backward))

    def close(found, wanted):
        for one, right in zip(found, wanted, strict=True):
            assert np.abs(one - right).max() < 1e-5 * np.abs(right).max()

    def columns(x, moved, a):
        return comm.column(x, standing_for(weight, moved), a)

    moved = differentiated(weight)
    ys, back = jax.vjp(columns, jnp.asarray(x), moved, jnp.asarray(a))
    gradients = back((jnp.asarray(dy), jnp.asarray(dz)))
    close(ys, [rx @ rw, rx @ a])
    close(gradients, [rdy @ rw.T + dz @ a.T, rx.T @ rdy, rx.T @ dz])

    def one_row(x, moved, a, b):
        return comm.row(x, standing_for(weight, moved), Adapter(a, b, scale))

    y, back = jax.vjp(one_row, jnp.asarray(x), moved, jnp.asarray(a), jnp.asarray(b))
    change, dchange = rx @ a * scale, rdy @ b.T * scale
    close([y], [rx @ rw + change @ b])
    wanted = [rdy @ rw.T + dchange @ a.T, rx.T @ rdy, rx.T @ dchange, change.T @ rdy]
    close(back(jnp.asarray(dy)), wanted)


def test_adapters_beside_8_bits_stay_in_the_compute_dtype() -> None:
    comm = Local(jnp.bfloat16, quantized=Fp8Products(), products=frozenset({"w"}))
    drawn_as = lambda *shape: jnp.asarray(drawn(*shape), jnp.bfloat16)  # noqa: E731
    x, a, b = drawn_as(TOKENS, K), drawn_as(K, 3), drawn_as(3, COLUMNS)
    weight = comm.fetch({"w": drawn_as(K, COLUMNS)}, "")["w"]
    y, back = jax.vjp(lambda x, a, b: comm.row(x, weight, Adapter(a, b, 2.0)), x, a, b)
    ys, back_columns = jax.vjp(lambda x, a: comm.column(x, weight, a), x, a)
    made = (y, *back(y), *ys, *back_columns(ys))
    assert {each.dtype for each in made} == {jnp.dtype(jnp.bfloat16)}


def error_of(x, form):
    """How far each number may be from x: half of what lies between two of its neighbours."""
    scale = expected_scale(x, form)
    if form == INT8:
        return np.full(x.shape, scale / 2)
    bits = {"float8_e4m3fn": (3, -6), "float8_e5m2": (2, -14)}[form.dtype]
    fraction, least = bits
    return np.maximum(np.abs(x) * 2.0 ** -(fraction + 1), scale * 2.0 ** (least - fraction - 1))


@pytest.mark.parametrize("products", PRODUCTS, ids=lambda p: type(p).__name__)
def test_the_error_of_a_product_is_within_its_bound(products) -> None:
    """|ab - a'b'| <= |a| eb + |b| ea + ea eb of each term; of so many terms of both signs the error
    is a few per cent of that, and far from nothing."""
    x, w = drawn(64, 256), drawn(256, 48, seed=1)
    comm, (weight,) = quantised(products, w)
    (y,) = comm.column(jnp.asarray(x), weight)
    ex, ew = error_of(x, products.forward), error_of(w, products.forward)
    bound = np.abs(x) @ ew + ex @ np.abs(w) + ex @ ew
    error = np.abs(y - x.astype(np.float64) @ w)
    assert (error <= bound).all()
    assert 0.02 < (error / bound).max() < 0.9


def test_whole_numbers_are_added_exactly_however_many_there_are() -> None:
    """127 * 127 * k is beyond int32 from `MOST_TERMS` on; the last term is another."""
    k = MOST_TERMS + 1000
    x = jnp.full((1, k), 127, jnp.int8).at[0, -1].set(-127)
    w = Scaled(jnp.full((k, 1), 127, jnp.int8), jnp.float32(1.0))
    assert 127 * 127 * k > 2**31
    assert float(product(x, w)[0, 0]) == np.float32(127 * 127 * (k - 2))


@pytest.mark.parametrize("products", PRODUCTS, ids=lambda p: type(p).__name__)
def test_outputs_and_gradients_have_the_compute_dtype(products) -> None:
    x, w = jnp.asarray(drawn(TOKENS, K), jnp.bfloat16), jnp.asarray(drawn(K, COLUMNS, seed=1))
    comm = Local(jnp.bfloat16, quantized=products, products=frozenset({"w"}))
    weight = comm.fetch({"w": w}, "")["w"]
    run = lambda x, m: comm.row(x, standing_for(weight, m))  # noqa: E731
    y, back = jax.vjp(run, x, differentiated(weight))
    assert {y.dtype, *(each.dtype for each in back(y))} == {jnp.dtype(jnp.bfloat16)}


def test_only_named_matrices_are_quantised_and_frozen_ones_have_no_gradient() -> None:
    w = jnp.asarray(drawn(K, COLUMNS))
    comm = Local(jnp.float32, quantized=Fp8Products(), products=frozenset({"a.w"}))
    found = comm.fetch({"w": w, "v": w, "b": w[0]}, "a.")
    assert isinstance(found["w"], QuantizedWeight) and found["v"] is w
    assert not isinstance(comm.fetch({"w": w}, "b.")["w"], QuantizedWeight)
    x = jnp.asarray(drawn(TOKENS, K))
    y, back = jax.vjp(lambda x: comm.column(x, found["w"])[0], x)
    trained = lambda x, m: comm.column(x, standing_for(found["w"], m))[0]  # noqa: E731
    same, both = jax.vjp(trained, x, differentiated(found["w"]))
    np.testing.assert_array_equal(y, same)
    np.testing.assert_array_equal(back(y)[0], both(y)[0])


def test_a_matrix_in_8_bits_is_read_by_products_alone() -> None:
    _, (weight,) = quantised(Fp8Products(), drawn(K, COLUMNS))
    assert weight[...] is weight
    for read in (lambda: weight[0], lambda: jnp.sum(weight), lambda: jnp.ones((2, K)) @ weight):
        with pytest.raises(ValueError, match=r"\[16, 20\] is read .*column or row alone, or use"):
            read()


def test_gathered_parameters_get_gradients_as_they_rest() -> None:
    """What stands beside the stack: fp32 parameters, used in 8 bits of their bf16."""
    comm = Local(jnp.bfloat16, quantized=Int8Products(), products=frozenset({"w"}))
    params = {"w": jnp.asarray(0.02 * drawn(K, COLUMNS)), "b": jnp.asarray(drawn(COLUMNS, seed=1))}
    x = jnp.asarray(drawn(TOKENS, K), jnp.bfloat16)

    def run(params, x):
        used, x = comm.gather(params, "", x)
        return jnp.sum(jnp.sin(comm.row(x, used["w"]).astype(jnp.float32) + used["b"][None]))

    def plainly(params, x):
        return jnp.sum(
            jnp.sin((x @ params["w"].astype(x.dtype)).astype(jnp.float32) + params["b"][None])
        )

    found, right = (jax.grad(f, argnums=(0, 1))(params, x) for f in (run, plainly))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert 0 < np.abs(a - b).max() < 0.1 * np.abs(b).max()


KEPT = {"none": 0, "full": 1, "attention": 1, "dots": 0, "dots_and_attention": 0}
"""Products that each policy has made again, of two of which the backward pass reads the first."""


@pytest.mark.parametrize("policy", REMAT)
def test_policies_keep_the_outputs_of_products(policy: str) -> None:
    comm, (w, v) = quantised(Fp8Products(), drawn(K, COLUMNS), drawn(COLUMNS, K, seed=1))

    def run(x):
        (y,) = comm.column(x, w)
        return comm.row(jnp.tanh(y), v)

    def both(x, dy):
        y, back = jax.vjp(remat(run, policy), x)
        return y, back(dy)

    x = jnp.asarray(drawn(TOKENS, K))
    text = jax.jit(both).lower(x, x).compile().as_text()
    dots = sum(" dot(" in line for line in text.splitlines())
    assert dots == 4 + KEPT[policy]  # two forward, and the gradients of both inputs


def test_ways_of_one_device_take_no_ring() -> None:
    ways = Ways(Fp8Products(), jnp.float32)
    assert ways.ring is None
    _, (weight,) = quantised(Fp8Products(), drawn(K, COLUMNS))
    x = jnp.asarray(drawn(TOKENS, K))
    np.testing.assert_array_equal(column(ways, x, (weight,))[0], row(ways, x, weight))
    assert replace(weight, stand_in=None).shape == (K, COLUMNS)


def test_products_with_gradients_ask_for_whole_sums() -> None:
    """At the default precision a Hopper GPU may add 8-bit floats up in fewer bits than fp32's."""
    numbers = jnp.ones((4, 4), E4M3.dtype)
    found = []
    for other in (E4M3, E5M2):
        traced = jax.make_jaxpr(product_of_numbers)(numbers, jnp.ones((4, 4), other.dtype))
        (dot,) = (e for e in traced.jaxpr.eqns if e.primitive.name == "dot_general")
        found.append(dot.params["precision"])
    assert found == [None, (jax.lax.Precision.HIGHEST,) * 2]
