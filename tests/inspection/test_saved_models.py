"""A saved run looked at: as a module, by its loss on rows, and by the loss of each token."""

from __future__ import annotations

import io
import json
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxtrain
from jaxtrain import cli
from jaxtrain.checkpoint import committed_steps
from jaxtrain.data import BigramChain, BpeTokenizer, ByteTokenizer, TokenizerFile
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.whole import WholeDocuments
from jaxtrain.inspection.opened import stored_model
from jaxtrain.inspection.score import score_rows
from jaxtrain.inspection.scorer import run_scorer
from jaxtrain.moe import Balance, Capacity
from jaxtrain.nn.local import Local
from jaxtrain.step.layer_order import AtRest
from jaxtrain.step.pipeline import evaluated_at_once
from jaxtrain.step.train_step import make_evaluation_step
from tests.chats import write_folder
from tests.tiny import SEQ, VOCAB, Table

TEXTS = [f"{n} words, of which {n % 7} are short and {n % 5} long." for n in range(120)]


def trained(experiment, run: Path, mesh: Any = "cpu_1", **more):
    return jaxtrain.train(experiment, mesh, run_dir=run, stream=io.StringIO(), **more)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inspection")


def of_text(folder: Path, tokenizer: Any, **more: Any) -> jaxtrain.Experiment:
    """A small decoder on `TEXTS`."""
    path = folder / "texts.txt"
    if not path.exists():
        path.write_text("\n\n".join(TEXTS))
    block = jaxtrain.BlockConfig(
        jaxtrain.AttentionConfig(heads=2, head_dim=4), jaxtrain.MlpConfig(hidden=16)
    )
    model = jaxtrain.DecoderConfig(
        vocab=300, embed=8, layers=2, period=(block,), tied=True, chunk_tokens=64
    )
    return jaxtrain.Experiment(
        model=model,
        data=jaxtrain.TextData(
            jaxtrain.TextFiles(str(path), separator="\n\n", held_out=0.2), tokenizer, seq=32
        ),
        optimizer=jaxtrain.AdamW(3e-2),
        steps=4,
        batch=8,
        microbatches=2,
        checkpoints=jaxtrain.SavePolicy(every=2),
        evaluation=jaxtrain.Evaluation(every=100, batches=None),
        logging=jaxtrain.Logging(tensorboard=False),
        **more,
    )


@pytest.fixture(scope="module")
def bpe(home: Path):
    """A run of a text on trained tokens, with averages: (its result, its directory)."""
    experiment = of_text(home, BpeTokenizer(300), ema_decay=0.9)
    return trained(experiment, home / "bpe", cache_dir=home / "cache"), home / "bpe"


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = np.asarray(z, np.float64)
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def test_a_module_gives_the_logits_that_decoding_gives(bpe) -> None:
    model = jaxtrain.load(bpe[1], averaged=False)
    assert isinstance(model, nnx.Module)
    params = bpe[0].session.state.params
    np.testing.assert_array_equal(model.embedding[...], params["embedding"])
    products = str(jax.make_jaxpr(model.logits)(jnp.ones((1, 2), jnp.int32)))
    assert "dot_general" in products and "precision=None" not in products
    tokens = jnp.asarray(np.arange(40).reshape(2, 20) % 300)
    logits = model.logits(tokens)
    caches = model.empty_cache(2, 20, jnp.float32)
    decoded, _ = model.decode(tokens, caches, jnp.int32(0), comm=Local())
    assert logits.shape == (2, 20, 300) and logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, decoded[..., :300], atol=1e-5)
    packed = jnp.concatenate([tokens[:1, :9], tokens[1:, :11]], 1)
    segments = jnp.asarray([[1] * 9 + [2] * 11])
    positions = jnp.asarray([[*range(9), *range(11)]])
    apart = model.logits(packed, segments=segments, positions=positions)
    np.testing.assert_allclose(apart[0, 9:], logits[1, :11], atol=1e-5)
    assert np.abs(np.asarray(model.logits(packed)[0, 9:] - logits[1, :11])).max() > 1e-3


def test_a_module_is_averaged_split_and_of_a_step(bpe, home: Path) -> None:
    result, run = bpe
    state = result.session.state
    average = jaxtrain.load(run)
    np.testing.assert_array_equal(average.embedding[...], state.ema["embedding"])
    earlier = jaxtrain.load(f"{run}@2", averaged=False)
    assert np.abs(np.asarray(earlier.embedding[...] - state.params["embedding"])).max() > 0
    split = jaxtrain.load(run, mesh=jaxtrain.mesh_from_axes(fsdp=2, tensor=2))
    assert len(split.embedding[...].sharding.device_set) == 4
    tokens = jnp.asarray(np.arange(40).reshape(2, 20))
    logits = jax.jit(lambda model, tokens: model.logits(tokens))(split, tokens)
    np.testing.assert_allclose(logits, average.logits(tokens), atol=1e-5)
    gradient = nnx.grad(lambda model: model.logits(tokens).sum())(average)
    assert float(jnp.abs(gradient.embedding[...]).max()) > 0
    with pytest.raises(ValueError, match="no such step"):
        jaxtrain.load(f"{run}@3")


@pytest.mark.parametrize(
    "axes", [{"data": 1}, {"fsdp": 2, "tensor": 2}, {"stage": 2}, {"context": 2}]
)
def test_an_evaluation_is_the_one_of_the_run(bpe, home: Path, axes: dict[str, int]) -> None:
    result, run = bpe
    cache = dict(cache_dir=home / "cache")
    values = jaxtrain.evaluate(run, mesh=jaxtrain.mesh_from_axes(**axes), **cache)
    names = ("eval_loss", "bits_per_byte")
    assert set(values) == set(names)
    for name in names:
        if axes == {"data": 1}:
            assert values[name] == result.evaluation[name]
        np.testing.assert_allclose(values[name], result.evaluation[name], rtol=1e-5)


def test_an_evaluation_of_one_batch_of_a_step_and_of_the_last_weights(bpe, home: Path) -> None:
    """Against the session of the run."""
    result, run = bpe
    session, cache = result.session, dict(cache_dir=home / "cache")
    expected = session.evaluate(session.state, batches=1)
    assert jaxtrain.evaluate(run, batches=1, **cache) == expected
    last = session.evaluate(replace(session.state, ema={}), batches=None)
    assert jaxtrain.evaluate(run, averaged=False, **cache) == last
    np.testing.assert_allclose(
        list(jaxtrain.evaluate(run, microbatches=4, **cache).values()),
        [result.evaluation[name] for name in ("eval_loss", "bits_per_byte")],
        rtol=1e-5,
    )
    values = [jaxtrain.evaluate(f"{run}@{step}", **cache)["eval_loss"] for step in (2, 4)]
    assert values[1] == result.evaluation["eval_loss"] < values[0]
    train = jaxtrain.evaluate(run, split="train", **cache)["eval_loss"]
    assert train not in (*values, expected["eval_loss"])


def test_other_texts_are_encoded_by_the_run_s_tokenizer(bpe, home: Path, tmp_path: Path) -> None:
    """Against the run's own data, of which a copy has another name."""
    _, run = bpe
    cache = dict(cache_dir=home / "cache")
    (tmp_path / "copy.txt").write_text((home / "texts.txt").read_text())
    source = jaxtrain.TextFiles(str(tmp_path / "copy.txt"), separator="\n\n", held_out=0.2)
    own = jaxtrain.evaluate(run, **cache)
    assert jaxtrain.evaluate(run, source, split="held_out", **cache) == own
    name, several = str(tmp_path / "copy.txt"), [str(tmp_path / "copy.txt")] * 2
    everything = [jaxtrain.evaluate(run, files, **cache) for files in (name, several, source)]
    assert everything[0] == everything[1] == everything[2] != own
    whole = jaxtrain.TextFiles(name, separator="\n\n", held_out=0.0)
    assert everything[0] == jaxtrain.evaluate(run, whole, split="train", **cache)
    (tmp_path / "copy.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    assert jaxtrain.evaluate(run, tmp_path / "copy.jsonl", **cache) == everything[0]
    mixture = Mixture(((1.0, source),))
    assert jaxtrain.evaluate(run, mixture, **cache) == own
    data = jaxtrain.TextData(source, BpeTokenizer(300), seq=32)
    assert jaxtrain.evaluate(run, data, **cache) == own
    other = jaxtrain.TextData(source, ByteTokenizer(), seq=32)
    with pytest.raises(ValueError, match=r"is not that of .*give the source alone, TextFiles"):
        jaxtrain.evaluate(run, other, **cache)


def test_scores_are_log_probabilities(bpe) -> None:
    """Against a softmax of the logits by NumPy."""
    result, run = bpe
    scored = jaxtrain.score(run, TEXTS[:11])
    model, encode = jaxtrain.load(run), result.session.dataset.encode
    assert len(scored) == 11
    for text, (ids, log_probs) in zip(TEXTS, scored, strict=False):
        assert ids == [int(i) for i in encode(text)] and len(log_probs) == len(ids)
        assert np.isnan(log_probs[0])
        expected = log_softmax(model.logits(jnp.asarray([ids[:-1]]))[0])
        expected = expected[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(log_probs[1:], expected, atol=1e-5)
    np.testing.assert_allclose(scored[0].total, scored[0].log_probs[1:].sum(), rtol=1e-6)
    (last,) = jaxtrain.score(run, TEXTS[:1], averaged=False, microbatches=8)
    ids = scored[0].ids
    logits = jaxtrain.load(run, averaged=False).logits(jnp.asarray([ids[:-1]]))[0]
    expected = log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(last.log_probs[1:], expected, atol=1e-5)
    again = jaxtrain.score(run, [one.ids for one in scored])
    np.testing.assert_array_equal(again[3].log_probs, scored[3].log_probs)
    on_mesh = jaxtrain.score(run, TEXTS[:11], mesh=jaxtrain.mesh_from_axes(fsdp=2, context=2))
    np.testing.assert_allclose(on_mesh[9].log_probs, scored[9].log_probs, rtol=1e-4)
    assert jaxtrain.score(run, []) == []
    lazily = jaxtrain.score(run, (text for text in TEXTS[:2]))
    assert [one.ids for one in lazily] == [one.ids for one in scored[:2]]


def test_a_text_begins_as_it_did_in_training(home: Path, tmp_path: Path) -> None:
    """With bos, of a tokenizer that puts it before each document."""
    folder = write_folder(home / "mistral", "mistral").parent
    experiment = of_text(home, TokenizerFile(str(folder), add_bos=True))
    data = replace(experiment.data, packing=WholeDocuments())
    experiment = replace(experiment, data=data, model=replace(experiment.model, vocab=400))
    result = trained(experiment, home / "with bos", cache_dir=home / "cache")
    ((ids, _),) = jaxtrain.score(home / "with bos", [TEXTS[0][:20]])
    dataset = result.session.dataset
    assert ids[0] == dataset.vocabulary.bos and ids == dataset.encode(TEXTS[0][:20])
    source = jaxtrain.TextFiles(str(home / "texts.txt"), separator="\n\n", held_out=0.2)
    values = jaxtrain.evaluate(
        home / "with bos", source, split="held_out", cache_dir=home / "cache"
    )
    assert values["eval_loss"] == result.evaluation["eval_loss"]
    other = jaxtrain.TextData(source, TokenizerFile(str(folder), add_bos=False), seq=32)
    own = jaxtrain.evaluate(home / "with bos", cache_dir=home / "cache")
    moved = folder.rename(home / "moved")
    with pytest.warns(UserWarning) as told:
        again = jaxtrain.evaluate(home / "with bos", cache_dir=home / "cache")
    text = rf"there is no tokenizer {folder}.*: texts are encoded by the tokenizer that .* keeps"
    assert [bool(re.search(text, str(w.message))) for w in told] == [True]
    assert again == own and own["eval_loss"] == values["eval_loss"], "by the tokenizer it keeps"
    moved.rename(folder)
    bare = jaxtrain.evaluate(home / "with bos", other, cache_dir=home / "cache")
    assert bare["eval_loss"] != values["eval_loss"]  # the same ids, without bos


@pytest.mark.filterwarnings("ignore:there is no tokenizer")
def test_a_text_ends_as_it_did_in_training(home: Path) -> None:
    """Without eos, of a tokenizer that puts none behind a document; also where its file is gone."""
    folder, cache = write_folder(home / "without eos", "mistral").parent, dict(cache_dir=home / "c")
    source = TokenizerFile(str(folder), add_eos=False)
    experiment = of_text(home, source)
    experiment = replace(experiment, model=replace(experiment.model, vocab=400))
    result = trained(experiment, home / "bare", **cache)
    own = jaxtrain.evaluate(home / "bare", **cache)
    assert own["eval_loss"] == result.evaluation["eval_loss"]
    data = experiment.data.source
    assert jaxtrain.evaluate(home / "bare", data, split="held_out", **cache) == own
    folder.rename(home / "moved without eos")
    assert jaxtrain.evaluate(home / "bare", **cache) == own


def test_files_are_read_as_the_run_s_own(home: Path, tmp_path: Path) -> None:
    """By the field that its source names."""
    path = tmp_path / "said.jsonl"
    path.write_text("".join(json.dumps({"said": text}) + "\n" for text in TEXTS))
    experiment, cache = of_text(home, ByteTokenizer()), dict(cache_dir=home / "cache")
    source = jaxtrain.data.JsonLines(str(path), text_field="said", held_out=0.2)
    data = replace(experiment.data, source=source)
    trained(replace(experiment, data=data, steps=1), tmp_path / "run", **cache)
    whole = replace(source, held_out=0.0)
    expected = jaxtrain.evaluate(tmp_path / "run", whole, split="train", **cache)
    assert jaxtrain.evaluate(tmp_path / "run", str(path), **cache) == expected


def test_adapters_in_16_bits_on_rows_whose_documents_see_each_other(home: Path) -> None:
    """What is looked at is what was trained: precision, adapters, rows."""
    experiment = of_text(home, ByteTokenizer(), precision=jaxtrain.bf16)
    data = replace(experiment.data, isolate_documents=False)
    experiment = replace(experiment, data=data)
    cache = dict(cache_dir=home / "cache")
    trained(experiment, home / "base", **cache)
    tuning = jaxtrain.FineTuning(jaxtrain.FromRun(home / "base"), lora=jaxtrain.LoRA(2, 64.0))
    result = trained(replace(experiment, fine_tuning=tuning), home / "lora", **cache)
    shutil.rmtree(home / "base")
    names = ("eval_loss", "bits_per_byte")
    own = jaxtrain.evaluate(home / "lora", **cache)
    assert own == {name: result.evaluation[name] for name in names}
    source = jaxtrain.evaluate(home / "lora", data.source, split="held_out", **cache)
    assert source == own
    held_out = data.open("held_out", seed=0, cache_dir=home / "cache")
    rows = held_out.rows(np.arange(len(held_out)))
    losses = score_rows(home / "lora", rows)
    mean = np.sum(losses * rows["weights"]) / np.sum(rows["weights"])
    np.testing.assert_allclose(mean, own["eval_loss"], rtol=1e-6)
    model = jaxtrain.load(home / "lora")  # its adapters are merged: apart by bf16's rounding
    logits = model.logits(jnp.asarray(rows["tokens"]), dtype=jnp.bfloat16)
    chosen = np.take_along_axis(log_softmax(logits), rows["targets"][..., None], -1)[..., 0]
    assert np.abs(np.where(rows["weights"] > 0, -chosen - losses, 0)).max() < 0.1


LAYOUTS = {
    "fsdp, tensor": {"fsdp": 2, "tensor": 2},
    "gspmd": {"fsdp": 2, "tensor": 2},
    "stages": {"stage": 2, "tensor": 2},
    "interleaved": {"stage": 2},
    "context, experts": {"context": 2, "expert": 2},
}


@pytest.fixture(scope="module")
def saved(home: Path) -> Callable[[str], Path]:
    """name -> a run on one device whose model and mode suit that layout."""
    runs: dict[str, Path] = {}
    attention = jaxtrain.AttentionConfig(heads=2, head_dim=4)
    experts = jaxtrain.MoeConfig(hidden=8, experts=4, balance=Balance(loss_weight=0.1))

    def run_for(name: str) -> Path:
        mode = "gspmd" if name == "gspmd" else None
        has_experts = "experts" in name
        interleaved = name == "interleaved"
        key = f"{mode}, {has_experts}, {interleaved}"
        if key not in runs:
            mlp = experts if has_experts else jaxtrain.MlpConfig(hidden=16)
            model = jaxtrain.DecoderConfig(
                vocab=VOCAB,
                embed=8,
                layers=4 if interleaved else 2,
                period=(jaxtrain.BlockConfig(attention, mlp),),
                chunk_tokens=SEQ,
            )
            experiment = jaxtrain.Experiment(
                model=model,
                data=BigramChain(vocab=VOCAB, seq=SEQ, successors=2),
                optimizer=jaxtrain.AdamW(3e-2),
                steps=1,
                batch=8,
                execution=jaxtrain.Execution(mode=mode),
                evaluation=None,
                logging=jaxtrain.Logging(tensorboard=False),
            )
            runs[key], axes = home / key, {"data": 1}
            if interleaved:  # its layers rest in another order
                pipeline = jaxtrain.Pipeline("interleaved", chunks=2)
                execution = replace(experiment.execution, pipeline=pipeline)
                experiment = replace(experiment, execution=execution, microbatches=2)
                axes = LAYOUTS[name]
            trained(experiment, runs[key], jaxtrain.mesh_from_axes(**axes))
        return runs[key]

    return run_for


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_score_is_the_loss_that_training_adds_up_to_the_bit(saved, name: str) -> None:
    """One token alone has a weight: the evaluation's sum is its loss."""
    run, mesh = saved(name), jaxtrain.mesh_from_axes(**LAYOUTS[name])
    data = BigramChain(vocab=VOCAB, seq=SEQ, successors=2)
    dataset = data.open("train", seed=0, cache_dir=Path())
    losses = score_rows(run, dataset.rows(np.arange(19)), mesh=mesh)  # of two batches and more
    assert losses.shape == (19, SEQ)
    alone = score_rows(run, dataset.rows(np.arange(19)))
    np.testing.assert_allclose(alone, losses, rtol=1e-5, atol=1e-6)
    stored = stored_model(run, data)
    assembly, devices = stored.on(mesh, dataset)
    params, pieces = stored.state(AtRest(assembly, devices)).params, evaluated_at_once(assembly)
    size = 8 // assembly.experiment.microbatches
    batch = assembly.placed(dataset, devices, pieces).rows(np.arange(size * pieces))
    evaluate = jax.jit(make_evaluation_step(assembly, devices))
    order = assembly.row_orders.get("weights", np.arange(SEQ))
    for row, position in ((0, 0), (3, 5), (size * pieces - 1, SEQ - 1)):
        alone = np.zeros((size * pieces, SEQ), np.float32)
        alone[row, position] = 1.0
        alone = alone[:, order].reshape(batch["weights"].shape)
        one = {**batch, "weights": jax.device_put(alone, batch["weights"].sharding)}
        assert float(evaluate(params, {}, one).loss) == losses[row, position]


@pytest.mark.parametrize("name", LAYOUTS)
def test_texts_that_share_rows_are_scored_as_if_alone(saved, name: str) -> None:
    """By the logits of the model on one device, a text at a time; ids are likeliest by argmax."""
    run, random = saved(name), np.random.default_rng(0)
    texts = [random.integers(VOCAB, size=n).tolist() for n in [2, SEQ + 1, 3, *range(2, 9)] * 3]
    score = run_scorer(run, SEQ, mesh=jaxtrain.mesh_from_axes(**LAYOUTS[name]))
    scores, model = score(texts), jaxtrain.load(run)
    assert len(scores) == len(texts)
    marks = []
    for text, (log_probs, likeliest) in zip(texts, scores, strict=True):
        logits = model.logits(jnp.asarray([text[:-1]]))[0]
        expected = log_softmax(logits)[np.arange(len(text) - 1), text[1:]]
        np.testing.assert_allclose(log_probs, expected, rtol=1e-5, atol=1e-6)
        best = np.argmax(logits[:, :VOCAB], axis=1)
        np.testing.assert_array_equal(likeliest, best == np.array(text[1:]))
        marks += likeliest.tolist()
    assert True in marks and False in marks
    assert score([]) == []
    (alone,) = score([[5]])
    assert not len(alone.log_probs) and not len(alone.likeliest)


def test_texts_do_not_compete_for_the_places_of_experts(tmp_path: Path) -> None:
    """With a capacity the tokens of a row do: each text has a row of its own."""
    experts = jaxtrain.MoeConfig(
        hidden=8, experts=4, experts_per_token=2, capacity=Capacity(1.0, routing_group=SEQ)
    )
    block = jaxtrain.BlockConfig(jaxtrain.AttentionConfig(heads=2, head_dim=4), experts)
    experiment = jaxtrain.Experiment(
        model=jaxtrain.DecoderConfig(vocab=VOCAB, embed=8, layers=1, period=(block,)),
        data=BigramChain(vocab=VOCAB, seq=SEQ, successors=2),
        optimizer=jaxtrain.AdamW(3e-2),
        steps=1,
        batch=4,
        evaluation=None,
        logging=jaxtrain.Logging(tensorboard=False),
    )
    trained(experiment, tmp_path / "run")
    score, random = run_scorer(tmp_path / "run", SEQ), np.random.default_rng(0)
    texts = [random.integers(VOCAB, size=4).tolist() for _ in range(12)]
    together = score(texts)
    for text, of_text in zip(texts, together, strict=True):
        np.testing.assert_array_equal(score([text])[0].log_probs, of_text.log_probs)


def test_a_scorer_takes_averages_and_refuses_what_it_cannot_score(bpe, own, tmp_path) -> None:
    run, ids = bpe[1], [3, 1, 4, 1, 5]
    averaged, last = (run_scorer(run, SEQ, averaged=a)([ids])[0] for a in (None, False))
    for scored, kind in ((averaged, None), (last, False)):
        (expected,) = jaxtrain.score(run, [ids], averaged=kind)
        np.testing.assert_allclose(scored.log_probs, expected.log_probs[1:], rtol=1e-5)
    assert not np.allclose(averaged.log_probs, last.log_probs)
    saves = jaxtrain.SavePolicy(every=1)
    trained(replace(own, model=noted, steps=1, checkpoints=saves), tmp_path / "run")
    with pytest.raises(ValueError, match="a function computes its loss itself, so"):
        run_scorer(tmp_path / "run", SEQ, trust=("tests", __name__))


class NotedTable(Table):
    """A model that notes that it does not train."""

    looked_at = False

    def eval(self, **attributes: Any) -> None:
        self.looked_at = True


def noted(rngs: nnx.Rngs) -> NotedTable:
    return NotedTable(rngs)


def test_rows_that_have_changed_since_are_warned_of(bpe, home: Path, tmp_path: Path) -> None:
    shutil.copytree(bpe[1], tmp_path / "run")
    cache, path = dict(cache_dir=home / "cache"), home / "texts.txt"
    text = path.read_text()
    with warnings.catch_warnings(action="error"):
        jaxtrain.evaluate(tmp_path / "run", batches=1, **cache)
        jaxtrain.evaluate(tmp_path / "run", batches=1, split="train", **cache)
    path.write_text(text + "\n\n" + "\n\n".join(f"{n} more words" for n in range(40)))
    try:
        for split in (None, "train"):
            with pytest.warns(UserWarning, match="the data has changed since"):
                jaxtrain.evaluate(tmp_path / "run", batches=1, split=split, **cache)
    finally:
        path.write_text(text)


def test_a_model_of_one_s_own_is_loaded_and_scored(own, tmp_path: Path) -> None:
    experiment = replace(own, model=noted, steps=2, checkpoints=jaxtrain.SavePolicy(every=1))
    run, trust = tmp_path / "run", ("tests", __name__)
    session = trained(experiment, run).session
    with pytest.raises(ValueError, match="trust"):
        jaxtrain.load(run)
    model = jaxtrain.load(run, trust=trust)
    assert model.looked_at
    np.testing.assert_array_equal(model.inward[...], session.state.params["inward"])
    ids = [3, 1, 4, 1, 5]
    (scored,) = jaxtrain.score(run, [ids], trust=trust)
    logits = np.asarray(model.inward[...])[ids[:-1]] @ np.asarray(model.outward[...])
    expected = log_softmax(logits)[np.arange(4), ids[1:]]
    np.testing.assert_allclose(scored.log_probs[1:], expected, atol=1e-5)
    other = BigramChain(vocab=VOCAB, seq=SEQ, successors=3)
    values = [jaxtrain.evaluate(run, d, batches=2, trust=trust) for d in (None, other)]
    assert values[0]["eval_loss"] < values[1]["eval_loss"]


class Squared(nnx.Module):
    """Multiplies by the square of the weights."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(jnp.zeros((VOCAB, VOCAB)))

    def loss(self, batch: dict[str, jax.Array], *, key: Any) -> tuple[jax.Array, jax.Array]:
        z = jax.nn.log_softmax(self.table[...][batch["tokens"]])
        chosen = jnp.take_along_axis(z, batch["targets"][..., None], -1)[..., 0]
        return -jnp.sum(chosen * batch["weights"] ** 2), jnp.sum(batch["weights"])


def squared(rngs: nnx.Rngs) -> Squared:
    return Squared(rngs)


def test_a_loss_that_cannot_be_told_apart_is_refused(own, tmp_path: Path) -> None:
    experiment = replace(own, model=squared, steps=1, checkpoints=jaxtrain.SavePolicy(every=1))
    trained(experiment, tmp_path / "run")
    with pytest.raises(ValueError, match=r"each multiplied by batch\['weights'\]"):
        jaxtrain.score(tmp_path / "run", [[1, 2, 3]], trust=("tests", __name__))


@pytest.mark.parametrize(
    ("texts", "text"),
    [
        ("one", r"give a list of them: \['one'\]"),
        ([[1]], "text 0 has 1 token, and a row scores 2 to 33; give a longer one"),
        ([[1, 2], [1] * 34], "text 1 has 34 tokens, .* give a shorter one, or its parts"),
        ([[1, 300], [-1, 2]], "text 0 has the id 300; give ids from 0 to 299"),
        ([[1.0, 2.0]], r"text 0 is \[1.0, 2.0\]; give a text, a list of messages, or ids as"),
        ([[1, 2], [b"ab", b"c"]], "text 1 is .*; give a text, a list of messages, or ids as"),
        ({"a": 1}, "texts is a dict; give a list of texts"),
        (None, "texts is a NoneType; give a list of texts"),
    ],
)
def test_texts_that_no_row_holds_are_refused(bpe, texts: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        jaxtrain.score(bpe[1], texts)


@dataclass(frozen=True)
class Bare:
    """Rows that do not say how long they are."""

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Any:
        corpus = BigramChain(vocab=VOCAB, seq=SEQ, successors=2)
        return corpus.open(split, seed=seed, cache_dir=cache_dir)


def test_what_is_asked_of_a_run_that_it_has_not(bpe, own, tmp_path: Path) -> None:
    run = bpe[1]
    with pytest.raises(ValueError, match='use "held_out" or "train"'):
        jaxtrain.evaluate(run, split="test")
    with pytest.raises(ValueError, match="batches=0"):
        jaxtrain.evaluate(run, batches=0)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is no run and no folder of weights"):
        jaxtrain.load(tmp_path)
    for looked_at, text in (
        (tmp_path, "is no run directory; give RUN or RUN@STEP"),
        (tmp_path / "weights", "is a folder of weights, which load and generate read"),
        (tmp_path / "none", "there is no directory"),
        (f"{run}@3", "no such step is committed"),
    ):
        for look in (jaxtrain.evaluate, lambda path: jaxtrain.score(path, [[1, 2]])):
            with pytest.raises(ValueError, match=text):
                look(looked_at)
    for data in (3, jaxtrain.TextFiles, {"tokens": 1}):
        with pytest.raises(ValueError, match="cannot be read; give files by name or pattern"):
            jaxtrain.evaluate(run, data)
    row = np.ones((2, 3), np.int32)
    for rows in ([1], {}, {"tokens": row, "targets": row[:1]}, {"tokens": row[0]}):
        with pytest.raises(ValueError, match=r"rows (is a|has fields of shapes)"):
            score_rows(run, rows)
    row = np.full((40, 4), 3, np.int32)
    row[38] = 300
    with pytest.raises(ValueError, match="300"):
        score_rows(run, {"tokens": row, "targets": row})
    row[38] = 3
    with pytest.raises(ValueError, match=r"context=3"):
        score_rows(run, {"tokens": row, "targets": row}, mesh=jaxtrain.mesh_from_axes(context=3))
    assert score_rows(run, {"tokens": row[:0], "targets": row[:0]}).shape == (0, 4)
    with pytest.raises(ValueError, match=r"give ids \[rows, seq\]"):
        jaxtrain.load(run).logits(jnp.arange(3))
    short = replace(jaxtrain.load(run).config, learned_positions=4).build(jax.random.key(0))
    assert short.logits(jnp.ones((1, 4), jnp.int32)).shape == (1, 4, 300)
    with pytest.raises(ValueError, match="rows of 5 tokens pass the 4 learned positions"):
        short.logits(jnp.ones((1, 5), jnp.int32))
    plain = replace(own, steps=1, checkpoints=jaxtrain.SavePolicy(every=1))
    trained(plain, tmp_path / "run")
    with pytest.raises(ValueError, match="has no averaged weights"):
        jaxtrain.evaluate(tmp_path / "run", averaged=True, trust="tests")
    with pytest.raises(ValueError, match="has no tokenizer: its data is no text; give ids"):
        jaxtrain.score(tmp_path / "run", ["a text"], trust="tests")
    source = jaxtrain.TextFiles("*.txt")
    with pytest.raises(ValueError, match="run is a BigramChain, which is no text"):
        jaxtrain.evaluate(tmp_path / "run", source, trust=["tests"])
    never = replace(plain, checkpoints=None)
    trained(never, tmp_path / "never")
    with pytest.raises(ValueError, match="saved nothing yet"):
        jaxtrain.evaluate(tmp_path / "never", trust="tests")
    bare = replace(plain, data=Bare())
    trained(bare, tmp_path / "bare")
    with pytest.raises(ValueError, match="does not say how long its rows are"):
        jaxtrain.score(tmp_path / "bare", [[1, 2]], trust=("tests", __name__))
    rows = Bare().open("train", seed=0, cache_dir=tmp_path).rows(np.arange(3))
    losses = score_rows(tmp_path / "bare", rows, trust="tests")
    np.testing.assert_array_equal(losses, score_rows(tmp_path / "run", rows, trust="tests"))


def test_the_command(bpe, home: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    result, run = bpe
    monkeypatch.setenv("JAXTRAIN_CACHE", str(home / "cache"))
    assert cli.main(["evaluate", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        name: result.evaluation[name] for name in ("eval_loss", "bits_per_byte")
    }
    (tmp_path / "copy.txt").write_text((home / "texts.txt").read_text())
    more = ["--files", str(tmp_path / "copy.txt"), "--mesh", "cpu_1", "--batches", "1"]
    assert cli.main(["evaluate", f"{run}@2", *more]) == 0
    assert "eval_loss " in capsys.readouterr().out
    assert cli.main(["evaluate", str(run), "--last", "--json"]) == 0
    last = jaxtrain.evaluate(run, averaged=False, cache_dir=home / "cache")
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == last
    assert cli.main(["evaluate", str(tmp_path)]) == 2


def test_a_step_is_named_alike_everywhere(bpe, tmp_path: Path) -> None:
    run = bpe[1]
    (first, *_, last) = committed_steps(run / "checkpoints")
    texts = [
        jaxtrain.generate_text(name, "a text", tokens=8, **more)
        for name, more in ((f"{run}@{first}", {}), (run, {"step": first}))
    ]
    assert texts[0] == texts[1]
    folders = [
        jaxtrain.export(name, tmp_path / folder, **more) / "model.safetensors"
        for folder, name, more in (
            ("a", f"{run}@{first}", {}),
            ("b", run, {"step": first}),
            ("c", f"{run}@{last}", {}),
        )
    ]
    of_first, again, of_last = (folder.read_bytes() for folder in folders)
    assert of_first == again != of_last
    with pytest.raises(ValueError, match=rf"@{first} names another step than step={last}"):
        jaxtrain.export(f"{run}@{first}", tmp_path / "d", step=last)
