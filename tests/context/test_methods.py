"""Every method of context parallelism against dense attention in float64, on 2, 4 and 8 devices."""

from __future__ import annotations

import itertools
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxtrain.attention.blockwise import Blockwise
from jaxtrain.attention.documents import document_starts
from jaxtrain.attention.kernels import SelfAttention
from jaxtrain.attention.splash import Splash
from jaxtrain.context import GatheredKeys, RingAttention, TwoLevel, Ulysses
from jaxtrain.mesh.compiler_options import KEEP_BARRIERS
from jaxtrain.program.collectives import dot_flops
from jaxtrain.program.text import program_text


class Case(NamedTuple):
    causal: bool = True
    window: int | None = None
    documents: tuple[int, ...] = ()
    softcap: float | None = None
    heads: int = 8
    kv_heads: int = 8
    seq: int = 32
    batch: int = 2
    head_dim: int = 4


PACKED = (3, 18, 2, 1, 5)
"""Lengths of a row's documents: longer than a device's part, and shorter; what is left is
padding."""
GROUPED = dict(heads=4, kv_heads=2)
CASES = {
    "causal": Case(),
    "grouped": Case(**GROUPED),
    "all see all": Case(causal=False, **GROUPED),
    "window in a part": Case(window=3, **GROUPED),
    "window over parts": Case(window=11, **GROUPED),
    "window over most": Case(window=29, **GROUPED),
    "packed": Case(documents=PACKED, **GROUPED),
    "packed, all see all": Case(documents=PACKED, causal=False, **GROUPED),
    "packed, window, softcap": Case(documents=PACKED, window=9, softcap=1.5, **GROUPED),
    "softcap": Case(softcap=1.5, **GROUPED),
    "document a token": Case(documents=(1,) * 32, **GROUPED),
}


def draw(case):
    """q, k, v and the output's cotangent."""
    rng = np.random.default_rng(3)
    sizes = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    shape = (case.batch, case.seq)
    return [rng.normal(size=(*shape, n, case.head_dim)).astype(np.float32) for n in sizes]


def row_starts(case):
    """Document starts [batch, seq] of two unlike rows; None where a row is one."""
    if not case.documents:
        return None
    rows = []
    for row in range(case.batch):
        lengths = case.documents[::-1] if row % 2 else case.documents
        ids = np.repeat(np.arange(len(lengths)) + 1, lengths)[: case.seq]
        rows.append(np.pad(ids, (0, case.seq - len(ids))))
    return np.asarray(document_starts(jnp.asarray(np.stack(rows), jnp.int32)))


@cache
def dense(case):
    """o, dq, dk, dv in float64, by the definition."""
    q, k, v, do = (x.astype(np.float64) for x in draw(case))
    group = case.heads // case.kv_heads
    wide = [np.repeat(x, group, axis=2) for x in (k, v)]
    scores = np.einsum("bqhd,bkhd->bhqk", q, wide[0]) * case.head_dim**-0.5
    capped = scores if case.softcap is None else case.softcap * np.tanh(scores / case.softcap)
    distance = np.arange(case.seq)[:, None] - np.arange(case.seq)[None]
    seen = np.ones_like(distance, bool) if not case.causal else distance >= 0
    seen = seen if case.window is None else seen & (distance < case.window)
    seen, starts = np.broadcast_to(seen, scores.shape), row_starts(case)
    if starts is not None:
        seen = seen & (starts[:, None, :, None] == starts[:, None, None, :])
    weights = np.where(seen, np.exp(capped - capped.max(-1, keepdims=True)), 0.0)
    weights /= weights.sum(-1, keepdims=True)
    o = np.einsum("bhqk,bkhd->bqhd", weights, wide[1])
    dweights = np.einsum("bqhd,bkhd->bhqk", do, wide[1])
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True))
    if case.softcap is not None:
        dscores = dscores * (1 - (capped / case.softcap) ** 2)
    dscores = dscores * case.head_dim**-0.5
    dq = np.einsum("bhqk,bkhd->bqhd", dscores, wide[0])
    dk = np.einsum("bhqk,bqhd->bkhd", dscores, q)
    dv = np.einsum("bhqk,bqhd->bkhd", weights, do)
    narrow = [x.reshape(*x.shape[:2], case.kv_heads, group, -1).sum(3) for x in (dk, dv)]
    return o, dq, *narrow


def program(method, ways, case, *, kernel=None, check_vma=True):
    """(what each device does, its arguments' order): q, k, v, cotangent and document starts to o,
    dq, dk, dv, of rows cut over `ways` devices."""
    mesh = jax.make_mesh((ways,), ("context",), axis_types=(AxisType.Auto,))
    order = method.order(ways).permutation(case.seq)
    attend = SelfAttention(case.causal, case.window, case.softcap, kernel=kernel)
    starts, tokens = row_starts(case), P(None, "context")

    def local(q, k, v, do, *starts):
        o, pull = jax.vjp(
            lambda q, k, v: method(attend, q, k, v, *(starts or (None,)), ("context",)), q, k, v
        )
        return o, *pull(do)

    specs = (*(tokens,) * 4, *(() if starts is None else (P(),)))
    on_devices = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=(tokens,) * 4, check_vma=check_vma
    )
    return jax.jit(on_devices), order


def run(method, ways, case, **options):
    """o, dq, dk, dv in natural order."""
    on_devices, order = program(method, ways, case, **options)
    starts, back = row_starts(case), np.argsort(order)
    given = [x[:, order] for x in draw(case)] + ([] if starts is None else [starts])
    return [np.asarray(x)[:, back] for x in on_devices(*given)]


def assert_near(found, expected, bound=1e-5):
    for name, a, b in zip(("o", "dq", "dk", "dv"), found, expected, strict=True):
        assert np.isfinite(a).all(), name
        assert np.abs(a - b).max() <= bound * max(np.abs(b).max(), 1.0), name


RINGS = [RingAttention(), RingAttention(zigzag=False)]
METHODS = [*RINGS, GatheredKeys(), GatheredKeys(zigzag=False)]
QUICK = [
    *((RingAttention(), 4, name) for name in CASES),
    *((RingAttention(zigzag=False), 4, name) for name in CASES if "causal" not in name),
    *((GatheredKeys(), 4, name) for name in ("packed", "packed, window, softcap")),
    (GatheredKeys(zigzag=False), 2, "packed"),
    *((Ulysses(), 2, name) for name in ("packed", "packed, window, softcap")),
    *((TwoLevel(2), 4, name) for name in ("packed", "packed, window, softcap")),
    (RingAttention(), 2, "packed"),
    (RingAttention(), 8, "packed"),
    (TwoLevel(2), 8, "packed"),
    (Ulysses(), 8, "causal"),
]
EVERY = [
    (method, ways, name)
    for ways, name in itertools.product((2, 4, 8), CASES)
    for method in [*METHODS, Ulysses(), TwoLevel(2), TwoLevel(2, zigzag=False)]
    if not method.violations(ways, seq=32, heads=CASES[name].heads, kv_heads=CASES[name].kv_heads)
]


@pytest.mark.parametrize(
    ("method", "ways", "name"),
    [*QUICK, *(pytest.param(*e, marks=pytest.mark.exhaustive) for e in EVERY if e not in QUICK)],
    ids=str,
)
def test_outputs_and_gradients_are_those_of_dense_attention(method, ways, name):
    assert_near(run(method, ways, CASES[name]), dense(CASES[name]))


UNTYPED = [RingAttention(), RingAttention(zigzag=False), TwoLevel(2)]


@pytest.mark.parametrize("method", UNTYPED, ids=str)
def test_types_of_what_varies_may_be_off(method):
    case = CASES["packed, window, softcap"]
    assert_near(run(method, 4, case, check_vma=False), dense(case))


def test_a_kernel_that_is_only_a_function_serves_where_rows_are_whole():
    def doubled(q, k, v, starts):
        return 2 * q

    mesh = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Auto,))
    q, k, v, _ = draw(CASES["causal"])
    parts = P(None, "context")

    def on_devices(method):
        call = lambda q, k, v: method(doubled, q, k, v, None, ("context",))  # noqa: E731
        return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=parts, out_specs=parts))

    np.testing.assert_array_equal(on_devices(Ulysses())(q, k, v), 2 * q)
    with pytest.raises(ValueError, match="give it a SelfAttention"):
        on_devices(RingAttention())(q, k, v)


@pytest.mark.parametrize(
    ("method", "share"),
    [(RingAttention(), 17 / 32), (GatheredKeys(), 17 / 32), (RingAttention(False), 1.0)],
    ids=str,
)
def test_zigzag_multiplies_2n_plus_1_of_4n_tiles(method, share):
    # In contiguous order the last device has all tiles, and the program is everybody's.
    case, ways = Case(batch=1, heads=2, kv_heads=1, seq=128), 8
    tile = Blockwise(query_block=8, key_block=8)
    on_devices, _ = program(method, ways, case, kernel=tile)
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in draw(case)]
    # As in a step: or what is made again in the backward pass is not.
    kept = {"xla_disable_hlo_passes": KEEP_BARRIERS}
    text = program_text(on_devices.lower(*given).compile(compiler_options=kept))
    forward_and_backward = 7 * 2 * case.heads * case.head_dim
    full = forward_and_backward * case.seq * case.seq / ways
    found = dot_flops(text) / full
    assert found <= 1.02 * share
    assert found >= 0.9 * share  # and it is these tiles that were counted
    branches = text.count(" conditional(")
    assert bool(branches) == (method == RingAttention(False)), "a branch is not everybody's"


def test_what_a_method_needs_is_told_with_its_remedy():
    told = RingAttention().violations(8, seq=100, heads=4, kv_heads=4)
    assert told == [
        "seq=100 is no multiple of 16, by which context=8 divides rows in zig-zag order; use "
        "seq=96 or 112"
    ]
    assert "or zigzag=False" in RingAttention().violations(4, seq=12, heads=1, kv_heads=1)[0]
    told = Ulysses().violations(4, seq=16, heads=8, kv_heads=2)
    assert told == [
        "Ulysses() trades over 4 devices of context=4, which do not divide a device's kv_heads=2; "
        "use RingAttention(), which splits no heads"
    ]
    (told,) = TwoLevel(3).violations(4, seq=16, heads=4, kv_heads=4)
    assert told.endswith("use group=2 or 4, or RingAttention(), which splits no heads")
    # Of groups those that fit heads and rows, and of rings the one that fits rows.
    (told,) = TwoLevel(3).violations(4, seq=12, heads=4, kv_heads=2)
    assert told.endswith("use group=2, or RingAttention(zigzag=False), which splits no heads")
    told, rows = TwoLevel(4).violations(6, seq=20, heads=8, kv_heads=8)
    assert told.endswith("use RingAttention(zigzag=False), which splits no heads")
    assert rows.startswith("seq=20 is no multiple of 6")
    for text in Ulysses().violations(4, seq=16, heads=3, kv_heads=3):
        assert "use RingAttention(), which splits no heads" in text
    # Its 4 chunks are cut over 8 devices, though 12 tokens are 4 chunks of 3.
    (told,) = TwoLevel(4).violations(8, seq=12, heads=4, kv_heads=4)
    assert "seq=12 is no multiple of 8" in told and "use seq=8 or 16" in told
    assert TwoLevel(4).violations(8, seq=16, heads=4, kv_heads=4) == []
    with pytest.raises(ValueError, match="group=1"):
        TwoLevel(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "packed", "window over parts"])
def test_splash_attends_within_the_ring(name):
    case = CASES[name]._replace(seq=512, batch=1, heads=2, kv_heads=1, head_dim=64)
    if case.documents:
        case = case._replace(documents=(50, 300, 20, 100))
    if case.window:
        case = case._replace(window=200)
    found = run(RingAttention(), 2, case, kernel=Splash(interpret=True), check_vma=False)
    assert_near(found, dense(case), 2e-5)
