"""The contract with the pipeline on: predicted and compiled collectives are equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import pytest

import jaxtrain
from jaxtrain.mesh.mesh import make_mesh
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.pipeline.config import Pipeline
from jaxtrain.planner.assembled import facts_of, followed
from jaxtrain.planner.contract import as_run, contract
from jaxtrain.planner.sent import local_elements
from jaxtrain.planner.traffic import step_traffic
from jaxtrain.telemetry.hlo import Collective, collectives
from jaxtrain.train.assembly import active_mesh, assemble
from jaxtrain.train.layouts import Layout, arranged
from jaxtrain.train.shrink import shrink
from jaxtrain.train.state import shardings
from jaxtrain.train.step import compile_step

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
TWO = (("stage", 2),)
WIDE = (("stage", 4), ("tensor", 2))
SPLIT = (("data", 2), ("fsdp", 2), ("stage", 2))
CUBE = (("fsdp", 2), ("stage", 2), ("tensor", 2))

GPIPE = Pipeline("gpipe")
ONE_F_ONE_B = Pipeline("one_f_one_b")
INTERLEAVED = Pipeline("interleaved", chunks=2)
ZERO_BUBBLE = Pipeline("zero_bubble")


def keeping(pipeline):
    """The schedule with what B needs kept by F."""
    return replace(pipeline, save="residuals")


@pytest.fixture(autouse=True, scope="module")
def cheap_compiler():
    """What a program sends is settled before its code is made."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def small():
    return shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)


def assembled(small, axes, pipeline, layers=4, prefix=0, suffix=0, loop=None, **fields):
    """Four microbatches, unless `fields` of a layout say otherwise; model fields by their names."""
    of_model = {k: fields.pop(k) for k in ("tied", "learned_positions") if k in fields}
    e = arranged(small, Layout(axes, **{"microbatches": 4, **fields}))
    (block,) = e.model.period
    model = replace(
        e.model,
        layers=layers + prefix + suffix,
        prefix=(block,) * prefix,
        suffix=(block,) * suffix,
        **of_model,
    )
    execution = replace(e.execution, pipeline=pipeline, loop=loop or e.execution.loop)
    e = replace(e, model=model, execution=execution)
    return assemble(e, jaxtrain.mesh_from_axes(**dict(axes)))


def compiled(assembly):
    mesh = active_mesh(make_mesh(assembly.spec), assembly.sizes)
    where = shardings(assembly.abstract, assembly.splits, mesh)
    return collectives(compile_step(assembly, mesh, where).as_text())


def told(broken):
    return "\n".join(map(str, broken))


def case(axes, pipeline, *, slow=True, **fields):
    """slow: run with the slow tests; None: by hand."""
    size = " x ".join(f"{a}={n}" for a, n in axes)
    said = ", ".join(f"{k}={v}" for k, v in fields.items())
    name = f"{size}: {pipeline.schedule} x {pipeline.chunks}, {pipeline.save}, {said}"
    marks = {True: pytest.mark.slow, False: (), None: pytest.mark.exhaustive}[slow]
    return pytest.param(axes, pipeline, fields, id=name, marks=marks)


CASES = [
    case(CUBE, ONE_F_ONE_B, slow=None),
    case(TWO, GPIPE, slow=None, layers=2, loop=LayerLoop(unroll=False, remat="full")),
    case(
        SPLIT,
        keeping(INTERLEAVED),
        layers=3,
        sharding="fsdp, reduced once",
        tied=False,
    ),
    case(CUBE, ZERO_BUBBLE, layers=3, loop=LayerLoop(prefetch=False)),
    case(CUBE, GPIPE, slow=False),
    case(SPLIT, GPIPE, layers=2, loop=LayerLoop(True, "full")),
    case(CUBE, ONE_F_ONE_B, microbatches=1, slow=None),
    case(CUBE, ONE_F_ONE_B, slow=None, microbatches=1, loop=LayerLoop(remat="full")),
    case(CUBE, INTERLEAVED, microbatches=1, slow=None),
    case(CUBE, ZERO_BUBBLE, microbatches=1, slow=None),
    case(CUBE, ZERO_BUBBLE, layers=3, mode="explicit, ring", slow=None),
    case(CUBE, keeping(GPIPE), layers=6, loop=LayerLoop(remat="full"), slow=None),
    case(CUBE, INTERLEAVED, layers=8, sharding="zero1", loop=LayerLoop(prefetch=False)),
    case(WIDE, INTERLEAVED, layers=8, prefix=1, suffix=1, tied=False, slow=None),
    case(SPLIT, ONE_F_ONE_B, layers=3, prefix=2, suffix=1, tied=False, learned_positions=16),
    case(CUBE, GPIPE, layers=6, mode="explicit, ring", loop=LayerLoop(remat="dots")),
    case(CUBE, ONE_F_ONE_B, layers=6, sharding="zero2", microbatches=2, slow=None),
    case(CUBE, ONE_F_ONE_B, layers=6, prefix=1, precision="bf16"),
    case(CUBE, keeping(ONE_F_ONE_B), slow=None, prefix=2, mode="explicit, recursive"),
    case(
        CUBE,
        ONE_F_ONE_B,
        layers=6,
        loop=LayerLoop(reshard_after_forward=False),
    ),
    case(CUBE, INTERLEAVED, slow=None, layers=12, loop=LayerLoop()),
    case(
        WIDE,
        GPIPE,
        slow=None,
        mode="explicit, ring",
        loop=LayerLoop(prefetch=False, remat="attention"),
    ),
    case(CUBE, ONE_F_ONE_B, slow=None, layers=6, prefix=2, loop=LayerLoop(True, "attention")),
    case(CUBE, ONE_F_ONE_B, slow=None, layers=3, sharding="data parallel"),
    case(CUBE, ZERO_BUBBLE, slow=None),
    case(
        CUBE,
        keeping(ZERO_BUBBLE),
        slow=None,
        layers=6,
        loop=LayerLoop(remat="dots", prefetch=False),
    ),
    case(CUBE, replace(ZERO_BUBBLE, chunks=2), layers=8, sharding="zero2", loop=LayerLoop()),
    case(CUBE, ZERO_BUBBLE, slow=None, prefix=2, suffix=1, loop=LayerLoop(True, "dots")),
    case(SPLIT, replace(ZERO_BUBBLE, chunks=2), slow=None, layers=3, sharding="fsdp, reduced once"),
]


def check_kept(assembly, found):
    held = contract(assembly, found)
    assert any("stage" in line.key.axes for line in held.lines)
    assert not held.broken, told(held.broken)
    assert any("tables" in words for words in held.rewrites) is any(e.in_branch for e in found)


@pytest.mark.parametrize(("axes", "pipeline", "fields"), CASES)
def test_the_contract_is_kept_in_a_pipeline(axes, pipeline, fields, small):
    assembly = assembled(small, axes, pipeline, **fields)
    check_kept(assembly, compiled(assembly))


def test_it_is_kept_and_a_collective_that_is_not_the_tables_breaks_it(small):
    """One in a branch that no table speaks of keeps its count, the most that may be."""
    assembly = assembled(small, CUBE, ONE_F_ONE_B, loop=LayerLoop(prefetch=False))
    found = compiled(assembly)
    check_kept(assembly, found)
    at = next(i for i, each in enumerate(found) if each.in_branch)
    hop = next(i for i, each in enumerate(found) if each.kind == "collective-permute")
    unnamed = replace(found[at], op_name="jit(run)/shard_map/ticks1/while/body/other/cond")
    for changed, kind in (
        ([*found[:at], unnamed, *found[at + 1 :]], found[at].kind),
        (found[:hop] + found[hop + 1 :], "collective-permute"),
        ([*found, found[hop]], "collective-permute"),
    ):
        broken = contract(assembly, changed).broken
        assert broken and {line.key.kind for line in broken} == {kind}


SCHEDULES = (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE, replace(ZERO_BUBBLE, chunks=2))


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("pipeline", SCHEDULES, ids=lambda p: f"{p.schedule} x {p.chunks}")
def test_what_stands_in_branches_runs_once_a_microbatch(pipeline, microbatches, small):
    """In every loop a branch is taken in some ticks, or what it does is not in one."""
    assembly = assembled(small, (("stage", 4),), pipeline, microbatches=microbatches)
    rows, loops = followed(assembly)
    for name in ("enter", "leave", "exit"):
        total = 0
        for number, loop in enumerate(loops):
            taken = getattr(rows, name)[loop.start : loop.stop] >= 0
            if taken.any():
                where = f"shard_map/ticks{number}/while/body/{name}/cond/branch_1_fun/psum"
                each = collective(where, len(taken), in_branch=not taken.all())
                (ran,) = as_run([each], assembly)
                assert not ran.in_branch
                total += ran.count
        assert total == microbatches


def collective(op_name, count, *, in_branch):
    return Collective(
        *("a", "all-reduce", "f32", 4, 4.0, 2, ((0, 1),), count, 1, False, in_branch, op_name)
    )


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_stages_hand_on_one_activation_a_tick(stages, microbatches, small):
    """1F1B and GPipe have M + R - 1 ticks with F, and as many with B; after the last B of two
    stages, a loop of its own, nothing is handed on. Interleaved V M + R - 1 where R divides M."""
    assembly = assembled(
        small, (("stage", stages),), ONE_F_ONE_B, layers=8, microbatches=microbatches
    )
    facts = facts_of(assembly)
    hops = {s.why: s for s in step_traffic(facts) if s.kind == "collective-permute"}
    due = microbatches + stages - 1
    counts = {why: sent.count for why, sent in hops.items()}
    assert counts == {
        "activations to the next stage": due,
        "gradients to the stage before": due - (stages == 2),
    }
    rows = 16 // microbatches
    assert {sent.buffer_bytes for sent in hops.values()} == {rows * 16 * facts.embed * 4}


@pytest.mark.parametrize("save", ["inputs", "residuals"])
@pytest.mark.parametrize("pipeline", SCHEDULES, ids=lambda p: f"{p.schedule} x {p.chunks}")
def test_weights_are_gathered_each_tick_or_once_a_step(pipeline, save, small):
    """What FSDP sends: every F and every B needs its chunk's weights, and a B that runs F again
    twice; gathered once a step, each chunk's travel once."""
    pipeline = replace(pipeline, save=save)
    looped = LayerLoop(prefetch=False, remat="dots")

    def gathered(sharding):
        axes = (("fsdp", 2), ("stage", 4))
        assembly = assembled(
            small, axes, pipeline, layers=16, sharding=sharding, loop=looped, microbatches=8
        )
        facts = facts_of(assembly)
        whole = sum(
            4 * local_elements(facts, leaf, leaf.in_use)
            for name, leaf in facts.leaves.items()
            if name.startswith("period.") and leaf.params != leaf.in_use
        )
        sent = step_traffic(facts)
        of_blocks = [s for s in sent if s.kind == "all-gather" and s.axes == ("fsdp",)]
        total = sum(s.count * s.buffer_bytes for s in of_blocks if "outside" not in s.why)
        return total / whole

    ticks = pipeline.chunks * 8 + 4 - 1
    each = 3 if save == "inputs" else 2
    assert gathered("fsdp") == each * ticks / pipeline.chunks
    assert gathered("fsdp, reduced once") == 1
