"""A corpus in an object store is read where it is, and gives what the same files on a disk give."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from object_store import ObjectStore, empty_cache, object_store, put_object

import jaxtrain
from jaxtrain.data import ByteTokenizer, TokenFiles, TokenizerFile
from jaxtrain.data.tokenization import tokenize
from jaxtrain.files.cache_entries import cache_contents
from jaxtrain.files.objects import RangeReader
from jaxtrain.files.pointer import StoreFailed, given_address, unreadable
from jaxtrain.sources import (
    Conversations,
    Csv,
    JsonLines,
    Parquet,
    Preferences,
    TextFiles,
    documents,
    fingerprint,
    records,
)
from jaxtrain.sources.document import piece_of

TEXTS = [f"document {i}: " + "x" * (i % 7) for i in range(60)]
ADDRESS = "s3://bucket/corpus"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ObjectStore]]:
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    with object_store() as store:
        yield store


@pytest.fixture
def corpus(tmp_path: Path, store: type[ObjectStore]) -> str:
    """A folder with files of each kind; the store has the same."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    table = io.BytesIO()
    pq.write_table(pa.table({"text": TEXTS}), table, row_group_size=7)
    texts = {"a/one.txt": "\n\n".join(TEXTS[:30]), "a/b/two.txt": "\n\n".join(TEXTS[30:])}
    chat = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
    files = {
        **{name: text.encode() for name, text in texts.items()},
        "a/.hidden.txt": b"hidden",
        ".folder/x.txt": b"hidden",
        "x[1]/a.txt": b"in brackets",
        "lines.jsonl": lines,
        "more/lines.jsonl.gz": gzip.compress(lines),
        "more/lines.json.bz2": bz2.compress(lines),
        "other/lines.txt": lines,
        "rows.csv": ("text\n" + "\n".join(TEXTS) + "\n").encode(),
        "rows.parquet": table.getvalue(),
        "chats.jsonl": json.dumps({"messages": chat}).encode() + b"\n",
        "pairs.jsonl": json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}).encode(),
    }
    for name, data in files.items():
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        put_object(f"bucket/corpus/{name}", data)
    put_object("bucket/corpus2/lines.jsonl", b"of another corpus\n")
    return str(tmp_path / "corpus")


SOURCES: dict[str, Callable[[str], Any]] = {
    "folder": lambda at: TextFiles(f"{at}/a", separator="\n\n"),
    "file": lambda at: TextFiles(f"{at}/a/one.txt", separator="\n\n"),
    "glob": lambda at: TextFiles(f"{at}/a/*.txt", separator="\n\n"),
    "glob of folders": lambda at: TextFiles(f"{at}/**/*.txt", separator="\n\n"),
    "hidden folder": lambda at: TextFiles((f"{at}/.folder", f"{at}/a/.hidden.txt"), held_out=0.0),
    "held out by name": lambda at: TextFiles(
        f"{at}/a", held_out_patterns=f"{at}/a/b/*", separator="\n\n"
    ),
    "ranges of lines": lambda at: JsonLines(f"{at}/lines.jsonl"),
    "gzip": lambda at: JsonLines(f"{at}/more/*.gz"),
    "folder of lines": lambda at: JsonLines(f"{at}/more"),
    "file of another suffix": lambda at: JsonLines(f"{at}/other/lines.txt"),
    "glob of one character": lambda at: JsonLines(f"{at}/other/line?.txt"),
    "glob of brackets": lambda at: JsonLines(f"{at}/other/[kl]ines.txt"),
    "name with brackets": lambda at: TextFiles(f"{at}/x[1]", held_out=0.0),
    "hidden glob": lambda at: TextFiles(f"{at}/a/.h*", held_out=0.0),
    "folders anywhere": lambda at: TextFiles(f"{at}/**/b/*.txt", separator="\n\n"),
    "all below": lambda at: TextFiles(f"{at}/a/**", separator="\n\n"),
    "glob of another suffix": lambda at: JsonLines(f"{at}/other/*"),
    "glob beside a folder": lambda at: TextFiles(f"{at}/a/*"),
    "CSV": lambda at: Csv(f"{at}/rows.csv"),
    "Parquet": lambda at: Parquet(f"{at}/rows.parquet"),
    "folder of Parquet": lambda at: Parquet(at),
    "conversations": lambda at: Conversations(f"{at}/chats.jsonl", held_out=0.0),
    "pairs": lambda at: Preferences(f"{at}/pairs.jsonl", held_out=0.0),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_documents_are_those_of_the_same_files_on_a_disk(
    kind: str, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small the ranges of lines and the requests are."""
    monkeypatch.setattr(records, "RANGE_BYTES", 100)
    monkeypatch.setattr(records, "LOOK_BYTES", 30)
    monkeypatch.setattr("jaxtrain.files.objects.PIECE", 90)
    monkeypatch.setattr("jaxtrain.files.fetched.BUFFER", 64)
    for split in ("train", "held_out"):
        given, stored = (SOURCES[kind](at) for at in (corpus, ADDRESS))
        expected = [d._replace(place=None) for d in documents(given, split)]
        assert [d._replace(place=None) for d in documents(stored, split)] == expected
        assert expected or split == "held_out"
        names = [piece.path.removeprefix(corpus) for piece in given.pieces(split)]
        assert [piece.path.removeprefix(ADDRESS) for piece in stored.pieces(split)] == names
    assert not cache_contents().entries


def test_lines_are_read_in_few_requests(corpus: str, store: type[ObjectStore]) -> None:
    """Of a file that is no longer than one: a list, its version before and after, its bytes."""
    kinds = requests_of(store)
    assert list(documents(JsonLines(f"{ADDRESS}/lines.jsonl"), "train"))
    assert kinds == ["ls", "info", "read", "info"]


def requests_of(store: type[ObjectStore]) -> list[str]:
    """Returns a list to which the kind of each request is added."""
    kinds: list[str] = []
    store.request = staticmethod(lambda kind, name: kinds.append(kind))
    return kinds


def test_places_are_addresses(corpus: str) -> None:
    (first, second, *_) = documents(JsonLines(f"{ADDRESS}/lines.jsonl", held_out=0.0), "train")
    assert first.place is not None and second.place is not None
    assert (first.place(), second.place()) == (
        f"{ADDRESS}/lines.jsonl:1",
        f"{ADDRESS}/lines.jsonl:2",
    )
    put_object("bucket/corpus/lines.jsonl", b'{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(ValueError, match=rf"^{ADDRESS}/lines.jsonl:2: no field 'text'"):
        list(documents(JsonLines(f"{ADDRESS}/lines.jsonl"), "train"))
    put_object("bucket/corpus/a/one.txt", b"a\xff")
    with pytest.raises(ValueError, match=rf"^{ADDRESS}/a/one.txt is not UTF-8 at byte 1 "):
        list(documents(TextFiles(f"{ADDRESS}/a/one.txt"), "train"))
    for name, data in (("rows.parquet", b"PAR1"), ("more/lines.jsonl.gz", b"no gzip")):
        put_object(f"bucket/corpus/{name}", data)
        source = (Parquet if "parquet" in name else JsonLines)(f"{ADDRESS}/{name}")
        with pytest.raises(ValueError, match=rf"^{ADDRESS}/{name} cannot be read") as damaged:
            list(documents(source, "train"))
        assert not isinstance(damaged.value, StoreFailed)


def test_records_that_are_left_out_cost_no_request(corpus: str, store: type[ObjectStore]) -> None:
    """The place of the first alone is looked for, by one more opening."""
    bad = b'{"txt": "b"}\n' * 50
    put_object("bucket/corpus/lines.jsonl", b'{"text": "a"}\n' + bad)
    kinds = requests_of(store)
    source = JsonLines(f"{ADDRESS}/lines.jsonl", on_bad="skip", held_out=0.0)
    assert [d.text for d in documents(source, "train")] == ["a"]
    assert len(kinds) == len(["ls", *2 * ["info", "read", "info"]])


def test_what_matches_no_file_is_named(corpus: str) -> None:
    for pattern in ("s3://bucket/corpus/*.zip", "s3://bucket/corpus/lin", "s3://none"):
        with pytest.raises(ValueError, match=f"no file matches '{pattern}'".replace("*", r"\*")):
            TextFiles(pattern).pieces("train")
    with pytest.raises(ValueError, match="no file matches 's3://bucket/corpus/a'"):
        Parquet("s3://bucket/corpus/a").pieces("train")
    with pytest.raises(ValueError, match=r"path='s3://' is no address"):
        TextFiles("s3://").pieces("train")


def test_a_corpus_is_another_one_once_a_file_is_written_again(corpus: str) -> None:
    source = JsonLines(f"{ADDRESS}/lines.jsonl")
    before = fingerprint(source, "train")
    assert fingerprint(source, "train") == before
    put_object("bucket/corpus/lines.jsonl", ObjectStore.files["bucket/corpus/lines.jsonl"][::-1])
    assert fingerprint(source, "train") != before


def test_a_file_that_was_written_since_it_was_listed_is_refused_at_once(
    corpus: str, store: type[ObjectStore]
) -> None:
    """Also of a format that it has not any more, and before a byte is read."""
    for kind, name in (
        ("CSV", "rows.csv"),
        ("Parquet", "rows.parquet"),
        ("gzip", "more/lines.jsonl.gz"),
    ):
        source = SOURCES[kind](ADDRESS)
        (piece,) = source.pieces("train")
        put_object(f"bucket/corpus/{name}", b"\xff")
        store.reads.clear()
        with pytest.raises(StoreFailed, match=f"{ADDRESS}/{name} cannot be read: .*written again"):
            list(source.read(piece, "train"))
        assert not store.reads


def test_what_is_of_two_versions_is_no_bad_record(corpus: str, store: type[ObjectStore]) -> None:
    def written(kind: str, path: str) -> None:
        if kind == "read":
            put_object(path, b'{"txt": 1}')

    source = JsonLines(f"{ADDRESS}/lines.jsonl")
    (piece,) = source.pieces("train")
    store.request = staticmethod(written)
    with pytest.raises(StoreFailed, match="written again"):
        list(source.read(piece, "train"))


@pytest.mark.parametrize("where", ["store", "disk"])
def test_a_held_out_file_that_grows_is_not_trained_on(
    where: str, corpus: str, store: type[ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks at it."""
    at = ADDRESS if where == "store" else corpus
    source = JsonLines(f"{at}/*.jsonl", held_out_patterns=(f"{at}/lines.jsonl", f"{at}/l*"))
    expected = [piece.path for piece in source.pieces("train")]
    assert f"{at}/lines.jsonl" not in expected and expected

    def grows(kind: str, name: str) -> None:
        put_object("bucket/corpus/lines.jsonl", store.files["bucket/corpus/lines.jsonl"] + b"\n")

    def grown(path: str, *, name: str) -> Any:
        with open(f"{corpus}/lines.jsonl", "ab") as file:
            file.write(b"\n")
        return piece_of(path, name=name)

    store.request = staticmethod(grows)
    monkeypatch.setattr("jaxtrain.sources.files.piece_of", grown)
    assert [piece.path for piece in source.pieces("train")] == expected


def test_a_file_of_two_patterns_is_read_once(corpus: str) -> None:
    source = JsonLines((f"{ADDRESS}/lines.jsonl", f"{ADDRESS}/l*.jsonl"))
    assert [piece.path for piece in source.pieces("train")] == [f"{ADDRESS}/lines.jsonl"]


def test_marks_of_empty_folders_are_no_files(corpus: str, store: type[ObjectStore]) -> None:
    """As consoles of stores write them; a name that no path has is refused."""
    put_object("bucket/corpus/a/", b"")
    put_object("bucket/corpus/a/new/", b"")
    texts = [document.text for document in documents(SOURCES["folder"](ADDRESS), "train")]
    assert texts == [document.text for document in documents(SOURCES["folder"](corpus), "train")]
    put_object("bucket/corpus/a//x.txt", b"x")
    with pytest.raises(StoreFailed, match=r"a name with two slashes is not read; rename it.*a//x"):
        SOURCES["folder"](ADDRESS).pieces("train")


def test_a_store_that_fails_in_another_process_is_told_here() -> None:
    for error in (ConnectionError("no route"), PermissionError("no")):
        failed = unreadable("s3://bucket/x", error)
        again = pickle.loads(pickle.dumps(failed))
        assert (type(again), str(again)) == (StoreFailed, str(failed))
        assert again.refusal == failed.refusal == isinstance(error, PermissionError)


def test_conversations_that_are_left_out_cost_no_request(
    store: type[ObjectStore], tmp_path: Path
) -> None:
    """The place of the first alone is looked for."""
    roles = ["user", "assistant", "assistant"]
    bad = json.dumps({"messages": [{"role": role, "content": "a"} for role in roles]})
    good = json.dumps({"messages": [{"role": role, "content": "a"} for role in roles[:2]]})
    put_object("bucket/chats.jsonl", "\n".join([good, *[bad] * 20]).encode())
    template = tmp_path / "template.jinja"
    template.write_text(STRICT)
    (tmp_path / "tokenizer.json").write_text(
        ByteTokenizer().published().bare().beginning_with(None)
    )
    tokenizer = TokenizerFile(str(tmp_path), chat_template=str(template))
    vocabulary = tokenizer.build(lambda: iter(()), corpus="", cache_dir=tmp_path)
    source = Conversations("s3://bucket/chats.jsonl", on_bad="skip", held_out=0.0)
    kinds = requests_of(store)
    assert len(tokenize(source, vocabulary, tmp_path / "x.tokens").prompts) == 1
    assert kinds.count("read") == 2


STRICT = (
    "{% for m in messages %}{% if loop.index0 == 2 %}{{ raise_exception('three') }}{% endif %}"
    "<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("occasion", [1, 2], ids=["before its bytes", "at the second piece"])
def test_a_file_that_is_written_while_it_is_read_is_refused(
    occasion: int, corpus: str, store: type[ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxtrain.files.fetched.BUFFER", 1000)
    name, reads = "bucket/corpus/lines.jsonl", []

    def written(kind: str, path: str) -> None:
        if kind == "read" and path == name:
            reads.append(path)
            if len(reads) == occasion:
                put_object(name, store.files[name].replace(b"x", b"y"))

    store.request = staticmethod(written)
    with pytest.raises(StoreFailed, match=f"{ADDRESS}/lines.jsonl cannot be read: .*written again"):
        list(documents(JsonLines(f"{ADDRESS}/lines.jsonl"), "train"))


@pytest.mark.parametrize("answers", [0, 1], ids=["at once", "after its size"])
@pytest.mark.parametrize("kind", ["ranges of lines", "gzip", "CSV", "Parquet", "file"])
def test_a_store_that_does_not_answer_is_told(
    kind: str, answers: int, corpus: str, store: type[ObjectStore]
) -> None:
    source = SOURCES[kind](ADDRESS)
    (piece,) = source.pieces("train")
    asked: list[str] = []

    def no_answer(kind: str, name: str) -> None:
        asked.append(name)
        if len(asked) > answers:
            raise ConnectionError("no route")

    store.request = staticmethod(no_answer)
    with pytest.raises(StoreFailed, match=f"{piece.path} cannot be read: .*no route; try again"):
        list(source.read(piece, "train"))
    asked += ["", ""]
    with pytest.raises(StoreFailed, match=r"s3://bucket/corpus/.* cannot be read: .*no route"):
        source.pieces("train")


def experiment(source: Any) -> jaxtrain.Experiment:
    block = jaxtrain.BlockConfig(jaxtrain.AttentionConfig(heads=2), jaxtrain.MlpConfig(hidden=8))
    return jaxtrain.Experiment(
        model=jaxtrain.DecoderConfig(vocab=257, embed=4, period=(block,), layers=1),
        data=jaxtrain.TextData(source, ByteTokenizer(), seq=16),
        optimizer=jaxtrain.AdamW(1e-2),
        steps=2,
        batch=8,
        checkpoints=None,
    )


def losses(source: Any, cache: Path) -> list[float]:
    result = jaxtrain.train(experiment(source), "cpu_1", cache_dir=cache, stream=io.StringIO())
    return [line["loss"] for line in result.history]


def test_a_run_reads_it_once_and_lists_it_then(
    corpus: str, store: type[ObjectStore], tmp_path: Path
) -> None:
    """Later starts look at the first document of each split."""
    expected = losses(JsonLines(f"{corpus}/lines.jsonl"), tmp_path / "1")
    stored = JsonLines(f"{ADDRESS}/lines.jsonl")
    assert jaxtrain.check(experiment(stored), "cpu_1") is not None
    assert losses(stored, tmp_path / "2") == expected
    kinds = requests_of(store)
    assert losses(stored, tmp_path / "2") == expected
    assert kinds.count("read") == len(["train", "held_out"]) and len(kinds) <= 12


def test_token_files_are_fetched_once(
    corpus: str, store: type[ObjectStore], tmp_path: Path
) -> None:
    out = tmp_path / "x.tokens"
    tokenize(JsonLines(f"{corpus}/lines.jsonl"), ByteTokenizer(), out)
    put_object("bucket/tokens/x.tokens", out.read_bytes())
    put_object("bucket/tokens/notes.txt", b"")
    expected = losses(TokenFiles(str(out)), tmp_path / "1")
    stored = TokenFiles("s3://bucket/tokens")
    assert losses(stored, tmp_path / "1") == expected
    (entry,) = cache_contents().entries
    assert entry.about == "s3://bucket/tokens/x.tokens"
    assert entry.path.read_bytes() == out.read_bytes()
    kinds = requests_of(store)
    assert losses(stored, tmp_path / "1") == expected and "read" not in kinds

    def no_answer(kind: str, name: str) -> None:
        if kind == "read":
            raise ConnectionError("no route")

    store.request = staticmethod(no_answer)
    empty_cache()
    with pytest.raises(
        StoreFailed, match=r"s3://bucket/tokens/x.tokens cannot be read: .*no route"
    ):
        losses(stored, tmp_path / "1")


def test_a_check_says_that_the_store_does_not_answer(store: type[ObjectStore]) -> None:
    """Not that data are missing, for another start may find them."""

    def no_answer(kind: str, name: str) -> None:
        raise ConnectionError("no route")

    store.request = staticmethod(no_answer)
    with pytest.raises(StoreFailed, match=f"{ADDRESS} cannot be read: .*no route; try again"):
        jaxtrain.check(experiment(JsonLines(ADDRESS)), "cpu_1")


def test_a_file_read_by_ranges_is_a_file(
    store: type[ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxtrain.files.objects.PIECE", 7)
    data = bytes(range(100))
    put_object("bucket/x", data)
    address = given_address("path", "s3://bucket/x")
    with io.BufferedReader(RangeReader(address, 100), 16) as stored, io.BytesIO(data) as given:
        for act in (
            lambda file: file.read(5),
            lambda file: file.read(40),
            lambda file: file.seek(-60, os.SEEK_END),
            lambda file: file.read(3),
            lambda file: file.seek(20, os.SEEK_CUR),
            lambda file: file.readline(),
            lambda file: file.seek(50),
            lambda file: file.read(2),
            lambda file: file.read(),
            lambda file: file.read(),
            lambda file: file.read(1),
            lambda file: file.tell(),
            lambda file: file.seek(200),
            lambda file: file.read(),
            lambda file: file.seek(90),
            lambda file: file.read(),
        ):
            assert act(stored) == act(given)


def test_a_check_names_the_corpus_that_is_not_there(store: type[ObjectStore]) -> None:
    with pytest.raises(ValueError, match="no file matches 's3://bucket/none'"):
        jaxtrain.check(experiment(JsonLines("s3://bucket/none")), "cpu_1")
