"""Adapters beside matrices: what they change, what they keep in memory, what bf16 leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain
from jaxtrain.models.adapters import (
    INTO,
    OUT_OF,
    Adapters,
    adapter_places,
    column,
    merge_adapters,
    row,
)
from jaxtrain.models.build import build_model
from jaxtrain.nn.local import Local
from jaxtrain.nn.module import put_together, take_apart
from jaxtrain.nn.remat import REMAT
from jaxtrain.nn.stack import LayerLoop

SCALE = 2.0


def problem(size: int, rank: int, lr: float) -> dict[str, jax.Array]:
    """A matrix with an adapter after about one step of Adam."""
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(0, 0.02, (size, size)), jnp.float32),
        "w_lora_a": jnp.asarray(rng.normal(0, size**-0.5, (size, rank)), jnp.float32),
        "w_lora_b": jnp.asarray(lr * rng.choice([-1.0, 1.0], (rank, size)), jnp.float32),
    }


@pytest.mark.parametrize("way", ["column", "row"])
def test_small_changes_are_not_rounded_away_in_bf16(way: str) -> None:
    """Added to w before the product, four of five would be."""
    params = problem(256, 8, 1e-4)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(64, 256)), jnp.bfloat16)

    def module(scale: float) -> Any:
        held = {k: v.astype(jnp.bfloat16) for k, v in params.items()}
        return SimpleNamespace(lora_scale=scale, **held)

    class Exact(Local):
        """The sum of both products as it is, where the output would be rounded to bf16."""

        def column(self, x: Any, *weights: Any) -> Any:
            return tuple(jnp.matmul(x, w, preferred_element_type=jnp.float32) for w in weights)

        def multiply(self, x: Any, weight: Any) -> Any:
            return jnp.matmul(x, weight, preferred_element_type=jnp.float32)

        def row(self, x: Any, weight: Any, adapter: Any = None) -> Any:
            return self.multiply(x, weight) + self.multiply(*self.adapter_pair(x, adapter))

    comm = Exact(jnp.bfloat16)

    def out(scale: float) -> np.ndarray:
        if way == "row":
            return np.asarray(row(comm, module(scale), "w", x), np.float64)
        return np.asarray(column(comm, module(scale), ("w",), x)[0], np.float64)

    change = out(SCALE) - out(0.0)
    exact = {k: np.asarray(v, np.float64) for k, v in params.items()}
    wanted = SCALE * np.asarray(x, np.float64) @ exact["w_lora_a"] @ exact["w_lora_b"]
    assert np.abs(change - wanted).max() < 1e-2 * np.abs(wanted).max()


def test_merged_is_what_is_used() -> None:
    params = problem(32, 4, 0.1)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(8, 32)), jnp.float32)
    module = SimpleNamespace(lora_scale=SCALE, **params)
    wanted = x @ merge_adapters(params, SCALE)["w"]
    comm = Local()
    for found in (column(comm, module, ("w",), x)[0], row(comm, module, "w", x)):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_no_two_matrices_begin_with_the_same_adapter() -> None:
    """Every leaf and layer has numbers of its own, a standard deviation of in ** -0.5, and a B of
    zeros."""
    rank, block = 4, jaxtrain.BlockConfig(jaxtrain.AttentionConfig(2), jaxtrain.MlpConfig(16))
    config = jaxtrain.DecoderConfig(11, 16, 3, (block,), prefix=(block,), vocab_multiple=1)
    names = tuple(adapter_places(config.describe()))
    adapters = Adapters(rank, SCALE, names)
    params = take_apart(build_model(config, jax.random.key(0), adapters=adapters)).params
    matrices = []
    for name in names:
        a = np.asarray(params[name + INTO], np.float64)
        assert not np.any(np.asarray(params[name + OUT_OF]))
        for matrix in a.reshape(-1, *a.shape[-2:]):
            assert matrix.shape == (16, rank), name
            matrices.append(matrix.ravel() * 16**0.5)
    assert len(matrices) == 3 * 7
    likeness = np.corrcoef(matrices)
    np.fill_diagonal(likeness, 0)
    assert np.abs(likeness).max() < 0.6  # of 64 numbers that are drawn apart: 8 ** -1 is usual
    assert np.std(matrices) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize(
    "remat",
    [r if r == "full" else pytest.param(r, marks=pytest.mark.slow) for r in REMAT],
)
@pytest.mark.sampled(3)
def test_nothing_of_a_matrix_size_is_kept_for_the_backward_pass(remat: str, unroll: bool) -> None:
    """Neither a matrix with its adapter nor A B; but for the parameters themselves."""
    attention = jaxtrain.AttentionConfig(2, kv_heads=1)
    block = jaxtrain.BlockConfig(attention, jaxtrain.MlpConfig(24))
    plain = jaxtrain.DecoderConfig(11, 16, 3, (block,), vocab_multiple=1)
    inside = ("query", "key", "value", "out")
    names = [f"period.0.attention.{n}" for n in inside]
    names += [f"period.0.mlp.{n}" for n in ("gate", "up", "down")]
    tokens = jnp.zeros((5, 8), jnp.int32)
    sizes = {(16, 16), (16, 8), (16, 24), (24, 16)}

    def kept(adapters: Adapters | None) -> list[tuple[int, ...]]:
        split = take_apart(build_model(plain, jax.random.key(0), adapters=adapters))

        def loss(params: Any) -> jax.Array:
            model, loop = put_together(split.static, params), LayerLoop(remat=remat, unroll=unroll)
            return model.loss({"tokens": tokens, "targets": tokens}, loop=loop)[0]

        residuals = jax.tree.leaves(jax.vjp(loss, split.params)[1])
        return sorted(each.shape for each in residuals if each.shape[-2:] in sizes)

    found = kept(Adapters(2, SCALE, tuple(names)))
    assert found == kept(None) and len(found) >= len(names)
