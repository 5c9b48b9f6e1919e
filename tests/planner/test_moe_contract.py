"""The contract with mixtures of experts: predicted and compiled collectives are equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs import held, lowered

import jaxtrain
from jaxtrain.attention import Blockwise
from jaxtrain.certificate.layouts import Layout, experiment_on
from jaxtrain.certificate.routing import Numbered
from jaxtrain.certificate.shrink import shrink
from jaxtrain.collectives import Collectives, Ragged
from jaxtrain.contract.contract import contract
from jaxtrain.mesh.hardware import CHIPS
from jaxtrain.moe import BlockLoop
from jaxtrain.planner.assembled import facts_of
from jaxtrain.planner.traffic import step_traffic
from jaxtrain.program.stablehlo import lowered_collectives
from jaxtrain.step.assembly import assemble

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
CUBE = (("data", 2), ("fsdp", 2), ("tensor", 2))
STAGED = (("fsdp", 2), ("stage", 2), ("tensor", 2))
RAGGED = Collectives(experts=Ragged())
DOTS, FULL = "scanned, remat dots_and_attention", "scanned, prefetch, remat full"
ALL = "unrolled, remat none"
APART = (("data", 2), ("expert", 2), ("tensor", 2))
STAGED_GATHERED = (("fsdp", 2), ("stage", 2), ("expert", 2))
STAGED_APART = (("expert", 2), ("stage", 2), ("tensor", 2))
BALANCED = jaxtrain.MoeConfig(
    192,
    experts=8,
    router=jaxtrain.moe.SigmoidRouter(bias=True),
    shared=jaxtrain.transformer.SharedExpert(64, weighed=True),
    balance=jaxtrain.moe.Balance(0.01, 1e-3, 1e-3),
)
SWITCH = replace(
    BALANCED,
    experts_per_token=1,
    router=jaxtrain.moe.SoftmaxRouter(renormalise=False),
    capacity=jaxtrain.moe.Capacity(1.25, routing_group=8),
    balance=jaxtrain.moe.Balance(0.01),
)


def routed(**fields: Any) -> jaxtrain.Experiment:
    """The small experiment with experts in every block, and those fields of the model, in which 1
    stands for such a block and 0 for a dense one."""
    dense = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    (block,) = dense.model.period
    mixture = fields.pop("mixture", jaxtrain.MoeConfig(block.mlp.hidden, experts=4))
    blocks = (block, replace(block, mlp=mixture))
    parts = {part: fields.pop(part, ()) for part in ("prefix", "suffix")}
    parts["period"] = fields.pop("period", (1,))
    found: dict[str, Any] = {k: tuple(blocks[i] for i in part) for k, part in parts.items()}
    return replace(dense, model=replace(dense.model, **found, **fields))


def without_routing(experiment: jaxtrain.Experiment) -> jaxtrain.Experiment:
    """The experiment as a user runs it: a certificate alone keeps the routing, in leaves of which
    the optimizer, and so a step's program, knows nothing."""
    model = experiment.model.varied(dropout=experiment.model.dropout)
    data = experiment.data.data if isinstance(experiment.data, Numbered) else experiment.data
    return replace(experiment, model=model, data=data)


def assembled(
    layout: Layout, given: dict[str, Any] | None = None, chunk: int | None = None, **fields: Any
) -> Any:
    """The small experiment on a layout; given: its fields that are not the model's."""
    experiment = replace(without_routing(experiment_on(routed(**fields), layout)), **given or {})
    if chunk is not None:
        execution = replace(experiment.execution, expert_chunk=chunk)
        experiment = replace(experiment, execution=execution)
    return assemble(experiment, jaxtrain.mesh_from_axes(**dict(layout.axes)))


def slow(name: str, *case: Any, **fields: Any) -> Any:
    return pytest.param(*case, fields, id=name, marks=pytest.mark.slow)


def by_hand(name: str, *case: Any, **fields: Any) -> Any:
    return pytest.param(*case, fields, id=name, marks=pytest.mark.exhaustive)


def staged(
    pipeline: str, periods: int, loop: str = DOTS, *, axes: Any = STAGED, **fields: Any
) -> Layout:
    return Layout(axes, pipeline=pipeline, microbatches=2, periods=periods, loop=loop, **fields)


BESIDE: dict[str, Any] = {"layers": 4, "period": (0,), "prefix": (1,), "suffix": (1,)}
ROUTERS = jaxtrain.FineTuning(trainable=("*.mlp.router",))
ADAPTERS = jaxtrain.FineTuning(lora=jaxtrain.LoRA(2, 4.0))
OF_EXPERTS = jaxtrain.FineTuning(lora=jaxtrain.LoRA(2, 4.0, targets=("*.mlp.*",)))
OF_ROUTERS = jaxtrain.FineTuning(lora=jaxtrain.LoRA(2, 4.0, targets=("*.mlp.router",)))


def of_part(
    name: str,
    loop: str,
    tuning: jaxtrain.FineTuning,
    marks: Any = pytest.mark.exhaustive,
    **fields: Any,
) -> Any:
    """Trains a part of each mixture; the first layer needs fewer gradients than the second."""
    fields |= {"mixture": BALANCED, "given": {"fine_tuning": tuning}, "layers": 2}
    return pytest.param(Layout(APART, loop=loop), fields, id=f"{name} alone, {loop}", marks=marks)


def trained(*names: str) -> jaxtrain.FineTuning:
    return jaxtrain.FineTuning(trainable=names)


UP, DOWN, SHARED = trained("*.mlp.up"), trained("*.mlp.down"), trained("*.mlp.shared.up")

CASES = [
    # B runs the layer again for attention's results alone: the gather of experts' weights is gone.
    slow("experts that are not read again", staged("1F1B", 2, axes=STAGED_GATHERED)),
    slow("adapters", Layout(CUBE, loop=DOTS), given={"fine_tuning": ADAPTERS}, **BESIDE),
    pytest.param(
        Layout(APART, loop=DOTS),
        {"mixture": BALANCED, "given": {"fine_tuning": OF_EXPERTS}},
        id="adapters of experts",
        marks=pytest.mark.slow,
    ),
    by_hand(
        "adapters of routers, nothing saved",
        Layout(CUBE, loop=FULL),
        given={"fine_tuning": OF_ROUTERS},
        **BESIDE,
    ),
    slow("routers alone", Layout(CUBE, loop=DOTS), given={"fine_tuning": ROUTERS}, **BESIDE),
    by_hand("adapters, 1F1B", staged("1F1B", 2), given={"fine_tuning": ADAPTERS}, suffix=(1,)),
    pytest.param(Layout(CUBE, loop=DOTS), {}, id="plain"),
    pytest.param(Layout(APART, loop=DOTS), {"mixture": BALANCED}, id="apart, balanced"),
    slow(
        "apart, in chunks, by permutes beside products",
        Layout(APART, "explicit, recursive", loop=FULL),
        chunk=8,
        mixture=BALANCED,
    ),
    # The block after the mixture is computed again from the mixture's outputs.
    pytest.param(
        Layout(APART, "explicit, recursive", loop=FULL),
        {"chunk": 16, "layers": 2, "period": (1, 0)},
        id="apart, in chunks, before a dense block",
    ),
    slow("apart, nothing saved, balanced", Layout(APART, loop=FULL), mixture=BALANCED),
    slow("apart, in chunks", Layout(APART, loop=DOTS), chunk=8),
    slow(
        "apart, capacity",
        Layout((("fsdp", 2), ("expert", 4)), loop=ALL, precision="bf16"),
        mixture=SWITCH,
    ),
    slow("apart, zero bubble", staged("zero bubble", 2, axes=STAGED_APART), mixture=BALANCED),
    by_hand("apart, 1F1B", staged("1F1B", 3, FULL, axes=STAGED_APART), mixture=BALANCED),
    by_hand("apart, chunks, 1F1B", staged("1F1B", 2, axes=STAGED_APART), chunk=8, mixture=BALANCED),
    by_hand(
        "apart, two chunks",
        staged("zero bubble, 2 chunks, residuals", 4, ALL, axes=STAGED_APART),
        mixture=BALANCED,
    ),
    by_hand("apart, Muon", Layout(APART, loop=DOTS), given={"optimizer": jaxtrain.Muon(0.1)}),
    of_part("experts' up", FULL, UP, ()),  # no result comes back again
    of_part("shared", FULL, SHARED, ()),  # no row is sent again
    of_part("routers", ALL, ROUTERS, ()),  # no weight is gathered again
    of_part("routers in chunks", ALL, ROUTERS, pytest.mark.slow, chunk=16),
    of_part("experts' up in chunks", FULL, UP, pytest.mark.slow, chunk=16),
    of_part("shared in chunks", FULL, SHARED, chunk=16),
    of_part("experts' down", ALL, DOWN),
    of_part("experts' down", FULL, DOWN),
    of_part("experts' up", ALL, UP),
    of_part("norms", ALL, trained("*.mlp_norm.scale")),
    of_part("adapters of experts", FULL, OF_EXPERTS),
    of_part("adapters of routers", ALL, OF_ROUTERS),
    slow("zero bubble", staged("zero bubble", 2)),
    slow("zero bubble, nothing saved", staged("zero bubble", 2, FULL), period=(0, 1), layers=4),
    by_hand("everything saved", Layout(CUBE)),
    slow("nothing saved, zero1", Layout(CUBE, loop=FULL, sharding="zero1")),
    by_hand(
        "rings, layer by layer", Layout(CUBE, "explicit, ring looped, layer by layer", loop=DOTS)
    ),
    by_hand("bf16", Layout(CUBE, "explicit, recursive", loop=FULL, precision="bf16")),
    by_hand(
        "beside dense blocks",
        Layout(CUBE, "explicit, ring looped, layer by layer", "data parallel", loop=FULL),
        layers=6,
        period=(0, 1),
        prefix=(1,),
        suffix=(1,),
    ),
    by_hand("1F1B", staged("1F1B", 3, ALL)),
    slow("zero bubble, beside dense blocks", staged("zero bubble", 2), period=(1, 0), suffix=(1,)),
    by_hand("zero bubble, two chunks", staged("zero bubble, 2 chunks, residuals", 4, FULL)),
    by_hand(
        "zero bubble, zero2", staged("zero bubble", 3, "unrolled, remat none", sharding="zero2")
    ),
    by_hand("Muon", Layout(CUBE, loop=DOTS), given={"optimizer": jaxtrain.Muon(0.1)}),
    by_hand("LAMB", Layout(CUBE, loop=DOTS), given={"optimizer": jaxtrain.optim.Lamb(0.1)}),
    by_hand(
        "Adafactor",
        Layout(CUBE, loop=DOTS),
        given={"optimizer": jaxtrain.optim.Adafactor(0.1, min_dim_size_to_factor=8)},
    ),
]


@pytest.mark.parametrize(("layout", "fields"), CASES)
@pytest.mark.sampled(9)
def test_the_contract_is_kept(layout: Layout, fields: dict[str, Any]) -> None:
    assembly = assembled(layout, **fields)
    found = held(assembly)
    assert found.lines and not found.broken, "\n".join(map(str, found.broken))


@pytest.mark.parametrize("loop", [ALL, FULL, DOTS])
def test_experts_move_the_tokens_of_a_dense_layer_whatever_their_number(loop: str) -> None:
    """Each device has a slice of every expert: tokens are gathered and scattered once a layer."""

    def of_tokens(kind: int) -> list[Any]:
        parts: dict[str, Any] = {"period": (kind,), "prefix": (kind,), "layers": 3}
        sent = step_traffic(facts_of(assembled(Layout(CUBE, loop=loop), **parts)))
        return [each for each in sent if each.axes == ("tensor",)]

    assert of_tokens(1) == of_tokens(0) != []


@pytest.mark.parametrize(
    ("chunk", "period", "again"), [(None, (1, 0), False), (16, (1, 0), True), (16, (0, 1), False)]
)
def test_a_mixture_in_chunks_runs_for_the_policy_where_its_outputs_are_read(
    chunk: int | None, period: tuple[int, ...], again: bool
) -> None:
    """Without chunks it runs again for its own gradients, and that suffices."""
    assembly = assembled(Layout(APART, loop=FULL), chunk=chunk, layers=2, period=period)
    lines = {sent.why for sent in step_traffic(facts_of(assembly))}
    assert any("for the policy" in line for line in lines) == again


@pytest.mark.parametrize("mixture", [BALANCED, SWITCH], ids=["balanced", "Switch"])
def test_no_more_rows_are_handed_over_than_there_are_choices(mixture: jaxtrain.MoeConfig) -> None:
    """By a ragged all-to-all, which XLA:CPU cannot compile; the program it would get is read."""
    here = jaxtrain.mesh_from_axes(**dict(APART))
    there = replace(here, chip=CHIPS["h100_sxm"], simulated=False)
    e = without_routing(experiment_on(routed(mixture=mixture), Layout(APART, loop=DOTS)))
    with pytest.raises(ValueError, match=r"XLA:CPU has not; use experts=Padded\(\)"):
        assemble(replace(e, execution=replace(e.execution, collectives=RAGGED)), here)
    kernels = dict(grouped_matmul=BlockLoop(), attention=Blockwise(), check_vma=True)
    found = {}
    for name, collectives in (("padded", Collectives()), ("ragged", RAGGED)):
        given = replace(e, execution=replace(e.execution, collectives=collectives, **kernels))
        assembly = assemble(given, there)
        read = lowered_collectives(lowered(assembly, here))
        kept = contract(assembly, read, read).handed
        assert all(each.kept for each in kept)
        found[name] = [each for each in kept if "all-to-all" in each.key.kind]
    rows = {k: [e for e in v if e.key.dtype != "s32"] for k, v in found.items()}
    (ragged,), (padded,) = rows["ragged"], rows["padded"]
    assert (ragged.key.kind, padded.key.kind) == ("ragged-all-to-all", "all-to-all")
    assert ragged.predicted == padded.predicted
    tokens = given.batch * given.data.seq // given.microbatches // 4
    row = 4 * e.model.embed
    assert ragged.buffer_bytes == tokens * mixture.experts_per_token * row <= padded.buffer_bytes
