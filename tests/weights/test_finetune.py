"""Fine-tuning: weights a run begins with, frozen leaves, adapters; what each costs and sends."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import at_rest

import jaxtrain
from jaxtrain import FineTuning, FromHuggingFace, FromRun, LoRA
from jaxtrain.certificate.certify import difference
from jaxtrain.certificate.layouts import Layout, experiment_on
from jaxtrain.certificate.outcome import program
from jaxtrain.checkpoint.storage import DamagedCheckpoint
from jaxtrain.contract.contract import contract
from jaxtrain.huggingface import write_folder
from jaxtrain.mesh.mesh import make_mesh
from jaxtrain.models.buffers import buffers_of, without_buffers
from jaxtrain.planner.assembled import why_not_predicted
from jaxtrain.program.collectives import collectives
from jaxtrain.program.stablehlo import lowered_collectives
from jaxtrain.program.text import program_text
from jaxtrain.quantization import Delayed, Fp8Products
from jaxtrain.quantization.delayed import scale_of
from jaxtrain.session.session import _first_state
from jaxtrain.step.assembly import active_mesh, assemble
from jaxtrain.step.layer_order import AtRest, params_in_natural_order
from jaxtrain.step.state import TrainState, shardings
from jaxtrain.step.train_step import trace_step
from jaxtrain.weights.generate import sample_ids
from jaxtrain.weights.loading import load, static_of
from jaxtrain.weights.start import settled_start

slow, by_hand = pytest.mark.slow, pytest.mark.exhaustive
ATTENTION = ("query", "key", "value", "out")
QUERIES = LoRA(2, alpha=4.0, targets=("*.attention.query", "*.mlp.down"))
ADAPTERS = {
    f"period.0.{name}_lora_{part}" for name in ("attention.query", "mlp.down") for part in "ab"
}


def of(decoder: jaxtrain.Experiment, tuning: FineTuning | None = None, **changes: Any) -> Any:
    """Three layers, so that two stages have a slot of padding; an untied head."""
    model = replace(decoder.model, layers=3, tied=False)
    given = {"model": model, "microbatches": 2, "steps": 6, "fine_tuning": tuning, **changes}
    return replace(decoder, **given)


def first_state(experiment: Any, **axes: int) -> tuple[AtRest, TrainState]:
    """As a session has it before its first step; nothing of the step is compiled."""
    order = at_rest(experiment, **axes)
    state, step = _first_state(order, None, settled_start(order.assembly), None)
    assert step == 0
    return order, state


def bits(tree: dict[str, Any]) -> dict[str, bytes]:
    return {k: np.asarray(v).tobytes() for k, v in tree.items()}


def moved(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The leaves that are not what they were, to the bit."""
    return {k for k, v in bits(before).items() if bits(after)[k] != v}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def trained(cache: Path) -> Callable[..., jaxtrain.Result]:
    def run(experiment: Any, run_dir: Path, **options: Any) -> Any:
        if experiment.checkpoints is None:
            experiment = replace(experiment, checkpoints=jaxtrain.SavePolicy(every=1000))
        axes = options.pop("axes", {"data": 1})
        return jaxtrain.train(
            experiment,
            jaxtrain.mesh_from_axes(**axes),
            run_dir=run_dir,
            cache_dir=cache,
            stream=io.StringIO(),
            **options,
        )

    return run


# Where a run begins.


@pytest.fixture(scope="module")
def runs() -> dict[Path, TrainState]:
    return {}


@pytest.fixture
def source(
    decoder: jaxtrain.Experiment, trained: Any, cache: Path, runs: Any, tmp_path: Path
) -> TrainState:
    """A run of two steps in tmp_path/source, with averages; its last state."""
    run = cache / "source"
    if run not in runs:
        runs[run] = trained(of(decoder, seed=3, ema_decay=0.5), run, steps=2).session.state
    shutil.copytree(run, tmp_path / "source")
    return runs[run]


CUBE, STAGES = dict(data=2, fsdp=2, tensor=2), dict(data=2, stage=2)
MESHES = [
    pytest.param((CUBE, STAGES), marks=by_hand),
    pytest.param((dict(stage=2, tensor=2), dict(fsdp=4), dict(stage=4)), marks=by_hand),
]


@pytest.mark.usefixtures("optimising_compiler")
@pytest.mark.parametrize("meshes", MESHES, ids=["few", "more"])
def test_a_start_from_a_run_is_that_run_to_the_bit_on_every_mesh(
    meshes: Any, source: TrainState, decoder: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """Its parameters, its averages, or some of the former with the rest initialised; nothing else
    of it: optimizer state and step begin anew, averages from the same weights."""
    run = tmp_path / "source"
    fresh = first_state(of(decoder))[1].params
    chosen = {f"period.0.attention.{k}" for k in ATTENTION} | {"norm.scale"}
    part = {k: (source.params if k in chosen else fresh)[k] for k in fresh}
    patterns = ("period.*.attention.*", "norm.scale")
    for start, expected in (
        (FromRun(run), source.params),
        (FromRun(str(run), step=2, averaged=True), source.ema),
        (FromRun(run, leaves=patterns), part),
    ):
        for axes in meshes:
            order, state = first_state(of(decoder, FineTuning(start), ema_decay=0.9), **axes)
            assert bits(params_in_natural_order(order.assembly, state.params)) == bits(expected), (
                start,
                axes,
            )
            assert bits(state.ema) == bits(state.params) and int(state.step) == 0
            assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.optimizer))


@pytest.mark.parametrize("meshes", [(CUBE,), *MESHES], ids=["one", "few", "more"])
def test_a_start_from_a_folder_is_what_was_written_on_every_mesh(
    meshes: Any, source: TrainState, decoder: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """With another dropout and padding of the vocabulary, in fp32 and bf16, adapters beside it."""
    folder, model = tmp_path / "folder", of(decoder).model
    write_folder(folder, model, source.params)
    read = jaxtrain.huggingface_config(folder)
    wider = replace(read, dropout=0.1, vocab_multiple=32, chunk_tokens=32)
    start = FineTuning(FromHuggingFace(folder), lora=QUERIES)
    for axes in meshes:
        precision = jaxtrain.optim.Precision(params=jnp.bfloat16) if axes == CUBE else jaxtrain.fp32
        given = of(decoder, start, model=wider, precision=precision)
        order, state = first_state(given, **axes)
        found = params_in_natural_order(order.assembly, state.params)
        assert found.keys() - source.params.keys() == ADAPTERS
        for name, leaf in source.params.items():
            rows = slice(len(leaf)) if name in ("embedding", "head") else slice(None)
            expected = np.asarray(leaf.astype(precision.params))
            np.testing.assert_array_equal(np.asarray(found[name])[rows], expected)
            assert not np.any(np.asarray(found[name])[len(leaf) :])
        assert not any(np.any(found[k]) for k in ADAPTERS if k.endswith("_b"))


@slow
def test_a_resumed_run_goes_on_from_its_own_weights(
    decoder: jaxtrain.Experiment, trained: Any, tmp_path: Path
) -> None:
    """What it began with may be gone; another start is another experiment."""
    trained(of(decoder, seed=3), tmp_path / "source", steps=1)
    tuned = of(decoder, FineTuning(FromRun(tmp_path / "source")))
    whole = trained(tuned, tmp_path / "whole", steps=4)
    trained(tuned, tmp_path / "run", steps=2)
    shutil.rmtree(tmp_path / "source")
    rest = trained(tuned, tmp_path / "run", steps=4)
    assert [line["step"] for line in rest.history] == [3, 4]
    assert bits(rest.session.state.params) == bits(whole.session.state.params)
    with pytest.raises(ValueError, match=r"another experiment: experiment\.fine_tuning"):
        trained(of(decoder), tmp_path / "run", steps=5)
    with pytest.raises(ValueError, match=r"source.checkpoints has no committed checkpoint"):
        trained(tuned, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_delayed_scales_begin_with_the_run_that_has_them(
    source: TrainState, decoder: jaxtrain.Experiment, trained: Any, tmp_path: Path
) -> None:
    """From a run that has none, with those of its weights; and a run that has them is read without
    them by one that has none, and by what generates and exports."""
    delayed = replace(jaxtrain.fp32, products=Fp8Products(Delayed(3)))
    tuned = of(decoder, FineTuning(FromRun(tmp_path / "source")), precision=delayed)
    state = first_state(tuned)[1]
    scales = buffers_of(tuned.model.describe(), scaled=True)
    assert bits(without_buffers(state.params, scales)) == bits(source.params)
    w, table = (state.params[f"period.0.mlp.up{end}"][1] for end in ("", "_scales"))
    assert float(jnp.max(jnp.abs(w))) <= 448 * float(scale_of(table, "w"))
    assert float(jnp.max(jnp.abs(w))) > 224 * float(scale_of(table, "w"))
    made = trained(tuned, tmp_path / "run", steps=1).session.state.params
    begun = first_state(of(decoder, FineTuning(FromRun(tmp_path / "run"))))[1].params
    assert bits(begun) == bits(without_buffers(made, scales))
    assert bits(load(tmp_path / "run").params) == bits(begun)


def test_a_damaged_start_is_refused(
    source: TrainState, decoder: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """And only if it touches what is asked for: chunks are verified as they are read."""
    (pack,) = (tmp_path / "source" / "checkpoints" / "2" / "state").glob("*.pack")
    data = bytearray(pack.read_bytes())
    at = bytes(data).index(np.asarray(source.params["period.0.mlp.up"]).tobytes())
    data[at] ^= 1
    pack.write_bytes(bytes(data))
    with pytest.raises(DamagedCheckpoint, match=r"params\.period\.0\.mlp\.up \[0:3"):
        first_state(of(decoder, FineTuning(FromRun(tmp_path / "source"))), fsdp=2)
    spared = FineTuning(FromRun(tmp_path / "source", leaves=("*.mlp.gate",)))
    first_state(of(decoder, spared), fsdp=2)


# Frozen leaves.

SETS: dict[str, FineTuning] = {
    "mlp": FineTuning(trainable=("*.mlp.*",)),
    "ends": FineTuning(trainable=("embedding", "norm*")),
    "lora": FineTuning(lora=QUERIES),
}


@pytest.mark.parametrize("optimizer", [
    jaxtrain.AdamW(1e-2), jaxtrain.Muon(1e-2), jaxtrain.optim.Lamb(1e-2), jaxtrain.SGD(1e-2),
    jaxtrain.optim.Adafactor(1e-2, min_dim_size_to_factor=4),
], ids=lambda o: type(o).__name__)  # fmt: skip
def test_frozen_leaves_have_no_state(optimizer: Any, decoder: jaxtrain.Experiment) -> None:
    """Of an optimizer's state what a model of the trained leaves alone would have; no average, no
    residual."""
    execution = jaxtrain.Execution(
        reducer=jaxtrain.compression.Compressed(jaxtrain.compression.Int8()), small_leaf=0
    )
    for tuning in SETS.values():
        for axes in (CUBE, STAGES):
            given = of(
                decoder, tuning, optimizer=optimizer, ema_decay=0.9, execution=execution,
                sharding=jaxtrain.data_parallel() | jaxtrain.tensor(),
            )  # fmt: skip
            assembly = at_rest(given, **axes).assembly
            trained = assembly.places.keys() - assembly.frozen
            assert trained and assembly.frozen
            state = assembly.abstract
            assert state.ema.keys() == trained == assembly.parts.keys()
            assert state.residuals["errors"].keys() == trained
            assert state.params.keys() == assembly.places.keys()
            axes_of = {k: assembly.split.axes[k] for k in trained}
            alone = optimizer.build(axes_of, steps=6, batch=8)
            due = jax.eval_shape(alone.init, {k: state.params[k] for k in trained})
            sizes = [leaf.size for leaf in jax.tree.leaves(state.optimizer)]
            assert sizes == [leaf.size for leaf in jax.tree.leaves(due)]


def test_check_counts_what_is_trained(decoder: jaxtrain.Experiment) -> None:
    mesh = jaxtrain.mesh_from_axes(data=2)
    whole = jaxtrain.check(of(decoder), mesh)
    part = jaxtrain.check(of(decoder, SETS["mlp"]), mesh)
    weights = 4 * 3 * 3 * 8 * 16
    assert part.bytes_per_device["optimizer"] == 2 * weights + 2 * 4  # moments and two counts
    assert part.bytes_per_device["params"] == whole.bytes_per_device["params"]
    assert whole.trained == whole.parameters and part.trained == weights // 4
    assert f"{part.trained:,} of them trained" in part.summary()
    assert "of them" not in whole.summary()


LAYOUTS = [
    pytest.param(Layout(tuple(CUBE.items())), marks=slow),
    *(
        pytest.param(layout, marks=slow)
        for layout in (
            Layout(tuple(STAGES.items()), pipeline="1F1B", microbatches=4, periods=3),
            Layout(tuple(CUBE.items()), mode="gspmd", sharding="zero2"),
            Layout(
                tuple(CUBE.items()),
                "explicit, ring",
                "zero1",
                loop="scanned, prefetch, remat full",
                dropout=0.1,
            ),
            Layout(
                tuple(CUBE.items()),
                "explicit, ring looped, layer by layer",
                loop="scanned, remat dots_and_attention",
                precision="bf16",
            ),
            Layout(
                tuple(CUBE.items()),
                sharding="fsdp, reduced once",
                loop="scanned, prefetch, kept weights",
            ),
            Layout(
                (("fsdp", 2), ("stage", 2), ("tensor", 2)),
                sharding="zero1",
                pipeline="GPipe, residuals",
                microbatches=4,
                periods=4,
            ),
            Layout(tuple(STAGES.items()), pipeline="interleaved", microbatches=4, periods=4),
            Layout(tuple(STAGES.items()), pipeline="zero bubble", microbatches=4, periods=3),
            Layout(
                (("stage", 2), ("tensor", 2)),
                pipeline="zero bubble, 2 chunks, residuals",
                microbatches=4,
                periods=4,
                loop="scanned, remat dots_and_attention",
            ),
        )
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "name", ["lora", *(pytest.param(k, marks=by_hand) for k in ("mlp", "ends"))]
)
@pytest.mark.sampled(5)
def test_losses_are_those_of_one_device(
    name: str,
    layout: Layout,
    decoder: jaxtrain.Experiment,
    one_device_runs: dict[Any, Any],
    fresh_programs: None,
) -> None:
    """Gradients too, of just the leaves that are trained. In small steps: AdamW's first ones go by
    signs, and where those of bf16 differ large ones (3e-2) come to a tenth of the state."""
    given = of(
        replace(decoder, optimizer=jaxtrain.AdamW(3e-3)),
        SETS[name],
        data=jaxtrain.data.BigramChain(16, 8, isolate_documents=True),
    )
    key = name, layout.reference()
    if key not in one_device_runs:
        one_device_runs[key] = program(given, layout.reference())()
    trained = one_device_runs[key].grads[0].keys()
    assert trained == ADAPTERS if name == "lora" else trained < one_device_runs[key].init.keys()
    found = difference(layout, program(given, layout)(), one_device_runs[key])
    assert found.passed, found


@slow
def test_frozen_leaves_are_in_no_compressed_sum(
    decoder: jaxtrain.Experiment, opened: Any, stepped: Any
) -> None:
    """Losses are near those of exact sums; errors and averages are of what is trained alone."""
    losses = {}
    for reducer in (
        jaxtrain.collectives.Lax(),
        jaxtrain.compression.Compressed(jaxtrain.compression.Int8(block=16)),
    ):
        execution = jaxtrain.Execution(reducer=reducer, small_leaf=0)
        given = of(decoder, SETS["mlp"], ema_decay=0.9, execution=execution, clip_norm=0.5)
        session = opened(given, data=2)
        before = bits(session.state.params)
        losses[reducer] = [stepped(session)["loss"] for _ in range(4)]
        found = bits(session.state.params)
        trained = {k for k in found if found[k] != before[k]}
        assert trained == {f"period.0.mlp.{k}" for k in ("gate", "up", "down")}
    exact, near = losses.values()
    np.testing.assert_allclose(near, exact, rtol=1e-3)
    assert exact[-1] < exact[0]
    errors = session.state.residuals["errors"]
    assert errors.keys() == session.state.ema.keys() == trained
    assert all(np.any(leaf) for leaf in errors.values())


# What a step sends.

BLOCK = jaxtrain.BlockConfig(
    jaxtrain.AttentionConfig(heads=4, kv_heads=4, head_dim=4, qkv_bias=True),
    jaxtrain.MlpConfig(hidden=16),
)
SENT: dict[str, FineTuning] = {
    **SETS,
    "lora in the stack": FineTuning(lora=LoRA(2, 4.0, ("period.*.query", "period.*.out"))),
    "down": FineTuning(trainable=("period.*.down",)),
    "prefix": FineTuning(trainable=("prefix.0.mlp.down",)),
    "suffix": FineTuning(trainable=("suffix.0.attention.key_bias",)),
    "biases": FineTuning(trainable=("*_bias",)),
    "head": FineTuning(trainable=("head",)),
}
PIPED = (("fsdp", 2), ("stage", 2), ("tensor", 2))
PATHS = {
    "none": Layout(tuple(CUBE.items())),
    "full": Layout(tuple(CUBE.items()), loop="scanned, prefetch, remat full"),
    "kept": Layout(tuple(CUBE.items()), sharding="zero1", loop="scanned, prefetch, kept weights"),
    "dots": Layout(tuple(CUBE.items()), loop="scanned, remat dots_and_attention"),
    "ring": Layout(tuple(CUBE.items()), "explicit, ring looped, layer by layer", "zero2"),
    "1F1B": Layout(PIPED, pipeline="1F1B", microbatches=4, periods=4),
    "GPipe": Layout(
        PIPED, sharding="fsdp, reduced once", pipeline="GPipe, residuals", microbatches=4, periods=4
    ),
    "chunks": Layout(
        PIPED,
        pipeline="interleaved",
        microbatches=4,
        periods=4,
        loop="scanned, remat dots_and_attention",
    ),
}
MARKS = {("lora", "none"): (), ("mlp", "ring"): slow}
"""Of cases that are not run by hand."""


@pytest.mark.parametrize(
    ("name", "path"),
    [
        pytest.param(name, path, marks=MARKS.get((name, path), by_hand))
        for name in SENT
        for path in PATHS
    ],
)
@pytest.mark.usefixtures("optimising_compiler")
def test_what_a_step_with_frozen_leaves_sends_is_predicted(
    name: str, path: str, decoder: jaxtrain.Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte; gradients of frozen leaves are sent nowhere."""
    layout, ends = PATHS[path], () if "stage" in dict(PATHS[path].axes) else (BLOCK,)
    model = jaxtrain.DecoderConfig(
        vocab=16, embed=16, layers=6, period=(BLOCK,), prefix=ends, suffix=ends, vocab_multiple=32
    )
    data = jaxtrain.data.BigramChain(16, 8, isolate_documents=True)
    given = experiment_on(of(decoder, SENT[name], model=model, data=data, batch=16), layout)
    try:
        assembly = assemble(given, jaxtrain.mesh_from_axes(**dict(layout.axes)))
    except ValueError as error:
        assert ends == () and ("names none" in str(error) or "behind the pipeline" in str(error))
        return
    assert why_not_predicted(assembly) is None
    mesh = active_mesh(make_mesh(assembly.spec), assembly.sizes)
    where = shardings(assembly.abstract, assembly.splits, mesh)
    lowered = trace_step(assembly, mesh, where).lower()
    compiled = lowered.compile(compiler_options=assembly.compiler_options or None)
    ran = collectives(program_text(compiled))
    found = contract(assembly, lowered_collectives(lowered), ran)
    assert not found.broken, found.broken


def test_a_step_sends_less_the_more_is_frozen(decoder: jaxtrain.Experiment) -> None:
    from jaxtrain.planner.assembled import facts_of
    from jaxtrain.planner.traffic import step_traffic

    def sent(tuning: FineTuning | None) -> dict[str, float]:
        facts = facts_of(at_rest(of(decoder, tuning), **CUBE).assembly)
        kinds = {each.kind: 0.0 for each in step_traffic(facts)}
        for each in step_traffic(facts):
            if each.axes == ("fsdp",):
                kinds[each.kind] += each.count * each.buffer_bytes
        return kinds

    whole, part = sent(None), sent(SETS["mlp"])
    matrices = 3 * 3 * 8 * 16 * 4  # gate, up and down of three layers in fp32, halved by `tensor`
    assert part["reduce-scatter"] == 2 * matrices // 2 < whole["reduce-scatter"]


# What a checkpoint writes.


def written(run: Path, step: int) -> int:
    """Bytes of packs that only this step has written."""
    packs = (run / "checkpoints" / str(step) / "state").glob(f"{step}.*.pack")
    return sum(pack.stat().st_size for pack in packs)


@slow
def test_a_save_with_nine_tenths_frozen_writes_what_moved(
    decoder: jaxtrain.Experiment, trained: Any, tmp_path: Path
) -> None:
    """Once two kept steps have copies of what is frozen; norms are small, and written each time.
    Against the first save where the optimizer keeps nothing, and against the same save of a run
    that trains everything where it keeps two moments of what it trains."""
    model = replace(decoder.model, layers=3, embed=512, tied=False)
    saves = dict(checkpoints=jaxtrain.SavePolicy(every=1, keep=4), model=model)
    plain = jaxtrain.SGD(1e-2, momentum=0.0, weight_decay=0.0)
    tuning = FineTuning(trainable=("*.attention.key",))
    found = {}
    for name, given in {
        "sgd": of(decoder, tuning, optimizer=plain, **saves),
        "adamw": of(decoder, tuning, **saves),
        "all": of(decoder, **saves),
    }.items():
        run = trained(given, tmp_path / name, steps=4, axes={"fsdp": 2})
        found[name] = {step: written(tmp_path / name, step) for step in (1, 4)}
        params = run.session.state.params
    share = params["period.0.attention.key"].size / sum(leaf.size for leaf in params.values())
    assert 0.05 < share < 0.1
    assert share < found["sgd"][4] / found["sgd"][1] < share + 0.03
    assert share < found["adamw"][4] / found["all"][4] < share + 0.03


# Adapters.


def test_adapters_alone_are_trained_and_merge_into_their_matrices(
    source: TrainState, decoder: jaxtrain.Experiment, trained: Any, tmp_path: Path
) -> None:
    """On imported weights: the first loss is theirs, only adapters move, and what is exported is
    w + alpha / rank A B."""
    folder = tmp_path / "folder"
    write_folder(folder, of(decoder).model, source.params)
    start = FromHuggingFace(folder)
    plain = trained(of(decoder, FineTuning(start)), tmp_path / "plain", steps=1)
    tuned = of(decoder, FineTuning(start, lora=QUERIES))
    run = trained(tuned, tmp_path / "run", steps=3, axes={"fsdp": 2, "tensor": 2})
    assert run.history[0]["loss"] == pytest.approx(plain.history[0]["loss"], rel=1e-5)

    after = run.session.state.params
    assert moved(source.params, after) == set()
    before = first_state(tuned)[1].params
    assert moved(before, after) == ADAPTERS
    norms = [np.linalg.norm(np.asarray(leaf, np.float64)) for leaf in after.values()]
    assert run.history[-1]["param_norm"] == pytest.approx(np.linalg.norm(norms), rel=1e-5)

    jaxtrain.export(tmp_path / "run", tmp_path / "out")
    out, said = load(tmp_path / "out"), []
    for form, params in (
        (run.session.assembly.split.static, after),
        (static_of(out.config), out.params),
    ):
        options = dict(tokens=8, temperature=0.0)
        said.append(sample_ids(form, out.config, jaxtrain.fp32, params, [3, 1, 4], **options))
    assert said[0] == said[1]
    found = out.params
    assert found.keys() == source.params.keys()
    for name, leaf in source.params.items():
        expected = np.asarray(leaf, np.float64)
        if name + "_lora_a" in ADAPTERS:
            a, b = (np.asarray(after[f"{name}_lora_{x}"], np.float64) for x in "ab")
            assert a.shape == (3, leaf.shape[1], 2) and b.shape == (3, 2, leaf.shape[2])
            expected = expected + 4.0 / 2 * np.einsum("lir,lro->lio", a, b)
            assert np.abs(expected - np.asarray(leaf)).max() > 1e-4
        np.testing.assert_allclose(np.asarray(found[name])[:16], expected[:16], atol=1e-6)


def test_a_run_begins_from_another_with_adapters_beside_it(
    source: TrainState, decoder: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """Its adapters are its own; those of other layers and of another seed are other numbers."""
    tuning = FineTuning(FromRun(tmp_path / "source"), lora=QUERIES, trainable=("norm.scale",))
    order, state = first_state(of(decoder, tuning), **STAGES)
    assert order.assembly.places.keys() - order.assembly.frozen == ADAPTERS | {"norm.scale"}
    found = params_in_natural_order(order.assembly, state.params)
    assert bits({k: found[k] for k in source.params}) == bits(source.params)
    a = np.asarray(found["period.0.mlp.down_lora_a"])
    other = first_state(of(decoder, tuning, seed=9))[1].params["period.0.mlp.down_lora_a"]
    assert a.shape == (3, 16, 2) and len({*a.reshape(-1), *np.asarray(other).reshape(-1)}) == 192
    assert a.std() == pytest.approx(16**-0.5, rel=0.3)
