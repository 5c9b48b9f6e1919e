"""Delayed scales against a history that Python keeps, and products by them against NumPy."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxtrain.nn.local import Local
from jaxtrain.quantization import Delayed, Fp8Products
from jaxtrain.quantization.delayed import (
    FIRST,
    SCALES,
    first_table,
    next_table,
    scale_of,
    seen,
)
from jaxtrain.quantization.formats import E4M3, E5M2, Format
from jaxtrain.quantization.weights import differentiated, standing_for

FORMS = {"x": E4M3, "w": E4M3, "dy": E5M2}
TYPES = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
TOKENS, K, COLUMNS = 12, 16, 20


def needed(greatest: float, form: Format) -> float:
    """The least power of two by which this magnitude is within the format, by Python's numbers."""
    scale = 2.0 ** (math.floor(math.log2(greatest / form.largest)) - 1)
    while greatest > form.largest * scale:
        scale *= 2
    return scale


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    wide = random.normal(size=shape) * np.exp(random.normal(size=shape))
    return wide.astype(np.float32)


@pytest.mark.parametrize("history", [1, 3, 16])
def test_a_scale_is_the_greatest_that_the_steps_before_needed(history: int) -> None:
    """Of tensors whose size jumps by up to 2^40 either way; a step of zeros counts for none, one
    that is not finite neither. What they are taken for before any is seen counts until one is."""
    random = np.random.default_rng(history)
    w = drawn(2, K, COLUMNS)
    table = first_table(jnp.asarray(w), E4M3, E5M2, history, 2.0**-9)
    dy = FIRST["dy"] * 2.0**-9
    greatest = {"x": [FIRST["x"]] * 2, "w": np.abs(w).max((1, 2)), "dy": [dy] * 2}
    guessed = {(row, layer) for row in ("x", "dy") for layer in range(2)}
    known = {
        (row, layer): deque([needed(float(greatest[row][layer]), FORMS[row])], history)
        for row in FORMS
        for layer in range(2)
    }
    for _ in range(40):
        found = np.zeros(table.shape, np.float32)
        for (row, layer), steps in known.items():
            kind = random.integers(5)
            parts = [drawn(6, seed=random.integers(99)) * 2.0 ** random.integers(-40, 40)]
            parts.append(parts[0] / 1000)  # of another device, or microbatch
            if kind < 2:
                parts = [np.zeros(6, np.float32)] if kind else [np.float32([1.0, np.nan])]
            at = list(FORMS).index(row) * 256
            for part in parts:
                found[layer, at : at + 256] += np.asarray(seen(jnp.asarray(part), FORMS[row]))
            if kind >= 2 and (row, layer) in guessed:
                guessed.remove((row, layer))
                steps.clear()
            if kind >= 2:
                steps.append(needed(float(np.abs(parts[0]).max()), FORMS[row]))
        table = next_table(table, jnp.asarray(found / 7.0), history)
        for (row, layer), steps in known.items():
            assert float(scale_of(table[layer], row)) == max(steps), (row, layer)


def test_a_step_has_one_scale_of_each_tensor_whatever_parts_it_saw() -> None:
    """So that the leaf is the same where more devices, or microbatches, saw smaller parts."""
    table = first_table(jnp.asarray(drawn(K, COLUMNS)), E4M3, E5M2, 4)
    small, large = (seen(jnp.full(3, x), E4M3) for x in (0.01, 30.0))
    few = jnp.concatenate([large, large, large])
    many = jnp.concatenate([large + 3 * small, 2 * large + small, large])
    np.testing.assert_array_equal(next_table(table, few, 4), next_table(table, many, 4))


def by_scales(scales: dict[str, float], weights: dict[str, np.ndarray]) -> tuple:
    """One device's communicator, weights as layers use them, and their leaves of scales."""
    comm = Local(jnp.float32, quantized=Fp8Products(Delayed(1)), products=frozenset(weights))
    rows = [np.float32(np.log2(scales[row]) + 127 == np.arange(256)) for row in FORMS]
    tables = {k + SCALES: jnp.asarray(np.concatenate(rows)) for k in weights}
    made = comm.fetch({**{k: jnp.asarray(w) for k, w in weights.items()}, **tables}, "")
    return comm, {k: made[k] for k in weights}, {k: tables[k + SCALES] for k in weights}


def rounded(x: np.ndarray, scale: float, form: Format) -> np.ndarray:
    """Cut off at the largest number, cast by ml_dtypes."""
    cut = np.clip(x.astype(np.float64) / scale, -form.largest, form.largest)
    return cut.astype(np.float32).astype(TYPES[form]).astype(np.float64) * scale


@pytest.mark.parametrize("room", [4.0, 1.0, 2.0**-3])
@pytest.mark.parametrize("split", ["column", "row"])
def test_products_are_those_of_operands_rounded_by_the_scales_given(
    split: str, room: float
) -> None:
    """Some of the operands cut off where there is no room; and each scale's gradient says what its
    tensor needed in this step."""
    x, dy = drawn(TOKENS, K), 1e-3 * drawn(TOKENS, COLUMNS, seed=3)
    ws = {"a": drawn(K, COLUMNS, seed=1)} | (
        {"b": drawn(K, COLUMNS, seed=2)} if split == "column" else {}
    )
    of = {"x": x, "w": ws["a"], "dy": dy}
    scales = {k: room * needed(float(np.abs(v).max()), FORMS[k]) for k, v in of.items()}
    comm, weights, tables = by_scales(scales, ws)

    def run(x, moved, tables):
        used = [replace(standing_for(weights[k], moved[k]), scales=tables[k]) for k in weights]
        return comm.column(x, *used) if split == "column" else (comm.row(x, used[0]),)

    moved = {k: differentiated(w) for k, w in weights.items()}
    ys, back = jax.vjp(run, jnp.asarray(x), moved, tables)
    dx, dws, found = back((jnp.asarray(dy),) * len(ys))
    xr, dyr = rounded(x, scales["x"], E4M3), rounded(dy, scales["dy"], E5M2)
    wr = {k: rounded(w, scales["w"], E4M3) for k, w in ws.items()}
    pairs = [(y, xr @ w) for y, w in zip(ys, wr.values(), strict=True)]
    pairs += [(dx, sum(dyr @ w.T for w in wr.values()))]
    pairs += [(dw, xr.T @ dyr) for dw in dws.values()]
    for got, right in pairs:
        assert np.abs(got - right).max() < 1e-5 * np.abs(right).max()
    for name, w in ws.items():
        rows = np.asarray(found[name]).reshape(3, 256)
        wanted = [needed(float(np.abs(v).max()), f) for v, f in ((x, E4M3), (w, E4M3), (dy, E5M2))]
        assert (np.argmax(rows, 1) - 127 == np.log2(wanted)).all()
        assert (rows.sum(1) == 1).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_cut_off(bad: float) -> None:
    """A skipped step is known by it."""
    x = drawn(TOKENS, K)
    x[3, 4] = bad
    comm, weights, tables = by_scales({"x": 1.0, "w": 1.0, "dy": 1.0}, {"a": drawn(K, COLUMNS)})
    y = comm.row(jnp.asarray(x), replace(weights["a"], scales=tables["a"]))
    assert not np.isfinite(y[3]).any() and np.isfinite(np.delete(y, 3, 0)).all()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Delayed(0), "history=0 must be a whole number of 1 or more"),
        (lambda: Fp8Products(scaling="delayed"), r"scaling='delayed' must .* use Delayed\(\), or"),
    ],
)
def test_wrong_scaling_is_refused(make, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
