"""Held-out loss is that of the rows that were asked for, whatever they are cut into."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxtrain
from jaxtrain.data import BatchRamp, BigramChain
from jaxtrain.mesh.mesh import make_mesh
from jaxtrain.scoring.ended import Ended
from jaxtrain.session import session
from jaxtrain.session.evaluate import Evaluator
from jaxtrain.session.first_state import initialise
from jaxtrain.session.rows import open_split
from jaxtrain.step.assembly import assemble
from jaxtrain.step.batches import fields_of
from jaxtrain.step.state import TrainState, shardings
from tests.tiny import SEQ, VOCAB

HELD_OUT = 1024
"""Rows of a bigram chain's held-out split."""

Evaluate = Callable[..., dict[str, float]]


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., tuple[Evaluator, TrainState]]:
    """An experiment's evaluator, opened, and its initial state on mesh axes; nothing is trained."""

    def of(experiment: jaxtrain.Experiment, **axes: int) -> tuple[Evaluator, TrainState]:
        spec = jaxtrain.mesh_from_axes(**(axes or {"data": 1}))
        train = open_split(experiment, "train", tmp_path)
        assembly = assemble(experiment, spec, fields_of(train, experiment.data))
        mesh = make_mesh(spec)
        evaluator = Evaluator(assembly, mesh, cache_dir=tmp_path)
        evaluator.open()
        state = initialise(assembly, shardings(assembly.abstract, assembly.splits, mesh))
        return evaluator, state

    return of


def by_hand(experiment: jaxtrain.Experiment, state: TrainState, rows: int) -> float:
    """Mean loss of the `Table` model over the first held-out rows, in numpy."""
    data = experiment.data.open("held_out", seed=experiment.seed, cache_dir=Path())
    batch = data.rows(np.arange(rows))
    inward, outward = (np.asarray(state.params[k], np.float64) for k in ("inward", "outward"))
    logits = inward[batch["tokens"]] @ outward
    chosen = np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    nats = np.log(np.exp(logits).sum(-1)) - chosen
    return float((nats * batch["weights"]).sum() / batch["weights"].sum())


CUTS = {
    **{f"{n} microbatches": {"microbatches": n} for n in (1, 2, 4, 8)},
    "a ramp by 2": {"batch": BatchRamp(start=2, end=8, increment=2, steps=3), "microbatches": 2},
    "a ramp by 4": {"batch": BatchRamp(start=4, end=8, increment=4, steps=1), "microbatches": 4},
}


@pytest.mark.parametrize("cut", CUTS)
def test_held_out_loss_is_of_batches_of_the_experiment(
    cut: str, own: jaxtrain.Experiment, made: Any
) -> None:
    """`batches` times the (largest) batch of rows, whatever a step cuts them into."""
    ragged = replace(own, data=replace(own.data, isolate_documents=True), batch=8)
    experiment = replace(ragged, **CUTS[cut])
    evaluator, state = made(experiment)
    for batches, rows in ((1, 8), (3, 24), (None, HELD_OUT)):
        found = evaluator(state, batches=batches)["eval_loss"]
        assert found == pytest.approx(by_hand(experiment, state, rows), rel=1e-6)


def test_each_named_set_has_the_loss_of_its_own_rows(own: jaxtrain.Experiment, made: Any) -> None:
    ragged = replace(own.data, isolate_documents=True)
    chain = partial(BigramChain, VOCAB, SEQ, isolate_documents=True)
    sets = {"three": chain(successors=3), "five": chain(successors=5)}
    own = replace(own, data=ragged, evaluation=jaxtrain.Evaluation(sets=sets))
    evaluator, state = made(own, fsdp=2)
    values = evaluator(state, batches=2)
    assert evaluator.digests.keys() == {"", *sets} and len({*evaluator.digests.values()}) == 3
    for name, data in [("", own.data), *sets.items()]:
        expected = by_hand(replace(own, data=data), state, 2 * own.batch)
        metric = f"eval_loss/{name}" if name else "eval_loss"
        assert values.pop(metric) == pytest.approx(expected, rel=1e-6)
    assert not values, "tokens of a chain stand for no bytes"


def test_a_pipeline_evaluates_the_rows_that_were_asked_for(
    decoder: jaxtrain.Experiment, made: Any
) -> None:
    """Two pieces are on their way at once; one that nobody asked for is on its way with the third,
    and counts nothing."""
    two = replace(decoder, model=replace(decoder.model, layers=2))
    found = []
    for axes in ({"data": 1}, {"stage": 2}):
        evaluator, state = made(two, **axes)
        found.append([evaluator(state, batches=n)["eval_loss"] for n in (1, 3)])
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert abs(found[0][0] - found[0][1]) > 1e-4


def test_averages_are_evaluated_where_they_are_kept(
    own: jaxtrain.Experiment, opened: Any, stepped: Any
) -> None:
    session = opened(replace(own, ema_decay=0.9), fsdp=2)
    for _ in range(5):
        stepped(session)
    found = session.evaluate(session.state, batches=2)["eval_loss"]
    averages = replace(session.state, params=session.state.ema)
    assert found == pytest.approx(by_hand(own, averages, 16), rel=1e-6)
    assert abs(found - by_hand(own, session.state, 16)) > 1e-3, "the average lags behind"


def test_the_last_evaluation_is_of_the_final_batches(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    often = jaxtrain.Evaluation(every=1, batches=1, final_batches=3)
    mesh = jaxtrain.mesh_from_axes(data=1)
    logged = replace(own, evaluation=often, checkpoints=jaxtrain.SavePolicy(every=100))
    result = jaxtrain.train(logged, mesh, run_dir=tmp_path / "run", steps=2, cache_dir=tmp_path)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line)["eval_loss"] for line in lines]
    assert found[-1] == result.evaluation["eval_loss"]
    assert found[1] == pytest.approx(by_hand(own, result.session.state, 24), rel=1e-6)
    first = jaxtrain.train(logged, mesh, steps=1, cache_dir=tmp_path).session.state
    assert found[0] == pytest.approx(by_hand(own, first, 8), rel=1e-6)


def test_bits_are_of_the_bytes_that_weigh(own: jaxtrain.Experiment, made: Any) -> None:
    """A target that counts a quarter has a quarter of its nats and of its bytes."""
    evaluator, state = made(own)
    split = evaluator._sets[""].split
    data, every = split, split.rows
    data.token_bytes = np.arange(own.data.vocab) % 5

    def rows(indices: np.ndarray) -> dict[str, np.ndarray]:
        found = every(indices)
        share = np.float32([0.0, 0.25, 1.0, 2.0])[found["tokens"] % 4]
        return {**found, "weights": share}

    data.rows = rows
    found, batch = evaluator(state, batches=2), rows(np.arange(16))
    seen = (data.token_bytes[batch["targets"]] * batch["weights"]).sum()
    nats = found["eval_loss"] * batch["weights"].sum()
    assert found["bits_per_byte"] == pytest.approx(nats / np.log(2) / seen, rel=1e-6)


def test_rows_behind_the_last_have_no_weight_and_no_document(own: jaxtrain.Experiment) -> None:
    """Where experts have a capacity, their tokens take no place."""
    data = replace(own.data, isolate_documents=True).open("held_out", seed=0, cache_dir=Path())
    rows = Ended(data).rows(np.arange(HELD_OUT - 2, HELD_OUT + 3))
    assert rows["segments"][:2].any() and rows["weights"][:2].any()
    assert not rows["segments"][2:].any() and not rows["weights"][2:].any()
    assert rows["segments"].dtype == np.int32 and rows["weights"].dtype == np.float32


@dataclass(frozen=True)
class Fields:
    """A bigram chain of `held_out` rows, of which only these fields are given; `image` is one of
    its own."""

    train: tuple[str, ...]
    held: tuple[str, ...]
    held_out: int = 24
    vocab: int = 16
    seq: int = 8
    weight: float = 1.0

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Any:
        dataset = BigramChain(self.vocab, self.seq).open(split, seed=seed, cache_dir=cache_dir)
        every, names = dataset.rows, self.train if split == "train" else self.held

        def rows(indices: np.ndarray) -> dict[str, np.ndarray]:
            found = every(indices)
            found["image"] = found["tokens"].astype(np.float32)
            found["weights"] = found["weights"] * np.float32(self.weight)
            return {name: found[name] for name in names}

        dataset.rows = rows
        dataset._length = self.held_out if split == "held_out" else 1 << 20
        return dataset


class Images(nnx.Module):
    """Reads an image [seq] and its labels, and nothing else."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.matrix = nnx.Param(jax.random.normal(rngs.params(), (8, 16)), axes=("embed", "vocab"))

    def loss(self, batch: dict[str, jax.Array], *, key: Any) -> tuple[jax.Array, jax.Array]:
        scores = jax.nn.log_softmax(batch["image"] @ self.matrix[...])
        chosen = jnp.take_along_axis(scores, batch["targets"][:, :1], -1)
        return -jnp.sum(chosen), jnp.float32(chosen.size)


def images(rngs: nnx.Rngs) -> Images:
    return Images(rngs)


TOKENS, BARE = ("tokens", "targets", "weights"), ("tokens", "targets")
IMAGES = ("image", "targets")
LACKING: dict[str, tuple[str, Fields, str]] = {
    "a decoder's targets": (
        "decoder", Fields(("tokens", "weights"), TOKENS),
        "train rows of Fields have tokens, weights and no targets; a DecoderConfig reads",
    ),
    "a decoder's tokens, held out": (
        "decoder", Fields(TOKENS, ("targets",)), "held_out rows of Fields have targets and no tok",
    ),
    "weights that a module reads": (
        "own", Fields(BARE, BARE), "Table.loss reads 'weights', and a batch of this data has",
    ),
    "weights, held out only": (
        "own", Fields(TOKENS, BARE), r"weights: none for the float32\[8\] of training rows",
    ),
    "weights to end a split with": (
        "images", Fields(IMAGES, IMAGES, held_out=21),
        r"read 24 rows, in pieces of 4, .* split of 21: .*image, targets and no weights; use "
        r"Evaluation\(batches=2, final_batches=2\)",
    ),
    "rows, held out": ("decoder", Fields(TOKENS, TOKENS, held_out=0), "split has no rows; use a"),
    "a weight, held out": (
        "decoder", Fields(TOKENS, TOKENS, weight=0.0),
        "no token of the 8 held-out rows that an evaluation reads has a weight above 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LACKING)
def test_a_field_that_is_not_there_is_told_at_the_start(
    case: str, own: jaxtrain.Experiment, tmp_path: Path, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By its name, before anything is compiled or written; and by `check`."""
    model, data, message = LACKING[case]
    given = own if model == "images" else request.getfixturevalue(model)
    given = replace(given, **({"model": images} if model == "images" else {}), data=data, steps=2)
    given = replace(given, microbatches=2, evaluation=jaxtrain.Evaluation(every=1, batches=1))
    monkeypatch.setattr(session, "compile_step", lambda *_: pytest.fail("a step was compiled"))
    mesh = jaxtrain.mesh_from_axes(data=1)
    with pytest.raises(ValueError, match=message):
        jaxtrain.check(given, mesh)
    with pytest.raises(ValueError, match=message):
        jaxtrain.train(given, mesh, run_dir=tmp_path / "run", cache_dir=tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_decoder_without_weights_counts_every_target_of_every_row_once(
    decoder: jaxtrain.Experiment, made: Any
) -> None:
    """Of a held-out split that ends within a batch, as with weights of ones; rows behind the end
    count nothing."""
    found = []
    for names in (TOKENS, BARE):
        data = Fields(names, names, held_out=21)
        evaluator, state = made(replace(decoder, data=data, microbatches=2))
        found.append(evaluator(state, batches=None)["eval_loss"])
    assert found[0] == found[1]
    exact, state = made(replace(decoder, data=Fields(BARE, BARE, held_out=21), batch=21))
    assert found[1] == pytest.approx(exact(state, batches=1)["eval_loss"], rel=1e-6)


def test_whole_batches_need_no_weights(own: jaxtrain.Experiment, made: Any) -> None:
    data = Fields(IMAGES, IMAGES, held_out=21)
    evaluation = jaxtrain.Evaluation(batches=2, final_batches=2)
    evaluator, state = made(replace(own, model=images, data=data, evaluation=evaluation))
    rows = data.open("held_out", seed=0, cache_dir=Path()).rows(np.arange(16))
    scores = jax.nn.log_softmax(rows["image"] @ state.params["matrix"])
    by_hand = -np.mean(np.take_along_axis(np.asarray(scores), rows["targets"][:, :1], -1))
    assert evaluator(state, batches=2)["eval_loss"] == pytest.approx(by_hand, rel=1e-6)
    with pytest.raises(ValueError, match="no weights"):
        evaluator(state, batches=None)


@pytest.mark.parametrize("axes", [{"stage": 2}, {"tensor": 2}], ids=str)
def test_a_batch_that_is_whole_on_every_device_is_evaluated_in_chunks(
    axes: dict[str, int], decoder: jaxtrain.Experiment, made: Any
) -> None:
    """The loss of several chunks of tokens is summed in a loop, whose sums differ by device."""
    model = replace(decoder.model, layers=2, chunk_tokens=decoder.data.seq)
    found = []
    for mesh in ({}, axes):
        evaluator, state = made(replace(decoder, model=model), **mesh)
        found.append(evaluator(state, batches=1)["eval_loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-6)
