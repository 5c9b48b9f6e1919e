"""What a pipelined step does over what it needs: arithmetic on tables, and the compiled program."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from programs import lowered

import jaxtrain
from jaxtrain import cli
from jaxtrain import operations as of
from jaxtrain.attention.kernels import Reference
from jaxtrain.certificate.layouts import Layout, experiment_on
from jaxtrain.certificate.shrink import shrink
from jaxtrain.contract.compile import CompileReport
from jaxtrain.moe.block_loop import BlockLoop
from jaxtrain.moe.grouped import block_count, block_rows
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.operations.node import Node
from jaxtrain.pipeline.analysis import bubble
from jaxtrain.pipeline.config import Pipeline
from jaxtrain.pipeline.overhead import executed_over_useful
from jaxtrain.planner.backward_work import body_work
from jaxtrain.planner.overhead import flop_facts, overhead
from jaxtrain.program.collectives import dot_flops
from jaxtrain.program.text import program_text
from jaxtrain.quantization import Fp8Products
from jaxtrain.step.assembly import assemble

ROOT = Path(__file__).parents[2]
TWO = (("stage", 2),)
FOUR = (("stage", 4),)
CUBE = (("fsdp", 2), ("stage", 2), ("tensor", 2))
NOTHING, ALL = LayerLoop(True, "none"), LayerLoop(True, "full")
LOOPED, DOTS = LayerLoop(False, "full"), LayerLoop(True, "dots")


@pytest.fixture(scope="module")
def small():
    return shrink(jaxtrain.load_experiment(ROOT / "experiments" / "stdlib_lm.py"), devices=8)


def assembled(
    small,
    axes,
    pipeline,
    layers,
    loop=NOTHING,
    microbatches=4,
    experts=False,
    narrow=False,
    **beside,
):
    """`beside`: blocks before and behind the pipeline. The reference kernel skips no score, and
    keeps what autodiff needs: its products are those that are counted. experts: in the pipeline's
    blocks. narrow: products are in 8 bits."""
    e = experiment_on(small, Layout(axes, microbatches=microbatches))
    (block,) = e.model.period
    if experts:
        block = replace(block, mlp=jaxtrain.MoeConfig(64, experts=4))
        e = replace(e, model=replace(e.model, period=(block,)))
    parts = {part: (block,) * count for part, count in beside.items()}
    model = replace(e.model, layers=layers + sum(beside.values()), **parts)
    execution = replace(e.execution, pipeline=pipeline, loop=loop, attention=Reference())
    products = Fp8Products() if narrow else None
    precision = replace(e.precision, products=products)
    e = replace(e, model=model, execution=execution, precision=precision)
    return assemble(e, jaxtrain.mesh_from_axes(**dict(axes)))


def case(name, *how, marks=pytest.mark.slow, **beside):
    return pytest.param(how, beside, id=name, marks=marks)


def of_whole_blocks(step, rows, seq, flops=Node.flops):
    """Experts multiply whole blocks of rows, of which some are padding, that nobody needs."""
    if step.exchange is None:
        return flops(step, rows, seq)
    routing = step.exchange
    sizes = (rows * seq * routing.per_token, routing.experts, BlockLoop().largest_block)
    return 2 * block_count(*sizes) * block_rows(*sizes) * sum(w.size for w, _ in step.products)


def keeping(pipeline):
    return replace(pipeline, save="residuals")


ONE_F_ONE_B, GPIPE = Pipeline("one_f_one_b"), Pipeline("gpipe")
INTERLEAVED, ZERO_BUBBLE = Pipeline("interleaved", chunks=2), Pipeline("zero_bubble")
BY_HAND = pytest.mark.exhaustive
CASES = [
    case("1F1B, padded", TWO, ONE_F_ONE_B, 3, LayerLoop(False, "dots"), marks=()),
    case("1F1B, padded, beside others", TWO, ONE_F_ONE_B, 3, DOTS, prefix=1, suffix=1),
    case("zero bubble", TWO, ZERO_BUBBLE, 2, LOOPED, marks=()),
    case("1F1B of four", FOUR, ONE_F_ONE_B, 8, NOTHING, 8),
    case("1F1B of four, residuals", FOUR, keeping(ONE_F_ONE_B), 8, NOTHING, 8, marks=BY_HAND),
    case("GPipe of four", FOUR, GPIPE, 8, NOTHING, 8),
    case("interleaved, residuals", TWO, keeping(INTERLEAVED), 6, ALL),
    case("interleaved, split", CUBE, INTERLEAVED, 12, LayerLoop(), 2),
    case("zero bubble, 8 bits", TWO, ZERO_BUBBLE, 2, LOOPED, marks=(), narrow=True),
    case("zero bubble, 8 bits, dots", TWO, ZERO_BUBBLE, 2, DOTS, marks=BY_HAND, narrow=True),
    case("zero bubble, dots", TWO, ZERO_BUBBLE, 2, DOTS, marks=BY_HAND),
    case(
        "zero bubble, two chunks",
        CUBE,
        replace(ZERO_BUBBLE, chunks=2),
        8,
        LayerLoop(False, "dots", prefetch=False),
        2,
        suffix=1,
    ),
    case("zero bubble, dots, experts", TWO, ZERO_BUBBLE, 2, DOTS, marks=BY_HAND, experts=True),
    case("1F1B, experts", TWO, ONE_F_ONE_B, 2, ALL, experts=True),
    case("1F1B, dots, residuals, experts", TWO, keeping(ONE_F_ONE_B), 2, DOTS, experts=True),
    case("GPipe, looped, beside others", TWO, GPIPE, 2, LOOPED, prefix=2, suffix=1, marks=BY_HAND),
]


@pytest.mark.parametrize(("how", "beside"), CASES)
@pytest.mark.sampled(9)
def test_a_compiled_step_has_the_flops_that_are_predicted(how, beside, small, monkeypatch):
    assembly = assembled(small, *how, **beside)
    if beside.get("experts"):
        monkeypatch.setattr(Node, "flops", of_whole_blocks)
    compiled = lowered(assembly).compile(compiler_options=assembly.compiler_options or None)
    devices = math.prod(assembly.sizes.values())
    work = overhead(assembly)
    assert work is not None and work.flops is not None
    assert dot_flops(program_text(compiled)) * devices == sum(work.flops)
    assert work.flops.needed == flop_facts(assembly).needed
    assert min(work.flops) >= 0 and work.flops.idle > 0


@pytest.mark.parametrize("pipeline", [ONE_F_ONE_B, GPIPE, INTERLEAVED, ZERO_BUBBLE], ids=str)
def test_blocks_alone_do_what_their_schedule_says(pipeline, small):
    """Without a head, remat and padding; of an F run again less what nobody needs of it."""
    for save in ("residuals", "inputs"):
        assembly = assembled(small, FOUR, replace(pipeline, save=save), 8, microbatches=8)
        facts, work = flop_facts(assembly), overhead(assembly).flops
        size = 2 * assembly.described.embed * assembly.described.head.padded
        head = 3 * 8 * facts.rows * facts.seq * size
        blocks = sum(work) - head
        needed = work.needed + work.padding - head
        schedule = assembly.pipeline.schedule
        said = executed_over_useful(schedule, keep_residuals=save == "residuals")
        if save == "residuals":
            # Of attention no part is W's: in a tick without B there is none.
            exact = schedule.weight is None
            assert blocks / needed == pytest.approx(said, rel=1e-12 if exact else 0.05)
            assert work.again == work.remat == 0
        else:
            assert 0.9 * said < blocks / needed <= said
            assert work.again > 0


def test_what_was_measured_of_four_stages(small):
    """Eight layers, eight microbatches, all devices against one: counted in compiled programs as
    1.364, 1.741, 1.790 and 1.498, with a kernel that skips scores and makes some again."""
    cases = {
        1.364: keeping(ONE_F_ONE_B),
        1.741: ONE_F_ONE_B,
        1.790: GPIPE,
        1.498: INTERLEAVED,
    }
    for measured, pipeline in cases.items():
        work = overhead(assembled(small, FOUR, pipeline, 8, microbatches=8)).flops
        assert work.over_needed == pytest.approx(measured, rel=0.02)


def test_bytes_of_idle_ticks_and_of_what_runs_again(small):
    """Under fsdp a stage gathers weights in every tick: of 5 for 4 with two stages. Kept, nothing
    runs again; gathered once a step, a tick sends activations alone."""
    inputs, residuals = (
        overhead(assembled(small, CUBE, pipeline, 4)).sent
        for pipeline in (ONE_F_ONE_B, keeping(ONE_F_ONE_B))
    )
    assert inputs.needed == residuals.needed
    assert inputs.again > 0 and residuals.again == 0
    assert inputs.idle > residuals.idle > 0
    assert inputs.remat == residuals.remat == inputs.padding == 0
    assert overhead(assembled(small, CUBE, ONE_F_ONE_B, 4, LOOPED)).sent.remat > 0
    alone = overhead(assembled(small, TWO, ONE_F_ONE_B, 4)).sent
    # Hops: 5 ticks forward, 4 of 5 back; else nothing of a tick is sent.
    hop = 4 * (16 // 4) * 16 * 64
    assert alone.idle == hop and alone.again == 0


def test_nothing_is_said_without_a_pipeline_or_of_what_is_not_known(small):
    whole = assemble(experiment_on(small, Layout((("data", 2),))), jaxtrain.mesh_from_axes(data=2))
    assert overhead(whole) is None
    tuned = replace(assembled(small, TWO, ONE_F_ONE_B, 4).experiment, fine_tuning=FROZEN)
    work = overhead(assemble(tuned, jaxtrain.mesh_from_axes(stage=2)))
    assert work.flops is None and work.sent is not None
    assert work.as_json()["flops"] is None and "FLOPs" not in work.summary()


FROZEN = jaxtrain.FineTuning(trainable=("period.*",))


def test_the_commands_print_it(tmp_path, capsys):
    arguments = ["check", str(ROOT / "experiments" / "stdlib_lm.py"), "--json"]
    arguments += ["--mesh", str(ROOT / "meshes" / "cpu_stage4_tensor2.toml")]
    arguments += ["--set", "microbatches=8"]
    assert cli.main(arguments) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    flops = found["pipeline_work"]["flops"]
    schedule = jaxtrain.Pipeline().table(stages=4, microbatches=8)
    assert flops["over_needed"] > 1 / (1 - bubble(schedule)) and flops["again"] > 0
    assert f"the step does {flops['over_needed']:.3f} times the matmul FLOPs it needs" in said.err
    assert found["pipeline"]["published_in_flight"] == [4, 3, 2, 1]
    assert "buffers: inputs 7, cotangents 1, an input of" in said.err
    assert " bytes; stages that do not go in step keep 4" in said.err


def test_compile_prints_it_too(small):
    checked = jaxtrain.check(
        assembled(small, TWO, ONE_F_ONE_B, 4).experiment, jaxtrain.mesh_from_axes(stage=2)
    )
    memory = dict.fromkeys(("argument_bytes", "temp_bytes", "host_temp_bytes", "peak_bytes"))
    report = CompileReport(checked, memory, None, 0.0, 0.0, None, {}, {}, None, {}, ())
    work = overhead(checked.assembly)
    assert work.summary() in report.summary().splitlines()
    assert report.as_json()["pipeline_work"] == work.as_json()


def test_check_notes_a_table_that_does_not_pay(small):
    assembly = assembled(small, TWO, ZERO_BUBBLE, 4)
    notes = jaxtrain.check(assembly.experiment, assembly.spec).notes
    assert any(note.startswith("pipeline: zero bubble does not pay") for note in notes)


def test_b_computes_again_what_it_reads_itself_and_not_what_w_does() -> None:
    """W has the inputs of the products that it computes gradients of. Of a replicated product B
    computes them."""
    up, down, mix = (of.Weight(name, 8, 8) for name in ("up", "down", "mix"))
    split = (of.ColumnParallel((up,)), of.RowParallel(down))

    def again(block: of.Block, *, split: bool) -> tuple[Any, ...]:
        leaves = {f"b.{k}": SimpleNamespace(trained=True) for k in ("up", "down", "mix")}
        facts: Any = SimpleNamespace(
            model=SimpleNamespace(blocks={"b.": block}),
            narrow=False,
            scaling=None,
            sequence=None,
            leaves=leaves,
            loop=SimpleNamespace(remat="full"),
            trains=lambda *names: bool({*names} & leaves.keys()),
            named=lambda *names: {*names} & leaves.keys(),
        )
        return body_work(facts, ["b."], below=True, split=split).again

    gather, scatter = of.Gather(8), of.Scatter(8)
    assert again(split, split=False) == (gather,) and again(split, split=True) == ()
    mixed = (*split, of.ReplicatedProduct((mix,)))
    assert again(mixed, split=False) == again(mixed, split=True) == (gather, scatter)
    twice = (*split, *split)
    assert again(twice, split=False) == (gather, scatter, gather) and again(twice, split=True) == ()
