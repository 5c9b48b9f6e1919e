"""Runs on preference pairs: the formula, every mesh, resumed, branched, evaluated, refused."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from object_store import object_store

import jaxtrain
from jaxtrain import (
    AdamW,
    Evaluation,
    Experiment,
    FineTuning,
    FromRun,
    LoRA,
    SavePolicy,
    TextData,
    cli,
)
from jaxtrain.checkpoint.run_config import REFERENCE
from jaxtrain.data import Conversations, JsonLines, Preferences, TokenizerFile
from jaxtrain.files import array_file
from jaxtrain.inspection.verify import damaged_reference
from jaxtrain.losses import DPO
from jaxtrain.moe import Balance
from jaxtrain.session.session import Session

SEQ, BATCH = 32, 8
MESHES = {
    "data x fsdp x tensor": dict(data=2, fsdp=2, tensor=2),
    "rows in parts": dict(context=2, tensor=2),
    "stages": dict(stage=2, fsdp=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs, of which the chosen answer is the prompt backwards; and a model of chosen answers."""
    folder, rng = tmp_path_factory.mktemp("pairs"), random.Random(0)
    lines = []
    for _ in range(80):
        prompt = "".join(rng.choices("abcd", k=rng.randint(2, 6)))
        rejected = "".join(rng.choices("xyz", k=rng.randint(2, 6)))
        lines.append({"prompt": prompt + ":", "chosen": prompt[::-1], "rejected": rejected})
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    base = of_texts(folder)
    train(replace(base, logging=stopping(base)), folder / "base", folder)
    return folder


class StopAfter(jaxtrain.Callback):
    def after_step(self, run: jaxtrain.Run, step: int, *_: Any) -> None:
        if step == 3:
            run.stop()


def stopping(experiment: Experiment) -> jaxtrain.Logging:
    """Its logging, by which a run stops after three steps."""
    return replace(experiment.logging, callbacks=(StopAfter,))


def of_texts(folder: Path) -> Experiment:
    """What the first model is trained by: the loss of each token of chosen answers."""
    source = JsonLines(str(folder / "pairs.jsonl"), text_field="chosen", prompt_field="prompt")
    experiment = replace(tuned(folder), data=TextData(source, seq=SEQ), fine_tuning=None)
    return replace(experiment, steps=9, checkpoints=SavePolicy(every=2, keep=9))


def tuned(folder: Path, **tuning: Any) -> Experiment:
    block = jaxtrain.BlockConfig(jaxtrain.AttentionConfig(heads=2), jaxtrain.MlpConfig(hidden=32))
    model = jaxtrain.DecoderConfig(
        vocab=257, embed=16, layers=2, period=(block,), vocab_multiple=64
    )
    return Experiment(
        model=model,
        data=TextData(Preferences(str(folder / "pairs.jsonl"), held_out=0.2), seq=SEQ),
        optimizer=AdamW(1e-2),
        steps=6,
        batch=BATCH,
        microbatches=2,
        evaluation=Evaluation(every=3, batches=1),
        checkpoints=SavePolicy(every=2),
        logging=jaxtrain.Logging(every=1, tensorboard=False),
        fine_tuning=FineTuning(FromRun(folder / "base"), preferences=DPO(0.5), **tuning),
    )


def train(experiment: Experiment, run: str | Path | None, folder: Path, **options: Any) -> str:
    axes = options.pop("axes", {"data": 1})
    stream = io.StringIO()
    jaxtrain.train(
        experiment,
        jaxtrain.mesh_from_axes(**axes),
        run_dir=run,
        cache_dir=folder / "cache",
        stream=stream,
        **options,
    )
    return stream.getvalue()


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses_of(run: Path) -> list[float]:
    return [line["loss"] for line in lines_of(run) if "loss" in line]


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    train(tuned(folder), folder / "run", folder)
    return folder / "run"


def test_the_loss_is_the_formulas(folder: Path, run: Path) -> None:
    """Of the step's pairs by the log-probabilities of `jaxtrain.score`; and so is an evaluation."""
    lines = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    sides: dict[str, Any] = {}
    experiment = tuned(folder)
    for split in ("train", "held_out"):
        documents = experiment.data.documents(split)
        sides[split] = [[d.prompt + d.text for d in pair.answers] for pair in documents]
    assert len(sides["train"]) + len(sides["held_out"]) == len(lines)

    def gains(step: str, split: str) -> np.ndarray:
        """[pairs, 2]: how much likelier answers are than in the model of the start."""
        texts = [text for pair in sides[split] for text in pair]
        prompts = [text.index(":") + 1 for text in texts]
        ids = [[*text.encode(), 256] for text in texts]  # with the eos that ends an answer
        now, first = (jaxtrain.score(r, ids) for r in (f"{run}@{step}", folder / "base"))
        answers = [
            np.sum(a.log_probs[n:] - b.log_probs[n:], dtype=np.float64)
            for a, b, n in zip(now, first, prompts, strict=True)
        ]
        return np.array(answers).reshape(-1, 2)

    values = jaxtrain.evaluate(run)
    by_step = gains("6", "held_out")
    margin = 0.5 * (by_step[:, 0] - by_step[:, 1])
    np.testing.assert_allclose(values["eval_loss"], np.mean(np.log1p(np.exp(-margin))), rtol=1e-4)
    np.testing.assert_allclose(values["eval_reward_margin"], margin.mean(), rtol=1e-3)
    np.testing.assert_allclose(values["eval_reward_chosen"], 0.5 * by_step[:, 0].mean(), rtol=1e-3)
    np.testing.assert_allclose(values["eval_reward_accuracy"], (margin > 0).mean())
    assert "bits_per_byte" not in values


def test_a_session_that_evaluates_later_compares_too(
    folder: Path, opened: Callable[..., Session]
) -> None:
    """Its held-out rows are opened before its first model is gone."""
    session = opened(tuned(folder))
    values = session.evaluate(session.state, batches=1)
    np.testing.assert_allclose(values["eval_loss"], np.log(2), rtol=1e-6)


def test_the_first_step_has_log_2(run: Path) -> None:
    first = lines_of(run)[0]
    np.testing.assert_allclose(first["loss"], np.log(2), rtol=1e-6)
    assert abs(first["reward_margin"]) < 1e-6 and losses_of(run)[-1] < 0.6


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_every_mesh_has_the_same_losses(
    folder: Path, run: Path, axes: dict[str, int], fresh_programs: None, tmp_path: Path
) -> None:
    train(tuned(folder), tmp_path / "run", folder, axes=axes)
    np.testing.assert_allclose(losses_of(tmp_path / "run"), losses_of(run), rtol=1e-5)
    for name in ("eval_loss", "eval_reward_margin"):
        here, there = ([x[name] for x in lines_of(r) if name in x] for r in (tmp_path / "run", run))
        assert len(here) == 2
        np.testing.assert_allclose(here, there, rtol=2e-5)


@pytest.fixture
def stopped(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A run that stopped after three steps, whose first model is then no longer there."""

    def make(experiment: Experiment) -> Path:
        train(replace(experiment, logging=stopping(experiment)), tmp_path / "run", folder)
        assert len(losses_of(tmp_path / "run")) == 3
        return tmp_path / "run"

    return make


def test_a_run_goes_on_without_the_model_that_it_began_with(
    folder: Path, run: Path, stopped: Callable[..., Path]
) -> None:
    base = folder / "elsewhere"
    shutil.copytree(folder / "base", base)
    moved = tuned(folder)
    moved = replace(moved, fine_tuning=replace(moved.fine_tuning, start=FromRun(base)))
    begun = stopped(moved)
    shutil.rmtree(base)
    said = train(moved, begun, folder)
    assert "resuming at step 3" in said and "in the first model" not in said
    assert losses_of(begun) == losses_of(run), "to the bit"


def test_a_run_in_a_store_keeps_its_losses_there(
    folder: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine goes on with them, and `verify` reads them."""
    experiment, address = tuned(folder), "s3://bucket/pairs"
    with object_store() as store:
        for number, logging in enumerate((stopping(experiment), experiment.logging)):
            (tmp_path / str(number)).mkdir()
            monkeypatch.chdir(tmp_path / str(number))
            said = train(replace(experiment, logging=logging), address, folder)
        assert "resuming at step 3" in said and "in the first model" not in said
        assert losses_of(Path("runs/pairs")) == losses_of(run), "to the bit"
        assert damaged_reference(address) == []
        name = next(name for name in store.files if name.endswith(".losses"))
        data = bytearray(store.files[name])
        data[-1] ^= 1
        store.files[name] = bytes(data)
        (damage,) = damaged_reference(address)
        assert f"s3://{name}" in damage


@pytest.fixture
def apart(folder: Path, tmp_path: Path) -> Experiment:
    """The experiment from a copy of the first model's run, which may change."""
    shutil.copytree(folder / "base", tmp_path / "base")
    experiment = tuned(folder)
    tuning = replace(experiment.fine_tuning, start=FromRun(tmp_path / "base"))
    return replace(experiment, fine_tuning=tuning)


def kept_by(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / REFERENCE).iterdir()}


def damaged_losses(run: Path) -> None:
    """Of two splits one is lost and one damaged."""
    first, second = sorted((run / REFERENCE).glob("*.losses"))
    first.unlink()
    content = bytearray(second.read_bytes())
    content[-1] ^= 1
    second.write_bytes(content)


def test_what_was_lost_or_damaged_is_computed_by_the_same_model(
    folder: Path,
    run: Path,
    apart: Experiment,
    stopped: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(array_file, "VERIFY_BYTES", 64)  # as for long files
    begun = stopped(apart)
    assert cli.main(["verify", str(begun)]) == 0
    damaged_losses(begun)
    assert cli.main(["verify", str(begun)]) == 1
    assert re.search(r"DAMAGED .*\.losses .*: the next start computes it", capsys.readouterr().out)
    said = train(apart, begun, folder, axes=dict(context=2, tensor=2))
    assert said.count("in the first model") == 2 and "it is not used" in said
    np.testing.assert_allclose(losses_of(begun), losses_of(run), rtol=1e-5)
    for path in (begun / REFERENCE).glob("*.losses"):
        path.unlink()
    train(of_texts(folder), Path(apart.fine_tuning.start.run_dir), folder)
    train(apart, begun, folder)
    assert kept_by(begun) == kept_by(run), "of the step that it began with, not the newest"


def test_another_or_no_model_is_told(
    folder: Path, apart: Experiment, stopped: Callable[..., Path]
) -> None:
    begun = stopped(apart)
    damaged_losses(begun)
    base = Path(apart.fine_tuning.start.run_dir)
    shutil.move(base, base.parent / "right")
    other = replace(of_texts(folder), optimizer=AdamW(2e-2))
    train(replace(other, logging=stopping(other)), base, folder)
    with pytest.raises(ValueError, match=r"training rows .* is another model now; bring back"):
        train(apart, begun, folder)
    shutil.rmtree(apart.fine_tuning.start.run_dir)
    with pytest.raises(ValueError, match=r"are not in .*, and that model is not there: "):
        train(apart, begun, folder)
    shutil.rmtree(begun / REFERENCE)
    with pytest.raises(
        ValueError, match=r"are not in .*; bring it back from a copy, or begin anew"
    ):
        train(apart, begun, folder)


def test_a_held_out_set_that_comes_later_is_compared_with_the_same_model(
    folder: Path, apart: Experiment, stopped: Callable[..., Path]
) -> None:
    begun = stopped(apart)
    lines = (folder / "pairs.jsonl").read_text().splitlines()
    (folder / "more.jsonl").write_text("\n".join(lines[:16]))
    evaluation = Evaluation(
        every=3, batches=1, sets={"more": Preferences(str(folder / "more.jsonl"))}
    )
    said = train(replace(apart, evaluation=evaluation), begun, folder)
    assert re.findall(r"losses of \d+ (.*) rows in the first model", said) == ["held-out more"]
    assert "eval_reward_margin/more" in said
    assert jaxtrain.evaluate(begun).keys() >= {"eval_loss", "eval_loss/more"}


def test_a_start_does_not_trust_what_an_earlier_start_kept(folder: Path, tmp_path: Path) -> None:
    """A start that ended before its first save may have had other weights."""
    keep = jaxtrain.checkpoint.Keep(best=jaxtrain.checkpoint.Best("eval_loss"))
    experiment = replace(tuned(folder), steps=1, checkpoints=SavePolicy(every=5, keep=keep))
    train(experiment, tmp_path / "a", folder)
    shutil.copytree(tmp_path / "a" / REFERENCE, tmp_path / "b" / REFERENCE)
    again = replace(tuned(folder), fine_tuning=FineTuning(preferences=DPO(0.5)))
    train(replace(again, steps=1), tmp_path / "b", folder)
    np.testing.assert_allclose(losses_of(tmp_path / "b"), [np.log(2)], rtol=1e-6)


def test_a_branch_compares_with_the_same_model(folder: Path, run: Path, tmp_path: Path) -> None:
    """Of which its run keeps the losses, with the start or without it."""
    for number, start in enumerate((tuned(folder).fine_tuning.start, None)):
        tuning = FineTuning(start, preferences=DPO(0.5))
        experiment = replace(tuned(folder), fine_tuning=tuning)
        branch = tmp_path / str(number)
        said = train(experiment, branch, folder, from_run=f"{run}@4")
        assert losses_of(branch) == losses_of(run)[4:] and "in the first model" not in said
        differs = "fine_tuning.start was .*" if start is None else "no field"
        assert re.search(f"kept; what differs: {differs}\n", said), said
        assert kept_by(branch) == kept_by(run)


def test_a_branch_with_other_rows_asks_the_same_model(
    folder: Path, run: Path, tmp_path: Path
) -> None:
    experiment = tuned(folder)
    lines = (folder / "pairs.jsonl").read_text().splitlines()
    (folder / "half.jsonl").write_text("\n".join(lines[::2]))
    source = Preferences(str(folder / "half.jsonl"), held_out=0.2)
    other = replace(experiment, data=replace(experiment.data, source=source))
    said = train(other, tmp_path / "other", folder, from_run=f"{run}@4")
    assert said.count("in the first model") == 2
    first, branched = ((r / REFERENCE / "weights").read_bytes() for r in (run, tmp_path / "other"))
    assert first == branched
    longer = replace(other, data=replace(other.data, seq=40))
    said = train(longer, tmp_path / "longer", folder, from_run=f"{run}@4")
    assert said.count("in the first model") == 2


def test_a_branch_does_without_what_tells_the_model_where_nothing_is_computed(
    folder: Path, run: Path, tmp_path: Path
) -> None:
    weights = run / REFERENCE / "weights"
    content = weights.read_bytes()
    weights.unlink()
    try:
        train(tuned(folder), tmp_path / "b", folder, from_run=f"{run}@4")
        assert losses_of(tmp_path / "b") == losses_of(run)[4:]
        longer = replace(tuned(folder), data=replace(tuned(folder).data, seq=40))
        with pytest.raises(ValueError, match=r"are not in .*; bring it back from a copy"):
            train(longer, tmp_path / "longer", folder, from_run=f"{run}@4")
    finally:
        weights.write_bytes(content)


def test_a_run_begun_anew_keeps_its_reference(
    folder: Path, run: Path, stopped: Callable[..., Path]
) -> None:
    begun = stopped(tuned(folder))
    experiment = tuned(folder)
    train(replace(experiment, logging=stopping(experiment)), begun, folder, fresh=True)
    assert kept_by(begun) == kept_by(begun.with_name(f"{begun.name}.1")) == kept_by(run)
    train(experiment, begun, folder)
    assert losses_of(begun) == losses_of(run)


def test_a_start_that_is_refused_writes_no_reference(
    folder: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run took the directory while this one compiled, from other weights."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("used by another run")

    monkeypatch.setattr("jaxtrain.run.directory.sole_run", refuse)
    with pytest.raises(ValueError, match="used by another run"):
        train(tuned(folder), tmp_path / "run", folder)
    assert not (tmp_path / "run" / REFERENCE).exists()


def test_a_folder_that_is_removed_below_the_run_is_written_again(
    folder: Path, run: Path, tmp_path: Path
) -> None:
    class Removed(jaxtrain.Callback):
        def after_step(self, _: jaxtrain.Run, step: int) -> None:
            if step == 3:
                shutil.rmtree(tmp_path / "run")

    experiment = replace(tuned(folder), checkpoints=SavePolicy(every=6))  # none is in flight then
    said = train(experiment, tmp_path / "run", folder, callbacks=[Removed()])
    assert "was removed below the run" in said and kept_by(tmp_path / "run") == kept_by(run)


def test_a_branch_of_a_run_without_pairs_compares_with_what_it_begins_with(
    folder: Path, tmp_path: Path
) -> None:
    experiment = replace(tuned(folder), fine_tuning=FineTuning(preferences=DPO(0.5)))
    train(experiment, tmp_path / "b", folder, from_run=f"{folder / 'base'}@2")
    np.testing.assert_allclose(losses_of(tmp_path / "b")[0], np.log(2), rtol=1e-6)
    (path, *_) = (tmp_path / "b" / REFERENCE).glob("*.losses")
    path.unlink()
    with pytest.raises(ValueError, match=r"what fine_tuning\.start names is another model now"):
        train(experiment, tmp_path / "b", folder)


def test_adapters_and_their_base(folder: Path, tmp_path: Path) -> None:
    experiment = tuned(folder, lora=LoRA(rank=2))
    train(replace(experiment, steps=4), tmp_path / "run", folder, axes=dict(fsdp=2, tensor=2))
    losses = losses_of(tmp_path / "run")
    np.testing.assert_allclose(losses[0], np.log(2), rtol=1e-6)
    assert losses[-1] < losses[0]
    assert jaxtrain.evaluate(tmp_path / "run", microbatches=1)["eval_loss"] < np.log(2)


def test_other_data_is_evaluated_by_the_loss_of_each_token(folder: Path, run: Path) -> None:
    source = JsonLines(str(folder / "pairs.jsonl"), text_field="chosen", prompt_field="prompt")
    values = jaxtrain.evaluate(run, source)
    assert values.keys() == {"eval_loss", "bits_per_byte"}
    kept = {path: path.read_bytes() for path in (run / REFERENCE).iterdir()}
    try:
        for path in kept:
            path.unlink()
        with pytest.raises(ValueError, match="keeps no losses of these pairs in the model that"):
            jaxtrain.evaluate(run)
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


def with_balance(experiment: Experiment) -> Experiment:
    (block,) = experiment.model.period
    mixture = jaxtrain.MoeConfig(32, experts=2, balance=Balance(0.01))
    block = replace(block, mlp=mixture)
    return replace(experiment, model=replace(experiment.model, period=(block,)))


REFUSED: dict[str, tuple[Callable[[Experiment], Experiment], str]] = {
    "pairs without a loss of them": (
        lambda e: replace(e, fine_tuning=None),
        r"rejected answers, .*use fine_tuning=FineTuning\(start, preferences=DPO\(\)\)",
    ),
    "a loss of pairs without pairs": (
        lambda e: replace(e, data=TextData(JsonLines("a.jsonl"), seq=SEQ)),
        "fine_tuning.preferences compares pairs of answers, and JsonLines has none",
    ),
    "conversations": (
        lambda e: replace(e, data=TextData(Conversations("a.jsonl"), TokenizerFile("t.json"))),
        "and Conversations has none",
    ),
    "balanced experts": (with_balance, "use balance=None in the mixtures"),
    "a best save by bytes": (
        lambda e: replace(
            e,
            checkpoints=SavePolicy(
                keep=jaxtrain.checkpoint.Keep(best=jaxtrain.checkpoint.Best("bits_per_byte"))
            ),
        ),
        "pairs of answers stand for no bytes; use eval_loss",
    ),
}


@pytest.mark.parametrize(("change", "says"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_by_check_and_train(
    folder: Path, change: Callable[[Experiment], Experiment], says: str
) -> None:
    experiment = change(tuned(folder))
    for act in (jaxtrain.check, jaxtrain.train):
        with pytest.raises(ValueError, match=says):
            act(experiment, "cpu_1")


def test_sets_are_pairs_as_the_data_is(folder: Path) -> None:
    pairs = Preferences(str(folder / "pairs.jsonl"))
    texts = JsonLines(str(folder / "pairs.jsonl"), text_field="chosen")
    of_pairs = tuned(folder)
    of_texts = replace(of_pairs, data=TextData(texts, seq=SEQ), fine_tuning=None)
    cases = {
        "it has no pairs of answers, .* use Preferences": (of_pairs, texts),
        "it has pairs of answers, and .* leave the set out": (of_texts, pairs),
    }
    for says, (experiment, source) in cases.items():
        evaluation = Evaluation(sets={"more": source})
        for act in (jaxtrain.check, jaxtrain.train):
            with pytest.raises(ValueError, match=rf"sets\['more'\]: {says}"):
                act(replace(experiment, evaluation=evaluation), "cpu_1")


def test_random_weights_are_told(folder: Path) -> None:
    experiment = replace(tuned(folder), fine_tuning=FineTuning(preferences=DPO()))
    (note,) = jaxtrain.check(experiment, "cpu_1").notes
    assert "begins with random weights; use start=" in note
    assert not jaxtrain.check(tuned(folder), "cpu_1").notes


def test_a_model_of_ones_own_has_no_loss_of_pairs(own: Experiment) -> None:
    with pytest.raises(ValueError, match="this model has no loss of pairs"):
        jaxtrain.check(replace(own, fine_tuning=FineTuning(preferences=DPO())), "cpu_1")


@dataclass(frozen=True)
class Made:
    """A user's own data: rows of two answers, with these fields changed; None takes one out."""

    changed: Any = ()

    def open(self, split: str, *, seed: int, cache_dir: Path) -> MadeRows:
        return MadeRows(dict(self.changed), split)


class MadeRows:
    seq, vocab = 8, 257

    def __init__(self, changed: dict[str, Any], split: str) -> None:
        self.changed, self.digest = changed, split

    def __len__(self) -> int:
        return 16

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(int(indices[0]))
        row: dict[str, Any] = {
            "weights": np.ones(8, np.float32),
            "segments": np.repeat(np.int32([1, 2]), 4),
            "reference": np.full(8, 5.5, np.float32),
        } | self.changed
        fields = {name: value for name, value in row.items() if value is not None}
        rows = {name: np.broadcast_to(v, (len(indices), *v.shape)) for name, v in fields.items()}
        ids = rng.integers(0, 257, (2, len(indices), 8)).astype(np.int32)
        return {"tokens": ids[0], "targets": ids[1], **rows}


def test_rows_of_ones_own_bring_the_references_losses(folder: Path, tmp_path: Path) -> None:
    experiment = replace(tuned(folder), data=Made(), steps=1)
    said = train(experiment, tmp_path / "run", folder)
    assert "in the first model" not in said and not (tmp_path / "run" / REFERENCE).exists()
    margin = lines_of(tmp_path / "run")[0]["reward_margin"]
    assert abs(margin) > 1e-3, "5.5 is no loss of this model"
    assert jaxtrain.check(experiment, "cpu_1").notes == ()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"segments": np.repeat([4, 3, 2, 1], 2)}, r"documents \[4, 3, 2, 1\]; number answers 1"),
        ({"segments": np.repeat([1, 0], 4)}, r"number its documents \[1\]"),
        ({"segments": np.repeat([41, 42], 4)}, r"number its documents \[41, 42\]"),
        ({"reference": np.ones(8, np.int32)}, "'reference' is int32"),
        ({"reference": np.float32(np.nan) * np.ones(8)}, "has values that are not finite"),
        ({"reference": None, "segments": None}, "no segments, reference; a DecoderConfig reads"),
    ],
)
def test_rows_of_ones_own_that_are_no_pairs_are_refused(
    folder: Path, changed: dict[str, Any], says: str
) -> None:
    experiment = replace(tuned(folder), data=Made(tuple(changed.items())))
    for act in (jaxtrain.check, jaxtrain.train):
        with pytest.raises(ValueError, match=rf"the train rows of Made.*{says}"):
            act(experiment, "cpu_1")


def test_data_without_pairs_is_refused(own: Experiment, folder: Path) -> None:
    chain = replace(own.data, vocab=257, isolate_documents=True)
    with pytest.raises(ValueError, match=r"compares pairs of answers, and BigramChain has none"):
        jaxtrain.check(replace(tuned(folder), data=chain), "cpu_1")
