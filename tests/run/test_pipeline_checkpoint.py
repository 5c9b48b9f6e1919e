"""What leaves a pipelined run and enters it: checkpoints in natural layer order, samples, held-out
loss, counts. The laws are held against one device, and against slots counted by hand."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import Asking, at_rest

import jaxtrain
from jaxtrain.checkpoint import CheckpointManager, SavePolicy
from jaxtrain.compression import Compressed, Int8, PowerSGD
from jaxtrain.pipeline.config import Pipeline
from jaxtrain.run.result import Result
from jaxtrain.session.evaluate import Evaluator
from jaxtrain.session.session import initialise
from jaxtrain.state_format.leaves import named_leaves
from jaxtrain.step.assembly import Assembly, assemble
from jaxtrain.step.layer_order import AtRest, natural_shapes
from jaxtrain.step.state import TrainState
from jaxtrain.weights.generate import generate_ids

STEPS = 4
PLAIN, CHUNKED = Pipeline(), Pipeline("interleaved", chunks=2)
ONE = {"data": 1}
slow = pytest.mark.slow


def of(decoder: jaxtrain.Experiment, layers: int = 4, **changes: Any) -> jaxtrain.Experiment:
    model = replace(decoder.model, layers=layers)
    return replace(decoder, **{"model": model, "microbatches": 2, "steps": STEPS, **changes})


def piped(
    experiment: jaxtrain.Experiment, pipeline: Pipeline, **execution: Any
) -> jaxtrain.Experiment:
    return replace(
        experiment, execution=replace(experiment.execution, pipeline=pipeline, **execution)
    )


def first_state(rest: AtRest) -> TrainState:
    return initialise(rest.assembly, rest.shardings)


# What is in a state: every optimizer that keeps something of its own, and compressed sums.

FACTORED = jaxtrain.optim.Adafactor(1e-2, momentum=0.9, min_dim_size_to_factor=4)
STATES: dict[str, Any] = {
    "adamw, average": (dict(ema_decay=0.9), {}),
    "adafactor": (
        dict(optimizer=jaxtrain.optim.Adafactor(1e-2, momentum=0.9, min_dim_size_to_factor=4)),
        {},
    ),
    "muon": (dict(optimizer=jaxtrain.Muon(1e-2)), {}),
    "int8": ({}, dict(reducer=Compressed(Int8(block=16)), small_leaf=0)),
}
MESHES = {
    "chunks": (4, dict(stage=2, tensor=2), CHUNKED),
    "padded": (3, dict(data=2, stage=2), PLAIN),
    "padded chunks": (5, dict(data=2, stage=2, tensor=2), CHUNKED),
    "even": (4, dict(data=2, stage=2), PLAIN),
}
CASES = [
    ("adamw, average", "chunks"),
    ("adafactor", "padded"),
    ("int8", "padded chunks"),
    ("int8", "even"),
    pytest.param("muon", "padded chunks", marks=slow),
    pytest.param("adafactor", "padded chunks", marks=slow),
]


def slots_by_hand(layers: int, stages: int, chunks: int) -> dict[tuple[int, int], int]:
    """(chunk, slot) -> layer, dealt one position after another."""
    depth = -(-layers // (stages * chunks))
    spare = stages * chunks * depth - layers  # positions with one less, the last ones
    found, layer = {}, 0
    for position in range(stages * chunks):
        chunk, stage = divmod(position, stages)
        for i in range(depth - (position >= stages * chunks - spare)):
            found[chunk, stage * depth + i] = layer
            layer += 1
    return found


def in_layers(name: str, leaf: np.ndarray, rest: AtRest) -> np.ndarray:
    """A leaf with its layers in natural order, each taken from its slot by hand; the leaf itself
    where it is not stacked over them."""
    layout = rest.assembly.pipeline.layout if rest.assembly.pipeline else None
    if layout is None or ".period." not in name or name.startswith("residuals.factors."):
        return leaf
    at, many = int(name.startswith("residuals")), layout.chunks > 1
    out = np.zeros((*leaf.shape[:at], layout.layers, *leaf.shape[at + 1 + many :]), leaf.dtype)
    for (chunk, slot), layer in slots_by_hand(layout.layers, layout.stages, layout.chunks).items():
        out[(slice(None),) * at + (layer,)] = leaf[_index(at, chunk, slot, many)]
    return out


def _index(at: int, chunk: int, slot: int, many: bool) -> tuple[Any, ...]:
    return (slice(None),) * at + ((chunk, slot) if many else (slot,))


def in_slots(name: str, leaf: np.ndarray, rest: AtRest, padding: float) -> np.ndarray:
    """Inverse of `in_layers`, with `padding` in slots that have no layer."""
    found = named_leaves(rest.assembly.abstract)[name]
    if found.shape == leaf.shape:
        return leaf
    layout = rest.assembly.on_stages.layout
    at, many = int(name.startswith("residuals")), layout.chunks > 1
    out = np.full(found.shape, padding, leaf.dtype)
    for (chunk, slot), layer in slots_by_hand(layout.layers, layout.stages, layout.chunks).items():
        out[_index(at, chunk, slot, many)] = leaf[(slice(None),) * at + (layer,)]
    return out


@pytest.mark.parametrize(("kind", "cut"), CASES)
def test_a_save_is_that_of_one_device(
    kind: str, cut: str, decoder: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """Paths, shapes and types; every layer's numbers from its slot, though NaN fills the padding;
    and back into slots, where the padding is zero."""
    changes, execution = STATES[kind]
    layers, axes, pipeline = MESHES[cut]
    rest = at_rest(piped(of(decoder, layers, **changes), pipeline, **execution), **axes)
    unpiped = {axis: n for axis, n in axes.items() if axis != "stage"}
    alone = at_rest(piped(of(decoder, layers, **changes), PLAIN, **execution), **(unpiped or ONE))
    due, found = (named_leaves(natural_shapes(each.assembly)) for each in (alone, rest))
    assert found.keys() == due.keys()
    for name, leaf in found.items():
        if name == "residuals.errors.norm.scale":  # every stage sums it
            continue
        assert (leaf.shape, leaf.dtype) == (due[name].shape, due[name].dtype), name
    stacked = {name for name in found if found[name].shape != rest_shape(rest, name)}
    assert stacked == set(rest.slots) and (len(stacked) >= 7 or cut == "even")

    rng = np.random.default_rng(0)
    numbers = {
        k: rng.integers(1, 100, v.shape).astype(v.dtype) if k != "step" else np.int32(4)
        for k, v in found.items()
    }
    structure = jax.tree.structure(rest.template)
    filled = [
        jax.device_put(in_slots(name, numbers[name], rest, np.nan), leaf.sharding)
        for name, leaf in named_leaves(rest.template).items()
    ]
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    natural = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=one) for k, v in found.items()}
    with CheckpointManager(tmp_path, SavePolicy()) as manager:
        manager.save(4, structure.unflatten(filled), {}, rest.slots)
        manager.wait()
        whole = manager.restore(4, as_tree(natural))[0]
        for name, leaf in named_leaves(whole).items():
            assert np.asarray(leaf).tobytes() == numbers[name].tobytes(), name
        again = manager.restore(4, rest.template, rest.slots)[0]
    for name, leaf in named_leaves(again).items():
        np.testing.assert_array_equal(leaf, in_slots(name, numbers[name], rest, 0), err_msg=name)
    same = jax.tree.map(lambda a, where: a.sharding == where, again, rest.shardings)
    assert jax.tree.all(same)


def rest_shape(rest: AtRest, name: str) -> tuple[int, ...]:
    return named_leaves(rest.assembly.abstract)[name].shape


def as_tree(leaves: dict[str, Any]) -> Any:
    """Leaves by their paths as nested dicts: containers do not matter to a checkpoint."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        at = tree
        for key in parents:
            at = at.setdefault(key, {})
        at[last] = leaf
    return tree


@pytest.mark.parametrize("cut", MESHES)
def test_a_save_and_a_restore_run_no_program_and_hold_nothing_twice(
    cut: str, decoder: jaxtrain.Experiment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even one that was compiled before: nothing but copies to the host and back."""
    layers, axes, pipeline = MESHES[cut]
    rest = at_rest(piped(of(decoder, layers), pipeline), **axes)
    state = jax.block_until_ready(first_state(rest))
    jax.clear_caches()
    with CheckpointManager(tmp_path, SavePolicy()) as manager, jax.log_compiles():
        before = {id(array) for array in jax.live_arrays()}
        manager.save(0, state, {}, rest.slots)
        made = [array for array in jax.live_arrays() if id(array) not in before]
        # Views of shards: they hold the buffers that were there.
        held = {s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(state) for s in shards(x)}
        assert all(x.unsafe_buffer_pointer() in held for x in made)
        manager.wait()
        found = manager.restore(0, rest.template, rest.slots)[0]
    assert not [r.getMessage() for r in caplog.records if "ompil" in r.getMessage()]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def shards(leaf: jax.Array) -> Any:
    return leaf.addressable_shards


def test_padding_does_not_make_a_leaf_large_enough_to_compress(
    decoder: jaxtrain.Experiment,
) -> None:
    """What is compressed is learned from: it is the same on every mesh."""
    size = 3 * 8 * 2 * 4
    for small_leaf in (size - 1, size):
        execution = dict(reducer=Compressed(Int8(block=16)), small_leaf=small_leaf)
        given = piped(of(decoder, 3), PLAIN, **execution)
        alone, padded = (
            assemble(given, jaxtrain.mesh_from_axes(data=2, **stages)).parts
            for stages in ({}, {"stage": 2})
        )
        assert alone.keys() == padded.keys()
        assert ("period.0.attention.query" in alone) == (small_leaf < size)


# Runs.


@pytest.fixture
def trained(tmp_path: Path) -> Callable[..., Result]:
    def run(experiment: Any, axes: dict[str, int], name: str, **options: Any) -> Result:
        return jaxtrain.train(
            replace(experiment, checkpoints=SavePolicy(every=1000)),
            jaxtrain.mesh_from_axes(**axes),
            run_dir=tmp_path / name,
            cache_dir=tmp_path / "cache",
            stream=options.pop("stream", io.StringIO()),
            **options,
        )

    return run


def losses(*results: Result) -> list[float]:
    return [line["loss"] for result in results for line in result.history]


def read_back(run: Path, step: int, like: AtRest) -> TrainState:
    """The checkpoint as a run on `like`'s mesh reads it; raises where it does not fit."""
    with CheckpointManager(run / "checkpoints", SavePolicy()) as manager:
        return manager.restore(step, like.template, like.slots)[0]


EVALUATION = jaxtrain.Evaluation(every=2, batches=3, final_batches=3)
JOURNEYS = [
    pytest.param(4, [(dict(stage=2), CHUNKED), (ONE, PLAIN)], id="chunks, one device", marks=slow),
    pytest.param(
        3,
        [(dict(stage=2), PLAIN), (dict(stage=4), PLAIN), (ONE, PLAIN)],
        id="padded",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        8,
        [
            (dict(stage=4), CHUNKED),
            (dict(tensor=2, stage=2), Pipeline("zero_bubble")),
            (dict(stage=4), Pipeline("gpipe", save="residuals")),
            (dict(fsdp=2, stage=2), CHUNKED),
        ],
        id="four meshes",
        marks=slow,
    ),
    pytest.param(3, [(ONE, PLAIN), (dict(stage=2), PLAIN)], id="from one device", marks=slow),
]


@pytest.mark.parametrize(("layers", "journey"), JOURNEYS)
@pytest.mark.sampled(3)
def test_a_run_goes_from_mesh_to_mesh(
    layers: int,
    journey: list[Any],
    decoder: jaxtrain.Experiment,
    trained: Callable[..., Result],
    tmp_path: Path,
) -> None:
    """One step on each mesh, the rest on the last: losses of one device, held out ones too; and
    what is saved is what was there, to the bit, in one device's shapes."""
    given = of(decoder, layers, ema_decay=0.9, evaluation=EVALUATION, microbatches=4)
    whole = trained(given, ONE, "whole")
    alone, parts = at_rest(given, **ONE), []
    for step, (axes, pipeline) in enumerate(journey, 1):
        last = STEPS if step == len(journey) else step
        parts.append(trained(piped(given, pipeline), axes, "run", steps=last))
        session = parts[-1].session
        stored = named_leaves(read_back(tmp_path / "run", last, alone))
        for name, leaf in named_leaves(session.state).items():
            layers_of = in_layers(name, np.asarray(leaf), session.at_rest)
            np.testing.assert_array_equal(layers_of, stored[name], err_msg=name)
        held = named_leaves(session.state)
        for name in ("params.embedding", "optimizer.0.mu.embedding", "step"):
            np.testing.assert_array_equal(held[name], stored[name])
    np.testing.assert_allclose(losses(*parts), losses(whole), rtol=1e-5)
    assert len(losses(*parts)) == STEPS
    assert parts[-1].evaluation == pytest.approx(whole.evaluation, rel=1e-5)


@slow
@pytest.mark.parametrize(
    ("reducer", "optimizer"),
    [
        (Compressed(Int8(block=16)), FACTORED),
        (Compressed(PowerSGD(2)), jaxtrain.Muon(1e-2)),
    ],
    ids=["int8", "powersgd"],
)
@pytest.mark.sampled(3)
def test_compressed_sums_go_on_elsewhere(
    reducer: Any, optimizer: Any, decoder: jaxtrain.Experiment, trained: Callable[..., Result]
) -> None:
    """The errors that are carried are in natural order too. Sums are rounded anew on each mesh, so
    the losses are near one another, not equal."""
    given = of(decoder, 3, optimizer=optimizer)
    given = piped(given, PLAIN, reducer=reducer, small_leaf=100)
    whole = trained(given, {"data": 2}, "whole")
    first = trained(given, dict(data=2, stage=2), "run", steps=2)
    assert first.session is not None
    name = "period.0.mlp.up"
    held = np.asarray(first.session.state.residuals["errors"][name])
    errors = in_layers(f"residuals.errors.{name}", held, first.session.at_rest)
    assert errors.shape == (2, 3, 8, 16) and np.abs(errors).max() > 0
    rest = trained(given, {"data": 2}, "run")
    np.testing.assert_allclose(losses(first, rest), losses(whole), rtol=2e-2)


@pytest.mark.parametrize("when", [pytest.param("between steps", marks=slow), "in an evaluation"])
def test_an_interrupted_pipeline_is_saved(
    when: str,
    decoder: jaxtrain.Experiment,
    trained: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever runs then has ended before the state is read."""
    given = piped(of(decoder, evaluation=EVALUATION), CHUNKED)
    running: list[Any] = []
    evaluate, save = Evaluator._run, CheckpointManager.save
    busy = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda i, x: jnp.sin(x @ x), x).sum())

    def interrupted(*arguments: Any) -> Any:
        step = arguments[0]._step

        def slowly(*given: Any) -> Any:
            running.append(busy(jnp.ones((300, 300))))
            os.kill(os.getpid(), signal.SIGINT)
            sums = step(*given)
            return sums._replace(loss=sums.loss + 0 * running[-1])

        with monkeypatch.context() as patch:
            patch.setattr(arguments[0], "_step", slowly)
            return evaluate(*arguments)

    def watched(*arguments: Any, **options: Any) -> None:
        assert all(each.is_ready() for each in running), "an evaluation still runs"
        save(*arguments, **options)

    monkeypatch.setattr(CheckpointManager, "save", watched)
    asked: list[None] = []

    def stop() -> bool:
        asked.append(None)
        if when == "between steps" and len(asked) == 2:
            raise KeyboardInterrupt
        return False

    if when == "in an evaluation":
        monkeypatch.setattr(Evaluator, "_run", interrupted)
    stream = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        trained(given, dict(stage=2), "run", stream=stream, callbacks=[Asking(stop)])
    assert "interrupted; saved step 2" in stream.getvalue()
    stored = read_back(tmp_path / "run", 2, at_rest(given, **ONE))
    assert stored.params["period.0.mlp.up"].shape == (4, 8, 16) and int(stored.step) == 2


# What else reads a laid state.

READERS = [
    pytest.param(4, dict(stage=2), CHUNKED, id="chunks"),
    pytest.param(3, dict(stage=2, tensor=2), PLAIN, id="padded", marks=slow),
    pytest.param(4, dict(data=2, stage=4), PLAIN, id="even", marks=slow),
]


@pytest.mark.parametrize(("layers", "axes", "pipeline"), READERS)
@pytest.mark.sampled(2)
def test_a_continuation_from_stages_is_that_of_one_device(
    layers: int, axes: dict[str, int], pipeline: Pipeline, decoder: jaxtrain.Experiment
) -> None:
    given = of(decoder, layers)
    init = jaxtrain.nn.Initialisation(std=0.5)  # so that the likeliest is no matter of rounding
    given = replace(given, model=replace(given.model, init=init, vocab_multiple=32))

    def continued(rest: AtRest) -> list[int]:
        params = first_state(rest).params
        return generate_ids(rest.assembly, params, [3, 1, 4], tokens=8, temperature=0.8)

    found = continued(at_rest(piped(given, pipeline), **axes))
    assert found == continued(at_rest(given, **ONE)) and len(set(found)) > 1


@pytest.mark.parametrize(("layers", "axes", "pipeline"), READERS)
@pytest.mark.sampled(2)
def test_held_out_loss_depends_neither_on_stages_nor_on_batches_in_flight(
    layers: int,
    axes: dict[str, int],
    pipeline: Pipeline,
    decoder: jaxtrain.Experiment,
    tmp_path: Path,
) -> None:
    """Batches that do not fill a call too: two are on their way at a time, or four."""
    data = replace(decoder.data, isolate_documents=True)
    given = of(decoder, layers, data=data)

    def evaluated(rest: AtRest) -> list[float]:
        assembly = rest.assembly
        evaluator = Evaluator(assembly, rest.mesh, cache_dir=tmp_path)
        state = first_state(rest)
        found = [evaluator(state, batches=n)["eval_loss"] for n in (1, 2, 3, None)]
        return found

    found, due = (
        evaluated(at_rest(piped(given, pipeline), **axes)),
        evaluated(at_rest(given, **ONE)),
    )
    np.testing.assert_allclose(found, due, rtol=1e-5)
    assert len(set(due)) == 4, "other batches, another loss"


def block_parameters(assembly: Assembly) -> int:
    """Of one layer of the `decoder` fixture: four projections of 8 x 8, a gated MLP, two norms."""
    hidden, embed = 16, assembly.experiment.model.embed
    return 4 * embed * embed + 3 * embed * hidden + 2 * embed


def test_check_counts_layers_and_tells_of_the_pipeline(
    decoder: jaxtrain.Experiment, tmp_path: Path
) -> None:
    given = of(decoder, 30, microbatches=8)
    spec = jaxtrain.mesh_from_axes(stage=4)
    report = jaxtrain.check(piped(given, CHUNKED), spec)
    alone = jaxtrain.check(given, jaxtrain.mesh_from_axes(**ONE))
    assert report.parameters == alone.parameters
    assert report.parameters == 30 * block_parameters(report.assembly) + 8 + 16 * 8
    assert alone.summary().count("\n") == 1 and "pipeline" not in alone.as_json()
    line = report.summary().splitlines()[2]
    # 3(M + (R - 1)/V) = 28.5 for work of 24: Narayanan et al. 2021.
    assert "interleaved, 4 stages x 2 chunks, 8 microbatches" in line
    assert "cost 28.5 forward passes of a stage, bubble 15.8%" in line
    assert (
        "30 layers in 32 slots of 4 stages x 2 chunks: 2 stand idle, 6.7% more arithmetic" in line
    )
    found = report.as_json()["pipeline"]
    assert (found["cost"], found["layers"], found["slots"]) == (28.5, 30, 32)
    assert json.loads(json.dumps(found)) == found
    even = jaxtrain.check(of(decoder, 4), spec).summary().splitlines()[2]
    assert "slots" not in even and "one_f_one_b, 4 stages, 2 microbatches: 8 ticks" in even
