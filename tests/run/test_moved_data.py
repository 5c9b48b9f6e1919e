"""A corpus or a tokenizer that lies elsewhere is the same if its bytes are."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

import jaxtrain
from jaxtrain.data import ByteTokenizer, Mixture, TokenFiles, TokenizerFile
from jaxtrain.data.token_file import TokenDocument, write_token_file
from tests.chats import write_folder

TEXTS = [f"text number {n} of a few words, {n % 7} of them." for n in range(60)]
EVALUATION = jaxtrain.Evaluation(every=2, batches=1)
SOURCES = ["text", "held out", "token files", "mixture", "mixture, held out"]


def write(folder: Path, texts: list[str]) -> Path:
    """A folder with the texts as a text file, a JSON Lines file and token files."""
    folder.mkdir()
    (folder / "a.txt").write_text("\n\n".join(texts))
    (folder / "b.txt").write_text("\n\n".join(texts[:9]))
    documents = [TokenDocument(list(text.encode()), 0) for text in texts]
    write_token_file(folder / "a.tokens", documents, vocab=258)
    write_token_file(folder / "b.tokens", documents[:9], vocab=258)
    return folder


def source_in(folder: Path, kind: str):
    apart = dict(held_out_patterns=f"{folder}/b.txt")
    text = jaxtrain.TextFiles(f"{folder}/a.txt", separator="\n\n", held_out=0.1)
    if kind == "text":
        return text
    if kind == "held out":
        return jaxtrain.TextFiles(f"{folder}/*.txt", separator="\n\n", **apart)
    tokens = TokenFiles(f"{folder}/*.tokens", held_out_paths=f"{folder}/b.tokens")
    if kind == "token files":
        return tokens
    if kind == "mixture, held out":
        text = jaxtrain.TextFiles(f"{folder}/*.txt", separator="\n\n", **apart)
    return Mixture(((0.5, text), (0.5, tokens)))


def on(
    decoder: jaxtrain.Experiment,
    data: jaxtrain.TextData,
    evaluation: jaxtrain.Evaluation | None = EVALUATION,
) -> jaxtrain.Experiment:
    """Four steps on this data, each second one saved."""
    return replace(
        decoder,
        model=replace(decoder.model, vocab=400),
        data=data,
        steps=4,
        batch=4,
        checkpoints=jaxtrain.SavePolicy(every=2),
        evaluation=evaluation,
    )


@pytest.mark.parametrize("kind", SOURCES)
def test_a_corpus_that_was_moved_is_the_same_and_another_is_not(
    decoder, tmp_path: Path, kind: str
) -> None:
    first, second = write(tmp_path / "first", TEXTS), write(tmp_path / "second", TEXTS)
    other = write(tmp_path / "other", [*TEXTS, "one more"])

    def trained(folder: Path, run: str | None, steps: int):
        data = jaxtrain.TextData(source=source_in(folder, kind), tokenizer=ByteTokenizer(), seq=8)
        experiment = on(decoder, data, evaluation=None)
        where = None if run is None else tmp_path / run
        more = dict(steps=steps, cache_dir=tmp_path / "cache", stream=io.StringIO())
        return jaxtrain.train(experiment, "cpu_1", run_dir=where, **more)

    whole = [line["loss"] for line in trained(first, None, 4).history]
    begun = trained(first, "run", 2)
    moved = trained(second, "run", 4)
    assert [line["loss"] for line in [*begun.history, *moved.history]] == whole
    trained(first, "again", 2)
    with pytest.raises(ValueError, match="was trained on another corpus") as refused:
        trained(other, "again", 4)
    field = "paths" if kind == "token files" else "patterns"
    assert f"{field} was" in str(refused.value) and str(other) in str(refused.value)


def test_a_tokenizer_that_was_moved_is_the_same(decoder, tmp_path: Path) -> None:
    folder, told = write(tmp_path / "texts", TEXTS), io.StringIO()
    source = jaxtrain.TextFiles(f"{folder}/a.txt", separator="\n\n", held_out=0.1)
    more = dict(run_dir=tmp_path / "run", cache_dir=tmp_path / "cache", stream=told)
    for number, name in enumerate(("first", "second"), 1):
        path = write_folder(tmp_path / name, "gemma")
        data = jaxtrain.TextData(source, TokenizerFile(str(path)), seq=8)
        result = jaxtrain.train(on(decoder, data), "cpu_1", steps=2 * number, **more)
    assert result.session.start == 2 and "NOTE" not in told.getvalue()


def test_other_held_out_data_is_taken_and_told(decoder, tmp_path: Path) -> None:
    folder = write(tmp_path / "texts", TEXTS)

    def train(run: str, steps: int, **more) -> str:
        told = io.StringIO()
        source = source_in(folder, "held out")
        experiment = on(decoder, jaxtrain.TextData(source, ByteTokenizer(), seq=8))
        more = dict(steps=steps, cache_dir=tmp_path / "cache", stream=told) | more
        jaxtrain.train(experiment, "cpu_1", run_dir=tmp_path / run, **more)
        return told.getvalue()

    note = "NOTE the held-out data is not that of step 2: its eval_loss does not compare"
    assert "NOTE" not in train("run", 2) + train("run", 3)
    (folder / "b.txt").write_text("\n\n".join(TEXTS[9:20]))
    assert note.replace("step 2", "step 3") in train("run", 4)
    assert note in train("branch", 4, from_run=f"{tmp_path / 'run'}@2")
