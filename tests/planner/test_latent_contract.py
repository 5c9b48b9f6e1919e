"""The contract with latent attention: predicted and compiled collectives are equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs import lowered

import jaxtrain
from jaxtrain.certificate.layouts import Layout, experiment_on
from jaxtrain.certificate.shrink import shrink
from jaxtrain.contract.contract import contract
from jaxtrain.planner.arithmetic import asked_flops
from jaxtrain.planner.assembled import facts_of
from jaxtrain.planner.traffic import step_traffic
from jaxtrain.program.collectives import collectives, dot_flops
from jaxtrain.program.order import side_by_side
from jaxtrain.program.stablehlo import lowered_collectives
from jaxtrain.program.text import program_text
from jaxtrain.quantization import Fp8Products, Int8Products
from jaxtrain.step.assembly import assemble
from jaxtrain.transformer import LatentAttentionConfig

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
CUBE = (("data", 2), ("fsdp", 2), ("tensor", 2))
STAGED = (("fsdp", 2), ("stage", 2), ("tensor", 2))
CUT = (("fsdp", 2), ("context", 2), ("tensor", 2))
DOTS, FULL = "scanned, remat dots_and_attention", "scanned, prefetch, remat full"
ALL = "unrolled, remat none"
BOTH = LatentAttentionConfig(heads=8, query_latent=32)
LITE = LatentAttentionConfig(heads=8)
LORA = jaxtrain.FineTuning(lora=jaxtrain.LoRA(2, 4.0, targets=("*.attention.*",)))


def latent(attention: LatentAttentionConfig, **fields: Any) -> jaxtrain.Experiment:
    """The small experiment with this attention in its blocks."""
    given = jaxtrain.load_experiment(EXPERIMENT)
    (block,) = given.model.period
    model = replace(given.model, period=(replace(block, attention=attention),), tied=True)
    small = shrink(replace(given, model=model), devices=8)
    parts = {k: small.model.period * fields.pop(k, 0) for k in ("prefix", "suffix")}
    return replace(small, model=replace(small.model, **parts, **fields))


def assembled(
    layout: Layout, attention: LatentAttentionConfig, given: dict[str, Any], **fields: Any
) -> Any:
    experiment = replace(experiment_on(latent(attention, **fields), layout), **given)
    return assemble(experiment, jaxtrain.mesh_from_axes(**dict(layout.axes)))


def by_hand(
    name: str, layout: Layout, attention: LatentAttentionConfig = BOTH, **given: Any
) -> Any:
    return pytest.param(layout, attention, given, id=name, marks=pytest.mark.exhaustive)


def staged(pipeline: str, loop: str = DOTS, **fields: Any) -> Layout:
    return Layout(STAGED, pipeline=pipeline, microbatches=2, periods=2, loop=loop, **fields)


RING = "explicit, ring"
CASES = [
    pytest.param(Layout(CUBE, loop=DOTS), BOTH, {}, id="both"),
    by_hand("queries of tokens", Layout(CUBE, loop=FULL), LITE),
    by_hand("everything saved", Layout(CUBE, loop=ALL), LITE),
    by_hand("zero1, bf16", Layout(CUBE, loop=FULL, sharding="zero1", precision="bf16")),
    by_hand("rings", Layout(CUBE, RING, loop=DOTS)),
    by_hand("looped rings", Layout(CUBE, "explicit, ring looped, layer by layer", loop=DOTS)),
    by_hand("cut rows", Layout(CUT, loop=DOTS)),
    by_hand("cut rows, rings, nothing saved", Layout(CUT, RING, loop=FULL), LITE),
    by_hand("zero bubble", staged("zero bubble")),
    by_hand("zero bubble, nothing saved", staged("zero bubble", FULL), LITE),
    by_hand("1F1B, blocks beside", staged("1F1B", FULL), prefix=1, suffix=1, layers=4),
    by_hand("1F1B", staged("1F1B", FULL)),
    by_hand("adapters", Layout(CUBE, loop=DOTS), fine_tuning=LORA),
    by_hand("adapters, nothing saved", Layout(CUBE, loop=FULL), LITE, fine_tuning=LORA),
    by_hand(
        "latents alone",
        Layout(CUBE, loop=DOTS),
        fine_tuning=jaxtrain.FineTuning(trainable=("*.latent_down",)),
    ),
    by_hand(
        "queries alone",
        Layout(CUBE, loop=FULL),
        fine_tuning=jaxtrain.FineTuning(trainable=("*.query_up",)),
    ),
    by_hand(
        "8 bits",
        Layout(CUBE, loop=DOTS),
        precision=replace(jaxtrain.optim.fp32, products=Fp8Products()),
    ),
    by_hand(
        "8 bits, nothing saved, rings",
        Layout(CUBE, RING, loop=FULL),
        LITE,
        precision=replace(jaxtrain.optim.fp32, products=Int8Products()),
    ),
    by_hand(
        "8 bits, zero bubble",
        staged("zero bubble", FULL),
        precision=replace(jaxtrain.optim.fp32, products=Fp8Products()),
    ),
    by_hand("Muon", Layout(CUBE, loop=DOTS), optimizer=jaxtrain.Muon(0.1)),
]


@pytest.mark.parametrize(("layout", "attention", "given"), CASES)
def test_the_contract_is_kept(
    layout: Layout, attention: LatentAttentionConfig, given: dict[str, Any]
) -> None:
    model = {k: given[k] for k in ("prefix", "suffix", "layers") if k in given}
    rest = {k: v for k, v in given.items() if k not in model}
    assembly = assembled(layout, attention, rest, **model)
    before = lowered(assembly)
    text = program_text(before.compile(compiler_options=assembly.compiler_options or None))
    assert not side_by_side(text)
    found = contract(assembly, lowered_collectives(before), collectives(text))
    assert found.lines and not found.broken, "\n".join(map(str, found.broken))
    # In rings some products are made again that the policy keeps, of any attention.
    if (asked := asked_flops(assembly)) is not None and layout.mode == "explicit":
        assert 0.9 * asked < dot_flops(text) <= 1.01 * asked


def test_latents_are_gathered_and_not_tokens() -> None:
    """In the forward pass of a layer, for attention: two latents and a rotary key."""
    facts = facts_of(assembled(Layout(CUBE, loop=DOTS, microbatches=1), BOTH, {}))
    up = facts.leaves["period.0.attention.latent_up"]
    assert up.params[-2:] == (("fsdp",), ("tensor",)) and up.in_use[-2:] == ((), ("tensor",))
    a = latent(BOTH).model.period[0].attention
    sent = [e for e in step_traffic(facts) if e.why == "columns"]
    sizes = sorted(e.buffer_bytes // (4 * facts.tokens) for e in sent if e.count)
    embed = facts.model.embed
    assert set(sizes) == {a.latent, a.query_latent, a.rope_head_dim, embed}
    assert sizes.count(embed) == len(facts.model.layers)
