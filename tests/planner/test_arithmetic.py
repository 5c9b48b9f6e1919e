"""The FLOPs that the source asks for, against the model's own count and against compiled steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import jaxtrain
from jaxtrain.attention.blockwise import Blockwise
from jaxtrain.attention.kernels import Reference
from jaxtrain.attention.online_softmax import AttentionMask, Scoring
from jaxtrain.attention.splash import Splash
from jaxtrain.attention.tiling import Tiling
from jaxtrain.attention.triton import Triton
from jaxtrain.certificate.shrink import shrink
from jaxtrain.context.methods import GatheredKeys, RingAttention, Ulysses
from jaxtrain.mesh.mesh import make_mesh
from jaxtrain.moe import Megablox, MosaicBlocks, TritonBlocks
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.operations.experts import ExpertCall
from jaxtrain.planner.arithmetic import asked_flops, calls, least_kernel_flops, opaque_flops
from jaxtrain.program.collectives import dot_flops
from jaxtrain.step.assembly import Assembly, active_mesh, assemble
from jaxtrain.step.running_kernels import expert_chunks
from jaxtrain.step.state import shardings
from jaxtrain.step.train_step import compile_step

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}


def assembled(
    axes: dict[str, int],
    remat: str = "none",
    *,
    experts: int = 0,
    dense_after: bool = False,
    seq: int = 16,
    unroll: bool = True,
    window: int | None = None,
    **execution: Any,
) -> Assembly:
    small = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    (block,) = small.model.period
    block = replace(block, attention=replace(block.attention, window=window))
    period = (block,)
    if experts:
        mixture = replace(block, mlp=jaxtrain.MoeConfig(block.mlp.hidden, experts))
        period = (mixture, block) if dense_after else (mixture,)
    execution = {"loop": LayerLoop(unroll=unroll, remat=remat), **execution}
    e = replace(
        small,
        model=replace(small.model, period=period),
        data=replace(small.data, seq=seq),
        execution=jaxtrain.Execution(**execution),
        microbatches=2,
    )
    return assemble(e, jaxtrain.mesh_from_axes(**axes))


@pytest.mark.parametrize("axes", [{"data": 1}, {"tensor": 2}, CUBE], ids=str)
def test_all_devices_together_are_asked_for_the_models_own_flops(axes: dict[str, int]) -> None:
    """Dense attention, everything saved: three forward passes, of the padded vocabulary."""
    assembly = assembled(axes, attention=Reference())
    e = assembly.experiment
    padded = replace(e.model, vocab=e.model.padded_vocab)
    whole = padded.flops(seq=e.data.seq, sequences=e.batch).train_full
    asked = asked_flops(assembly)
    assert asked is not None and asked * assembly.spec.devices == whole


def test_what_is_made_again_is_asked_for() -> None:
    """By each policy: the products of the weights, of the attention, of both, of neither."""

    def asked(remat: str, **given: Any) -> float:
        found = asked_flops(assembled({"data": 1}, remat, **given))
        assert found is not None
        return found

    flops = assembled({"data": 1}).experiment
    forward = flops.model.flops(seq=16, sequences=flops.batch)
    head = 2 * flops.model.embed * flops.model.vocab * 16 * flops.batch
    products = forward.matmul - head
    # Its two products, of one tile cut to the mask.
    attention = forward.attention_full
    none = asked("none")
    assert asked("dots_and_attention") == none
    assert asked("attention") - none == products
    assert asked("dots") - none == attention
    assert asked("full") - none == products + attention
    fused = asked("none", attention=Triton(interpret=True))
    assert fused == none - 3.5 * attention
    experts = asked("none", experts=4)
    assert asked("dots", experts=4) - experts > attention, "a mixture is saved by `none` alone"


def test_products_of_a_fused_kernel_are_in_no_program() -> None:
    """What is asked for is then the router's alone; the rest is opaque, without the padding of
    blocks where there is none."""

    def found(remat: str, **given: Any) -> tuple[float, float]:
        assembly = assembled({"tensor": 2}, remat, experts=4, attention=Reference(), **given)
        asked = asked_flops(assembly)
        assert asked is not None
        return asked, opaque_flops(assembly)

    e = assembled({"data": 1}, experts=4).experiment
    tokens, embed, hidden = e.batch * 16, e.model.embed, e.model.period[0].mlp.hidden
    products = e.model.layers * 2 * tokens * 2 * 3 * embed * hidden / 2  # two experts, two devices
    for remat, times in (("none", 3), ("dots", 4)):
        portable, nothing = found(remat)
        asked, opaque = found(remat, grouped_matmul=Megablox(interpret=True))
        assert nothing == 0 and opaque == times * products
        assert portable - asked >= times * products
    for padded in (TritonBlocks(interpret=True), MosaicBlocks(interpret=True)):
        assert found("none", grouped_matmul=padded)[1] >= 3 * products


def call_of(assembly: Assembly) -> ExpertCall:
    return next(each for each in calls(assembly) if isinstance(each, ExpertCall))


def test_a_kernel_has_at_least_the_flops_of_one_forward_call() -> None:
    """Of attention two products a head and pair, causal; of experts one of three matrices."""
    e = assembled({"data": 1}).experiment
    (block,) = set(e.model.period)
    heads, width = block.attention.heads, e.model.embed // block.attention.heads
    rows = e.batch // 2 // e.microbatches  # of two devices that share rows, or heads
    pairs = 16 * 17 / 2
    attention = 2 * 2 * rows * pairs * heads * width
    for axes in ({"data": 2}, {"tensor": 2}):
        found = least_kernel_flops(assembled(axes, attention=Triton(interpret=True)))
        assert found == attention
    experts = assembled({"data": 2}, experts=4, grouped_matmul=Megablox(interpret=True))
    whole = opaque_flops(experts) / 3 / e.model.layers / e.microbatches
    assert least_kernel_flops(experts) == pytest.approx(whole / 3)
    chunked = assembled(
        {"data": 2}, experts=4, grouped_matmul=Megablox(interpret=True), expert_chunk=8
    )
    # Chunks are computed again, though everything is saved.
    chunks, made = expert_chunks(chunked, call_of(chunked)), opaque_flops(chunked) / 4
    assert chunks > 1
    each = made / e.model.layers / e.microbatches / chunks / 3
    assert least_kernel_flops(chunked) == pytest.approx(each)
    assert least_kernel_flops(assembled({"data": 2})) == 0


METHODS: dict[str, tuple[Any, float]] = {
    "zig-zag": (RingAttention(), 8 * 8 / 2),
    "contiguous": (RingAttention(zigzag=False), 8 * 8 / 2),
    "gathered": (GatheredKeys(), 8 * 8 / 2),
    "trading": (Ulysses(), 16 * 17 / 2 / 2),  # of half of the heads
}


@pytest.mark.parametrize("name", METHODS)
def test_a_kernel_of_split_rows_has_the_pairs_of_two_parts(name: str) -> None:
    """Of rows of 16 tokens on two devices. In zig-zag order a hop has two tiles of 4 x 4, and a
    device's own part three, two of them causal."""
    method, pairs = METHODS[name]
    cut = assembled({"context": 2}, attention=Splash(interpret=True), context=method)
    e = cut.experiment
    (block,) = set(e.model.period)
    heads, width = block.attention.heads, e.model.embed // block.attention.heads
    found = least_kernel_flops(cut)
    assert found == pytest.approx(2 * 2 * e.batch / e.microbatches * pairs * heads * width)
    assert found <= opaque_flops(cut)
    kernel = Splash(interpret=True)
    windowed = assembled({"context": 2}, attention=kernel, context=method, window=4)
    assert (least_kernel_flops(windowed) > 0) == (name == "trading")


@pytest.mark.parametrize("seq", [16, 500, 4096])
@pytest.mark.parametrize("window", [None, 64])
def test_pairs_of_tiles_are_the_visible_ones_and_the_rest_of_their_tiles(
    seq: int, window: int | None
) -> None:
    blocks, mask = Blockwise(64, 128), AttentionMask(window=window)
    tiling = Tiling(blocks.query_block, blocks.key_block, seq, Scoring(mask, 1.0), None)
    seen = sum(min(i + 1, window or seq) for i in range(seq))
    rows = -(-seq // 64) * 64
    assert seen <= tiling.pairs() <= seen + rows * (64 + 2 * 128)


ASKED_WHOLE = [
    ({"data": 1}, "dots_and_attention", {}),
    pytest.param({"fsdp": 2}, "none", {"seq": 1024}, marks=pytest.mark.slow),
    pytest.param({"data": 1}, "none", {"attention": Reference()}, marks=pytest.mark.slow),
]
ASKED_AT_MOST = [
    ({"tensor": 2}, "full", {"experts": 4, "unroll": False}),
    # A mixture runs once more for the dense layer after it.
    ({"expert": 2}, "full", {"experts": 4, "dense_after": True, "expert_chunk": 8}),
    pytest.param({"fsdp": 2, "tensor": 2}, "full", {"unroll": False}, marks=pytest.mark.slow),
    pytest.param({"data": 1}, "attention", {}, marks=pytest.mark.slow),
    pytest.param({"data": 1}, "dots", {}, marks=pytest.mark.slow),
    pytest.param({"fsdp": 2}, "none", {"experts": 4}, marks=pytest.mark.slow),
    pytest.param({"expert": 2}, "none", {"experts": 4}, marks=pytest.mark.slow),
    pytest.param({"expert": 2}, "none", {"experts": 4, "expert_chunk": 8}, marks=pytest.mark.slow),
]


def compiled_over_asked(axes: dict[str, int], remat: str, given: dict[str, Any]) -> float:
    assembly = assembled(axes, remat, **given)
    mesh = active_mesh(make_mesh(assembly.spec), assembly.sizes)
    where = shardings(assembly.abstract, assembly.splits, mesh)
    asked = asked_flops(assembly)
    assert asked is not None
    return dot_flops(compile_step(assembly, mesh, where).as_text()) / asked


@pytest.mark.parametrize(("axes", "remat", "given"), ASKED_WHOLE, ids=str)
def test_a_compiled_step_has_what_is_asked_for(
    axes: dict[str, int], remat: str, given: dict[str, Any]
) -> None:
    assert compiled_over_asked(axes, remat, given) == 1.0


@pytest.mark.parametrize(("axes", "remat", "given"), ASKED_AT_MOST, ids=str)
@pytest.mark.sampled(3)
def test_a_compiled_step_has_no_more_than_is_asked_for(
    axes: dict[str, int], remat: str, given: dict[str, Any]
) -> None:
    """What is made again and read by nobody XLA leaves out: the last product of a block."""
    assert 0.9 < compiled_over_asked(axes, remat, given) <= 1.0


@pytest.mark.parametrize(
    "change",
    [
        dict(execution=jaxtrain.Execution(mode="gspmd")),
        dict(optimizer=jaxtrain.Muon(0.1)),
        dict(execution=jaxtrain.Execution(attention=lambda *given: given[0])),
        dict(fine_tuning=jaxtrain.FineTuning(trainable=("*.attention.*",))),
        dict(fine_tuning=jaxtrain.FineTuning(lora=jaxtrain.LoRA(2))),
    ],
    ids=("gspmd", "Muon", "a kernel of one's own", "frozen leaves", "adapters"),
)
def test_where_it_is_not_known_nothing_is_asked(change: dict[str, Any]) -> None:
    small = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    assert asked_flops(assemble(replace(small, **change), jaxtrain.mesh_from_axes(fsdp=2))) is None


def test_a_pipeline_asks_by_its_ticks_which_are_not_counted_here() -> None:
    small = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    assert asked_flops(assemble(small, jaxtrain.mesh_from_axes(stage=2))) is None
