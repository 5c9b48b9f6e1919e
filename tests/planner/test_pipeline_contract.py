"""The contract with the pipeline on: predicted and compiled collectives are equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import pytest
from programs import held, programs

import jaxtrain
from jaxtrain.certificate.layouts import Layout, experiment_on
from jaxtrain.certificate.shrink import shrink
from jaxtrain.contract.contract import contract
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.pipeline import tick
from jaxtrain.pipeline.config import Pipeline
from jaxtrain.planner.assembled import facts_of
from jaxtrain.planner.sent import local_elements
from jaxtrain.planner.traffic import step_traffic
from jaxtrain.step.assembly import assemble

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
TWO = (("stage", 2),)
FLAT = (("stage", 2), ("fsdp", 2))
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


@pytest.fixture(scope="module")
def small():
    return shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)


def assembled(small, axes, pipeline, layers=4, prefix=0, suffix=0, loop=None, **fields):
    """Four microbatches, unless `fields` of a layout say otherwise; model fields by their names."""
    of_model = {k: fields.pop(k) for k in ("tied", "learned_positions") if k in fields}
    e = experiment_on(small, Layout(axes, **{"microbatches": 4, **fields}))
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
    # Of the last layer that B runs again, the gather of the matrix that it does not read is gone.
    case(FLAT, ONE_F_ONE_B, slow=False, layers=2, microbatches=2, mode="explicit, recursive"),
    case(FLAT, ZERO_BUBBLE, mode="explicit, recursive", loop=LayerLoop(True, "attention")),
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
    case(SPLIT, ONE_F_ONE_B, slow=False, layers=6, microbatches=1, loop=LayerLoop()),
    case(CUBE, keeping(ONE_F_ONE_B), slow=None, layers=6, loop=LayerLoop()),
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


def check_kept(found):
    assert any("stage" in line.key.axes for line in found.lines)
    assert not found.broken, told(found.broken)


@pytest.mark.parametrize(("axes", "pipeline", "fields"), CASES)
@pytest.mark.sampled(7)
def test_the_contract_is_kept_in_a_pipeline(axes, pipeline, fields, small):
    check_kept(held(assembled(small, axes, pipeline, **fields)))


def test_it_is_kept_and_a_hop_more_or_less_breaks_it(small):
    assembly = assembled(small, CUBE, ONE_F_ONE_B, loop=LayerLoop(prefetch=False))
    before, found = programs(assembly)
    check_kept(contract(assembly, before, found))
    hop = next(i for i, each in enumerate(found) if each.kind == "collective-permute")
    for changed in (found[:hop] + found[hop + 1 :], [*found, found[hop]]):
        broken = contract(assembly, before, changed).broken
        assert broken and {line.key.kind for line in broken} == {"collective-permute"}


class Opened:
    """`lax` in which what the executor does in some ticks is done in all of them, by a predicate
    that is right only in the source (`when`)."""

    def __init__(self, when):
        self.when = when

    def __getattr__(self, name):
        return getattr(jax.lax, name)

    def cond(self, predicate, work, other, m, before):
        return jax.lax.cond(self.when(predicate, m, before), work, other, m, before)


def by_data(predicate, m, before):
    """As it should be, but for a sum of what is there: no text tells what that is."""
    total = sum(jax.numpy.sum(leaf) for leaf in jax.tree.leaves(before))
    return predicate & (jax.lax.pmax(total, "stage") < jax.numpy.inf)


@pytest.mark.parametrize(
    ("when", "unread"),
    [(lambda _, m, __: m >= -1, False), (by_data, True)],
    ids=["always", "by data"],
)
def test_a_head_in_every_tick_breaks_it(when, unread, small, monkeypatch):
    """The compiled side is the program's own: by the tables of the prediction the head runs in 4 of
    5 ticks, whatever the program does."""
    monkeypatch.setattr(tick, "lax", Opened(when))
    assembly = assembled(small, TWO, GPIPE, layers=2)
    found = held(assembly)
    of_head = next(each for each in found.lines if "sums over the vocabulary" in each.why)
    assert of_head in found.broken and of_head.unread is unread, told(found.lines)
    once = 2 * facts_of(assembly).chunks
    asked = 3 * 5 if unread else 0  # for entrance, head and exit, in all their ticks
    assert of_head.compiled == of_head.predicted + once + asked
    assert ("cannot be read" in str(of_head)) is unread


SCHEDULES = (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE, replace(ZERO_BUBBLE, chunks=2))


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
    assert {sent.buffer_bytes for sent in hops.values()} == {rows * 16 * facts.model.embed * 4}


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
