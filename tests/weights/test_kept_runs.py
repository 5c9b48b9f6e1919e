"""A run directory is enough: with neither its data's classes nor its corpus, and from an older
version; and what cannot be done with it is told before a weight is read."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import jaxtrain
from jaxtrain import FineTuning, FromHuggingFace, FromRun, cli
from jaxtrain.checkpoint.run_config import refuse_other_experiment
from jaxtrain.checkpoint.storage import committed_steps
from jaxtrain.experiment import RESUMABLE, completed, config_of
from jaxtrain.experiment.stored import stored_field
from jaxtrain.state_format.manifest import read_manifest, write_manifest
from jaxtrain.tokenizers import HuggingFaceVocabulary
from jaxtrain.weights import loading
from jaxtrain.weights.loading import load, record_run
from jaxtrain.weights.tokenizer_files import GENERATION, SETTINGS, TOKENIZER

TEXT = "the capital of France is Paris and Paris is a city on it"
WORDS = sorted({f"\u2581{word}" for word in TEXT.split()})
TOLD = ["--prompt", "the capital of France is", "--tokens", "12", "--seed", "1"]


def spaced() -> str:
    """A tokenizer like Llama's: words carry the space before them, a text begins with bos."""
    ids = {token: i for i, token in enumerate(["<s>", "</s>", "?", *WORDS])}
    found = Tokenizer(models.WordLevel(ids, unk_token="?"))
    found.pre_tokenizer = pre_tokenizers.Metaspace()
    found.decoder = decoders.Metaspace()
    found.add_special_tokens(["<s>", "</s>", "?"])
    found.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return found.to_str()


@pytest.fixture
def experiment(decoder: jaxtrain.Experiment, tmp_path: Path) -> jaxtrain.Experiment:
    """On text, with a tokenizer.json that puts bos before a text."""
    (tmp_path / "text").mkdir()
    for i in range(8):
        (tmp_path / "text" / f"{i}.txt").write_text(TEXT)
    (tmp_path / TOKENIZER).write_text(spaced(), encoding="utf-8")
    files = jaxtrain.TextFiles(str(tmp_path / "text" / "?.txt"))
    kept = jaxtrain.data.TokenizerFile(str(tmp_path / TOKENIZER), eos="</s>")
    init = jaxtrain.nn.Initialisation(std=1.0)  # so that what comes before tells
    return replace(
        decoder,
        model=replace(decoder.model, vocab=3 + len(WORDS), init=init, vocab_multiple=1),
        data=jaxtrain.TextData(files, kept, seq=24),
        steps=2,
        checkpoints=jaxtrain.SavePolicy(every=1000),
    )


def train(experiment: jaxtrain.Experiment, run: Path) -> jaxtrain.Result:
    cache = run.parent / "cache"
    mesh = jaxtrain.mesh_from_axes(data=1)
    return jaxtrain.train(experiment, mesh, run_dir=run, cache_dir=cache, stream=io.StringIO())


def said(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert cli.main(["generate", str(path), *TOLD]) == 0
    return capsys.readouterr().out


def changed(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Its config.json and its steps, as if something else had been written."""
    config = json.loads((run / "config.json").read_text())
    change(config["experiment"])
    (run / "config.json").write_text(json.dumps(config))
    for step in committed_steps(run / "checkpoints"):
        changed_step(run, step, change)


def changed_step(run: Path, step: int, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = read_manifest(run / "checkpoints" / str(step))
    change(manifest.metadata["experiment"])
    chunks = [chunk for of_leaf in manifest.chunks.values() for chunk in of_leaf]
    write_manifest(manifest.directory, step, manifest.leaves, manifest.metadata, chunks)


def test_a_step_of_another_experiment_is_not_used(
    experiment: jaxtrain.Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As training does not go on from it: it was put there by hand."""
    run = tmp_path / "run"
    train(replace(experiment, checkpoints=jaxtrain.SavePolicy(every=1)), run)
    changed_step(run, 2, lambda e: e["optimizer"].update(b1=0.5))
    told = r"step 2 of .*run: the step is of another experiment: experiment.optimizer.b1 was 0.5"
    begun = replace(experiment, fine_tuning=FineTuning(FromRun(run)))
    for use in (
        lambda: jaxtrain.generate_text(run, "the", tokens=1),
        lambda: jaxtrain.export(run, tmp_path / "out"),
        lambda: jaxtrain.check(begun, jaxtrain.mesh_from_axes(data=1)),
    ):
        with pytest.raises(ValueError, match=told + r".*; give another step \(1\)"):
            use()
    assert cli.main(["generate", str(run), "--step", "1", *TOLD]) == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_and_its_folder_go_on_alike_whatever_the_tokenizer_adds(
    experiment: jaxtrain.Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training never put bos before a text; and the words after the prompt keep their space."""
    result = train(experiment, tmp_path / "run")
    session = jaxtrain.generate(result.session, TOLD[1], tokens=12, seed=1)
    assert said(tmp_path / "run", capsys) == f"{TOLD[1]}{session}\n"
    jaxtrain.export(tmp_path / "run", tmp_path / "out")
    assert said(tmp_path / "out", capsys) == f"{TOLD[1]}{session}\n"
    assert session.startswith(" ")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == 24 and config["eos_token_id"] == 1


def test_a_run_is_used_without_the_class_of_its_data(
    experiment: jaxtrain.Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    train(experiment, run)
    wanted = said(run, capsys)
    changed(run, lambda e: e["data"].update({"class": "an_experiment_file:Data"}))
    assert said(run, capsys) == wanted
    jaxtrain.export(run, out)
    assert said(out, capsys) == wanted

    # As an older version kept it, without what ends a text: nobody can say.
    (run / SETTINGS).unlink()
    with pytest.warns(UserWarning, match=r"bare is written without a tokenizer: .*run's data is"):
        jaxtrain.export(run, tmp_path / "bare")
    assert not (tmp_path / "bare" / TOKENIZER).exists()
    assert load(tmp_path / "bare").params.keys() == load(out).params.keys()
    with pytest.raises(ValueError, match=r"run has no tokenizer, .*: .*run's data is not of this"):
        jaxtrain.generate_text(run, "the")


@pytest.mark.parametrize("command", ["generate", "export"])
def test_a_run_of_a_strangers_runs_no_shell(
    command: str,
    experiment: jaxtrain.Experiment,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the place of a function a class of JAX's, that calls what it holds with what it holds."""
    run, marker = tmp_path / "run", tmp_path / "ran"
    train(experiment, run)
    shell = {
        "class": "jax._src.api:VJP",
        "fun": "subprocess:call",
        "in_tree": ["sh", "-c", f"touch {marker}"],
        "out_tree": -1,
        "args_res": None,
        "opaque_residuals": None,
    }
    changed(run, lambda e: e["model"]["period"][0]["mlp"].update(activation=shell))
    told = ["--prompt", "a"] if command == "generate" else ["--out", str(tmp_path / "out")]
    assert cli.main([command, str(run), *told]) == cli.REFUSED and not marker.exists()
    said = capsys.readouterr().err
    assert "model.period[0].mlp.activation is 'jax._src.api:VJP', which is not of this" in said
    assert "if that code is yours, give trust=" in said and "--trust jax" in said


def test_a_start_from_a_run_with_code_of_ones_own_says_so(
    experiment: jaxtrain.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, mesh = tmp_path / "run", jaxtrain.mesh_from_axes(data=1)
    train(experiment, run)
    (tmp_path / "mine_of_kept_runs.py").write_text("def double(x):\n    return x + x\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "mine_of_kept_runs:double"
    changed(run, lambda e: e["model"]["period"][0]["mlp"].update(activation=name))

    def begun(**trust: Any) -> jaxtrain.Experiment:
        return replace(experiment, fine_tuning=FineTuning(FromRun(run, **trust)))

    with pytest.raises(ValueError, match=r'give trust="mine_of_kept_runs" \(--trust'):
        jaxtrain.check(begun(), mesh)
    with pytest.raises(ValueError, match=r"activation is .*silu.*, there .*double"):
        jaxtrain.check(begun(trust="mine_of_kept_runs"), mesh)
    with pytest.raises(ValueError, match="which is no module's name"):
        begun(trust="../mine")
    # Whom a run trusted is no part of what it learnt: it may change when the run goes on.
    (tmp_path / "again").mkdir()
    trusting = {"experiment": config_of(begun(trust="mine_of_kept_runs"))}
    (tmp_path / "again" / "config.json").write_text(json.dumps(trusting))
    given = {"experiment": config_of(begun())}
    refuse_other_experiment(tmp_path / "again", given, ignore=RESUMABLE, completed=completed)


@pytest.mark.parametrize("named", ["corpus", "file"])
def test_no_path_that_a_run_spells_is_opened(
    named: str, experiment: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """Neither to train a tokenizer on, nor for one, nor for what a folder says."""
    run, out, folder = tmp_path / "run", tmp_path / "out", tmp_path / "private"
    train(experiment, run)
    wanted = jaxtrain.generate_text(run, "the", tokens=3)
    data = experiment.data
    if named == "corpus":
        data = replace(data, tokenizer=jaxtrain.data.BpeTokenizer(300, eos="</s>"))
    changed(run, lambda e: e.update(data=config_of(data)))
    for name in (TOKENIZER, SETTINGS, GENERATION):
        (run / name).unlink()
    with pytest.raises(ValueError, match=r"keeps no tokenizer.json, .*put .* start the training"):
        jaxtrain.generate_text(run, "the", tokens=3)
    with pytest.warns(UserWarning, match=r"written without a tokenizer: .*keeps no tokenizer.json"):
        jaxtrain.export(run, out)
    assert not (out / TOKENIZER).exists()

    # A folder that it says to have begun with.
    folder.mkdir()
    (folder / TOKENIZER).write_text(spaced(), encoding="utf-8")
    (folder / SETTINGS).write_text('{"eos_token": "</s>", "chat_template": "secret"}')
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')
    (run / TOKENIZER).write_text(spaced(), encoding="utf-8")
    tuned = config_of(FineTuning(FromHuggingFace(folder)))
    changed(run, lambda e: e.update(fine_tuning=tuned))
    jaxtrain.export(run, tmp_path / "tuned")
    assert "secret" not in (tmp_path / "tuned" / SETTINGS).read_text()
    said = json.loads((tmp_path / "tuned" / "config.json").read_text())
    assert said["max_position_embeddings"] == 24

    if named == "file":
        (run / TOKENIZER).unlink()
        changed(run, lambda e: e.update(config_of(experiment)))
        train(experiment, run)
        assert jaxtrain.generate_text(run, "the", tokens=3) == wanted


def test_a_run_of_an_older_version_is_used_and_resumed(
    experiment: jaxtrain.Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(experiment, run)
    wanted = said(run, capsys)

    def older(e: dict[str, Any]) -> None:
        """`sample` was beside `evaluation`; other fields were not there."""
        e["sample"] = None
        for name in ("fine_tuning", "ema_decay", "microbatches"):
            e.pop(name, None)
        e["data"].pop("isolate_documents", None)
        e["model"]["period"][0]["attention"].pop("qkv_bias", None)

    changed(run, older)
    (run / SETTINGS).unlink()
    (run / TOKENIZER).write_text(spaced(), encoding="utf-8")
    assert stored_field(run, "microbatches") == 1
    assert said(run, capsys) == wanted
    jaxtrain.export(run, tmp_path / "out")
    assert said(tmp_path / "out", capsys) == wanted
    assert train(experiment, run).session.start == 2
    assert (run / SETTINGS).is_file(), "kept since"

    # What differs from a default is another experiment still.
    changed(run, older)
    for other, told in (
        (replace(experiment, microbatches=2), "microbatches was 1, now 2"),
        (replace(experiment, ema_decay=0.5), "ema_decay was null, now 0.5"),
    ):
        given = {"experiment": config_of(other)}
        with pytest.raises(ValueError, match=told):
            refuse_other_experiment(run, given, completed=completed)


def test_a_sample_is_found_where_it_once_was(decoder: jaxtrain.Experiment, tmp_path: Path) -> None:
    sample = jaxtrain.Sample("a", tokens=3)
    now = {"experiment": config_of(replace(decoder, evaluation=jaxtrain.Evaluation(7)))}
    (tmp_path / "config.json").write_text(json.dumps(now))

    def older(e: dict[str, Any]) -> None:
        del e["evaluation"]["sample"]
        e["sample"] = config_of(sample)

    changed(tmp_path, older)
    assert stored_field(tmp_path, "evaluation") == jaxtrain.Evaluation(7, sample=sample)


def test_what_is_no_experiment_is_told(tmp_path: Path) -> None:
    for text in ("{}", '{"experiment": 3}', '{"model_type": "llama"}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match="has no experiment; give a run directory"):
            stored_field(tmp_path, "model")


def test_what_a_folder_knew_of_tokens_and_positions_is_handed_on(
    experiment: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """Through a run begun from it, another begun from that, and a start without the folder."""
    train(experiment, tmp_path / "run")
    jaxtrain.export(tmp_path / "run", tmp_path / "folder")
    folder = tmp_path / "folder"
    (folder / TOKENIZER).write_text(spaced(), encoding="utf-8")
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages }}"}
    (folder / SETTINGS).write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    told = {"max_position_embeddings": 4096, "eos_token_id": [1, 2]}
    (folder / "config.json").write_text(json.dumps({**config, **told}))
    (folder / GENERATION).unlink()

    vocabulary = HuggingFaceVocabulary(spaced(), eos="</s>")
    runs = {"tuned": FromHuggingFace(folder), "again": FromRun(tmp_path / "tuned")}

    def record(name: str) -> None:
        tuned = replace(experiment, fine_tuning=FineTuning(runs[name]))
        given = {"experiment": config_of(tuned)}
        record_run(tmp_path / name, given, SimpleNamespace(vocabulary=vocabulary))

    for name in runs:
        record(name)
        shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / name / "checkpoints")
    jaxtrain.export(tmp_path / "tuned", tmp_path / "first")
    shutil.rmtree(folder)
    record("tuned")  # as when it is resumed
    for name, run, positions in (
        ("first", "", 4096),
        ("second", "tuned", 4096),
        ("3", "again", 4096),
    ):
        if run:
            jaxtrain.export(tmp_path / run, tmp_path / name)
        found = json.loads((tmp_path / name / "config.json").read_text())
        assert found["max_position_embeddings"] == positions
        assert (found["bos_token_id"], found["eos_token_id"]) == (0, [1, 2])
        kept = json.loads((tmp_path / name / SETTINGS).read_text())
        assert settings.items() <= kept.items() and kept["add_bos_token"] is False
        tokenizer = load(tmp_path / name).tokenizer
        assert tokenizer is not None and (tokenizer.bos, tokenizer.ends) == (None, {1, 2})


def test_a_text_is_over_at_any_of_its_ends(experiment: jaxtrain.Experiment, tmp_path: Path) -> None:
    """A word that the model says, made one more of them, cuts there."""
    train(experiment, tmp_path / "run")
    jaxtrain.export(tmp_path / "run", tmp_path / "out")
    words = jaxtrain.generate_text(tmp_path / "out", TOLD[1], tokens=12, seed=1).split()
    assert len(words) > 2 and len(set(words)) > 1
    end = next(i for i, word in enumerate(words) if word != words[0])
    number = 3 + WORDS.index("\u2581" + words[end])
    (tmp_path / "out" / GENERATION).write_text(json.dumps({"eos_token_id": [1, number]}))
    cut = jaxtrain.generate_text(tmp_path / "out", TOLD[1], tokens=12, seed=1)
    assert cut.split() == words[:end]


def test_what_is_refused_is_refused_before_a_weight_is_read(
    experiment: jaxtrain.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    bare = replace(experiment.data.tokenizer, add_bos=False)  # an empty prompt is one with bos
    experiment = replace(experiment, data=replace(experiment.data, tokenizer=bare))
    train(experiment, run)

    def never(*_: Any) -> Any:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(loading, "read_stored", never)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(ValueError) as caught:
        jaxtrain.export(run, tmp_path / "there", dtype="int8")
    for part in ("dtype is int8; give one of float32", "there is there already; remove it"):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match="dtype is 'fp16'; give one of float32"):
        jaxtrain.export(run, out, dtype="fp16")
    with pytest.raises(ValueError, match=r"step 2 of .* no averaged weights.*ema_decay.*averaged="):
        jaxtrain.export(run, out, averaged=True)
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        jaxtrain.generate_text(run, "")
    with pytest.raises(AssertionError, match="a weight was read"):
        jaxtrain.export(run, out)

    attention = replace(experiment.model.period[0].attention, qk_norm=jaxtrain.nn.LayerNorm())
    model = replace(
        experiment.model, period=(replace(experiment.model.period[0], attention=attention),)
    )
    train(replace(experiment, model=model), tmp_path / "other")
    with pytest.raises(ValueError, match=r"no family of .* has this model"):
        jaxtrain.export(tmp_path / "other", out)
    assert not out.exists()

    shutil.rmtree(run / "checkpoints")
    for act in (lambda: jaxtrain.generate_text(run, "a"), lambda: jaxtrain.export(run, out)):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"run is a run that has saved nothing yet; wait"):
                act()
            (run / "checkpoints").mkdir(exist_ok=True)
