"""The vendors' kernels against the dense definition: those of Pallas run in Python here, and what
cuDNN is asked for is computed by loops over the memory that its tables name."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_gpu import TRITON_IS_DEPRECATED, abstract_gpus
from jax import checkpoint_policies as policies
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from jaxtrain.attention import cudnn as ours
from jaxtrain.attention.blockwise import Blockwise
from jaxtrain.attention.cudnn import Cudnn
from jaxtrain.attention.documents import document_starts
from jaxtrain.attention.kernels import Reference
from jaxtrain.attention.online_softmax import AttentionMask, Scoring
from jaxtrain.attention.splash import Splash, SplashBlocks
from jaxtrain.attention.triton import Triton


class Case(NamedTuple):
    causal: bool = True
    window: int | None = None
    documents: bool = False
    softcap: float | None = None
    kv_heads: int = 2
    seq: int = 128
    head_dim: int = 64

    @property
    def scoring(self):
        return Scoring(AttentionMask(self.causal, self.window), 0.2, self.softcap)


def draw(case, dtype):
    """q, k, v, the cotangent of the output, and starts."""
    rng = np.random.default_rng(case.seq)
    shapes = [(2, case.seq, n, case.head_dim) for n in (4, case.kv_heads, case.kv_heads, 4)]
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]
    if not case.documents:
        return *arrays, None
    ids = np.sort(rng.integers(1, 5, (2, case.seq)), axis=1)
    ids[0] = np.minimum(ids[0], 2)  # six documents in all
    return *arrays, document_starts(jnp.asarray(ids, jnp.int32))


def everything(kernel, case, dtype):
    """o, log-sum-exp and gradients."""
    *arrays, do, starts = draw(case, dtype)

    def loss(q, k, v):
        o, lse = kernel(q, k, v, starts, case.scoring)
        # The log-sum-exp is a constant to derivatives: what is made of it adds nothing.
        return jnp.sum((o * do).astype(jnp.float32)) + jnp.sum(lse), (o, lse)

    (_, found), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arrays)
    return dict(zip(("o", "lse", "dq", "dk", "dv"), (*found, *grads), strict=True))


@cache
def dense(case, dtype):
    return everything(Reference(), case, dtype)


def assert_near(found, expected, bound):
    for name, x in expected.items():
        a, b = np.asarray(found[name], np.float64), np.asarray(x, np.float64)
        assert a.shape == b.shape, name
        assert np.abs(a - b).max() <= bound * max(np.abs(b).max(), 1.0), name


BOTH = [Case(), Case(documents=True), Case(causal=False, documents=True)]


@pytest.mark.parametrize("case", [*BOTH, Case(documents=True, window=9, softcap=2.0)], ids=str)
def test_blockwise_gives_the_log_sum_exp_too(case):
    found = jax.jit(partial(everything, Blockwise(64, 48, 4000), case, jnp.float32))()
    assert_near(found, dense(case, jnp.float32), 2e-6)


@pytest.mark.parametrize("case", BOTH, ids=str)
def test_triton_is_the_reference(case):
    kernel = Triton(block=64, backward_block=32, interpret=True)
    assert_near(everything(kernel, case, jnp.float32), dense(case, jnp.float32), 1e-5)


TILES = SplashBlocks(*[128] * 8)
FUSED = replace(TILES, kv=256, kv_compute=128, fused_backward=True)
SPLASH = [(TILES, Case(seq=256)), (TILES, Case(causal=False, documents=True, seq=256, kv_heads=1))]
SPLASH += [(FUSED, Case(documents=True, window=40, softcap=2.0, seq=256))]


@pytest.mark.parametrize(("blocks", "case"), SPLASH, ids=str)
def test_splash_is_the_reference(blocks, case):
    kernel = Splash(blocks, interpret=True)
    assert_near(everything(kernel, case, jnp.float32), dense(case, jnp.float32), 1e-5)


def test_splash_has_every_size_as_a_value_and_names_those_that_do_not_fit():
    blocks = SplashBlocks(q=384, kv_dq=100)
    told = "; ".join(Splash(blocks).violations(1024, 128))
    assert "blocks.q=384" in told and "blocks.kv_dq=100" in told
    fused = SplashBlocks(kv_dq=100, fused_backward=True)
    assert Splash(fused).violations(1024, 128) == []


class FakeCudnn:
    """cuDNN's contract for what JAX hands it: q, k, v and o are flat memories, of which document s
    begins at an offset in elements, is so long, and lies there in strides of all heads."""

    def __init__(self, answer: Any) -> None:
        self.calls: list[dict[str, Any]] = []
        self._answer = answer

    def bind(self, *operands: Any, **options: Any) -> Any:
        self.calls.append(options)
        packed = options["mask_type"] in (cudnn.MaskType.PADDING, cudnn.MaskType.PADDING_CAUSAL)
        operands = [
            np.asarray(x, np.float64 if x.ndim == 4 or x.ndim == 3 else None) for x in operands
        ]
        return self._answer(operands, options, packed)


def _sequences(operands, packed):
    """(number, memory offsets in q and in k, length) of each sequence."""
    q, k = operands[:2]
    if not packed:
        sizes = (q[0].size, k[0].size)
        return [(i, i * sizes[0], i * sizes[1], q.shape[1]) for i in range(len(q))]
    lengths, _, of_q, of_k = (x.reshape(-1) for x in operands[4:8])
    assert lengths.max() <= q.shape[1], "no sequence is longer than a row"
    return [(s, of_q[s], of_k[s], n) for s, n in enumerate(lengths) if n > 0]


def _rows(memory, offset, length, like):
    """[length, heads, head_dim] from an offset on."""
    size = length * like.shape[2] * like.shape[3]
    return memory.reshape(-1)[offset : offset + size].reshape(length, *like.shape[2:])


def _weights(q, k, options):
    """[heads, queries, keys] and the log-sum-exp."""
    group = q.shape[1] // k.shape[1]
    logits = np.einsum("qhd,khd->hqk", q, np.repeat(k, group, axis=1)) * options["scale"]
    apart = np.arange(len(q))[:, None] - np.arange(len(k))[None]
    causal = options["mask_type"] in (cudnn.MaskType.CAUSAL, cudnn.MaskType.PADDING_CAUSAL)
    seen = (apart >= 0) if causal else np.ones_like(apart, bool)
    if options["sliding_window_length"] is not None:
        seen = seen & (apart < options["sliding_window_length"])
    logits = np.where(seen, logits, -np.inf)
    lse = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return np.exp(logits - lse[..., None]), lse


def _sequence_count(operands, packed):
    return operands[4].size if packed else len(operands[0])


def _forward(operands, options, packed):
    q, k, v = operands[:3]
    o = np.full(q.size, np.nan)
    statistics = np.full((_sequence_count(operands, packed), q.shape[2], q.shape[1]), np.nan)
    for s, at_q, at_k, n in _sequences(operands, packed):
        rows, keys, values = (_rows(x, at, n, x) for x, at in ((q, at_q), (k, at_k), (v, at_k)))
        weights, lse = _weights(rows, keys, options)
        wide = np.repeat(values, q.shape[2] // v.shape[2], axis=1)
        o[at_q : at_q + rows.size] = np.einsum("hqk,khd->qhd", weights, wide).reshape(-1)
        statistics[s, :, :n] = lse
    return jnp.asarray(o.reshape(q.shape), jnp.bfloat16), jnp.asarray(statistics, jnp.float32)


def _backward(operands, options, packed):
    q, k, v = operands[:3]
    statistics, o, do = operands[10:]
    dq, dk, dv = (np.full(x.size, np.nan) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    for s, at_q, at_k, n in _sequences(operands, packed):
        rows, keys, values, out, dout = (
            _rows(x, at, n, x) for x, at in ((q, at_q), (k, at_k), (v, at_k), (o, at_q), (do, at_q))
        )
        weights, lse = _weights(rows, keys, options)
        # From what was saved, as the kernel does it: what is wrong with it shows.
        weights = weights * np.exp(lse - statistics[s, :, :n])[..., None]
        wide = (np.repeat(x, group, axis=1) for x in (keys, values))
        wide_k, wide_v = wide
        dweights = np.einsum("qhd,khd->hqk", dout, wide_v)
        delta = np.sum(out * dout, axis=-1).T[..., None]
        dlogits = weights * (dweights - delta) * options["scale"]
        parts = (
            (dq, at_q, np.einsum("hqk,khd->qhd", dlogits, wide_k)),
            (dk, at_k, np.einsum("hqk,qhd->khd", dlogits, rows)),
            (dv, at_k, np.einsum("hqk,qhd->khd", weights, dout)),
        )
        for memory, at, made in parts:
            if memory is not dq:
                made = made.reshape(n, -1, group, made.shape[-1]).sum(2)
            memory[at : at + made.size] = made.reshape(-1)
    made = zip((dq, dk, dv), (q, k, v), strict=True)
    return [jnp.asarray(x.reshape(like.shape), jnp.bfloat16) for x, like in made]


@pytest.fixture
def fake(monkeypatch):
    """cuDNN by loops; `lax.cond` by its value, for loops cannot be traced."""
    calls = FakeCudnn(_forward), FakeCudnn(_backward)
    monkeypatch.setattr(cudnn, "_dot_product_attention_fwd_p", calls[0])
    monkeypatch.setattr(cudnn, "_dot_product_attention_bwd_p", calls[1])
    monkeypatch.setattr(ours.lax, "cond", lambda fits, a, b, *xs: a(*xs) if fits else b(*xs))
    return calls


def both_passes(kernel, case, ids=None):
    """ids: of documents, of other rows than those of the case."""
    q, k, v, do, starts = draw(case, jnp.bfloat16)
    starts = starts if ids is None else document_starts(jnp.asarray(ids, jnp.int32))
    o, lse = kernel.forward(q, k, v, starts, case.scoring)
    saved = ours.SavedAttention(q, k, v, starts, o, lse)
    return dict(o=o, lse=lse) | dict(
        zip(("dq", "dk", "dv"), kernel.backward(saved, do, case.scoring), strict=True)
    )


CUDNN = [
    Case(seq=24, head_dim=8),
    Case(seq=24, head_dim=8, causal=False, kv_heads=4),
    Case(seq=24, head_dim=8, window=5, kv_heads=1),
    Case(seq=24, head_dim=8, documents=True),
    Case(seq=24, head_dim=8, documents=True, kv_heads=4, window=5),
    Case(seq=24, head_dim=8, documents=True, causal=False, kv_heads=1),
]


@pytest.mark.parametrize("case", CUDNN, ids=str)
def test_cudnn_is_asked_for_what_the_reference_computes(fake, case):
    found = both_passes(Cudnn(documents=4), case)
    assert len(fake[0].calls) == len(fake[1].calls) == 1
    assert_near(found, dense(case, jnp.bfloat16), 2**-6)


def test_rows_with_more_documents_than_there_is_room_for_are_computed_all_the_same(fake):
    case = CUDNN[3]
    found = both_passes(Cudnn(documents=2), case)
    assert not fake[0].calls and not fake[1].calls
    assert_near(found, dense(case, jnp.bfloat16), 2**-6)


@pytest.mark.parametrize("count", [5, 6, 7])
def test_documents_are_cudnns_up_to_exactly_the_room_there_is(fake, count) -> None:
    """Three a row in the mean of two; the last one that has room is whole."""
    case = CUDNN[3]
    ids = np.stack([np.arange(24) // 6, np.minimum(np.arange(24) // 4, count - 5)])
    passed = both_passes(Cudnn(documents=3), case, ids)
    assert [len(passes.calls) for passes in fake] == ([1, 1] if count <= 6 else [0, 0])
    assert_near(passed, both_passes(Cudnn(documents=24), case, ids), 2**-6)


LENGTHS = ([32], [9, 8, 7, 3, 2, 2, 1]), ([1, 31], [17, 1, 1, 1, 4, 8]), ([1] * 8 + [24], [8] * 4)
"""Tokens of the documents of two rows of 32: at both ends of each group's."""


@pytest.fixture
def three_groups(monkeypatch):
    """Documents of over 8, over 2 and at most 2 of 32 tokens."""
    monkeypatch.setattr(ours, "SHORTEST", 2)
    return Cudnn(documents=16)


@pytest.mark.parametrize("rows", LENGTHS, ids=str)
@pytest.mark.parametrize(
    "case", [Case(seq=32, head_dim=8), Case(seq=32, head_dim=8, window=8, kv_heads=1)], ids=str
)
def test_documents_of_similar_lengths_are_computed_together(fake, three_groups, case, rows):
    ids = np.stack([np.repeat(np.arange(len(row)), row) for row in rows])
    starts = document_starts(jnp.asarray(ids, jnp.int32))
    found = both_passes(three_groups, case, ids)
    assert [len(passes.calls) for passes in fake] == [3, 3]
    windows = [case.window, None, None]  # none is of use to documents of as many tokens
    assert all([o["sliding_window_length"] for o in p.calls] == windows for p in fake)
    q, k, v, do, _ = draw(case, jnp.bfloat16)
    reference = Reference()
    (o, lse), pull = jax.vjp(lambda *arrays: reference(*arrays, starts, case.scoring), q, k, v)
    dq, dk, dv = pull((do, jnp.zeros_like(lse)))
    assert_near(found, dict(o=o, lse=lse, dq=dq, dk=dk, dv=dv), 2**-6)


@pytest.mark.parametrize(("last", "fits"), [([16, 16], True), ([16, 15, 1], False)], ids=str)
def test_only_short_documents_can_have_no_room(monkeypatch, fake, last, fits) -> None:
    """There is room for 16 of up to 8 tokens, a few a row in the mean, and for all longer ones."""
    monkeypatch.setattr(ours, "SHORTEST", 8)
    ids = np.stack([np.repeat(np.arange(len(x)), x) for x in ([2] * 16, last)])
    both_passes(Cudnn(documents=8), Case(seq=32, head_dim=8), ids)
    assert [len(passes.calls) for passes in fake] == ([2, 2] if fits else [0, 0])


@pytest.mark.parametrize(
    ("seq", "documents", "longest", "rooms"),
    [
        (4096, 64, [4096, 1024, 256], [4, 4, 4]),
        (8192, 64, [8192, 2048, 512, 128], [4, 4, 4, 2]),
        (4096, 100, [4096, 1024, 256], [4, 4, 7]),
        (512, 64, [512, 128], [4, 16]),
        (1000, 64, [1000], [64]),
        (384, 5, [384], [5]),
    ],
)
def test_groups_have_room_for_all_that_a_row_can_hold(seq, documents, longest, rooms) -> None:
    groups = ours.length_groups(seq, documents)
    assert [group.longest for group in groups] == longest
    assert [group.room for group in groups] == rooms
    for group in groups[:-1]:  # shorter ones than `above + 1` are another group's
        assert group.longest // (group.above + 1) < group.room
    assert groups[-1].above == 0 and groups[-1].room * seq >= documents * longest[-1]


GPU_CALLS = {"__cudnn$fmha": Cudnn(documents=4), "__gpu$xla.gpu.triton": Triton()}


@TRITON_IS_DEPRECATED
@pytest.mark.parametrize("case", BOTH, ids=str)
@pytest.mark.parametrize("target", GPU_CALLS)
def test_kernels_lower_for_a_gpu_that_is_not_here(target, case):
    """Forward and backward: cuDNN has one kernel for each, Triton two for the gradients."""
    q, k, v, do, starts = draw(case, jnp.bfloat16)

    def loss(q, k, v):
        o, _ = GPU_CALLS[target](q, k, v, starts, case.scoring)
        return jnp.sum((o * do).astype(jnp.float32))

    with jax.sharding.use_abstract_mesh(abstract_gpus(one=1)):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, v)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f"custom_call @{target}") == (2 if "cudnn" in target else 3)


def calls_of(kernel, case, remat):
    """How often the forward and the backward primitive stand in the traced gradient."""
    *arrays, _, starts = draw(case, jnp.bfloat16)

    @partial(jax.checkpoint, policy=remat)
    def run(q, k, v):
        return jnp.sum(jnp.sin(kernel(jnp.sin(q), k, v, starts, case.scoring)[0]))

    text = str(jax.make_jaxpr(jax.grad(run, (0, 1, 2)))(*arrays))
    return tuple(text.count(f"dot_product_attention_{way}[") for way in ("fwd", "bwd"))


@pytest.mark.parametrize("documents", [False, True])
def test_named_residuals_spare_cudnns_forward_kernel_in_the_backward_pass(documents):
    case = Case(seq=24, head_dim=8, documents=documents)
    kept = policies.save_only_these_names("attention_out", "attention_lse")
    assert calls_of(Cudnn(), case, kept) == (1, 1)
    assert calls_of(Cudnn(), case, policies.nothing_saveable) == (2, 1)


def test_heads_cross_the_choice_of_a_kernel_as_one_dim_with_theirs() -> None:
    """XLA lays out what crosses a conditional as either branch likes, and then transposes it."""
    case = Case(seq=24, head_dim=8, documents=True)
    q, k, v, do, starts = draw(case, jnp.bfloat16)

    def both(q, k, v, do):
        o, lse = Cudnn().forward(q, k, v, starts, case.scoring)
        return Cudnn().backward(ours.SavedAttention(q, k, v, starts, o, lse), do, case.scoring)

    steps = jax.make_jaxpr(both)(q, k, v, do).eqns
    barriers = [eqn for eqn in steps if eqn.primitive.name == "optimization_barrier"]
    barred = {x for eqn in barriers for x in eqn.outvars}
    conditionals = [eqn for eqn in steps if eqn.primitive.name == "cond"]
    assert len(conditionals) == 2
    for eqn, taken, given in zip(conditionals, (3, 5), (1, 3), strict=True):
        arrays = [x for x in eqn.invars if x.aval.dtype == jnp.bfloat16]
        assert len(arrays) == taken and all(x in barred and x.aval.ndim == 3 for x in arrays)
        results = [x for x in eqn.outvars if x.aval.dtype == jnp.bfloat16]
        assert len(results) == given and all(x.aval.ndim == 3 for x in results)
