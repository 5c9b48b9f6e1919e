"""Experts' products in 8 bits against NumPy, by each kernel; those of Pallas run in Python here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxtrain.moe import BlockLoop, Megablox, TritonBlocks
from jaxtrain.moe.layer import plan_rows
from jaxtrain.moe.narrow import grouped_matmuls
from jaxtrain.nn.local import Local
from jaxtrain.nn.remat import REMAT, remat
from jaxtrain.quantization import Delayed, Fp8Products, Int8Products
from jaxtrain.quantization.delayed import SCALES, entry
from jaxtrain.quantization.formats import Format
from jaxtrain.quantization.weights import differentiated

TRITON = TritonBlocks(largest_block=32, columns=32, depth=16, interpret=True)
MEGABLOX = Megablox(tile=(128, 128, 128), interpret=True)
KERNELS = [BlockLoop(largest_block=32), TRITON, MEGABLOX]
SIZES, EMBED, HIDDEN = (100, 0, 28), 32, 48
TYPES = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
}


def rounded(x: np.ndarray, form: Format) -> np.ndarray:
    """In the format by a scale of its own, and back, by NumPy and ml_dtypes."""
    greatest = float(np.abs(x).max(initial=0.0))
    if not greatest:
        return np.zeros_like(x)
    scale = greatest / form.largest
    if not form.is_integer:
        scale = 2.0 ** np.ceil(np.log2(scale))
    shrunk = (x / scale).astype(np.float32)
    return (np.round(shrunk) if form.is_integer else shrunk).astype(TYPES[form.dtype]) * scale


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: type(k).__name__)
@pytest.mark.parametrize("products", [Fp8Products(), Int8Products(), Fp8Products(Delayed(1))])
def test_experts_multiply_as_each_would_alone(products: Any, kernel: Any) -> None:
    """One a thousand times larger than another, and one without rows. With delayed scales by those
    that it would have had, and it says so of the next."""
    rng = np.random.default_rng(0)
    chosen = rng.permutation(np.repeat(np.arange(3), SIZES))[:, None].astype(np.int32)
    plan = plan_rows(jnp.asarray(chosen), 3, kernel.largest_block)
    real = np.asarray(plan.slots)[:, None] < chosen.size
    owner = np.repeat(plan.owners, len(plan.slots) // len(plan.owners))
    size = np.array([1.0, 1.0, 1000.0])
    x = np.float32(rng.normal(size=(len(real), EMBED)) * real * size[owner, None])
    dys = [np.float32(rng.normal(size=(len(real), HIDDEN)) * real) for _ in range(2)]
    ws = [np.float32(rng.normal(size=(3, EMBED, HIDDEN)) * size[:, None, None]) for _ in dys]
    names = ("gate", "up")
    tables = {k + SCALES: jnp.zeros((3, 768)) for k in names if products.scaling}
    forms = (products.forward, products.forward, products.backward)
    for k, w, dy in zip(names, ws, dys, strict=True):
        if products.scaling:
            of = [[v[owner == e] for v in (x, dy)] for e in range(3)]
            each = [
                [
                    entry(jnp.float32(np.abs(v).max(initial=0.0)), f)
                    for v, f in zip(row, forms, strict=True)
                ]
                for row in ((of[e][0], w[e], of[e][1]) for e in range(3))
            ]
            tables[k + SCALES] = jnp.stack([jnp.concatenate(row) for row in each])
    comm = Local(jnp.float32, quantized=products, expert_matrices=frozenset(names))
    weights = comm.fetch({**dict(zip(names, map(jnp.asarray, ws), strict=True)), **tables}, "")

    def run(x: Any, moved: Any, tables: Any) -> Any:
        used = [
            replace(weights[k], stand_in=moved[k], scales=tables.get(k + SCALES)) for k in names
        ]
        return grouped_matmuls(kernel, x, tuple(used), plan.owners)

    moved = {k: differentiated(weights[k]) for k in names}
    ys, back = jax.vjp(run, jnp.asarray(x), moved, tables)
    dx, dws, found = back(tuple(map(jnp.asarray, dys)))
    wanted_dx = np.zeros_like(x)
    for k, w, dy, y in zip(names, ws, dys, ys, strict=True):
        for e in range(3):
            mine = owner == e
            triple = (x[mine], w[e], dy[mine])
            xr, wr, dyr = (
                rounded(v, f).astype(np.float64) for v, f in zip(triple, forms, strict=True)
            )
            wanted_dx[mine] += dyr @ wr.T
            near(y[mine], xr @ wr)
            near(dws[k][e], xr.T @ dyr)
        if products.scaling:
            np.testing.assert_array_equal(found[k + SCALES], tables[k + SCALES])
    for e in range(3):
        near(dx[owner == e], wanted_dx[owner == e])


@pytest.mark.parametrize("policy", [name for name in REMAT if name != "none"])
def test_policies_save_no_product_of_experts(policy: str) -> None:
    """As of experts in 16 bits: neither rows nor hidden units of them."""
    rows, experts = 128, 2
    comm = Local(jnp.float32, quantized=Fp8Products(), expert_matrices=frozenset({"up", "down"}))
    matrices = {
        "up": jnp.ones((experts, EMBED, HIDDEN)),
        "down": jnp.ones((experts, HIDDEN, EMBED)),
    }
    weights = comm.fetch(matrices, "")
    owners = jnp.arange(experts)

    def run(x: Any) -> Any:
        (hidden,) = grouped_matmuls(BlockLoop(), x, (weights["up"],), owners)
        return grouped_matmuls(BlockLoop(), jnp.tanh(hidden), (weights["down"],), owners)[0]

    _, back = jax.vjp(remat(run, policy), jnp.ones((rows, EMBED)))
    sizes = [leaf.size for leaf in jax.tree.leaves(back)]
    assert rows * HIDDEN not in sizes and sizes.count(rows * EMBED) == 1, "the input alone"


def near(found: Any, wanted: np.ndarray) -> None:
    bound = 1e-5 * np.abs(wanted).max(initial=1e-30)
    assert found.shape == wanted.shape
    assert np.abs(np.asarray(found, np.float64) - wanted).max(initial=0.0) <= bound
