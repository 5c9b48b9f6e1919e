"""A kernel that is wrong in one head or one expert is found before the first step, and named."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_gpu import NEW_JAX, TRITON_IS_DEPRECATED, abstract_gpus

import jaxtrain
from jaxtrain import Health
from jaxtrain.attention import Blockwise, Cudnn, Splash, Triton
from jaxtrain.attention.fused import attend
from jaxtrain.attention.online_softmax import AttentionMask, Scoring
from jaxtrain.cluster import agreement
from jaxtrain.context import RingAttention, Ulysses
from jaxtrain.health import checks, kernel_check
from jaxtrain.health.attention_case import (
    AttentionProblem,
    attention_distances,
    document_starts,
    inputs_of,
    problems_of,
)
from jaxtrain.health.expert_case import choices_of, expert_distances, within
from jaxtrain.health.kernel_case import bound_for, distance, part_norms
from jaxtrain.health.kernel_check import cases_of, check_kernels, is_checked
from jaxtrain.hopper import FlashAttention
from jaxtrain.moe import BlockLoop, Megablox, MosaicBlocks, TritonBlocks
from jaxtrain.moe.grouped import Asked
from jaxtrain.operations.block import attentions
from jaxtrain.optim.precision import bf16, fp8, fp16, fp32
from jaxtrain.quantization.formats import E4M3, E5M2
from jaxtrain.session.check import check
from jaxtrain.step.assembly import Assembly, assemble
from jaxtrain.transformer import LatentAttentionConfig

BF16, FP32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
MASK = AttentionMask()
BETWEEN, FAR = AttentionMask(causal=False), AttentionMask(window=200, offset=128)
PROBLEM = AttentionProblem(
    seq=128,
    heads=4,
    kv_heads=2,
    head_dim=16,
    scoring=Scoring(MASK, 0.25),
    documents=True,
    merged=False,
    dtype=FP32,
)
ASKED = Asked(512, 4, 32, 64, FP32)


@dataclass(frozen=True)
class OffAttention:
    """`Blockwise`, but for one result in one head, from a token on. blind: it sees no documents.
    scored: fields of a `Scoring` that it takes instead."""

    heads_alike: ClassVar[bool] = True
    result: str = "none"
    head: int = 0
    token: int = 0
    blind: bool = False
    scored: tuple[tuple[str, Any], ...] = ()

    def refusals(self, *_: Any, **__: Any) -> list[str]:
        return []

    def __call__(self, *operands: Any) -> Any:
        return attend(self, *operands)

    def forward(self, q: Any, k: Any, v: Any, starts: Any, scoring: Scoring) -> Any:
        starts, scoring = self._changed(starts, scoring)
        o, lse = Blockwise().forward(q, k, v, starts, scoring)
        return self._off("o", o), self._off("lse", lse)

    def backward(self, saved: Any, do: Any, scoring: Scoring) -> Any:
        starts, scoring = self._changed(saved.starts, scoring)
        dq, dk, dv = Blockwise().backward(saved._replace(starts=starts), do, scoring)[:3]
        return self._off("dq", dq), self._off("dk", dk), self._off("dv", dv)

    def _changed(self, starts: Any, scoring: Scoring) -> tuple[Any, Scoring]:
        return None if self.blind else starts, replace(scoring, **dict(self.scored))

    def _off(self, result: str, x: jax.Array) -> jax.Array:
        return x.at[:, self.token :, self.head].mul(1.5) if result == self.result else x


@dataclass(frozen=True)
class OffExperts:
    """`BlockLoop`, but for one result of some experts. of_columns: in matrices of so many alone."""

    result: str = "none"
    experts: tuple[int, ...] = ()
    of_columns: int | None = None
    narrow: bool = False
    largest_block: int = 64
    least: int = 0

    def violations(self, asked: Asked) -> list[str]:
        return [f"embed={asked.embed} is too small"] if asked.embed < self.least else []

    def forward(self, rows: Any, weights: Any, owners: Any) -> Any:
        return self._rows("y", BlockLoop().forward(rows, weights, owners), owners)

    def backward(self, rows: Any, weights: Any, owners: Any, dy: Any) -> Any:
        dx, dw = BlockLoop().backward(rows, weights, owners, dy)
        right = self.of_columns not in (None, dw.shape[2])
        off = self.experts if self.result == "dw" and not right else ()
        return self._rows("dx", dx, owners), dw.at[jnp.array(off, int)].add(0.5)

    def _rows(self, result: str, x: jax.Array, owners: Any) -> jax.Array:
        wrong = jnp.isin(jnp.repeat(owners, len(x) // len(owners)), jnp.array(self.experts))
        return jnp.where(wrong[:, None] & (result == self.result), -x, x)


def attention_of(kernel: Any, problem: AttentionProblem = PROBLEM, heads: Any = (0, 1)) -> Any:
    run = jax.jit(partial(attention_distances, kernel, problem, heads))
    return {name: np.asarray(values) for name, values in run(*inputs_of(kernel, problem)).items()}


def experts_of(kernel: Any, asked: Asked = ASKED, formats: Any = None) -> Any:
    run = jax.jit(partial(expert_distances, kernel, asked, formats))
    values = run(jax.random.key(0), *choices_of(asked))
    return {name: np.asarray(a) for name, a in values.items()}


def wrong_parts(distances: Any, bound: float = 1e-4) -> dict[str, list[int]]:
    return {k: np.flatnonzero(~(v <= bound)).tolist() for k, v in distances.items()}


def none_wrong(distances: Any, bound: float = 1e-4) -> bool:
    return not any(wrong_parts(distances, bound).values())


def test_a_distance_is_of_the_worst_part_of_a_group() -> None:
    """Quotients of norms, the greatest of a group. Where nothing is expected the least rest counts,
    by the average part, and what is no number."""
    apart = jnp.array([[0.1, 0.0, 0.3], [0.0, 0.2, jnp.nan], [0.0, 0.0, 0.0], [0.0, 1e-3, 0.0]])
    size = jnp.array([[1.0, 1.0, 2.0], [1.0, 1.0, 1.0], [0.0, 0.0, 1.0], [1.0, 0.0, 1.0]])
    mean = np.sqrt(np.mean(np.square(size)))
    expected = [0.15, np.inf, 0.0, 1e-3 / (1e-6 * mean)]
    np.testing.assert_allclose(distance(apart, size), expected, rtol=1e-5)
    nothing = jnp.zeros((2, 1))
    np.testing.assert_array_equal(distance(jnp.array([[0.0], [1e-9]]), nothing), [0, np.inf])


@pytest.mark.parametrize(("tokens", "columns"), [(3, 5), (64, 128), (130, 257)])
def test_norms_are_of_64_tokens_and_128_columns(tokens: int, columns: int) -> None:
    x = np.random.default_rng(0).normal(size=(2, tokens, columns)).astype(np.float32)
    expected = [
        [
            np.linalg.norm(x[n, i : i + 64, j : j + 128])
            for i in range(0, tokens, 64)
            for j in range(0, columns, 128)
        ]
        for n in range(2)
    ]
    np.testing.assert_allclose(part_norms(jnp.asarray(x)), expected, rtol=1e-5)


@pytest.mark.parametrize("result", ["o", "dq", "dk", "dv"])
@pytest.mark.parametrize("first", [True, False])
def test_the_wrong_head_of_attention_is_named(result: str, first: bool) -> None:
    """Also if only the last tokens of a row are wrong, where outputs are small."""
    heads = 4 if result in ("o", "dq") else 2
    head = 0 if first else heads - 1
    found = attention_of(OffAttention(result, head, token=0 if first else 120))
    # Gradients are made with the output: one of queries and keys is wrong where that is.
    also = {"dq": [head], "dk": [head // 2]} if result == "o" else {}
    expected = {key: [] for key in ("o", "dq", "dk", "dv")} | also | {result: [head]}
    assert wrong_parts(found) == expected


@pytest.mark.parametrize("result", ["o", "dk"])
def test_the_last_tokens_of_a_row_count_in_16_bits(result: str) -> None:
    """Four of 512, whose outputs are small beside the first ones'."""
    problem = replace(PROBLEM, seq=512, dtype=BF16, documents=False)
    found = attention_of(OffAttention(result, 1, token=508), problem)
    assert wrong_parts(found, 3e-2)[result] == [1]


def test_a_log_sum_exp_counts_where_results_are_merged() -> None:
    """In a row that devices share."""
    off = OffAttention("lse", 1)
    merged = attention_of(off, replace(PROBLEM, merged=True, documents=False))
    assert wrong_parts(merged)["lse"] == [1] and "lse" not in attention_of(off)


@pytest.mark.parametrize("mask", [MASK, BETWEEN, FAR])
def test_documents_and_masks_that_a_kernel_does_not_see_are_found(mask: AttentionMask) -> None:
    problem = replace(PROBLEM, merged=True, scoring=Scoring(mask, 0.25), dtype=BF16)
    assert none_wrong(attention_of(OffAttention(), problem), 1e-2)
    blind = wrong_parts(attention_of(OffAttention(blind=True), problem), 3e-2)
    assert blind["o"] == [0, 1, 2, 3] and blind["dk"] == [0, 1]
    single = replace(problem, documents=False)
    assert none_wrong(attention_of(OffAttention(blind=True), single), 1e-2)
    other = ("mask", AttentionMask(window=100, offset=mask.offset))
    for asked in (single, problem):
        assert wrong_parts(attention_of(OffAttention(scored=(other,)), asked), 3e-2)["dq"]


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [("softcap", None, 50.0), ("softcap", 30.0, 31.5), ("scale", 0.25, 0.35), ("scale", 0.25, 1.0)],
)
def test_other_scores_are_found_in_16_bits(name: str, value: Any, right: float) -> None:
    """A softcap counts where logits are near it, so they are."""
    scoring = replace(PROBLEM.scoring, **{name: right})
    problem = replace(PROBLEM, scoring=scoring, dtype=BF16, documents=False)
    assert none_wrong(attention_of(OffAttention(), problem), 1e-2)
    assert wrong_parts(attention_of(OffAttention(scored=((name, value),)), problem), 3e-2)["dq"]


@pytest.mark.parametrize(("softcap", "scale"), [(5000.0, 128**-0.5), (200.0, 1 / 128), (50.0, 1.0)])
def test_a_softcap_that_hardly_counts_is_no_error(softcap: float, scale: float) -> None:
    scoring = Scoring(MASK, scale, softcap)
    problem = replace(PROBLEM, seq=256, head_dim=128, scoring=scoring, dtype=BF16)
    assert none_wrong(attention_of(Splash(interpret=True), problem), 1.5e-2)


MASKS = {
    "window 1": (AttentionMask(window=1), False),
    "window 66 of another part": (AttentionMask(window=66, offset=128), True),
    "window 3 of another part": (AttentionMask(window=3, offset=128), True),
    "no window": (MASK, False),
    "earlier keys": (BETWEEN, True),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("seq", [1, 2, 7, 128])
def test_rounding_is_no_error(name: str, seq: int) -> None:
    """Where queries see one key, or a few, scores have next to no gradient, and a log-sum-exp may
    be near 0."""
    mask, merged = MASKS[name]
    mask = replace(mask, offset=seq if mask.offset else 0)
    for head_dim, scale in ((16, 0.25), (128, 1.0)):
        scoring = Scoring(mask, scale)
        sizes: Any = dict(seq=seq, head_dim=head_dim, heads=8, kv_heads=8, merged=merged)
        problem = replace(PROBLEM, scoring=scoring, dtype=BF16, **sizes)
        for documents in (False, True):
            distances = attention_of(
                Blockwise(16, 16), replace(problem, documents=documents), tuple(range(8))
            )
            assert none_wrong(distances, 1e-2)


KERNELS = (Triton(interpret=True), Splash(interpret=True))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: type(k).__name__)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_kernels_of_accelerators_are_far_within_the_bound(kernel: Any, dtype: Any) -> None:
    scoring = Scoring(MASK, 128**-0.5)
    problem = replace(PROBLEM, seq=256, head_dim=128, scoring=scoring, dtype=jnp.dtype(dtype))
    assert none_wrong(attention_of(kernel, problem), 6e-3)


@pytest.mark.parametrize("result", ["y", "dx", "dw"])
@pytest.mark.parametrize("experts", [(0,), (3,), (0, 1, 3)])
def test_the_wrong_experts_are_found(result: str, experts: tuple[int, ...]) -> None:
    """All but the last, which a sum over rows would hide."""
    found = wrong_parts(experts_of(OffExperts(result, experts)))
    assert found == {key: [] for key in ("y", "dx", "dw")} | {result: list(experts)}


@pytest.mark.parametrize("columns", [32, 64])
def test_matrices_into_the_hidden_dim_and_out_of_it_are_compared(columns: int) -> None:
    assert wrong_parts(experts_of(OffExperts("dw", (1,), columns)))["dw"] == [1]


def test_few_rows_are_of_all_experts_but_one() -> None:
    """In their order, in parts of 64 rows of one expert."""
    few = choices_of(ASKED._replace(rows=6, experts=4))
    assert {*few.experts.tolist()} == {0, 1, 3} and few.experts.tolist() == sorted(few.experts)
    many = jax.tree.map(np.asarray, choices_of(ASKED._replace(rows=5000)))
    for part, owner in enumerate(many.owners):
        rows = np.flatnonzero(many.parts == part)
        assert 0 < len(rows) <= 64 and (many.experts[rows] == owner).all()
    assert len(many.parts) == 5000 and many.parts.max() == len(many.owners) - 1


def test_the_gradient_of_an_expert_without_rows_is_zero() -> None:
    """The second to last has none: what a kernel leaves in its matrix is wrong."""
    assert wrong_parts(experts_of(OffExperts("dw", (2,))))["dw"] == [2]
    assert experts_of(OffExperts())["dw"][2] == 0


@pytest.mark.parametrize(
    "kernel",
    [TritonBlocks(interpret=True), Megablox(tile=(128, 128, 128), interpret=True)],
    ids=lambda k: type(k).__name__,
)
def test_the_experts_of_accelerators_are_far_within_the_bound(kernel: Any) -> None:
    assert none_wrong(experts_of(kernel, Asked(512, 4, 128, 256, BF16)), 6e-3)


def test_products_in_8_bits_are_held_against_the_same_numbers() -> None:
    """So a bound for 16 bits serves: rounding to 8 bits is not in it."""
    assert none_wrong(experts_of(OffExperts(narrow=True), formats=(E4M3, E5M2)))
    off = OffExperts("dx", (1,), narrow=True)
    assert wrong_parts(experts_of(off, formats=(E4M3, E5M2)))["dx"] == [1]


def test_long_rows_are_cut() -> None:
    """Of 8 key heads as many as FLOPs are for, the last always; then rows are halved, with their
    windows, if the kernel takes it."""
    problem = replace(PROBLEM, heads=16, kv_heads=8)
    one = 14 * 2 * (128 * 128 / 2) * 2 * 16
    assert problem.head_flops == one
    cuts = [problem.compared_heads(n * one) for n in (0.5, 1, 3, 8, 99)]
    assert cuts == [(7,), (7,), (0, 4, 7), (*range(8),), (*range(8),)]
    kernel = OffAttention()
    assert [problem.within(n * one, kernel).seq for n in (1, 0.9, 0.25, 0.2)] == [128, 64, 64, 32]
    assert replace(problem, seq=126).within(1.0, kernel).seq == 63
    full = replace(problem, scoring=Scoring(BETWEEN, 0.25))
    assert full.head_flops == 2 * one
    far = replace(problem, scoring=Scoring(AttentionMask(window=9, offset=4), 0.25))
    assert far.head_flops == one * 9 / 64
    half = far.within(one * 9 / 128, kernel)
    assert half.scoring.mask == AttentionMask(window=5, offset=2) and half.seq == 64
    blocks = replace(problem, seq=1920).within(1.0, Triton(block=128))
    assert blocks.seq == 1920, "which they divide, and not a half of it"
    assert problem.within(1.0, lambda *_: None) == problem, "of a function nobody knows"


def test_large_experts_are_cut() -> None:
    """Rows first, to 512 of an expert, then dims, to 1024 and as far as the kernel takes it."""
    asked, kernel = Asked(4096, 4, 4096, 2048, FP32), OffExperts()
    work = 6 * 4096 * 4096 * 2048
    assert within(asked, kernel, work) == asked
    cuts = [within(asked, kernel, work / n)[:4] for n in (2, 4, 8, 99)]
    assert cuts == [
        (2048, 4, 4096, 2048),
        (2048, 4, 2048, 2048),
        (2048, 4, 2048, 1024),
        (2048, 4, 1024, 1024),
    ]
    many = within(Asked(4096, 64, 4096, 2048, FP32), kernel, work)
    assert many[:4] == (4096, 64, 1024, 1024), "2**28 bytes"
    assert within(asked, OffExperts(least=2048), work / 99)[:4] == (2048, 4, 2048, 1024)


def test_rows_of_documents_have_what_a_kernel_has_room_for() -> None:
    """One document as long as the row, and documents of all lengths."""
    starts = document_starts(4096, 4096)
    assert starts.shape == (2, 4096) and not starts[0].any()
    lengths = np.diff([*np.unique(starts[1]), 4096])
    assert (lengths < 8).any() and (lengths > 500).any() and 5 < len(lengths) < 40
    firsts = np.maximum.accumulate(np.where(np.diff(starts[1], prepend=-1), np.arange(4096), 0))
    np.testing.assert_array_equal(starts[1], firsts)
    assert len(np.unique(document_starts(4096, 3)[1])) == 3
    few = inputs_of(Cudnn(documents=2), replace(PROBLEM, seq=4096))[1]
    assert sum(len(np.unique(row)) for row in np.asarray(few)) == 4


@pytest.fixture
def attending(decoder: jaxtrain.Experiment) -> Callable[..., jaxtrain.Experiment]:
    """An experiment with an attention kernel, or a kernel of experts; heads=4, kv_heads=2."""

    def experiment(kernel: Any, context: Any = None, precision: Any = fp32) -> Any:
        config: Any = decoder.model
        layer = jaxtrain.AttentionConfig(heads=4, kv_heads=2, head_dim=4)
        mlp: Any = config.period[0].mlp
        execution = replace(decoder.execution, context=context)
        if isinstance(kernel, OffExperts):
            mlp = jaxtrain.MoeConfig(experts=4, experts_per_token=2, hidden=16)
            execution = replace(execution, grouped_matmul=kernel)
        else:
            execution = replace(execution, attention=kernel)
        model = replace(config, period=(jaxtrain.BlockConfig(layer, mlp),))
        return replace(decoder, model=model, execution=execution, precision=precision)

    return experiment


def assembled(experiment: Any, **axes: int) -> Assembly:
    return assemble(experiment, jaxtrain.mesh_from_axes(**(axes or {"data": 1})))


def test_a_run_with_a_wrong_kernel_is_refused(attending, tmp_path: Path) -> None:
    """Nothing is saved; the remedies that are named work; without the check it trains."""
    off = OffAttention("dk", head=1)
    e = replace(attending(off), steps=2, checkpoints=jaxtrain.SavePolicy(every=1))

    def run(name: str, wanted: bool | None, **execution: Any) -> str:
        stream = io.StringIO()
        execution["health"] = Health(kernels=wanted)
        changed = replace(e, execution=replace(e.execution, **execution))
        mesh = jaxtrain.mesh_from_axes(data=1)
        folders = dict(run_dir=tmp_path / name, cache_dir=tmp_path / "cache")
        result = jaxtrain.train(changed, mesh, **folders, stream=stream)
        assert result.history[-1]["step"] == 2
        return stream.getvalue()

    with pytest.raises(ValueError, match=r"^kernels: attention=OffAttention") as caught:
        run("wrong", True)
    said = str(caught.value)
    assert "computes dk of key head 1 wrongly (1 of 2), 5.0e-01 from Blockwise(" in said
    assert "for 4 heads of 4, 2 of keys, and 2 rows of 8 tokens; nothing was" in said
    assert said.endswith(
        "nothing was trained: use execution.attention=Blockwise(), or "
        "execution.health=Health(kernels=False) if it is meant to compute something else"
    )
    assert not list((tmp_path / "wrong").glob("checkpoints/[0-9]*"))
    assert "kernels: none to compare" in run("mended", True, attention=Blockwise())
    for name, wanted in (("off", False), ("by default", None)):
        assert "kernels:" not in run(name, wanted)
    right = run("right", True, attention=OffAttention())
    assert "NOTE kernels: attention=OffAttention(" in right and "is within 0.0e+00 of Bl" in right


def test_experts_of_a_device_are_checked(attending) -> None:
    """With `expert=2` a device has two of four."""
    told: list[str] = []
    right = assembled(attending(OffExperts()), expert=2, tensor=2)
    check_kernels(right, told.append)
    assert len(told) == 1 and "for 2 experts of [8, 8] and " in told[0]
    wrong = assembled(attending(OffExperts("dw", (1,))), expert=2, tensor=2)
    with pytest.raises(ValueError, match=r"dw of expert 1 wrongly \(1 of 2\), .* for 2 ex"):
        check_kernels(wrong, print)


OF_RING = (MASK, BETWEEN)
TILES = [
    (None, dict(tensor=2), [(8, 2, 1, MASK, False)]),
    (Ulysses(), dict(context=2), [(8, 2, 1, MASK, False)]),
    (
        RingAttention(zigzag=False),
        dict(context=2),
        [(4, 4, 2, MASK, True), (4, 4, 2, BETWEEN, True)],
    ),
    (RingAttention(), dict(context=2, tensor=2), [(4, 2, 1, MASK, True), (2, 2, 1, BETWEEN, True)]),
]


@pytest.mark.parametrize(("method", "axes", "expected"), TILES)
def test_problems_are_those_of_a_device(method, axes, expected, attending) -> None:
    """(tokens, heads, key heads, mask, whether results are merged)."""
    off, portable = attending(OffAttention("lse"), method), attending(None, method)
    # A kernel of one's own is refused where rows are cut: it stands for one of the library's.
    assembly = replace(assembled(portable, **axes), experiment=off)
    (call,) = attentions(assembly.described.layers[0])
    problems = problems_of(assembly, call, assembly.roles)
    kinds = [(p.seq, p.heads, p.kv_heads, p.scoring.mask, p.merged) for p in problems]
    assert kinds == expected
    result = "lse" if problems[0].merged else "dq"  # of which the log-sum-exp makes gradients
    with pytest.raises(ValueError, match=f"computes {result} of head 0 wrongly"):
        check_kernels(assembly, print, wanted=True)


def test_the_scores_are_those_of_the_model(attending) -> None:
    experiment = attending(None)
    config = replace(experiment.model.period[0].attention, softcap=20.0, scale=0.7, window=5)
    latent = LatentAttentionConfig(
        heads=4, latent=8, nope_head_dim=8, rope_head_dim=4, value_head_dim=4
    )
    for attention, size, scoring in (
        (config, 4, Scoring(AttentionMask(window=5), 0.7, 20.0)),
        (latent, 12, Scoring(MASK, 12**-0.5)),
        (replace(latent, scale=0.5), 12, Scoring(MASK, 0.5)),
    ):
        block = replace(experiment.model.period[0], attention=attention)
        model = replace(experiment.model, period=(block,))
        assembly = assembled(replace(experiment, model=model))
        (call,) = attentions(assembly.described.layers[0])
        (problem,) = problems_of(assembly, call, assembly.roles)
        assert problem.scoring == scoring and problem.head_dim == size


def test_layers_outside_a_pipeline_have_fewer_heads(attending) -> None:
    """They are split over stages too."""
    experiment = attending(OffAttention())
    model = replace(experiment.model, layers=3, prefix=experiment.model.period)
    piped = replace(experiment, model=model, microbatches=2)
    cases = cases_of(assembled(piped, stage=2))
    assert [case.problem.partition(",")[0] for case in cases] == ["4 heads of 4", "2 heads of 4"]


def test_of_a_long_ring_the_own_the_first_and_the_last_tile_are_compared(attending) -> None:
    experiment = attending(None, RingAttention(zigzag=False))
    attention = replace(experiment.model.period[0].attention, window=6)
    block = replace(experiment.model.period[0], attention=attention)
    e = replace(experiment, model=replace(experiment.model, period=(block,)))
    assembly = assembled(e, context=8)
    (call,) = attentions(assembly.described.layers[0])
    problems = problems_of(assembly, call, assembly.roles)
    assert [p.scoring.mask.offset for p in problems] == [0, 1, 5]
    assert [p.apart for p in problems] == [0, 1, 5]


def test_experts_in_8_bits_are_compared_so(attending) -> None:
    experiment = attending(OffExperts(narrow=True), precision=fp8)
    (case,) = cases_of(assembled(experiment))
    assert case.problem.endswith("rows in 8 bits") and case.bound == 3e-2
    told: list[str] = []
    check_kernels(assembled(experiment), told.append)
    assert "in 8 bits" in told[0] and "not compared" not in told[0]
    (case,) = cases_of(assembled(attending(OffExperts(), precision=fp8)))
    assert "8 bits" not in case.problem


def test_a_start_that_takes_no_step_checks_nothing(opened, own, monkeypatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        checks, "check_kernels", lambda assembly, tell, *, wanted: asked.append(wanted)
    )
    session = opened(own)
    for start, wanted in ((0, True), (20, True), (0, None), (0, False)):
        session.start = start
        checks.HealthChecks(Health(kernels=wanted), session, print).begin()
    assert asked == [True]
    chip = replace(session.assembly, spec=jaxtrain.load_mesh("h100_8"))
    session.assembly = chip
    checks.HealthChecks(Health(), session, print).begin()
    assert asked == [True, None]


def test_each_process_has_what_one_finds(attending, monkeypatch) -> None:
    """A kernel that is wrong on one machine ends the run on all."""
    other = json.dumps({"error": "kernels: a is wrong", "refuses": True})
    monkeypatch.setattr(agreement, "all_gather_text", lambda text: [text, other])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"^process 1: kernels: a is wrong$"):
        check_kernels(assembled(attending(OffAttention())), print, wanted=True)
    own = r"^process 0: kernels: attention=.* wrongly .*; process 1: kernels: a is wrong$"
    with pytest.raises(ValueError, match=own):
        check_kernels(assembled(attending(OffAttention("o"))), print, wanted=True)


def test_a_wrong_kernel_is_not_said_to_be_within_its_bound(attending) -> None:
    told: list[str] = []
    with pytest.raises(ValueError, match="wrongly"):
        check_kernels(assembled(attending(OffAttention("o"))), told.append, wanted=True)
    assert not told


def test_what_cannot_be_compared_is_said(attending, monkeypatch) -> None:
    """A check that fails is no wrong kernel: the step has compiled with it."""

    def short(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nof a device")

    told: list[str] = []
    monkeypatch.setattr("jaxtrain.health.attention_case.attention_distances", short)
    check_kernels(assembled(attending(OffAttention("o"))), told.append, wanted=True)
    (line,) = told
    assert "was not compared for 4 heads of 4, 2 of keys, and 2 rows of 8 tokens" in line
    assert line.endswith(": RESOURCE_EXHAUSTED: out of memory")


@dataclass(frozen=True)
class Standard(OffAttention):
    standard: ClassVar[bool] = True


def unscaled(q: Any, k: Any, v: Any, starts: Any, scoring: Any) -> Any:
    """Softmax attention; its log-sum-exp nobody reads."""
    return Blockwise()(q, k, v, starts, scoring)[0], None


def test_a_kernel_of_one_s_own_need_not_be_standard(attending) -> None:
    """It is compared if it says that it is, or where the field asks for it."""
    told: list[str] = []
    own = assembled(attending(OffAttention("o")))
    check_kernels(own, told.append)
    assert not told
    with pytest.raises(ValueError, match="computes o of head 0 wrongly"):
        check_kernels(own, print, wanted=True)
    with pytest.raises(ValueError, match="computes o of head 0 wrongly"):
        check_kernels(assembled(attending(Standard("o"))), print)
    check_kernels(assembled(attending(unscaled)), told.append, wanted=True)
    assert told[0].startswith("NOTE kernels: attention=unscaled is within 0.0e+00 of Blockwise(")
    check_kernels(assembled(attending(None)), told.append, wanted=True)
    assert told[1].endswith("none to compare: attention and experts run the portable ones")
    assert len(told) == 2


def test_kernels_are_checked_on_accelerators_and_as_the_field_says(own, attending) -> None:
    simulated = assembled(own)
    chip = replace(simulated, spec=jaxtrain.load_mesh("h100_8"))
    cases = ((None, simulated), (None, chip), (True, simulated), (False, chip))
    assert [is_checked(*case) for case in cases] == [False, True, True, False]
    assert not [*cases_of(simulated)], "a model of one's own does not say what it runs"
    assert not [*cases_of(assembled(attending(None)))], "Blockwise is the portable one"
    with pytest.raises(ValueError, match="kernels='off' is a str; use"):
        Health(kernels="off")  # type: ignore[arg-type]


def test_bounds_follow_the_dtype_and_the_platform(attending) -> None:
    bounds = []
    for precision in (fp32, bf16, fp16):
        assembly = assembled(attending(None, precision=precision))
        chip = replace(assembly, spec=jaxtrain.load_mesh("h100_8"))
        bounds.append((bound_for(assembly), bound_for(chip)))
    assert bounds == [(1e-4, 3e-2), (3e-2, 3e-2), (3e-2, 3e-2)]


ROOT = Path(__file__).resolve().parents[2]
CHIPS = [
    ("llama3_8b", "v5p_512", ["Splash"], "16 heads of 128, 4 of keys, and 2 rows of 8,192"),
    ("llama3_8b_128k", "v5p_512_context8", ["Splash"] * 2, "keys of an earlier part"),
    (
        "mixtral_8x7b",
        "v5p_512",
        ["Splash", "Megablox"],
        "8 experts of [2048, 3584] and 8,192",
    ),
    ("llama3_8b", "h100_64", ["Cudnn"], "packed documents"),
]


@pytest.mark.parametrize(("experiment", "mesh", "kernels", "part"), CHIPS)
def test_what_a_chip_would_check(experiment, mesh, kernels, part) -> None:
    folder = ROOT / "experiments" / f"{experiment}.py"
    assembly = check(folder, ROOT / "meshes" / f"{mesh}.toml", data_here=False).assembly
    cases = [*cases_of(assembly)]
    assert [case.setting.partition("=")[2].partition("(")[0] for case in cases] == kernels
    assert part in cases[-1].problem


LOWERED = [
    ("tpu", Splash()),
    ("cuda", Cudnn()),
    ("cuda", Triton(block=32)),
    ("tpu", Megablox()),
    ("cuda", TritonBlocks()),
    pytest.param("cuda", MosaicBlocks(), marks=NEW_JAX),
    pytest.param("cuda", FlashAttention(), marks=NEW_JAX),
]


@TRITON_IS_DEPRECATED
@pytest.mark.parametrize(("platform", "kernel"), LOWERED)
def test_the_check_lowers_for_the_kernels_platform(platform: str, kernel: Any) -> None:
    """Beside the portable one, whose products are not in passes of 16 bits."""
    run: Any
    if isinstance(kernel, Megablox | TritonBlocks | MosaicBlocks):
        asked = Asked(2048, 4, 128, 256, BF16)
        run, inputs = partial(expert_distances, kernel, asked, None), choices_of(asked)
        inputs = (jax.random.key(0), *inputs)
    else:
        problem = replace(PROBLEM, seq=256, head_dim=128, dtype=BF16)
        run, inputs = (
            partial(attention_distances, kernel, problem, (1,)),
            inputs_of(kernel, problem),
        )
    with jax.sharding.use_abstract_mesh(abstract_gpus(one=1)):
        text = jax.jit(run).trace(*inputs).lower(lowering_platforms=(platform,)).as_text()
    assert "custom_call" in text and text.count("HIGHEST") >= 3


def test_products_have_the_precision_of_the_run(attending, monkeypatch) -> None:
    """Those of the kernel that is compared."""
    texts: list[str] = []
    jit = jax.jit

    def noted(function: Any) -> Any:
        texts.append(str(jax.make_jaxpr(function)(*inputs)))
        return jit(function)

    assembly = assembled(attending(OffAttention(), precision=replace(fp32, matmul="high")))
    (case,) = cases_of(assembly)
    inputs = case.inputs
    monkeypatch.setattr(kernel_check.jax, "jit", noted)
    check_kernels(assembly, print, wanted=True)
    assert "precision=(Precision.HIGH, Precision.HIGH)" in texts[0].replace("\n", " ")
