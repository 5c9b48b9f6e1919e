"""The contract on layouts of the certificate: predicted and compiled collectives are equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optax
import pytest
from programs import held, lowered, programs

import jaxtrain
from jaxtrain.certificate.layouts import Layout, experiment_on, layouts
from jaxtrain.certificate.shrink import shrink
from jaxtrain.collectives import Collectives, Recursive, Ring
from jaxtrain.contract.contract import Handed, Key, Line, axes_of, contract
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.mesh.sharding import ShardingRules, table
from jaxtrain.nn import bundle
from jaxtrain.planner.assembled import algorithm_name, facts_of
from jaxtrain.planner.sent import collective_traffic
from jaxtrain.planner.traffic import step_traffic
from jaxtrain.program.order import side_by_side
from jaxtrain.program.stablehlo import lowered_collectives
from jaxtrain.program.text import program_text
from jaxtrain.step.assembly import assemble

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
EXPLICIT = [each for each in layouts(8, "quick")[0] if each.mode != "gspmd"]
CUBE = (("data", 2), ("fsdp", 2), ("tensor", 2))
THREE_LEVELS = (("replica", 2), ("data", 2), ("fsdp", 2))
SHOWN = [
    Layout(CUBE),
    Layout(THREE_LEVELS, "explicit, hierarchical sums", "data parallel", microbatches=1),
    Layout(CUBE, "explicit, ring", "zero1", loop="scanned, prefetch, remat full"),
    Layout(CUBE, "explicit, recursive", "data parallel", precision="bf16"),
    Layout((("fsdp", 8),), loop="scanned, prefetch, kept weights", microbatches=1),
]
TILED = Layout((("fsdp", 4), ("tensor", 2)), "explicit, ring", loop="scanned, prefetch, remat full")


def assembled(layout: Layout, experiment=None):
    small = experiment or shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    return assemble(experiment_on(small, layout), jaxtrain.mesh_from_axes(**dict(layout.axes)))


def told(broken):
    return "\n".join(map(str, broken))


def weighed(layout):
    """Of the certificate's layouts every sixteenth is slow, the rest exhaustive."""
    often = layout in SHOWN or EXPLICIT.index(layout) % 16 == 0
    return pytest.param(layout, marks=pytest.mark.slow if often else pytest.mark.exhaustive)


@pytest.mark.parametrize("layout", [*SHOWN[:2], *map(weighed, (*SHOWN[2:], *EXPLICIT))], ids=str)
@pytest.mark.sampled(9)
def test_the_contract_is_kept(layout):
    assembly = assembled(layout)
    found = held(assembly)
    assert found.lines and not found.broken, told(found.broken)


def test_weight_gradients_in_tiles_are_predicted():
    """Each matrix of a layer by permutes of its own, in fp32 in a step of bf16 too: as many bytes
    as the bundle's, and the bundle is gone."""
    found = {
        precision: held(assembled(TILED._replace(precision=precision)))
        for precision in ("fp32", "bf16")
    }
    assert not any(each.broken for each in found.values()), told(found["bf16"].broken)
    facts = facts_of(assembled(TILED._replace(precision="bf16")))
    tiles = [each for each in step_traffic(facts) if "in tiles" in each.why]
    matrices = [k for k in facts.model.stacked_products if any(facts.leaves[k].params)]
    assert {(e.kind, e.axes, e.dtype) for e in tiles} == {
        ("collective-permute", ("fsdp",), "float32")
    }
    blocks = [e for e in step_traffic(facts) if e.why.startswith(("rows", "columns"))]
    assert {e.dtype for e in blocks} == {"bfloat16"}  # sums of activations too
    steps = facts.model.periods * facts.microbatches
    assert sum(each.count for each in tiles) == 3 * steps * len(matrices)
    elements = sum(int(np.prod(facts.leaves[k].shape[1:])) // 2 for k in matrices)
    assert sum(e.count * e.buffer_bytes for e in tiles) == 4 * elements * steps * 3 // 4


@pytest.mark.parametrize(
    ("collectives", "hops", "bundles"),
    [
        (Collectives(Recursive()), 3, 7),
        (Collectives(Ring(1)), 7, 4),
    ],
    ids=["recursive", "ring"],
)
def test_the_largest_leaves_are_predicted_one_by_one(collectives, hops, bundles):
    """By permutes of ours: seven matrices on eight devices by three hops each; by a ring of seven
    the three largest, and a bundle of the others."""
    assembly = assembled(Layout((("fsdp", 8),), loop="scanned, prefetch, remat full"))
    execution = replace(assembly.experiment.execution, collectives=collectives)
    assembly = replace(assembly, experiment=replace(assembly.experiment, execution=execution))
    found = held(assembly)
    assert not found.broken, told(found.broken)
    facts = facts_of(assembly)
    assert sum(any(facts.leaves[k].params) for k in facts.model.stacked_products) == 7
    sent = [e for e in step_traffic(facts) if e.why.startswith("weights of period")]
    layers = facts.model.periods
    fetches = facts.microbatches * (layers + facts.loop.fetched_again(layers))
    assert sum(each.count for each in sent) == hops * bundles * fetches


def test_a_stage_keeps_no_layers_weights_for_its_backward_pass():
    """Its layers are fetched again, the last one too: many microbatches are under way."""
    loop = "scanned, prefetch, remat full"
    whole = facts_of(assembled(Layout((("fsdp", 8),), loop=loop))).loop
    staged = Layout((("stage", 2), ("fsdp", 4)), loop=loop, pipeline="GPipe, residuals", periods=8)
    stage = facts_of(assembled(staged)).loop
    assert [whole.fetched_again(n) for n in (1, 2, 4)] == [0, 1, 4]
    assert [stage.fetched_again(n) for n in (1, 2, 4)] == [1, 2, 5]


MODELS = {
    "untied, with positions": dict(tied=False, learned_positions=16),
    "blocks beside the stack": dict(layers=4, prefix=1, suffix=1),
    "a period of two": dict(layers=4, period=2),
    "four layers": dict(layers=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["unrolled, remat none", "scanned, prefetch, remat full"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(3)
def test_the_contract_is_kept_for_other_shapes_of_model(name, loop):
    small = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    blocks = {k: v for k, v in MODELS[name].items() if k not in ("tied", "learned_positions")}
    rest = {k: v for k, v in MODELS[name].items() if k not in blocks}
    experiment = with_blocks(replace(small, model=replace(small.model, **rest)), **blocks)
    assembly = assembled(Layout(CUBE, loop=loop), experiment)
    found = held(assembly)
    assert not found.broken, told(found.broken)


def with_blocks(experiment, **counts):
    """The model with that many blocks before, in and after its period."""
    (block,) = experiment.model.period
    fields = {k: (block,) * v if k != "layers" else v for k, v in counts.items()}
    return replace(experiment, model=replace(experiment.model, **fields))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [Layout(CUBE), Layout((("fsdp", 8),), sharding="zero1")], ids=["fsdp", "zero1"]
)
@pytest.mark.parametrize(
    "optimizer",
    [
        jaxtrain.optim.Lamb(0.1),
        pytest.param(jaxtrain.optim.Lars(0.1), marks=pytest.mark.exhaustive),
        pytest.param(
            jaxtrain.optim.Adafactor(0.1, min_dim_size_to_factor=8), marks=pytest.mark.exhaustive
        ),
        jaxtrain.Muon(0.1),
    ],
    ids=lambda each: type(each).__name__,
)
@pytest.mark.sampled(3)
def test_what_an_optimizer_sends_is_predicted(optimizer, layout):
    small = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    small = with_blocks(replace(small, optimizer=optimizer), prefix=1, layers=4, suffix=1)
    assembly = assembled(layout, small)
    found = held(assembly)
    assert not found.broken, told(found.broken)
    without = [each for each in found.lines if any("RMS" in w or "norms of" in w for w in each.why)]
    assert without or any("whole" in w for each in found.lines for w in each.why)


def test_a_stack_that_does_not_divide_is_padded_where_matrices_are_made_whole():
    """Three layers over two devices travel as four, and so predicted."""
    small = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    small = with_blocks(replace(small, optimizer=jaxtrain.Muon(0.1)), layers=3)
    found = held(assembled(Layout((("fsdp", 2),)), small))
    assert not found.broken, told(found.broken)
    assert any("whole" in why for line in found.lines for why in line.why)


def test_a_sum_in_three_levels_sends_what_is_predicted():
    """The fastest axis has all of it, the next what is left of it; the slowest sums the rest."""
    small = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    axes = (("data", 2), ("fsdp", 2), ("expert", 2))
    placed = experiment_on(small, Layout(axes, sharding="data parallel"))
    execution = replace(placed.execution, reducer=jaxtrain.collectives.Hierarchical())
    assembly = assemble(replace(placed, execution=execution), jaxtrain.mesh_from_axes(**dict(axes)))
    found = held(assembly)
    assert not found.broken, told(found.broken)
    sent = [s for s in step_traffic(facts_of(assembly)) if s.why.startswith("gradients: ")]
    by_axis = {
        axis: sum(s.count * s.buffer_bytes for s in sent if s.axes == (axis,)) for axis, _ in axes
    }
    assert by_axis["expert"] > by_axis["fsdp"] > by_axis["data"] > 0


class Mine:
    """An optimizer of a user's own."""

    learning_rate = 0.1

    def violations(self, steps):
        return []

    def build(self, axes, *, steps, batch):
        return optax.sgd(0.1)


def test_a_users_own_optimizer_is_not_held_to_a_contract():
    small = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    with pytest.raises(ValueError, match="an optimizer of your own sends, Mine"):
        contract(assembled(Layout(CUBE), replace(small, optimizer=Mine())), [], [])


WIDE = (("data", 4), ("tensor", 2))
"""Matrices of 64 and more rows and columns, but for those of attention: 32."""

REDUCERS = [
    *(
        pytest.param(
            jaxtrain.compression.Compressed(codec, by=by),
            id=name,
            marks=pytest.mark.slow if name in ("int8", "PowerSGD") else pytest.mark.exhaustive,
        )
        for name, codec, by in (
            ("int8", jaxtrain.compression.Int8(), jaxtrain.collectives.Lax()),
            ("top-k by rings", jaxtrain.compression.TopK(0.05), jaxtrain.collectives.Ring()),
            ("sign, recursive", jaxtrain.compression.Sign(), jaxtrain.collectives.Recursive()),
            ("PowerSGD", jaxtrain.compression.PowerSGD(4), jaxtrain.collectives.Lax()),
            (
                "PowerSGD of a rank too high for attention",
                jaxtrain.compression.PowerSGD(40),
                jaxtrain.collectives.Ring(1),
            ),
            (
                "PowerSGD in levels",
                jaxtrain.compression.PowerSGD(4),
                jaxtrain.collectives.Hierarchical(),
            ),
        )
    ),
]


@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.sampled(2)
def test_what_a_compressed_reducer_sends_is_predicted(reducer):
    small = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    axes = WIDE if reducer.codec == jaxtrain.compression.PowerSGD(40) else CUBE
    placed = experiment_on(small, Layout(axes, loop="scanned, prefetch, remat full"))
    execution = replace(placed.execution, reducer=reducer, small_leaf=100)
    assembly = assemble(replace(placed, execution=execution), jaxtrain.mesh_from_axes(**dict(axes)))
    sums = facts_of(assembly).sums
    assert (axes == WIDE) is (0 < len(sums.factors) < len(sums.apart))
    found = held(assembly)
    assert not found.broken, told(found.broken)
    coded = not isinstance(reducer.codec, jaxtrain.compression.PowerSGD)
    assert coded is any(line.key.dtype == "u8" for line in found.lines)


@pytest.mark.parametrize("by", [jaxtrain.collectives.Lax(), jaxtrain.collectives.Ring()], ids=str)
def test_what_a_rounded_sum_sends_is_predicted(by):
    """Half of what one in fp32 does, to the bytes that pad a leaf for its devices."""
    small = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    placed = experiment_on(small, Layout(CUBE, sharding="data parallel"))
    sent = {}
    for reducer in (by, jaxtrain.collectives.Rounded(by)):
        execution = replace(placed.execution, reducer=reducer)
        assembly = assemble(
            replace(placed, execution=execution), jaxtrain.mesh_from_axes(**dict(CUBE))
        )
        found = held(assembly)
        assert not found.broken, told(found.broken)
        sums = [s for s in step_traffic(facts_of(assembly)) if s.why.startswith("gradients: ")]
        assert {s.dtype for s in sums} == {"float32" if reducer == by else "bfloat16"}
        sent[reducer] = sum(s.count * s.buffer_bytes for s in sums)
    # What a permute sends of a buffer is in its line; of an all-reduce, the buffer it sends twice.
    halves = 1 if isinstance(by, jaxtrain.collectives.Lax) else 2
    assert sent[by] == halves * sent[jaxtrain.collectives.Rounded(by)]


def test_all_reduces_that_xla_joins_on_gpus_keep_it(monkeypatch):
    """It concatenates their arrays; elsewhere, or where bytes are missing, it is broken."""
    assembly = assembled(SHOWN[0])
    before, found = programs(assembly)
    norms = [e for e in found if e.kind == "all-reduce" and e.group_size == 8]
    first, second, *_ = (e for e in norms if e.count == norms[0].count)
    both = replace(first, wire_bytes=first.wire_bytes + second.wire_bytes)
    rest = [e for e in found if e is not first and e is not second]
    assert len(contract(assembly, before, [*rest, both]).broken) == 1
    monkeypatch.setattr(MeshSpec, "platform", property(lambda spec: "gpu"))
    kept = contract(assembly, before, [*rest, both])
    assert not kept.broken and any("joins all-reduces" in words for words in kept.rewrites)
    assert len(contract(assembly, before, [*rest, first]).broken) == 1


def test_a_collective_more_or_of_another_size_breaks_it():
    assembly = assembled(SHOWN[0])
    before, found = programs(assembly)
    at = next(i for i, each in enumerate(found) if each.kind == "all-gather")
    for wrong in (
        found[:at] + found[at + 1 :],
        [*found, found[at]],
        [replace(e, wire_bytes=e.wire_bytes + 4) if i == at else e for i, e in enumerate(found)],
        [replace(e, dtype="bf16") if i == at else e for i, e in enumerate(found)],
    ):
        broken = contract(assembly, before, wrong).broken
        assert broken and all(line.key.kind == "all-gather" for line in broken)


def test_fsdp_sends_three_times_its_parameters():
    """Two gathers and a reduce-scatter of every matrix (Rajbhandari et al. 2020, section 7)."""
    layout = Layout((("fsdp", 8),), microbatches=1, loop="scanned, remat dots_and_attention")
    assembly = assembled(layout)
    facts = facts_of(assembly)
    sent = [each for each in step_traffic(facts) if each.kind != "all-reduce"]
    stacked = sum(
        4 * int(np.prod(leaf.shape))
        for name, leaf in facts.leaves.items()
        if name.startswith("period") and any(leaf.params)
    )
    table = 4 * int(np.prod(facts.leaves["embedding"].shape))
    assert sum(each.count * each.buffer_bytes for each in sent) == 3 * stacked + 2 * table


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (((0, 1), (2, 3), (4, 5), (6, 7)), ("tensor",)),
        (((0, 4), (1, 5), (2, 6), (3, 7)), ("data",)),
        (((0, 2, 4, 6), (1, 3, 5, 7)), ("data", "fsdp")),
        ((tuple(range(8)),), ("data", "fsdp", "tensor")),
        (((0, 1), (2, 3)), ("tensor",)),  # a permute among some
        (((0, 3),), ("fsdp", "tensor")),
    ],
)
def test_axes_of_groups(groups, axes):
    assert axes_of(groups, {"data": 2, "fsdp": 2, "tensor": 2}) == axes


def test_what_xla_chooses_is_not_held_to_a_contract():
    with pytest.raises(ValueError, match="only the explicit step"):
        contract(assembled(Layout(CUBE, "gspmd")), [], [])
    with pytest.raises(ValueError, match="on one device"):
        contract(assembled(Layout((("data", 1),))), [], [])


def test_names_of_algorithms():
    values = (
        jaxtrain.collectives.Lax(),
        jaxtrain.collectives.Recursive(),
        jaxtrain.collectives.Ring(1),
        jaxtrain.collectives.Ring(unroll=False),
    )
    names = [algorithm_name(value) for value in values]
    assert names == ["lax", "recursive", "ring_1", "ring_2_looped"]
    with pytest.raises(ValueError, match=r"Hierarchical.* use Lax\(\), Ring\(\) or Recursive"):
        algorithm_name(jaxtrain.collectives.Hierarchical())


def test_a_ring_sums_in_the_dtype_it_is_given():
    facts = SimpleNamespace(sizes={"data": 4})
    sent = collective_traffic(facts, "a sum", "all_reduce", "ring_1", ("data",), "bfloat16", 64)
    assert [(each.dtype, each.buffer_bytes) for each in sent] == [("bfloat16", 32)] * 2


TWO_DIMS = ShardingRules(params=table({"embed": "fsdp", "mlp": "data"}))


@pytest.mark.slow
def test_the_contract_is_kept_where_a_leaf_rests_split_over_two_dims():
    small = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    placed = replace(experiment_on(small, Layout(CUBE)), sharding=TWO_DIMS)
    assembly = assemble(placed, jaxtrain.mesh_from_axes(data=2, fsdp=4))
    found = held(assembly)
    assert not found.broken, told(found.broken)
    assert any("data" in line.key.axes and line.key.kind == "all-gather" for line in found.lines)


@pytest.mark.slow
@pytest.mark.parametrize("by", [jaxtrain.collectives.Lax(), jaxtrain.collectives.Ring()], ids=str)
@pytest.mark.sampled(2)
def test_fp16_travels_as_it_is(by):
    small = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    placed = replace(experiment_on(small, Layout(CUBE)), precision=jaxtrain.optim.fp16)
    execution = replace(placed.execution, collectives=jaxtrain.collectives.Collectives(by, by))
    assembly = assemble(replace(placed, execution=execution), jaxtrain.mesh_from_axes(**dict(CUBE)))
    found = held(assembly)
    assert not found.broken and not found.rewrites, told(found.broken)
    assert "f16" in {line.key.dtype for line in found.lines}


HANDED = [
    Layout((("data", 2), ("tensor", 2)), packing=False, precision="bf16"),
    Layout((("data", 2), ("fsdp", 2)), "explicit, ring", "zero2", packing=False, dropout=0.1),
    Layout((("stage", 2),), microbatches=2, periods=2, pipeline="1F1B", packing=False),
]


@pytest.mark.parametrize("layout", HANDED, ids=str)
def test_nothing_is_handed_to_xla_that_is_not_predicted(layout):
    """Not even sums that XLA would find unused, such as gradients of positions."""
    assembly = assembled(layout)
    found = contract(assembly, lowered_collectives(lowered(assembly)), []).handed
    assert found and all(line.kept for line in found), told(found)


def test_a_gather_in_fp32_breaks_it_where_xla_makes_all_of_them_fp32(monkeypatch):
    """What is handed to XLA tells; the programs that XLA:CPU makes of both are the same."""
    assembly = assembled(
        Layout((("fsdp", 2),), precision="bf16", loop="scanned, prefetch, remat full")
    )

    def handed():
        broken = contract(assembly, lowered_collectives(lowered(assembly)), []).broken
        return [line for line in broken if isinstance(line, Handed)]

    assert not handed(), told(handed())
    right = bundle.all_gather

    def wide(x, *how):
        return right(x.astype("float32"), *how).astype(x.dtype)

    monkeypatch.setattr(bundle, "all_gather", wide)
    broken = handed()
    assert {(line.key.kind, line.key.dtype, line.lowered) for line in broken} == {
        ("all-gather", "bf16", 0)
    }


def test_what_cannot_be_read_is_not_kept_though_it_comes_out_right():
    line = Line(Key("all-reduce", ("data",), "f32"), 4, 64.0, 4, 64.0, ())
    assert line.kept and not replace(line, unread=True).kept


def test_bf16_is_told_as_a_rewrite():
    assembly = assembled(Layout(CUBE, precision="bf16"))
    found = contract(assembly, [], [])
    assert any("bf16" in words for words in found.rewrites)
    assert {line.key.dtype for line in found.lines} == {"f32"}


LOOPED = "scanned, remat dots_and_attention"
FOLLOWED = [  # the head's gradient, the loss; what a pipeline's last ticks do not touch
    Layout(
        (("fsdp", 4), ("tensor", 2)),
        "explicit, ring looped, layer by layer",
        "zero2",
        loop=LOOPED,
        microbatches=1,
    ),
    Layout((("tensor", 4),), "explicit, ring", "zero1", loop=LOOPED, microbatches=1),
    Layout((("stage", 4),), "explicit, recursive", loop=LOOPED, microbatches=4, pipeline="1F1B"),
]


@pytest.mark.parametrize("layout", FOLLOWED, ids=str)
def test_what_follows_a_loop_waits_for_it(layout):
    compiled = lowered(assembled(layout)).compile()
    assert side_by_side(program_text(compiled), scheduled=False) == []
