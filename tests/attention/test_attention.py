"""Every kernel against the dense definition, that one against loops in float64, and what blockwise
promises besides: linear memory, hidden tiles skipped, the types of shard_map, names for remat."""

from __future__ import annotations

import itertools
import math
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import checkpoint_policies as policies
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from typecheck import unchecked

from jaxtrain.attention import triton
from jaxtrain.attention.blockwise import Blockwise, chunk_shape
from jaxtrain.attention.cudnn import Cudnn
from jaxtrain.attention.documents import document_starts
from jaxtrain.attention.kernels import (
    CPU_BLOCKS,
    CPU_LONG_BLOCKS,
    PlatformKernel,
    Reference,
    attention,
    choose,
)
from jaxtrain.attention.online_softmax import AttentionMask, Scoring
from jaxtrain.attention.splash import Splash, SplashBlocks
from jaxtrain.attention.tiling import Tiling
from jaxtrain.attention.triton import SHARED_BYTES, Triton, backward_bytes, forward_bytes


class Case(NamedTuple):
    causal: bool = True
    window: int | None = None
    segments: bool = False
    softcap: float | None = None
    batch: int = 2
    seq: int = 37
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8

    @property
    def options(self):
        return dict(causal=self.causal, window=self.window, softcap=self.softcap)


CASES = [
    Case(),
    Case(causal=False),
    Case(window=1),
    Case(window=9),
    Case(segments=True),
    Case(segments=True, causal=False, softcap=2.0),
    Case(segments=True, window=7, kv_heads=4, head_dim=5),
    Case(softcap=1.5, kv_heads=1, heads=3, seq=48),
    Case(seq=1, batch=1),
]

UNROLLED = Blockwise(query_block=24, key_block=24)
SCANNED = Blockwise(query_block=8, key_block=6)
CHUNKS = Blockwise(query_block=24, key_block=24, chunk_bytes=4000)
SCANNED_CHUNKS = Blockwise(query_block=5, key_block=8, chunk_bytes=1)
KERNELS = [UNROLLED, SCANNED, CHUNKS, SCANNED_CHUNKS]


def draw(case, dtype=jnp.float32):
    """q, k, v, cotangent of the output."""
    rng = np.random.default_rng(case.seq)
    sizes = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    shapes = [(case.batch, case.seq, n, case.head_dim) for n in sizes]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def documents(case):
    """Segments 1, 2, .. per row with padding (0) at the end; None when the case has none."""
    if not case.segments:
        return None
    rng = np.random.default_rng(7)
    found = np.sort(rng.integers(1, 4, (case.batch, case.seq)), axis=1)
    found[:, case.seq - 4 :] = 0
    return jnp.asarray(found, jnp.int32)


def value_and_grads(kernel, case, arrays, segments):
    starts = None if segments is None else document_starts(segments)

    def loss(q, k, v, do):
        o = attention(q, k, v, starts=starts, kernel=kernel, **case.options)
        return jnp.sum((o * do).astype(jnp.float32)), o

    (_, o), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    return (o, *grads)


@cache
def dense(case):
    """The reference's, compiled once for all kernels."""
    return value_and_grads(Reference(), case, draw(case), documents(case))


def assert_near(found, expected, bound):
    for name, a, b in zip(("o", "dq", "dk", "dv"), found, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(a).all(), name
        # All inputs are of order 1; where a query sees only itself, dq and dk are zero.
        assert np.abs(a - b).max() <= bound * max(np.abs(b).max(), 1.0), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_is_attention_by_loops_in_float64(case):
    q, k, v, _ = (np.asarray(x, np.float64) for x in draw(case))
    segments = documents(case)
    starts = None if segments is None else document_starts(segments)
    run = partial(attention, starts=starts, kernel=Reference(), **case.options)
    found = np.asarray(jax.jit(run)(*draw(case)[:3]))
    segments = None if segments is None else np.asarray(segments)
    group = case.heads // case.kv_heads
    for b, i, h in itertools.product(range(case.batch), range(case.seq), range(case.heads)):
        seen = [
            j
            for j in range(case.seq)
            if (j <= i or not case.causal)
            and (case.window is None or i - j < case.window)
            and (segments is None or segments[b, i] == segments[b, j])
        ]
        logits = k[b, seen, h // group] @ q[b, i, h] / math.sqrt(case.head_dim)
        if case.softcap is not None:
            logits = case.softcap * np.tanh(logits / case.softcap)
        weights = np.exp(logits) / np.exp(logits).sum()
        np.testing.assert_allclose(found[b, i, h], weights @ v[b, seen, h // group], atol=2e-6)


PAIRS = [*itertools.product([SCANNED], CASES), *itertools.product([UNROLLED], CASES[::3])]
PAIRS += itertools.product([CHUNKS, SCANNED_CHUNKS], [CASES[0], CASES[4], CASES[7]])
PAIRS += [
    pytest.param(UNROLLED, case, marks=pytest.mark.slow) for case in CASES if case not in CASES[::3]
]


@pytest.mark.parametrize(("kernel", "case"), PAIRS, ids=str)
def test_blockwise_equals_the_reference_in_value_and_gradient(kernel, case):
    found = value_and_grads(kernel, case, draw(case), documents(case))
    assert_near(found, dense(case), 2e-6)


def test_the_kernels_above_cover_both_loops_and_chunks():
    seq, scoring = Case().seq, Scoring(AttentionMask(), 1.0)
    for kernel, unrolled in zip(KERNELS, (True, False, True, False), strict=True):
        blocks = (kernel.query_block, kernel.key_block)
        assert Tiling(*blocks, seq, scoring, None).unrolled() == unrolled
    shape = dict(batch=2, seq=seq, heads=4, kv_heads=2)
    assert [chunk_shape(kernel, **shape) for kernel in KERNELS] == [(2, 2), (2, 2), (1, 1), (1, 1)]


@pytest.mark.parametrize("kernel", [UNROLLED, SCANNED], ids=str)
def test_16_bit_inputs_are_accumulated_in_fp32(kernel):
    case = Case(seq=48, segments=True)
    arrays, segments = draw(case, jnp.bfloat16), documents(case)
    found = value_and_grads(kernel, case, arrays, segments)
    assert all(x.dtype == jnp.bfloat16 for x in found)
    exact = [x.astype(jnp.float32) for x in arrays]
    # Half a unit in the last place of the inputs' products; 16-bit sums would be off by far more.
    assert_near(found, value_and_grads(Reference(), case, exact, segments), 2**-7)


def test_logits_far_apart_neither_overflow_nor_lose_the_winner():
    case = Case(seq=40, head_dim=16)
    q, k, v, do = draw(case)
    # Whole numbers and a scale of 1/4: the logits, up to 300, are the same to the bit.
    arrays = (jnp.round(4 * q), jnp.round(12 * k), v, do)
    for kernel in (UNROLLED, SCANNED):
        found = value_and_grads(kernel, case, arrays, None)
        assert_near(found, value_and_grads(Reference(), case, arrays, None), 1e-4)


BANDS = [AttentionMask(), AttentionMask(causal=False), *(AttentionMask(window=w) for w in (1, 5))]


@pytest.mark.parametrize("mask", BANDS, ids=str)
@pytest.mark.parametrize("blocks", [(4, 4), (8, 3), (3, 8), (16, 16)])
def test_exactly_the_visible_tiles_are_computed(mask, blocks):
    seq, (size_q, size_k) = 21, blocks
    at = jnp.arange(seq)
    seen = np.asarray(mask.visible(at[:, None], at[None]))
    tiling = Tiling(size_q, size_k, seq, Scoring(mask, 1.0), None)
    expected = [
        (a, b)
        for a, b in itertools.product(range(0, seq, size_q), range(0, seq, size_k))
        if seen[a : a + size_q, b : b + size_k].any()
    ]
    assert tiling.equal() == expected
    computed = np.zeros_like(seen)
    for queries, runs in tiling.trimmed():
        block = seen[queries.start : queries.stop]
        keys = [j for run in runs for j in run]
        assert keys == list(range(*np.flatnonzero(block.any(0))[[0, -1]] + [0, 1]))
        for run in runs:
            computed[queries.start : queries.stop, run.start : run.stop] = True
            whole = block[:, run.start : run.stop].all()
            assert (tiling.written_out(queries, run)[0] is None) == whole
    assert (computed >= seen).all()


def temp_bytes(kernel, seq):
    shape = jax.ShapeDtypeStruct((1, seq, 2, 8), jnp.float32)

    step = jax.jit(jax.grad(lambda *x: attention(*x, kernel=kernel).sum(), (0, 1, 2)))
    return step.lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("kernel", [CPU_LONG_BLOCKS, Blockwise()], ids=str)
def test_memory_is_linear_in_seq(kernel):
    small, large = temp_bytes(kernel, 2048), temp_bytes(kernel, 4096)
    assert large <= 2.2 * small
    assert large < 4096 * 4096 * 4  # not even one head's scores


def test_memory_of_the_reference_is_not_so_the_test_above_can_fail():
    assert temp_bytes(Reference(), 512) >= 3.5 * temp_bytes(Reference(), 256)


def test_the_default_blocks_hold_no_seq_by_seq_array_at_short_seq_either():
    seq = 512
    grad = jax.grad(lambda q: attention(q, q, q, kernel=Blockwise()).sum())
    assert f"{seq},{seq}" not in str(jax.make_jaxpr(grad)(jnp.zeros((2, seq, 2, 8))))


AXES = ("batch_axis", "head_axis")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("kernel", [CHUNKS, SCANNED], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_a_manual_shard_map_over_batch_and_heads_changes_nothing(mesh, kernel, check, kv_heads):
    """With one key head k and v vary over fewer mesh axes than q; their gradients are summed."""
    case = Case(batch=4, seq=24, heads=8, kv_heads=kv_heads, segments=True)
    arrays, segments = draw(case), documents(case)
    heads = P("batch_axis", None, "head_axis")
    keys = heads if kv_heads > 1 else P("batch_axis")

    def sharded(q, k, v, starts, scoring):
        return jax.shard_map(
            lambda *x: kernel(*x, scoring),
            mesh=mesh,
            in_specs=(heads, keys, keys, P("batch_axis")),
            out_specs=(heads, heads),
            check_vma=check,
        )(q, k, v, starts)

    assert_near(value_and_grads(sharded, case, arrays, segments), dense(case), 2e-6)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("kernel", [CHUNKS, SCANNED], ids=str)
def test_gradients_are_taken_inside_a_shard_map_in_a_scan_over_layers(mesh, kernel, check):
    case = Case(batch=2, seq=24, heads=8, kv_heads=4)
    q, k, v, do = draw(case)
    layers = jnp.asarray([0.5, 1.0, 2.0])

    def loss(kernel, q, k, v, do):
        @partial(jax.checkpoint, policy=policies.save_only_these_names("attention_out"))
        def layer(x, scale):
            return x + attention(x * scale, k, v, kernel=kernel), None

        return jnp.sum(jax.lax.scan(layer, q, layers)[0] * do)

    inside = jax.grad(partial(loss, kernel), (0, 1, 2))
    spec = P("batch_axis", None, "head_axis")
    run = jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check)
    found = jax.jit(run)(q, k, v, do)
    expected = jax.jit(jax.grad(partial(loss, Reference()), (0, 1, 2)))(q, k, v, do)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


def test_saving_the_named_residuals_spares_the_forward_pass_in_the_backward():
    case = Case(seq=32)
    q, k, v, _ = draw(case)

    def exponentials(*names):
        @partial(jax.checkpoint, policy=policies.save_only_these_names(*names))
        def run(q, k, v):
            return attention(q, k, v, kernel=Blockwise(16, 32)).sum()

        text = jax.jit(jax.value_and_grad(run)).lower(q, k, v).as_text()
        return text.count("stablehlo.exponential")

    # Two query blocks of one tile each: once forward, once backward, and not once more.
    assert exponentials("attention_out", "attention_lse") == 4
    assert exponentials("another_name") == 6


CHOICES = [
    (dict(platform="cpu", seq=512), CPU_BLOCKS),
    (dict(platform="cpu", seq=1024, documents=True, softcap=9.0), CPU_LONG_BLOCKS),
    (dict(platform="gpu"), Cudnn()),
    (dict(platform="gpu", dtype=jnp.float32), Blockwise),
    (dict(platform="gpu", documents=True, window=9, capability=9), Cudnn()),
    (dict(platform="gpu", capability=8), Cudnn()),
    (dict(platform="gpu", documents=True, capability=8), Triton(block=128)),
    (dict(platform="gpu", documents=True), Triton(block=128)),
    (dict(platform="gpu", documents=True, capability=8, seq=96), Blockwise),
    (dict(platform="gpu", documents=True, capability=8, seq=64), Triton(block=128)),
    (dict(platform="gpu", documents=True, capability=8, window=9), Blockwise),
    (dict(platform="gpu", documents=True, capability=8, checked=True), Blockwise),
    (dict(platform="gpu", softcap=9.0), Blockwise),
    (dict(platform="gpu", head_dim=256), Triton(block=64)),
    (dict(platform="gpu", head_dim=520), Blockwise),
    (dict(platform="tpu", documents=True, softcap=9.0), Splash()),
    (dict(platform="tpu", dtype=jnp.float32), Blockwise),
    (dict(platform="tpu", seq=1000), Blockwise),
    (dict(platform="tpu", checked=True), Blockwise),
    (dict(platform="another"), Blockwise()),
]


@pytest.mark.parametrize(("asked", "expected"), CHOICES, ids=str)
def test_the_platform_gets_its_own_kernel_where_that_computes_what_is_asked(asked, expected):
    usual = dict(dtype=jnp.bfloat16, seq=1024, head_dim=128, documents=False)
    found = choose(**(usual | asked))
    assert isinstance(found, expected) if isinstance(expected, type) else found == expected


def test_a_portable_kernel_on_an_accelerator_is_said_aloud():
    x = jnp.zeros((1, 8, 2, 8), jnp.float32)
    with pytest.warns(
        UserWarning, match="float32 with head_dim=8, seq=8 has no fused kernel for gpu .*dtype"
    ):
        attention(x, x, x, kernel=PlatformKernel("gpu"))
    x = x.astype(jnp.bfloat16)
    with pytest.warns(UserWarning, match="for gpu here .softcap=3.0 is not supported"):
        attention(x, x, x, softcap=3.0, kernel=PlatformKernel("gpu"))
    with pytest.warns(UserWarning, match="for tpu here .seq=8"):
        attention(x, x, x, kernel=PlatformKernel("tpu"))


@pytest.mark.parametrize("lost", ["TRITON", "TRITON_ATTENTION"])
def test_a_jax_without_tritons_kernels_has_the_portable_one_and_says_so(lost, monkeypatch):
    asked = dict(platform="gpu", documents=True, capability=8)
    usual = dict(dtype=jnp.bfloat16, seq=1024, head_dim=128)
    assert isinstance(choose(**usual, **asked), Triton)
    monkeypatch.setattr(triton, lost, "experimental/pallas/gone.py")
    assert isinstance(choose(**usual, **asked), Blockwise)
    x = jnp.zeros((1, 128, 1, 128), jnp.bfloat16)
    told = "JAX .* has no jax.experimental.pallas.gone any more"
    with pytest.warns(UserWarning, match=f"no fused kernel for gpu here .{told}"):
        attention(x, x, x, starts=jnp.zeros((1, 128), jnp.int32), kernel=PlatformKernel("gpu", 8))
    with pytest.raises(ValueError, match=f"Triton cannot compute this: {told}"):
        attention(x, x, x, kernel=Triton(interpret=True))


REFUSED = [
    (Cudnn(), jnp.bfloat16, dict(softcap=3.0), "softcap=3.0"),
    (Cudnn(), jnp.float32, {}, "dtype=float32"),
    (Splash(), jnp.bfloat16, {}, "pad to 128"),
    (Triton(block=16), jnp.bfloat16, dict(window=3, softcap=3.0), "window=3.*softcap=3.0"),
]


@pytest.mark.parametrize(("kernel", "dtype", "options", "message"), REFUSED, ids=str)
def test_a_kernel_refuses_what_it_cannot_compute(kernel, dtype, options, message):
    x = jnp.zeros((1, 8, 2, 64), dtype)
    with pytest.raises(ValueError, match=message):
        attention(x, x, x, kernel=kernel, **options)


def test_triton_takes_tiles_of_powers_of_two() -> None:
    """A seq below its blocks is a tile itself."""
    kernel, options = Triton(), dict(window=None, softcap=None)
    fits = [n for n in range(16, 400) if not kernel.violations(n, 128, **options)]
    assert fits == [16, 32, 64, 128, 256, 384]


@pytest.mark.parametrize(
    ("head_dim", "block"),
    [(64, 128), (128, 128), (129, 64), (192, 64), (256, 64), (257, 32), (512, 32)],
)
def test_tritons_tiles_fit_in_shared_memory(head_dim: int, block: int) -> None:
    """Its default block is the largest that fits in that of an A100. XLA's compiler says how much
    the forward kernel takes with 192 and 256, padded to 256: 328,192 bytes in blocks of 128."""
    kernel, options = Triton(), dict(window=None, softcap=None)
    assert kernel.block_of(head_dim) == block
    assert forward_bytes(block, head_dim) <= SHARED_BYTES["A100"]
    assert block == 128 or forward_bytes(2 * block, head_dim) > SHARED_BYTES["A100"]
    assert not kernel.violations(1024, head_dim, **options)
    assert forward_bytes(128, 192) == forward_bytes(128, 256) == 328_192


@pytest.mark.parametrize(
    ("block", "head_dim", "fits"),
    [(128, 64, True), (128, 128, True), (64, 256, True), (32, 512, True), (16, 1024, True),
     (128, 256, False), (64, 512, False), (32, 1024, False)],
)  # fmt: skip
def test_tritons_backward_tiles_fit_where_the_compiler_takes_them(
    block: int, head_dim: int, fits: bool
) -> None:
    """As XLA's compiler does for an H100; it asks for 427,520 and 402,176 bytes of the first two
    that it refuses."""
    kernel, options = Triton(block=16, backward_block=block), dict(window=None, softcap=None)
    problems = kernel.violations(1024, head_dim, **options)
    assert len(problems) == (not fits)
    assert all(told.endswith(f"; backward_block={block // 2} fits") for told in problems)
    assert (backward_bytes(128, 256), backward_bytes(64, 512)) == (427_520, 402_176)


def test_a_block_that_no_gpu_has_room_for_is_refused_with_one_that_fits() -> None:
    options = dict(window=None, softcap=None)
    (problem,) = Triton(block=128).violations(1024, 192, **options)
    assert problem.startswith("block=128 with head_dim=192 takes 328192 bytes of shared memory")
    assert problem.endswith("an H100 has 232448; block=64 fits")
    assert not Triton(block=64).violations(1024, 192, **options)
    assert not Triton(block=128).violations(64, 192, **options), "a row is a tile itself"
    assert not Triton(block=128, interpret=True).violations(1024, 192, **options)
    (problem, backward) = Triton(block=256).violations(1024, 2048, **options)
    assert problem.startswith("block=256") and problem.endswith("no block fits")
    assert backward.startswith("backward_block=32") and backward.endswith("no block fits")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Triton(block=3, backward_block=0), "block=3.*backward_block=0"),
        (lambda: SplashBlocks(q=0), "q=0"),
    ],
)
def test_sizes_that_no_kernel_has_are_refused_where_they_are_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


BAD = [
    (dict(k=(2, 8, 3, 4), v=(2, 8, 3, 4)), {}, "use kv_heads=1"),
    (dict(k=(2, 9, 2, 4)), {}, "differ"),
    (dict(q=(2, 8, 4)), {}, "found"),
    ({}, dict(softcap=0.0), "softcap=0.0"),
    ({}, dict(starts=jnp.ones((2, 7), jnp.int32)), "starts"),
    ({}, dict(window=0), "window=0"),
    ({}, dict(window=4, causal=False), "causal=True"),
]


@pytest.mark.parametrize(("shapes", "options", "message"), BAD, ids=str)
def test_bad_arguments_are_named(shapes, options, message):
    usual = dict(q=(2, 8, 4, 4), k=(2, 8, 2, 4), v=(2, 8, 2, 4))
    q, k, v = (jnp.zeros(shape) for shape in (usual | shapes).values())
    with pytest.raises(ValueError, match=message):
        unchecked(attention)(q, k, v, **options)


def test_all_violations_are_told_at_once():
    x = jnp.zeros((2, 8, 4, 4))
    with pytest.raises(ValueError, match=r"kv_heads=3.*softcap=-1"):
        attention(x, x[:, :, :3], x[:, :, :3], softcap=-1)
    with pytest.raises(ValueError, match=r"query_block=0, chunk_bytes=-1"):
        Blockwise(query_block=0, chunk_bytes=-1)


def test_splash_lowers_for_a_tpu_that_is_not_here():
    case = Case(segments=True, seq=256, batch=1, heads=2, kv_heads=1, head_dim=128)
    q, k, v, _ = draw(case, jnp.bfloat16)
    starts = document_starts(documents(case))

    def loss(q, k, v):
        return attention(q, k, v, starts=starts, kernel=Splash()).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, v)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 2  # forward, and one backward for all gradients
