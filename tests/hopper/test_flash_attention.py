"""Attention for Hopper GPUs against the dense definition, in JAX's simulator of a GPU: there copies
and stores that race are raised, memory that nobody wrote is NaN, and products are done at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_gpu import NEW_JAX, abstract_gpus
from jax.sharding import PartitionSpec as P

from jaxtrain.attention.blockwise import Blockwise
from jaxtrain.attention.documents import ScoreInputs, document_starts
from jaxtrain.attention.fused import SavedAttention
from jaxtrain.attention.kernels import Reference
from jaxtrain.attention.online_softmax import MASKED, AttentionMask, Scoring
from jaxtrain.hopper import FlashAttention
from jaxtrain.hopper.key_gradients import document_ends
from jaxtrain.hopper.scores import TilePlace, whole
from jaxtrain.hopper.tiles import BLOCK, key_tiles, query_tiles
from jaxtrain.scores import Alibi, RelativeBias, ScoreFunction

SIMULATED = FlashAttention(interpret=True)


class Case(NamedTuple):
    """lengths: of the documents of each row; none: rows are whole."""

    head_dim: int = 64
    mask: AttentionMask = AttentionMask()
    lengths: tuple[tuple[int, ...], ...] = ()
    softcap: float | None = None
    seq: int = 128
    heads: int = 2
    kv_heads: int = 1
    dtype: Any = jnp.bfloat16
    function: ScoreFunction | None = None

    @property
    def scoring(self) -> Scoring:
        return Scoring(self.mask, 1.5 * self.head_dim**-0.5, self.softcap, self.function)

    @property
    def values(self) -> jax.Array | None:
        """The function's, of heads."""
        return None if self.function is None else jnp.asarray(self.function.of_heads(self.heads))

    @property
    def starts(self) -> jax.Array | None:
        if not self.lengths:
            return None
        ids = [np.repeat(np.arange(len(row)), row) for row in self.lengths]
        return document_starts(jnp.asarray(np.stack(ids), jnp.int32))

    def arrays(self) -> list[jax.Array]:
        """q, k, v and the cotangent of o."""
        rng, rows = np.random.default_rng(0), max(len(self.lengths), 1)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(rows, self.seq, n, self.head_dim) for n in heads]
        return [jnp.asarray(rng.normal(size=shape), self.dtype) for shape in shapes]


def everything(kernel: Any, case: Case, dtype: Any) -> dict[str, jax.Array]:
    """o, log-sum-exp and gradients."""
    q, k, v, do = (x.astype(dtype) for x in case.arrays())
    learned = (case.values,) if case.function is not None and case.function.trained else ()

    def attended(q: jax.Array, k: jax.Array, v: jax.Array, *learned: jax.Array) -> Any:
        located: Any = case.starts
        if case.function is not None:
            located = ScoreInputs(case.starts, learned[0] if learned else case.values)
        return kernel(q, k, v, located, case.scoring)

    (o, lse), pull = jax.vjp(attended, q, k, v, *learned)
    gradients = pull((do, jnp.zeros_like(lse)))
    names = ("o", "lse", "dq", "dk", "dv", "dvalues")
    return dict(zip(names, (o, lse, *gradients), strict=False))


def assert_near(found: dict[str, jax.Array], expected: dict[str, jax.Array], bound: float) -> None:
    for name, x in expected.items():
        a, b = np.asarray(found[name], np.float64), np.asarray(x, np.float64)
        assert a.shape == b.shape, name
        least = 1e-5 if name == "lse" else bound
        assert np.abs(a - b).max() <= least * np.abs(b).max(), name


@dataclass(frozen=True)
class Fading(ScoreFunction):
    """Learned, one number a head; with a root and a maximum, whose derivatives are constants."""

    trained: ClassVar[bool] = True

    def of_heads(self, heads: int) -> np.ndarray:
        return np.linspace(0.1, 0.5, heads, dtype=np.float32)

    def __call__(self, score: Any, head: Any, query: Any, key: Any) -> Any:
        return jnp.maximum(score, -3.0) * jnp.exp(-head * jnp.sqrt(1.0 + query - key))


@dataclass(frozen=True)
class Often(ScoreFunction):
    """By the number of the head; keys that it hides itself are of one head alone."""

    def __call__(self, score: Any, head: Any, query: Any, key: Any) -> Any:
        hidden = (head == 1) & ((query - key) % 3 == 1)
        return jnp.where(hidden, -jnp.inf, score / (1 + head) + jnp.tanh(score))


CASES = [
    Case(),
    Case(seq=192, lengths=((5, 100, 87),), function=Alibi()),
    Case(seq=192, mask=AttentionMask(window=70), lengths=((50, 142),), function=Fading()),
    Case(heads=4, kv_heads=2, softcap=2.0, function=Often()),
    Case(mask=AttentionMask(causal=False), function=Alibi()),
    Case(seq=192, lengths=((100, 92), (192,)), heads=4, kv_heads=2),
    Case(seq=192, mask=AttentionMask(window=70), softcap=2.0, dtype=jnp.float16),
    Case(mask=AttentionMask(causal=False), softcap=3.0),
    Case(head_dim=128, seq=192, mask=AttentionMask(window=30), lengths=((40, 30, 122),)),
    Case(head_dim=192, lengths=((63, 65),), heads=1),
    Case(head_dim=256, heads=1, softcap=2.0),
]


@NEW_JAX
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_dense_definition(case: Case) -> None:
    """Weights and gradients of scores are rounded to 16 bits before the second product of each."""
    found = everything(SIMULATED, case, case.dtype)
    assert all(found[name].dtype == case.dtype for name in ("o", "dq", "dk", "dv"))
    bound = 2 * float(jnp.finfo(case.dtype).eps)
    assert_near(found, everything(Reference(), case, jnp.float32), bound)


@NEW_JAX
@pytest.mark.parametrize(
    "mask",
    [
        AttentionMask(causal=False),
        AttentionMask(offset=40),
        AttentionMask(window=100, offset=80),
        AttentionMask(window=9, offset=200),
    ],
    ids=str,
)
def test_keys_of_another_place_give_their_part(mask: AttentionMask) -> None:
    """Of the softmax over them alone; a query that sees none has a log-sum-exp of about MASKED, and
    finite numbers. Gradients are by the log-sum-exp of all keys."""
    case = Case(mask=mask)
    q, k, v, do = case.arrays()
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    o, lse = SIMULATED.forward(q, k, v, None, case.scoring)
    expected, sums = Reference()(*wide, None, case.scoring)
    sees = np.asarray(sums)[..., None] > MASKED / 2
    assert np.isfinite(np.asarray(o, np.float32)).all()
    assert (np.asarray(lse)[~sees[..., 0]] < MASKED / 2).all()
    parts = dict(found=(o, lse[..., None]), expected=(expected, sums[..., None]))
    held = {k: [np.where(sees, np.asarray(x, np.float32), 0) for x in v] for k, v in parts.items()}
    for a, b in zip(held["found"], held["expected"], strict=True):
        assert np.abs(a - b).max() <= 1e-2 * max(np.abs(b).max(), 1.0)
    # With others' keys in its sum, each weight is a share of what it is here alone.
    total = jnp.where(sums > MASKED / 2, sums + 0.3, 0.0)
    saved = SavedAttention(q, k, v, None, o, total)
    gradients = SIMULATED.backward(saved, do, case.scoring)
    assert_near(
        dict(zip("qkv", gradients, strict=True)), by_hand(case, np.asarray(o, float), total), 1e-2
    )


def by_hand(case: Case, o: np.ndarray, lse: jax.Array) -> dict[str, Any]:
    """Gradients for one key head and a given log-sum-exp, in fp64."""
    q, k, v, do = (np.asarray(x, np.float64)[0] for x in case.arrays())
    places = jnp.arange(case.seq)
    visible = np.asarray(case.mask.visible(places[:, None], places[None]))[:, None]
    s = np.einsum("qhd,kd->qhk", q, k[:, 0]) * case.scoring.scale
    p = np.where(visible, np.exp(s - np.asarray(lse, float)[0][..., None]), 0)
    dp = np.einsum("qhd,kd->qhk", do, v[:, 0])
    ds = p * (dp - np.sum(o[0] * do, -1)[..., None]) * case.scoring.scale
    dq = np.einsum("qhk,kd->qhd", ds, k[:, 0])
    dk, dv = np.einsum("qhk,qhd->kd", ds, q), np.einsum("qhk,qhd->kd", p, do)
    return {"q": dq[None], "k": dk[None, :, None], "v": dv[None, :, None]}


MASKS = [
    AttentionMask(causal, window, offset)
    for causal, window in ((True, None), (True, 1), (True, 65), (True, 150), (False, None))
    for offset in (0, 37, 128, 1000)
]


@pytest.mark.parametrize("lengths", [(), (1, 62, 2, 127, 128), (320,), (64, 64, 192)], ids=str)
def test_tiles_that_nobody_sees_are_skipped_and_no_others(lengths: tuple[int, ...]) -> None:
    """And a tile is whole just where each of its queries sees each of its keys."""
    seq = 320
    case = Case(lengths=(lengths,) if lengths else ())
    places = jnp.arange(seq)
    blocks = seq // BLOCK
    for mask in MASKS:
        if lengths and (mask.offset or not mask.causal):
            continue
        visible = np.asarray(mask.visible(places[:, None], places[None]))
        ends: Any = [None] * blocks
        begins = None
        if (starts := case.starts) is not None:
            begins = starts[0]
            visible = visible & (np.asarray(places)[None] >= np.asarray(begins)[:, None])
            ends = document_ends(starts)[0]
        tiles = visible.reshape(blocks, BLOCK, blocks, BLOCK).swapaxes(1, 2)
        seen, full = tiles.any((2, 3)), tiles.all((2, 3))
        for i in range(blocks):
            at = jnp.int32(i * BLOCK)
            start = None if begins is None else begins[i * BLOCK]
            assert run_of(seen[i]) == span(*key_tiles(at, start, seq, mask)), (mask, i)
            assert run_of(seen[:, i]) == span(*query_tiles(at, ends[i], seq, mask)), (mask, i)
            for j in np.flatnonzero(seen[i]):
                of_tile = None if begins is None else begins[i * BLOCK : (i + 1) * BLOCK]
                if mask.causal:
                    last = None if of_tile is None else jnp.max(of_tile)
                    place = TilePlace(at, jnp.int32(j * BLOCK), last_start=last)
                    assert bool(whole(place, mask)) == full[i, j]


def run_of(seen: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.flatnonzero(seen))


def span(first: jax.Array, count: jax.Array) -> tuple[int, ...]:
    return tuple(range(int(first), int(first) + int(count)))


@NEW_JAX
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("function", [None, Alibi(), Fading()], ids=str)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_it_is_lowered_for_a_gpu_that_is_not_here(
    head_dim: int, function: ScoreFunction | None, check_vma: bool
) -> None:
    """In a shard_map, whether types are checked or not: one kernel for o, one for the gradients of
    queries, one or two for those of keys and values; with a softcap, a window and documents."""
    case = Case(head_dim, AttentionMask(window=99), ((64, 64),) * 2, 5.0, heads=4, kv_heads=2)
    case = case._replace(function=function)

    def local(starts: jax.Array, *arrays: jax.Array) -> Any:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            values = case.values
            located: Any = starts if values is None else ScoreInputs(starts, values)
            o, _ = FlashAttention()(q, k, v, located, case.scoring)
            return jnp.sum((o * arrays[3]).astype(jnp.float32))

        return jax.grad(loss, (0, 1, 2))(*arrays[:3])

    split = P("data")
    run = jax.shard_map(
        local,
        mesh=abstract_gpus(data=2),
        in_specs=(split,) * 5,
        out_specs=(split,) * 3,
        check_vma=check_vma,
    )
    traced = jax.jit(run).trace(case.starts, *case.arrays())
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = 3 if head_dim == 128 else 4
    assert text.count("stablehlo.custom_call @mosaic_gpu") == kernels
    # Before a product or a copy reads shared memory it is committed: in each kernel a tile of
    # scores, and each result. Products into sums end before what they read is written. The
    # simulator asks for neither.
    program = str(traced.jaxpr)
    assert program.count("commit_smem") == kernels + 4
    assert program.count("wgmma_wait[n=0]") == kernels - 1


@dataclass(frozen=True)
class OfTable(ScoreFunction):
    def __call__(self, score: Any, head: Any, query: Any, key: Any) -> Any:
        return score + jnp.asarray([0.1, 0.2, 0.3])[key % 3]


@dataclass(frozen=True)
class Modulo(ScoreFunction):
    """With a number of heads of its own."""

    def of_heads(self, heads: int) -> np.ndarray:
        return np.ones(8)[: 8 // (heads == 8)]

    def __call__(self, score: Any, head: Any, query: Any, key: Any) -> Any:
        return score % 2.0


@dataclass(frozen=True)
class Power(ScoreFunction):
    """Of scores that may be below 0, where a logarithm has no value."""

    def __call__(self, score: Any, head: Any, query: Any, key: Any) -> Any:
        return score**2.0


@dataclass(frozen=True)
class Gamma(ScoreFunction):
    def __call__(self, score: Any, head: Any, query: Any, key: Any) -> Any:
        return score + jax.lax.lgamma(1.0 + query - key)


@dataclass(frozen=True)
class Root(ScoreFunction):
    def __call__(self, score: Any, head: Any, query: Any, key: Any) -> Any:
        return jnp.sqrt(score)


@dataclass(frozen=True)
class HidesAll(ScoreFunction):
    """Of the third token of a row."""

    def __call__(self, score: Any, head: Any, query: Any, key: Any) -> Any:
        return score - jnp.where(query == 2, jnp.inf, 0.0)


@NEW_JAX
def test_a_function_is_asked_only_where_a_key_is_seen() -> None:
    """Scores of a document with another are negative here, and have no root."""
    case = Case(lengths=((40, 88),), function=Root())
    sign = jnp.where(jnp.arange(case.seq) < 40, 1.0, -1.0)[None, :, None, None]
    q, k, v, do = case.arrays()
    q, k = ((jnp.abs(x) * sign).astype(x.dtype) for x in (q, k))

    def results(kernel: Any, dtype: Any) -> Any:
        located = ScoreInputs(case.starts, case.values)
        o, pull = jax.vjp(
            lambda *x: kernel(*x, located, case.scoring)[0], *(x.astype(dtype) for x in (q, k, v))
        )
        return dict(zip(("o", "dq", "dk", "dv"), (o, *pull(do.astype(o.dtype))), strict=True))

    assert_near(results(SIMULATED, case.dtype), results(Reference(), jnp.float32), 2e-2)


@NEW_JAX
def test_a_query_whose_keys_a_function_hides_has_their_mean() -> None:
    """As by the definition: they are seen, with the least score, which is a constant to gradients.
    Those of values need each weight, which beside that score has no digits: in no kernel."""
    case = Case(function=HidesAll())
    found = everything(SIMULATED, case, case.dtype)
    expected = everything(Reference(), case, jnp.float32)
    assert_near(found, {k: expected[k] for k in ("o", "lse", "dq", "dk")}, 1e-2)


ZIGZAG = [*range(64), *range(192, 256)]
LATER = [*range(128, 256)]


@NEW_JAX
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("tokens", [ZIGZAG, LATER], ids=["zig-zag", "later"])
def test_parts_of_a_row_are_where_they_are_said_to_be(tokens: list[int], documents: bool) -> None:
    """As devices have them whose rows are split: positions are given, and documents begin at places
    of the whole row."""
    case, places = Case(function=Fading()), jnp.asarray(tokens, jnp.int32)[None]
    firsts = np.repeat([0, 30, 130], [30, 100, 126])[tokens] if documents else np.zeros(128, int)
    starts = jnp.asarray(firsts, jnp.int32)[None]
    positions = (places - starts,) * 2
    q, k, v, do = case.arrays()

    def results(kernel: Any, dtype: Any) -> dict[str, jax.Array]:
        def attended(values: jax.Array, *x: jax.Array) -> Any:
            located = ScoreInputs(starts if documents else None, values, positions)
            return kernel.forward(*x, located, case.scoring)

        arrays = [x.astype(dtype) for x in (q, k, v)]
        o, lse = attended(case.values, *arrays)
        located = ScoreInputs(starts if documents else None, case.values, positions)
        saved = SavedAttention(*arrays, located, o, lse)
        gradients = kernel.backward(saved, do.astype(dtype), case.scoring)
        names = ("o", "lse", "dq", "dk", "dv", "dvalues")
        return dict(zip(names, (o, lse, *gradients), strict=True))

    expected = results(Blockwise(64, 64), jnp.float32)
    assert_near(results(SIMULATED, case.dtype), expected, 2e-2)


@pytest.mark.parametrize(
    ("change", "approximate"),
    [(dict(), True), (dict(softcap=3.0), False), (dict(function=Alibi()), False)],
    ids=str,
)
@NEW_JAX
def test_exponentials_alone_are_approximate(change: dict[str, Any], approximate: bool) -> None:
    """By 22 bits; the tanh of a softcap would be by 11."""
    case = Case(**change)
    traced = jax.jit(lambda: everything(FlashAttention(), case, case.dtype)).trace()
    assert str(traced.jaxpr).count(f"approx_math={approximate}") == 3


SCALE = jnp.float32(0.3)


@dataclass(frozen=True)
class Many(Fading):
    """What a function may use, in one."""

    trained: ClassVar[bool] = True

    def __call__(self, score: Any, head: Any, query: Any, key: Any) -> Any:
        far, near = 1.0 + query - key, ((query - key) % 3 == 1) & ~(score > 2) | (query != key)
        x = jnp.where(near, jnp.clip(score, -9.0, 9.0), -jnp.abs(score)) / (1 + head)
        y = jnp.sqrt(far) * jnp.sign(score) + jnp.log(far) + jnp.round(score) + x**3
        z = jnp.exp(-head) * jnp.exp2(-far) + jnp.sin(x) * jnp.cos(x) + jax.lax.rsqrt(far)
        u = jnp.tanh(x) + jax.nn.sigmoid(x) + jax.nn.gelu(x) + jnp.square(x) * far**-2 + far**-1
        w = (
            jax.nn.softplus(x)
            + jax.nn.elu(x)
            + jnp.sqrt(far)
            + jax.lax.stop_gradient(x)
            + jnp.float32(2)
        )
        return y + z + u + w + x * (query - key).astype(bool) + jnp.where(jnp.isfinite(x), SCALE, x)


@NEW_JAX
@pytest.mark.parametrize("trained", [True, False])
def test_functions_that_are_taken_are_lowered(trained: bool) -> None:
    kind = Many if trained else type("Untrained", (Many,), {"trained": False})
    case = Case(function=kind())
    traced = jax.jit(lambda: everything(FlashAttention(), case, case.dtype)).trace()
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 3


@NEW_JAX
def test_gradients_of_scores_are_scaled_before_they_are_rounded() -> None:
    """Else fp16 overflows where the portable kernel's gradients are finite."""
    case = Case(seq=64, heads=1, dtype=jnp.float16)
    q, k, v, do = case.arrays()
    scoring = replace(case.scoring, scale=1 / 64)

    def gradients(kernel: Any) -> Any:
        _, pull = jax.vjp(lambda *x: kernel(*x, None, scoring)[0], q, k, 10 * v)
        return pull(2000 * do)

    for a, b in zip(gradients(SIMULATED), gradients(Blockwise(64, 64)), strict=True):
        a, b = np.asarray(a, float), np.asarray(b, float)
        assert np.isfinite(b).all() and np.abs(a - b).max() <= 5e-3 * np.abs(b).max()


Q = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
PLAIN = Scoring(AttentionMask(), 1.0)
REFUSED = [
    (dict(q=Q.update(dtype=jnp.float32)), "dtype=float32 is not supported"),
    (dict(q=Q.update(shape=(1, 100, 2, 64))), "seq=100 .* pad to 128"),
    (dict(q=Q.update(shape=(1, 128, 2, 96))), "head_dim=96 is not 64, 128, 192 or 256"),
    (dict(q=Q.update(shape=(1, 128, 2, 320))), "head_dim=320"),
    (dict(q=Q.update(shape=(1, 128, 2, 0))), "head_dim=0"),
    (dict(documents=True, between=True), "documents between different places"),
    (
        dict(between=True, scoring=Scoring(AttentionMask(), 1.0, None, Alibi())),
        "functions of scores between different places",
    ),
    (
        dict(documents=True, scoring=Scoring(AttentionMask(causal=False), 1.0)),
        "documents without a causal mask",
    ),
    (
        dict(scoring=Scoring(AttentionMask(), 1.0, None, RelativeBias(8, 9))),
        r"values of shape \[8\] for each head",
    ),
    (dict(scoring=Scoring(AttentionMask(), 1.0, None, OfTable())), "reads an array of its own"),
    (dict(scoring=Scoring(AttentionMask(), 1.0, None, Modulo())), "uses rem of fractions, which"),
    (dict(scoring=Scoring(AttentionMask(), 1.0, None, Power())), "uses pow, which"),
    (dict(scoring=Scoring(AttentionMask(), 1.0, None, Gamma())), "uses lgamma, which"),
]


@NEW_JAX
@pytest.mark.parametrize(("asked", "told"), REFUSED, ids=str)
def test_what_it_does_not_compute_is_refused(asked: dict[str, Any], told: str) -> None:
    usual: dict[str, Any] = dict(q=Q, scoring=PLAIN, documents=False, between=False)
    assert FlashAttention().refusals(**usual) == []
    (refusal,) = FlashAttention().refusals(**usual | asked)
    assert re.search(told, refusal)


@dataclass(frozen=True)
class OfEight(Alibi):
    """With values for the model's heads, of which a device has some."""

    def of_heads(self, heads: int) -> np.ndarray:
        if heads != 8:
            raise ValueError("eight heads")
        return super().of_heads(heads)


@NEW_JAX
def test_values_are_those_of_the_heads_that_are_given() -> None:
    scoring = Scoring(AttentionMask(), 1.0, None, OfEight())
    q = jnp.zeros(Q.shape, Q.dtype)
    kernel = FlashAttention()
    assert kernel.refusals(Q, scoring, documents=False, between=False) == []
    run = lambda heads: kernel(q, q, q, ScoreInputs(None, heads), scoring)  # noqa: E731
    o, _ = jax.eval_shape(run, jnp.ones(2))
    assert o.shape == Q.shape
    with pytest.raises(ValueError, match=r"values of shape \[3\] for each head, not a number"):
        jax.eval_shape(run, jnp.ones((2, 3)))


@NEW_JAX
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_the_most_stages_are_those_that_shared_memory_holds(head_dim: int) -> None:
    """As Mosaic's compiler has it, which raises for one more."""
    q = Q.update(shape=(1, 128, 2, head_dim))
    asked: dict[str, Any] = dict(scoring=PLAIN, documents=False, between=False)
    (refusal,) = FlashAttention(99).refusals(q, **asked)
    most = int(refusal.partition("; use stages=")[2])
    assert FlashAttention(most).refusals(q, **asked) == [] and most >= 2

    def lowered(stages: int) -> str:
        kernel, saved = FlashAttention(stages), jax.ShapeDtypeStruct((1, 128, 2), jnp.float32)
        run = jax.jit(
            lambda q, lse: kernel.backward(SavedAttention(*[q] * 3, None, q, lse), q, PLAIN)
        )
        return run.trace(q, saved).lower(lowering_platforms=("cuda",)).as_text()

    assert "mosaic_gpu" in lowered(most)
    with pytest.raises(ValueError, match="exceeds available shared memory"):
        lowered(most + 1)
