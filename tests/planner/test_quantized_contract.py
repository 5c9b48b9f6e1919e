"""Products in 8 bits: what they send, predicted and compiled; the arithmetic they ask for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs import held, lowered

import jaxtrain
from jaxtrain.certificate.layouts import Layout, experiment_on
from jaxtrain.certificate.shrink import shrink
from jaxtrain.experiment.fine_tuning import FineTuning, LoRA
from jaxtrain.mesh.hardware import CHIPS, LINKS
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.moe import BlockLoop, TritonBlocks
from jaxtrain.operations.block import chain
from jaxtrain.operations.flows import gradient_flows
from jaxtrain.planner.arithmetic import asked_flops
from jaxtrain.planner.assembled import facts_of
from jaxtrain.planner.backward_work import body_work
from jaxtrain.planner.overhead import overhead
from jaxtrain.planner.seconds import step_seconds
from jaxtrain.planner.traffic import step_traffic
from jaxtrain.program.collectives import dot_flops
from jaxtrain.program.text import program_text
from jaxtrain.quantization import Delayed, Fp8Products, Int8Products
from jaxtrain.session.notes import notes
from jaxtrain.step.assembly import Assembly, assemble

by_hand = pytest.mark.exhaustive
EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
CUBE = (("data", 2), ("fsdp", 2), ("tensor", 2))
STAGES = (("fsdp", 2), ("stage", 2), ("tensor", 2))
FULL, DOTS = "scanned, prefetch, remat full", "scanned, remat dots_and_attention"
KEPT, PLAIN = "scanned, prefetch, kept weights", "unrolled, remat none"
PIPED = Layout(STAGES, microbatches=2, periods=4, pipeline="1F1B", packing=False)
BESIDE = dict(layers=4, prefix=1, suffix=1)
LAYOUTS: list[tuple[Layout, dict[str, int]]] = [
    *((Layout(((axis, 2),), loop=PLAIN), {}) for axis in ("data", "fsdp", "tensor")),
    *((Layout(CUBE, mode, loop=loop), {}) for mode in ("explicit", "explicit, ring")
      for loop in (FULL, KEPT, DOTS, PLAIN)),
    *((Layout(CUBE, sharding=sharding, loop=loop), {}) for sharding, loop in (
        ("zero1", FULL), ("zero2", KEPT), ("data parallel", DOTS), ("fsdp, reduced once", PLAIN))),
    *((PIPED._replace(loop=loop), {}) for loop in (FULL, KEPT, DOTS, PLAIN)),
    (PIPED._replace(pipeline="GPipe, residuals", loop=DOTS), {}),
    (Layout(CUBE, loop=FULL), BESIDE),
    (Layout(CUBE, "explicit, ring", "fsdp, reduced once", loop=PLAIN), BESIDE),
    (PIPED._replace(periods=None, loop=FULL), BESIDE),
    (PIPED._replace(axes=(("data", 2), ("stage", 2), ("tensor", 2)), mode="explicit, ring",
                    periods=None, loop=PLAIN), BESIDE),
]  # fmt: skip
SPLIT = Layout((("stage", 2), ("tensor", 2)), microbatches=2, periods=2, pipeline="zero bubble",
               packing=False, loop=FULL)  # fmt: skip
LAYOUTS += [
    (PIPED._replace(pipeline="zero bubble", microbatches=4, loop=loop), {})
    for loop in (FULL, KEPT, DOTS, PLAIN)
] + [
    (PIPED._replace(pipeline="zero bubble, 2 chunks, residuals", mode="explicit, ring",
                    microbatches=4, loop=DOTS), {}),
    (PIPED._replace(pipeline="zero bubble", microbatches=4, periods=None, loop=PLAIN), BESIDE),
]  # fmt: skip
SHOWN = (Layout(CUBE, "explicit, ring", loop=DOTS), {})
DELAYED = [
    (Layout(CUBE, loop=FULL), {}),
    (Layout(CUBE, "explicit, ring", "fsdp, reduced once", loop=PLAIN), BESIDE),
    (PIPED._replace(periods=None, loop=DOTS), BESIDE),
    (PIPED._replace(pipeline="zero bubble", microbatches=4, loop=FULL), {}),
]


def assembled(layout: Layout, products: Any = Fp8Products(), **counts: int) -> Assembly:  # noqa: B008
    small = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    (block,) = small.model.period
    beside: Any = {"period": (block,)}
    if experts := counts.pop("experts", 0):
        block = replace(block, mlp=jaxtrain.MoeConfig(block.mlp.hidden, experts))
        beside = {"period": (block,)}
    beside |= {k: (block,) * v if k != "layers" else v for k, v in counts.items()}
    placed = experiment_on(replace(small, model=replace(small.model, **beside)), layout)
    given = replace(placed, precision=replace(placed.precision, products=products))
    return assemble(given, jaxtrain.mesh_from_axes(**dict(layout.axes)))


def name_of(case: Any) -> str:
    return " ".join(map(str, case)) if isinstance(case, tuple) else str(case)


@pytest.mark.parametrize(
    ("layout", "counts"),
    [SHOWN, *(pytest.param(*case, marks=by_hand) for case in LAYOUTS if case != SHOWN)],
    ids=name_of,
)
def test_the_contract_is_kept_in_8_bits(layout: Layout, counts: dict[str, int]) -> None:
    found = held(assembled(layout, **counts))
    assert found.lines and not found.broken, "\n".join(map(str, found.broken))
    assert layout.axes == (("data", 2),) or any(e.key.dtype == "u8" for e in found.lines)


@pytest.mark.parametrize(
    ("layout", "counts"),
    [DELAYED[0], *(pytest.param(*case, marks=by_hand) for case in DELAYED[1:])],
    ids=name_of,
)
def test_with_delayed_scales_no_greatest_magnitude_is_sent(
    layout: Layout, counts: dict[str, int]
) -> None:
    """But what was seen, once a step, with the gradients that are whole on every device."""
    found = held(assembled(layout, Fp8Products(Delayed()), **counts))
    assert found.lines and not found.broken, "\n".join(map(str, found.broken))
    assert any(e.key.dtype == "u8" for e in found.lines)
    traffic = step_traffic(facts_of(assembled(layout, Fp8Products(Delayed()), **counts)))
    assert not any("greatest" in each.why and "logit" not in each.why for each in traffic)


ALONE = dict(layers=1)
KEYS = Layout((("data", 2), ("context", 2), ("tensor", 2)), context="gathered keys", loop=PLAIN)
MATRICES = ("*.query", "*.key", "*.value", "*.out", "*.up", "*.gate", "*.down")
TUNED: list[tuple[Layout, dict[str, int], Any, FineTuning]] = [
    (Layout(CUBE, loop=PLAIN), ALONE, Fp8Products(),
     FineTuning(lora=LoRA(2, targets=("*.query",)), trainable=("*.key",))),
    (Layout(CUBE, "explicit, ring", loop=DOTS), ALONE, Fp8Products(Delayed()),
     FineTuning(lora=LoRA(2, targets=("*.down",)))),
    (Layout(CUBE, loop=PLAIN), ALONE, Fp8Products(), FineTuning(lora=LoRA(2))),
    (KEYS, ALONE, Fp8Products(), FineTuning(trainable=("*.query",))),
    (KEYS, ALONE, Fp8Products(), FineTuning(lora=LoRA(2, targets=("*.query",)))),
    (Layout(CUBE, loop=FULL), {}, Fp8Products(), FineTuning(lora=LoRA(2, targets=MATRICES))),
    (Layout(CUBE, loop=FULL), {}, Fp8Products(Delayed()), FineTuning(lora=LoRA(2))),
    (Layout(CUBE, loop=FULL), BESIDE, Int8Products(),
     FineTuning(lora=LoRA(2, targets=("suffix.*.query",)))),
    (Layout(CUBE, "explicit, ring", "fsdp, reduced once", loop=PLAIN), BESIDE,
     Fp8Products(Delayed()), FineTuning(lora=LoRA(2, targets=MATRICES))),
    (Layout(CUBE, loop=KEPT), {}, Int8Products(),
     FineTuning(lora=LoRA(2, targets=("*.out", "*.down")))),
    (Layout(CUBE, loop=PLAIN), {}, Fp8Products(),
     FineTuning(lora=LoRA(2, targets=("*.up",)), trainable=("*.down",))),
    (Layout(CUBE, loop=PLAIN), {}, Fp8Products(Delayed()), FineTuning(trainable=("*.up",))),
    (PIPED._replace(loop=FULL), {}, Fp8Products(), FineTuning(lora=LoRA(2, targets=MATRICES))),
    (PIPED._replace(pipeline="GPipe, residuals", loop=DOTS), {}, Fp8Products(Delayed()),
     FineTuning(lora=LoRA(2))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "counts", "products", "tuning"),
    [*TUNED[:4], *(pytest.param(*case, marks=by_hand) for case in TUNED[4:])],
    ids=name_of,
)
def test_the_contract_is_kept_where_8_bit_matrices_are_frozen(
    layout: Layout, counts: dict[str, int], products: Any, tuning: FineTuning
) -> None:
    """Adapters' gradients need what a product sends; scales of gradients only those of a row-split
    matrix do. Those of the moment are of all outputs of a product together, also if one matrix is
    trained. Delayed scales see the gradients of all products of a trained block."""
    given = replace(assembled(layout, products, **counts).experiment, fine_tuning=tuning)
    found = held(assemble(given, jaxtrain.mesh_from_axes(**dict(layout.axes))))
    assert found.lines and not found.broken, "\n".join(map(str, found.broken))


@pytest.mark.parametrize("policy", [FULL, DOTS])
def test_delayed_scales_see_gradients_as_if_all_matrices_were_trained(policy: str) -> None:
    """Of a block with any trained leaf. Its inputs are recomputed too, which the scales see, but
    they are not gathered for gradients of frozen matrices."""
    layout, works = Layout(CUBE, loop=policy), []
    everything = assembled(layout, Fp8Products(Delayed())).experiment
    for trained in (MATRICES, ("*.gate",), ("*.down",)):
        given = replace(everything, fine_tuning=FineTuning(trainable=trained))
        facts = facts_of(assemble(given, jaxtrain.mesh_from_axes(**dict(CUBE))))
        works.append(body_work(facts, [*facts.model.stacked], below=False))
    whole, *partly = works
    assert len(whole.leaf_gradients) == 2, "of query, key and value; of gate and up"
    for work, gathers in zip(partly, (1, 0), strict=True):
        unsent = dict(leaf_gradients=(), maxima=())
        assert work._replace(**unsent) == whole._replace(**unsent)
        assert work.leaf_gradients == whole.leaf_gradients[:gathers]


def test_a_scale_alone_makes_a_flow() -> None:
    """Of gradients down to a product that has nothing trained."""
    nodes = chain((assembled(Layout(CUBE)).described.period[0],), narrow=True)
    seen = dict(observes=lambda node: "mlp.gate" in node.leaves)
    flows = gradient_flows(nodes, lambda *_: False, below=False, traded=False, **seen)
    product = next(number for number, node in enumerate(nodes) if "mlp.gate" in node.leaves)
    assert flows[product] and not flows[product].own and not any(flows[:product])
    assert all(flows[number].inputs for number, n in enumerate(nodes) if product in n.inputs)


def test_frozen_matrices_need_no_scales_of_gradients_but_for_what_is_below_them() -> None:
    """Numbers in the all-reduces of gradients' greatest magnitudes, of one layer of which nothing
    below is trained."""
    found = {}
    for name in ("query", "out", "gate"):
        tuning = FineTuning(lora=LoRA(2, targets=(f"*.{name}",)))
        given = assembled(Layout(CUBE, loop=PLAIN), **ALONE).experiment
        assembly = assemble(
            replace(given, fine_tuning=tuning, microbatches=1),
            jaxtrain.mesh_from_axes(**dict(CUBE)),
        )
        sent = [s for s in step_traffic(facts_of(assembly)) if s.why == "greatest gradients"]
        found[name] = sorted(s.buffer_bytes // 4 for s in sent for _ in range(s.count))
    assert found == {"query": [1, 1, 2], "out": [1, 1, 2], "gate": [1]}


MIXTURES = [
    (Layout(CUBE, loop=PLAIN), {}, Int8Products()),
    (Layout(CUBE, loop=FULL), {}, Fp8Products()),
    (Layout(CUBE, "explicit, ring", loop=DOTS), {}, Fp8Products()),
    (Layout(CUBE, "explicit, ring", "fsdp, reduced once", loop=PLAIN), BESIDE,
     Fp8Products(Delayed())),
    (Layout((("fsdp", 2), ("expert", 2), ("tensor", 2)), loop=FULL), BESIDE, Fp8Products()),
    (Layout((("data", 2), ("expert", 2), ("tensor", 2)), "explicit, ring", loop=DOTS), {},
     Int8Products()),
    (Layout((("fsdp", 2), ("expert", 2), ("tensor", 2)), "explicit, ring", "fsdp, reduced once",
            loop=PLAIN), {}, Fp8Products(Delayed())),
    (PIPED._replace(loop=FULL), {}, Fp8Products()),
    (PIPED._replace(pipeline="GPipe, residuals", loop=DOTS), {}, Fp8Products()),
    (PIPED._replace(periods=None, loop=PLAIN), BESIDE, Fp8Products()),
    (PIPED._replace(pipeline="zero bubble", microbatches=4, loop=FULL), {}, Fp8Products()),
    (PIPED._replace(pipeline="zero bubble", microbatches=4, loop=DOTS), {},
     Fp8Products(Delayed())),
    *((PIPED._replace(axes=(("expert", 2), ("stage", 2), ("tensor", 2)), pipeline=pipeline,
                      periods=2, loop=DOTS), {}, Fp8Products())
      for pipeline in ("1F1B", "zero bubble")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "counts", "products"),
    [MIXTURES[0], *(pytest.param(*case, marks=by_hand) for case in MIXTURES[1:])],
    ids=name_of,
)
def test_the_contract_is_kept_with_experts_in_8_bits(
    layout: Layout, counts: dict[str, int], products: Any
) -> None:
    found = held(assembled(layout, products, experts=4, **counts))
    assert found.lines and not found.broken, "\n".join(map(str, found.broken))


ROUTER, FIRST, LAST = ("*.router",), ("*.up", "*.gate"), ("*.down",)


@pytest.mark.parametrize(
    ("trainable", "policy"),
    [
        (FIRST, FULL),
        *(
            pytest.param(names, policy, marks=by_hand)
            for names in (FIRST, LAST, ROUTER, (*FIRST, *ROUTER), ("*.query",), ("*.up",))
            for policy in (FULL, DOTS, PLAIN)
            if (names, policy) != (FIRST, FULL)
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("products", [Int8Products(), Fp8Products(Delayed())], ids=str)
def test_the_contract_is_kept_where_experts_in_8_bits_are_frozen(
    trainable: tuple[str, ...], policy: Any, products: Any
) -> None:
    """The last matrices' inputs have scales again where something reads what these give, or their
    gradient."""
    layout = Layout((("data", 2), ("expert", 2), ("tensor", 2)), loop=policy)
    given = assembled(layout, products, experts=4).experiment
    (block,) = given.model.period
    model = replace(
        given.model, period=(replace(block, mlp=replace(block.mlp, kept_routing=None)),)
    )
    tuned = replace(given, model=model, fine_tuning=FineTuning(trainable=trainable))
    found = held(assemble(tuned, jaxtrain.mesh_from_axes(**dict(layout.axes))))
    assert found.lines and not found.broken, "\n".join(map(str, found.broken))


def test_matrices_of_experts_are_gathered_a_byte_each() -> None:
    """And an all-reduce has a greatest magnitude of each."""
    wide, narrow = (assembled(Layout(CUBE), p, experts=4) for p in (None, Fp8Products()))
    before, after = sent(wide, "weights of period"), sent(narrow, "weights of period")
    assert before["float32"] == 4 * after["uint8"] > 0 and set(after) == {"uint8"}
    found = {
        each.buffer_bytes // 4
        for each in step_traffic(facts_of(narrow))
        if "greatest w" in each.why
    }
    assert found == {4 + 3 * 4}


def sent(assembly: Assembly, part: str, kind: str = "all-gather") -> Counter[str]:
    """Bytes of the buffers of lines with these words, by dtype."""
    found: Counter[str] = Counter()
    for each in step_traffic(facts_of(assembly)):
        if part in each.why and each.kind == kind:
            found[each.dtype] += each.count * each.buffer_bytes
    return found


@pytest.mark.parametrize("products", [Int8Products(), Fp8Products(Delayed())], ids=str)
def test_the_contract_is_kept_where_w_multiplies_in_8_bits(products: Any) -> None:
    """It gathers a byte for each number of products' inputs and of their outputs' gradients."""
    assembly = assembled(SPLIT, products)
    found, gathered = held(assembly), sent(assembly, "products, for weight gradients")
    assert found.lines and not found.broken, "\n".join(map(str, found.broken))
    assert set(gathered) == {"uint8"}


def test_weights_and_tokens_are_gathered_a_byte_each() -> None:
    """A quarter of fp32's weights; of tokens each column product gathers once more, for dw. Sums,
    and what is of no product, are as they were."""
    wide, narrow = assembled(Layout(CUBE), None), assembled(Layout(CUBE), Int8Products())
    for part in ("weights of period", "rows, backward"):
        before, after = sent(wide, part), sent(narrow, part)
        assert before["float32"] == 4 * after["uint8"] > 0 and set(after) == {"uint8"}
    assert sent(narrow, "columns")["uint8"] * 4 == 2 * sent(wide, "columns")["float32"]
    for part in ("weights of embedding", "head", "embedding, backward"):
        assert sent(narrow, part) == sent(wide, part)
    assert sent(wide, "", "reduce-scatter") == sent(narrow, "", "reduce-scatter")


def test_greatest_magnitudes_are_few_numbers() -> None:
    """Of a layer: 7 of weights twice, 4 of products' inputs, 7 of gradients in 4 all-reduces."""
    assembly = assembled(Layout(CUBE, loop=PLAIN))
    e, found = assembly.experiment, Counter()
    for each in step_traffic(facts_of(assembly)):
        if "greatest" in each.why and "logit" not in each.why:
            found[each.buffer_bytes // 4] += each.count
    layers = e.microbatches * e.model.layers
    assert found == {7: 2 * layers, 1: (4 + 2) * layers, 3: layers, 2: layers}


@pytest.mark.parametrize("remat", [FULL, pytest.param(DOTS, marks=by_hand)])
def test_what_is_asked_for_is_what_is_compiled(remat: str) -> None:
    """Of dense layers of few tokens: all but the head's and attention's is of products."""
    assembly = assembled(Layout((("tensor", 2),), "explicit, ring", loop=remat))
    asked = asked_flops(assembly)
    options = assembly.compiler_options or None
    text = program_text(lowered(assembly).compile(compiler_options=options))
    assert asked is not None and dot_flops(text) <= 1.01 * asked
    assert dot_flops(text) > 0.7 * asked


def machine(chip: str) -> MeshSpec:
    links = (("host", LINKS["nvlink4"]),)
    return MeshSpec(
        name="m", path="", chip=CHIPS[chip], axes=(("fsdp", 8),), devices=8,
        devices_per_host=8, links=links,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("chip", "products", "times"),
    [
        ("h100_sxm", Fp8Products(), 2.0),
        ("h100_sxm", Int8Products(), 2.0),
        ("a100_80g", Fp8Products(), 1.0),
        ("a100_80g", Int8Products(), 2.0),
        ("tpu_v6e", Fp8Products(), 1.0),
        ("tpu_v6e", Int8Products(), 2.0),
    ],
)
def test_products_are_reckoned_at_the_chips_own_rate(
    chip: str, products: Any, times: float
) -> None:
    """Six FLOPs a weight and token of layers at that of 8 bits, the others at bfloat16's."""
    small = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    wide = replace(small, precision=jaxtrain.bf16, sharding=jaxtrain.fsdp())
    narrow = replace(wide, precision=replace(jaxtrain.bf16, products=products))
    before, after = (step_seconds(assemble(e, machine(chip))) for e in (wide, narrow))
    assert before is not None and after is not None
    m, block = small.model, small.model.period[0]
    heads = block.attention.heads * block.attention.size(m.embed)
    keys = block.attention.key_heads * block.attention.size(m.embed)
    weights = m.embed * (2 * heads + 2 * keys + 3 * block.mlp.hidden) * m.layers
    saved = 6 * weights * small.batch * small.data.seq / CHIPS[chip].bf16_flops / 8
    expected = before.compute_s - saved * (1 - 1 / times)
    assert after.compute_s == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize(
    ("chip", "products", "use"),
    [
        ("h100_sxm", Fp8Products(), None),
        ("h100_sxm", Int8Products(), None),
        ("tpu_v5p", Int8Products(), None),
        ("tpu_v5p", Fp8Products(), "use Int8Products(), whose rate is twice that"),
        ("tpu_v5e", Fp8Products(), "use Int8Products(), whose rate is twice that"),
        ("a100_80g", Fp8Products(), "use Int8Products(), whose rate is twice that"),
        ("tpu7x", Int8Products(), "use Fp8Products(), whose rate is twice that"),
    ],
    ids=str,
)
def test_products_that_are_no_faster_on_a_chip_are_noted(
    chip: str, products: Any, use: str | None
) -> None:
    e = assembled(Layout(CUBE), products).experiment
    told = [n for n in notes(assemble(e, machine(chip))) if "no faster than bf16" in n]
    assert [n.rpartition("; ")[2] for n in told] == ([] if use is None else [use])
    assert all(n.startswith(f"precision.products: {chip} multiplies {products.rate}") for n in told)


@pytest.mark.parametrize("kernel", [BlockLoop(), TritonBlocks()])
def test_experts_are_reckoned_at_that_rate_where_their_kernel_has_it(kernel: Any) -> None:
    """Two of them for each token; a kernel that takes no 8 bits multiplies them in 16."""
    chip, found = "h100_sxm", []
    for products in (None, Fp8Products()):
        e = assembled(Layout(CUBE), products, experts=4).experiment
        execution = replace(e.execution, grouped_matmul=kernel, loop=None)
        given = replace(e, precision=replace(jaxtrain.bf16, products=products), execution=execution)
        assembly = assemble(replace(given, sharding=jaxtrain.fsdp()), machine(chip))
        seconds, told = step_seconds(assembly), [n for n in notes(assembly) if "in 16 bits" in n]
        assert bool(told) == (products is not None and isinstance(kernel, TritonBlocks))
        assert seconds is not None
        found.append((e, seconds.compute_s))
    (e, before), (_, after) = found
    block, m = e.model.period[0], e.model
    heads = block.attention.heads * block.attention.size(m.embed)
    keys = block.attention.key_heads * block.attention.size(m.embed)
    met = 2 * heads + 2 * keys
    if isinstance(kernel, BlockLoop):
        met += 2 * 3 * block.mlp.hidden
    flops = 6 * m.embed * met * m.layers * e.batch * e.data.seq
    assert after == pytest.approx(before - flops / CHIPS[chip].bf16_flops / 8 / 2, rel=2e-4)


def test_a_pipeline_in_8_bits_does_the_same_arithmetic() -> None:
    """And sends what the parts of a step say that it sends."""
    works = [overhead(assembled(PIPED._replace(loop=FULL), p)) for p in (None, Fp8Products())]
    flops = [work.flops for work in works if work is not None]
    assert flops[0] == flops[1] and flops[0] is not None
    sizes = [work.sent for work in works if work is not None]
    assert sizes[0] is not None and sizes[1] is not None and sum(sizes[1]) < sum(sizes[0])
