"""Which kernel attends between the parts of a row: the one asked for wherever it computes that."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.attention import Blockwise, Cudnn, Reference, Splash, Triton
from jaxtrain.attention.kernels import PlatformKernel
from jaxtrain.attention.online_softmax import AttentionMask, Scoring
from jaxtrain.context.tiles import tile_kernel

HERE = AttentionMask(causal=True)
BEFORE = AttentionMask(causal=False)
"""Keys of an earlier part, all of which every query sees."""


def window(offset: int) -> AttentionMask:
    return AttentionMask(causal=True, window=96, offset=offset)


CASES: list[tuple[Any, AttentionMask, dict[str, Any], bool]] = [
    (Cudnn(), HERE, {}, True),
    (Cudnn(), BEFORE, {}, True),
    (Cudnn(), window(0), {}, True),
    (Cudnn(), window(128), {}, False),
    (Cudnn(), BEFORE, {"softcap": 30.0}, False),
    (Cudnn(), BEFORE, {"dtype": jnp.float32}, False),
    (Cudnn(), BEFORE, {"head_dim": 256}, False),
    (Splash(), BEFORE, {}, True),
    (Splash(), window(128), {"softcap": 30.0}, True),
    (Splash(), BEFORE, {"seq": 96}, False),
    (Splash(), BEFORE, {"head_dim": 96}, False),
    (Triton(), BEFORE, {}, True),
    (Triton(), HERE, {"documents": True}, True),
    (Triton(), BEFORE, {"documents": True}, False),
    (Triton(), window(0), {}, False),
    (Blockwise(16, 16), window(128), {"softcap": 30.0, "documents": True}, True),
    (Reference(), BEFORE, {}, False),
]


@pytest.mark.parametrize(("kernel", "mask", "asked", "taken"), CASES, ids=str)
def test_a_tile_has_the_kernel_asked_for_where_it_computes_that(
    kernel: Any, mask: AttentionMask, asked: dict[str, Any], taken: bool
) -> None:
    shape = (1, asked.get("seq", 128), 2, asked.get("head_dim", 64))
    q = jax.ShapeDtypeStruct(shape, asked.get("dtype", jnp.bfloat16))
    scoring = Scoring(mask, scale=1.0, softcap=asked.get("softcap"))
    found: list[Any] = []

    def traced(q: jax.Array) -> jax.Array:
        found.append(tile_kernel(kernel, q, scoring, documents=asked.get("documents", False)))
        return q

    jax.eval_shape(traced, q)
    assert found == [kernel] if taken else isinstance(found[0], Blockwise)


@pytest.mark.parametrize(
    ("kernel", "told"),
    [
        (Triton(), r"for gpu here \(documents between different places are not supported\)"),
        (Reference(), r"for gpu here \(Reference\(\) returns no log-sum-exp\)"),
    ],
    ids=str,
)
def test_why_a_named_kernel_does_not_compute_a_tile_is_told(
    kernel: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own reason, not those of the platform's kernels."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    q = jnp.zeros((1, 128, 2, 64), jnp.bfloat16)
    with pytest.warns(UserWarning, match=told):
        tile_kernel(kernel, q, Scoring(BEFORE, scale=1.0), documents=True)


@pytest.mark.parametrize(
    ("platform", "dtype", "mask", "reason"),
    [
        ("tpu", jnp.float32, BEFORE, "dtype=float32"),
        ("gpu", jnp.float32, BEFORE, "dtype=float32"),
        ("gpu", jnp.bfloat16, window(128), "no fused"),
        ("gpu", jnp.bfloat16, BEFORE, None),
        ("cpu", jnp.float32, BEFORE, None),
    ],
)
def test_an_accelerator_without_a_fused_kernel_for_a_tile_is_told(
    platform: str, dtype: Any, mask: AttentionMask, reason: str | None
) -> None:
    kernel, q = PlatformKernel(platform, 9), jnp.zeros((1, 128, 2, 64), dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tile_kernel(kernel, q, Scoring(mask, scale=1.0), documents=False)
    assert [reason in str(warning.message) for warning in caught] == (
        [] if reason is None else [True]
    )
