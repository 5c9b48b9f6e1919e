"""Functions of scores where rows and heads are on several devices, and on one by every kernel,
against dense attention in float64 with their values and gradients written out."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from score_functions import Fading
from test_methods import PACKED, Case, draw, row_starts

from jaxtrain.attention.blockwise import Blockwise
from jaxtrain.attention.cudnn import Cudnn
from jaxtrain.attention.kernels import (
    PlatformKernel,
    Reference,
    SelfAttention,
    choose,
    portable,
)
from jaxtrain.attention.online_softmax import AttentionMask, Scoring
from jaxtrain.attention.splash import Splash
from jaxtrain.attention.triton import Triton
from jaxtrain.context import GatheredKeys, RingAttention, TwoLevel, Ulysses
from jaxtrain.experiment.platform_kernels import Sequences, platform_attention
from jaxtrain.operations.attention import AttentionCall
from jaxtrain.scores import Alibi, RelativeBias, ScoreFunction
from jaxtrain.scores.function import ScoreTile


@dataclass(frozen=True)
class Placed(ScoreFunction):
    """Depends on the positions themselves, in their document, and on the head's number."""

    def __call__(
        self, score: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array
    ) -> jax.Array:
        return score + 0.1 * (head + 1) * jnp.sin(0.5 * query + key)


@dataclass(frozen=True)
class Steep(ScoreFunction):
    """Hides keys by itself, and has no finite derivative at a score of 0, as padding's are."""

    def __call__(
        self, score: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array
    ) -> jax.Array:
        return jnp.where(query - key < 6, jnp.sign(score) * jnp.sqrt(jnp.abs(score)), -jnp.inf)


FUNCTIONS = (Alibi(), RelativeBias(buckets=6, max_distance=12), Fading(), Placed(), Steep())
BUCKETS = [0, 1, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5, *[5] * 30]
"""Of each distance, by T5's formula with 3 narrow and 3 wide ones: 3 + 3 log(d / 3) / log(4)."""
CASES = {
    "causal": Case(heads=4, kv_heads=2),
    "packed": Case(documents=PACKED, heads=4, kv_heads=2),
    "window, softcap": Case(window=11, softcap=1.5, heads=4, kv_heads=4),
    "packed, window": Case(documents=PACKED, window=5, heads=4, kv_heads=2),
}


def values_of(function: ScoreFunction, heads: int) -> np.ndarray:
    start = function.of_heads(heads)
    noise = np.random.default_rng(5).normal(size=start.shape) * 0.3
    return (start + noise * function.trained).astype(np.float32)


@cache
def dense(case: Case, function: ScoreFunction) -> list[np.ndarray]:
    """o, dq, dk, dv and the gradient of the heads' values, in float64."""
    q, k, v, do = (x.astype(np.float64) for x in draw(case))
    values = values_of(function, case.heads).astype(np.float64)
    group = case.heads // case.kv_heads
    wide = [np.repeat(x, group, axis=2) for x in (k, v)]
    scores = np.einsum("bqhd,bkhd->bhqk", q, wide[0]) * case.head_dim**-0.5
    capped = scores if case.softcap is None else case.softcap * np.tanh(scores / case.softcap)
    places = np.arange(case.seq)
    distance = places[:, None] - places[None]
    seen = distance >= 0
    seen = seen if case.window is None else seen & (distance < case.window)
    seen, starts = np.broadcast_to(seen, scores.shape), row_starts(case)
    if starts is not None:
        seen = seen & (starts[:, None, :, None] == starts[:, None, None, :])
    far = np.maximum(distance, 0)
    factor, bias = np.ones(()), np.zeros(())
    if isinstance(function, Alibi):
        bias = -np.array([1 / 4, 1 / 16, 1 / 64, 1 / 256])[:, None, None] * far
    elif isinstance(function, RelativeBias):
        bias = values[:, np.array(BUCKETS)[far]]
    elif isinstance(function, Placed):
        place = np.broadcast_to(places, (case.batch, case.seq)) - (0 if starts is None else starts)
        bias = np.sin(0.5 * place[:, None, :, None] + place[:, None, None, :])
        bias = 0.1 * np.arange(1, case.heads + 1)[:, None, None] * bias
    elif isinstance(function, Steep):
        seen = seen & (far < 6)
        factor = 0.5 / np.sqrt(np.abs(capped))  # the derivative, half of the value
    else:
        factor = np.exp(-values[:, None, None] * np.sqrt(far + 0.25))
    changed = capped * factor * (2.0 if isinstance(function, Steep) else 1.0) + bias
    changed = np.where(seen, changed, -np.inf)
    weights = np.exp(changed - changed.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    dweights = np.einsum("bqhd,bkhd->bhqk", do, wide[1])
    dchanged = weights * (dweights - (weights * dweights).sum(-1, keepdims=True))
    dvalues = np.zeros_like(values)
    if isinstance(function, RelativeBias):
        for b in range(6):
            dvalues[:, b] = (dchanged * (np.array(BUCKETS)[far] == b)).sum((0, 2, 3))
    elif isinstance(function, Fading):
        dvalues = (dchanged * capped * factor * -np.sqrt(far + 0.25)).sum((0, 2, 3))
    dscores = dchanged * factor
    if case.softcap is not None:
        dscores = dscores * (1 - (capped / case.softcap) ** 2)
    dscores = dscores * case.head_dim**-0.5
    o, dq = (
        np.einsum("bhqk,bkhd->bqhd", weights, wide[1]),
        np.einsum("bhqk,bkhd->bqhd", dscores, wide[0]),
    )
    of_keys = np.einsum("bhqk,bqhd->bkhd", dscores, q), np.einsum("bhqk,bqhd->bkhd", weights, do)
    narrow = [x.reshape(*x.shape[:2], case.kv_heads, group, -1).sum(3) for x in of_keys]
    return [o, dq, *narrow, dvalues]


def assert_near(results: list[jax.Array], case: Case, function: ScoreFunction) -> None:
    names = ("o", "dq", "dk", "dv", "values")[: 4 + function.trained]
    for name, a, b in zip(names, results, dense(case, function), strict=False):
        assert np.isfinite(a).all(), name
        assert np.abs(a - b).max() <= 1e-5 * max(np.abs(b).max(), 1.0), name


KERNELS = (Reference(), Blockwise(), Blockwise(8, 8), Blockwise(5, 3, chunk_bytes=1))


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: type(f).__name__)
def test_every_portable_kernel_has_the_values_and_gradients(
    function: ScoreFunction, kernel: Any
) -> None:
    for case in CASES.values():
        assert_kernel_is_dense(kernel, function, case)


def assert_kernel_is_dense(kernel: Any, function: ScoreFunction, case: Case) -> None:
    *inputs, do = map(jnp.asarray, draw(case))
    computed = SelfAttention(True, case.window, case.softcap, None, kernel, function)
    values = jnp.asarray(values_of(function, case.heads))
    starts = row_starts(case)
    starts = None if starts is None else jnp.asarray(starts)

    def attend(q, k, v, values):
        return computed(q, k, v, computed.located(starts, values))

    def both(do, *inputs):
        o, pull = jax.vjp(attend, *inputs)
        return o, *pull(do)

    assert_near([*jax.jit(both)(do, *inputs, values)], case, function)


WAYS = {
    "ring": (RingAttention(), 4),
    "in order": (RingAttention(zigzag=False), 2),
    "looped": (RingAttention(unroll=False), 8),
    "gathered": (GatheredKeys(), 4),
    "Ulysses": (Ulysses(), 2),
    "two levels": (TwoLevel(group=2), 4),
}
SHORT = {
    ("ring", Fading): ("packed, window", "window, softcap"),
    ("ring", Placed): ("packed", "causal"),
    ("ring", Steep): ("packed, window",),
    ("in order", Fading): ("packed",),
    ("looped", Fading): ("packed",),
    ("gathered", RelativeBias): ("packed, window",),
    ("Ulysses", Fading): ("causal",),
    ("two levels", Alibi): ("causal",),
}


@pytest.mark.parametrize(("name", "kind"), SHORT, ids=str)
def test_methods_have_the_values_and_gradients(name: str, kind: type[ScoreFunction]) -> None:
    (function,) = (f for f in FUNCTIONS if isinstance(f, kind))
    for case in SHORT[name, kind]:
        assert_method_is_dense(*WAYS[name], function, CASES[case])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: type(f).__name__)
def test_every_method_has_the_values_and_gradients(function: ScoreFunction, name: str) -> None:
    for case in CASES.values():
        assert_method_is_dense(*WAYS[name], function, case)


def assert_method_is_dense(method: Any, ways: int, function: ScoreFunction, case: Case) -> None:
    """Heads and positions are those of the model, wherever a device has them."""
    mesh = jax.make_mesh((ways,), ("context",), axis_types=(AxisType.Auto,))
    order = method.order(ways).permutation(case.seq)
    kernel = Blockwise(4, 4)
    computed = SelfAttention(True, case.window, case.softcap, None, kernel, function)
    starts, tokens = row_starts(case), P(None, "context")

    def local(q, k, v, do, values, *starts):
        def attend(q, k, v, values):
            inputs = computed.located(*(starts or (None,)), values)
            return method(computed, q, k, v, inputs, ("context",))

        o, pull = jax.vjp(attend, q, k, v, values)
        return o, *pull(do)

    more = () if starts is None else (P(),)
    on_devices = jax.shard_map(
        local, mesh=mesh, in_specs=(*(tokens,) * 4, P(), *more),
        out_specs=(*(tokens,) * 4, P()),
    )  # fmt: skip
    args = [*(x[:, order] for x in draw(case)), values_of(function, case.heads)]
    *results, of_values = jax.jit(on_devices)(*args, *([] if starts is None else [starts]))
    results = [np.asarray(x)[:, np.argsort(order)] for x in results]
    assert_near([*results, np.asarray(of_values)], case, function)


@dataclass(frozen=True)
class Halved(ScoreFunction):
    """Returns 16 bits."""

    def __call__(
        self, score: jax.Array, head: jax.Array, query: jax.Array, key: jax.Array
    ) -> jax.Array:
        return score.astype(jnp.bfloat16)


def test_a_function_in_16_bits_leaves_the_softmax_in_32() -> None:
    places = jnp.arange(2, dtype=jnp.int32)[None]
    tile = ScoreTile(Halved(), places, places, jnp.zeros((1, 1)), causal=True)
    assert tile.changed(jnp.ones((1, 2, 2)), None).dtype == jnp.float32


def test_slopes_are_those_of_the_paper() -> None:
    assert np.allclose(Alibi().of_heads(8), [2.0**-i for i in range(1, 9)])
    # 12 heads: those of 8, and the 1st, 3rd, 5th and 7th of 16.
    assert np.allclose(Alibi().of_heads(12)[8:], [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5])


@pytest.mark.parametrize(("buckets", "farthest"), [*itertools.product([2, 8], [1, 3, 4, 5])])
def test_a_distance_without_a_wide_bucket_is_refused_with_one_that_has(
    buckets: int, farthest: int
) -> None:
    if farthest > buckets // 2:
        RelativeBias(buckets, farthest)
        return
    with pytest.raises(ValueError, match=r"use max_distance=\d+$") as error:
        RelativeBias(buckets, farthest)
    RelativeBias(buckets, int(error.value.args[0].rpartition("=")[2]))


@pytest.mark.parametrize("wrong", [dict(buckets=1), dict(buckets=8.5), dict(max_distance=math.nan)])
def test_buckets_and_distances_are_whole_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a whole number of"):
        RelativeBias(**wrong)


def test_a_function_without_values_of_heads_is_not_dropped() -> None:
    x = jnp.zeros((1, 4, 2, 4))
    with pytest.raises(ValueError, match=r"scores=Alibi\(\) was given no values of heads"):
        SelfAttention(scores=Alibi())(x, x, x, None)


def test_values_in_16_bits_have_gradients_in_16_bits_summed_in_32() -> None:
    case, function = CASES["packed"], Fading()
    *inputs, do = map(jnp.asarray, draw(case))
    computed = SelfAttention(kernel=Blockwise(4, 4), scores=function)
    values = jnp.asarray(values_of(function, case.heads)).astype(jnp.bfloat16)
    starts = jnp.asarray(row_starts(case))

    def loss(values: jax.Array) -> jax.Array:
        return (computed(*inputs, computed.located(starts, values)) * do).sum()

    exact = jax.grad(loss)(values.astype(jnp.float32))
    found = jax.grad(loss)(values)
    assert found.dtype == jnp.bfloat16 and (found == exact.astype(jnp.bfloat16)).all()


@pytest.mark.parametrize("method", [RingAttention(), GatheredKeys(), Ulysses()])
def test_a_method_refuses_scores_without_values_of_heads(method: Any) -> None:
    mesh = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Auto,))
    kernel, rows = SelfAttention(scores=Alibi()), P(None, "context")

    def attend(q: jax.Array) -> jax.Array:
        return method(kernel, q, q, q, None, ("context",))

    run = jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows)
    with pytest.raises(ValueError, match=r"scores=Alibi\(\) was given no values of heads"):
        jax.eval_shape(run, jax.ShapeDtypeStruct((1, 16, 2, 8), jnp.float32))


def test_fused_kernels_refuse_and_are_not_chosen() -> None:
    scoring = Scoring(AttentionMask(), 1.0, function=Alibi())
    q = jnp.zeros((1, 128, 2, 64), jnp.bfloat16)
    assert "(scores=Alibi() is a function)" in portable("gpu", q, scoring)
    for kernel in (Cudnn(), Triton(), Splash()):
        (refusal,) = kernel.refusals(q, scoring, documents=False, between=False)
        assert refusal == "a function of scores, Alibi(), is not supported"
    call = AttentionCall(2, 2, 64, scores=Alibi())
    sequences = Sequences(128, False, jnp.dtype(jnp.bfloat16))
    for platform in ("gpu", "tpu", "cpu"):
        kernel = PlatformKernel(platform, 9)
        assert isinstance(kernel.settled(q, scoring, documents=False), Blockwise)
        planned = platform_attention(kernel, call, sequences, checked=False)
        assert isinstance(planned, Blockwise)
        options = dict(dtype=jnp.bfloat16, seq=128, head_dim=64, documents=False, capability=9)
        assert isinstance(choose(platform, **options), Blockwise) == (platform == "cpu")
