"""TextData: from an experiment's field to rows, cached, the same every time it is opened."""

from __future__ import annotations

import ast
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import write_folder

import jaxtrain.data as data_package
from jaxtrain.data import tokenization
from jaxtrain.data.mixture import Mixture
from jaxtrain.data.permutation import shuffle
from jaxtrain.data.text import TextData
from jaxtrain.data.token_file import TokenFiles
from jaxtrain.data.tokenization import tokenize
from jaxtrain.sources import JsonLines, StdlibSource, TextFiles, documents
from jaxtrain.tokenizers import BpeTokenizer, ByteTokenizer, TokenizerFile


@pytest.fixture
def source(tmp_path: Path) -> TextFiles:
    for i in range(60):
        (tmp_path / f"{i:02d}.txt").write_text(f"text {i} " * (1 + i % 5), encoding="utf-8")
    return TextFiles(str(tmp_path / "*.txt"), held_out=0.2)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BpeTokenizer(vocab=270)], ids=str)
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_an_epoch_decodes_to_the_documents(
    source: TextFiles, tokenizer: ByteTokenizer | BpeTokenizer, split: str, tmp_path: Path
) -> None:
    data = TextData(source=source, tokenizer=tokenizer, seq=16)
    opened = data.open(split, seed=1, cache_dir=tmp_path / "cache")
    pieces = shuffle(np.arange(len(opened)), len(opened), "rows", opened.seed, 0)
    rows = opened.rows(np.argsort(pieces))
    stream = rows["tokens"][rows["segments"] > 0].tolist()
    eos = data.vocabulary(tmp_path / "cache").eos
    cuts = [i for i, token in enumerate(stream) if token == eos]
    found = [
        opened.decode(stream[a:b]) for a, b in zip([0, *(c + 1 for c in cuts)], cuts, strict=False)
    ]
    assert sorted(found) == sorted(d.text for d in documents(source, split))
    assert opened.token_bytes.shape == (opened.vocab,)
    learnt = rows["weights"] * opened.token_bytes[rows["targets"]]
    firsts = sum(opened.token_bytes[opened.encode(text)[0]] for text in found)
    assert learnt.sum() == sum(len(text.encode()) for text in found) - firsts


def test_the_cache_is_used_and_may_be_lost_or_damaged(
    source: TextFiles,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, cache = TextData(source=source, seq=16), tmp_path / "cache"
    expected = data.open("train", seed=1, cache_dir=cache).rows(np.arange(9))
    (path,) = cache.glob("*.tokens")
    with monkeypatch.context() as patch:
        patch.setattr(TextFiles, "read", None)
        warm = data.open("train", seed=1, cache_dir=cache)
    np.testing.assert_array_equal(warm.rows(np.arange(9))["tokens"], expected["tokens"])
    body = bytearray(path.read_bytes())
    body[4100] ^= 1
    path.write_bytes(body)
    again = data.open("train", seed=1, cache_dir=cache)
    np.testing.assert_array_equal(again.rows(np.arange(9))["tokens"], expected["tokens"])
    assert "tokenising the corpus again" in caplog.text
    elsewhere = data.open("train", seed=1, cache_dir=tmp_path / "other")
    assert elsewhere.digest == warm.digest


def test_a_changed_corpus_is_tokenised_again(source: TextFiles, tmp_path: Path) -> None:
    data, cache = TextData(source=source, seq=16), tmp_path / "cache"
    before = data.open("train", seed=1, cache_dir=cache).digest
    (tmp_path / "extra.txt").write_text("another document, and another")
    (tmp_path / "more.txt").write_text("and one more")
    assert data.open("train", seed=1, cache_dir=cache).digest != before


def test_many_openers_at_once_agree(source: TextFiles, tmp_path: Path) -> None:
    data = TextData(source=source, seq=16)

    def read(worker: int) -> bytes:
        opened = data.open("train", seed=1, cache_dir=tmp_path / "cache")
        return opened.rows(np.arange(20))["tokens"].tobytes()

    for attempt in range(5):
        with ThreadPoolExecutor(8) as pool:
            assert len(set(pool.map(read, range(8)))) == 1
        for path in (tmp_path / "cache").glob("*.tokens"):
            path.unlink()
        assert attempt or list((tmp_path / "cache").glob("*.index"))


def test_an_opener_that_was_overtaken_reads_what_the_other_wrote(
    source: TextFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other has removed the folder of shards while `mkdir` looked at it."""
    data, run, others = TextData(source=source, seq=16), tokenization._run, []

    def overtaken(shards: Any, **options: Any) -> None:
        monkeypatch.setattr(tokenization, "_run", run)
        others.append(data.open("train", seed=1, cache_dir=tmp_path / "cache"))
        folder = shards[0].path.parent
        assert not folder.exists()

        def mkdir(path: Path, *_: Any, **__: Any) -> None:
            raise FileExistsError(17, "File exists", str(path))

        with monkeypatch.context() as patched:
            patched.setattr(Path, "mkdir", mkdir)
            run(shards, **options)

    monkeypatch.setattr(tokenization, "_run", overtaken)
    opened = data.open("train", seed=1, cache_dir=tmp_path / "cache")
    assert opened.digest == others[0].digest


def test_seeds_change_training_rows_but_not_held_out_ones(
    source: TextFiles, tmp_path: Path
) -> None:
    data = TextData(source=source, seq=16)
    for split, equal in (("train", False), ("held_out", True)):
        rows = [
            data.open(split, seed=seed, cache_dir=tmp_path / "cache").rows(np.arange(5))["tokens"]
            for seed in (1, 2)
        ]
        assert np.array_equal(rows[0], rows[1]) == equal


def test_token_files_give_the_rows_of_their_source(source: TextFiles, tmp_path: Path) -> None:
    out, cache = tmp_path / "all.tokens", tmp_path / "cache"
    tokenize(source, ByteTokenizer(), out)
    direct = TextData(source=source, seq=16)
    tokenised = TextData(source=TokenFiles(str(out), held_out=0.0), seq=16)
    numbers = np.arange(30)
    a = direct.open("train", seed=1, cache_dir=cache).rows(numbers)
    b = tokenised.open("train", seed=1, cache_dir=cache).rows(numbers)
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])
    with pytest.raises(ValueError, match="TokenizerFile beside token files"):
        TextData(source=tokenised.source, tokenizer=BpeTokenizer()).open(
            "train", seed=1, cache_dir=cache
        )


def test_a_mixture_reads_its_parts_at_their_weights(source: TextFiles, tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    lines = [json.dumps({"q": "?" * 5, "text": "#" * (1 + i % 30)}) for i in range(300)]
    path.write_text("\n".join(lines))
    chat = JsonLines(str(path), prompt_field="q", held_out=0.0)
    parts = ((3.0, source), (1.0, chat))
    for tokenizer in (ByteTokenizer(), BpeTokenizer(vocab=300)):
        data = TextData(source=Mixture(parts), tokenizer=tokenizer, seq=16)
        opened = data.open("train", seed=1, cache_dir=tmp_path / "cache")
        rows = opened.rows(np.arange(1024))
        mine = rows["tokens"] == opened.encode("?????")[0]
        assert mine.any(axis=1).sum() <= 256
        alone = TextData(source=chat, tokenizer=ByteTokenizer(), seq=16)
        if isinstance(tokenizer, ByteTokenizer):
            part = alone.open("train", seed=1, cache_dir=tmp_path / "cache")
            turn = opened.order.turns(np.arange(1024))  # type: ignore[attr-defined]
            assert (turn.part == 1).sum() == 256
            expected = part.rows(turn.row[turn.part == 1])
            for name in rows:
                np.testing.assert_array_equal(rows[name][turn.part == 1], expected[name])
            assert (expected["weights"][expected["targets"] == ord("?")] == 0).all()


def test_bad_fields_are_refused(source: TextFiles, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seq=0"):
        TextData(source=source, seq=0)
    with pytest.raises(ValueError, match="split='test'"):
        TextData(source=source).open("test", seed=0, cache_dir=tmp_path)


def test_the_standard_library_opens_as_it_is(tmp_path: Path) -> None:
    data = TextData(source=StdlibSource(), seq=128)
    opened = {s: data.open(s, seed=0, cache_dir=tmp_path) for s in ("train", "held_out")}
    assert opened["train"].vocab == 257
    assert len(opened["train"]) > 5 * len(opened["held_out"]) > 500
    rows = opened["held_out"].rows(np.arange(100))
    whole = (rows["segments"] == 1).all(axis=1) & (rows["weights"] == 1).all(axis=1)
    text = opened["held_out"].decode(rows["tokens"][whole][0])
    assert any(text[:100] in d.text for d in data.documents("held_out"))


HEAVY = {"jax", "pyarrow", "tokenizers", "rich", "multiprocessing", "concurrent"}


@pytest.mark.parametrize("path", sorted(Path(data_package.__file__).parent.glob("*.py")), ids=str)
def test_importing_loads_no_heavy_library(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = [a.name for node in tree.body if isinstance(node, ast.Import) for a in node.names]
    names += [str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert names or path.name == "__init__.py"
    assert not {name.split(".")[0] for name in names} & HEAVY


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_a_prompt_and_its_text_are_encoded_as_one(tmp_path: Path, kind: str) -> None:
    """As one text: SentencePiece puts a space before each text it gets. Learnt is every token that
    has something of the text, and nothing is of the prompt alone."""
    tokenizer = TokenizerFile(str(write_folder(tmp_path / "t", "gemma", kind)), eos="</s>")
    pairs = [("what is two", " plus two? it"), ("hel", "lo how are"), ("how", "are"), ("", "are")]
    lines = [json.dumps({"q": prompt, "text": text}) for prompt, text in pairs]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = JsonLines(str(tmp_path / "a.jsonl"), prompt_field="q", held_out=0.0)
    data = TextData(source, tokenizer, seq=64)
    vocab = data.vocabulary(tmp_path)
    file = tokenize(source, vocab, tmp_path / "x.tokens")
    for number, (prompt, text) in enumerate(pairs):
        ids = file.tokens[file.offsets[number] : file.offsets[number + 1]].tolist()
        assert ids == [*vocab.encode(prompt + text), vocab.eos]
        count = int(file.prompts[number])
        assert prompt.startswith(vocab.decode(ids[:count]))
        assert len(vocab.decode(ids[: count + 1])) > len(prompt)


@pytest.mark.parametrize("processes", [1, 2])
def test_special_tokens_in_a_text_are_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, processes: int
) -> None:
    tokenizer = TokenizerFile(str(write_folder(tmp_path / "t", "qwen 2.5")), add_eos=False)
    for number in range(4):
        text = "<|im_start|>user" if number else "plain"
        (tmp_path / f"{number}.txt").write_text(f"{text} {number}")
    source = TextFiles(str(tmp_path / "?.txt"), held_out=0.0)
    vocab = TextData(source, tokenizer).vocabulary(tmp_path)
    with caplog.at_level("WARNING", logger="jaxtrain"):
        file = tokenize(source, vocab, tmp_path / "x", processes=processes, shard_bytes=1)
        assert caplog.text.count("'<|im_start|>'") == 1 and "Conversations" in caplog.text
        caplog.clear()
        plain = TextFiles(str(tmp_path / "0.txt"), held_out=0.0)
        tokenize(plain, vocab, tmp_path / "y")
        assert not caplog.records
    assert not set(file.tokens.tolist()) & set(vocab.special_ids.tolist())
