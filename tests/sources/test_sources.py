"""Sources: every document in exactly one split, and bad input named by file and place."""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxtrain.sources import (
    JsonLines,
    Parquet,
    StdlibSource,
    TextFiles,
    documents,
    fingerprint,
    records,
)

TEXTS = [f"document {i}: " + "x" * (i % 7) for i in range(200)]


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def source_of(kind: str, folder: Path, **options: Any) -> Any:
    """The same TEXTS behind each kind of source."""
    if kind == "text":
        for i, text in enumerate(TEXTS):
            (folder / f"{i:03d}.txt").write_text(text, encoding="utf-8")
        return TextFiles(str(folder / "*.txt"), **options)
    if kind == "separated":
        (folder / "all.txt").write_text("\n--\n".join(TEXTS), encoding="utf-8")
        return TextFiles(str(folder / "all.txt"), separator="\n--\n", **options)
    if kind == "jsonl":
        return JsonLines(write_jsonl(folder / "a.jsonl", [{"text": t} for t in TEXTS]), **options)
    pq.write_table(pa.table({"text": TEXTS}), folder / "a.parquet", row_group_size=30)
    return Parquet(str(folder / "a.parquet"), **options)


KINDS = ["text", "separated", "jsonl", "parquet"]


@pytest.mark.parametrize("held_out", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_each_document_is_in_one_split(kind: str, held_out: float, tmp_path: Path) -> None:
    source = source_of(kind, tmp_path, held_out=held_out)
    split = {s: [d.text for d in documents(source, s)] for s in ("train", "held_out")}
    assert sorted(split["train"] + split["held_out"]) == sorted(TEXTS)
    assert abs(len(split["held_out"]) - held_out * len(TEXTS)) <= 20


def test_all_kinds_hold_out_the_same_documents(tmp_path: Path) -> None:
    found = set()
    for kind in KINDS:
        folder = tmp_path / kind
        folder.mkdir()
        source = source_of(kind, folder, held_out=0.2)
        found.add(frozenset(d.text for d in documents(source, "held_out")))
    assert len(found) == 1 and found.pop()


def test_files_held_out_by_name_are_not_trained_on(tmp_path: Path) -> None:
    source_of("text", tmp_path)
    source = TextFiles(str(tmp_path / "*.txt"), held_out_patterns=str(tmp_path / "00*.txt"))
    assert [d.text for d in documents(source, "held_out")] == TEXTS[:10]
    assert [d.text for d in documents(source, "train")] == TEXTS[10:]


def test_json_lines_are_the_same_cut_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": t + "\u00e9" * (i % 5), "q": "Q" * i} for i, t in enumerate(TEXTS[:40])]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    source = JsonLines(path, prompt_field="q", held_out=0.0)
    expected = [(row["text"], row["q"]) for row in rows]
    for size in (1, 7, 64, 1 << 20):
        monkeypatch.setattr(records, "RANGE_BYTES", size)
        assert [d[:2] for d in documents(source, "train")] == expected, size
    assert len(source.pieces("train")) == 1


def test_parquet_reads_prompts(tmp_path: Path) -> None:
    pq.write_table(pa.table({"p": ["a", "b"], "t": ["x", "y"]}), tmp_path / "a.parquet")
    source = Parquet(str(tmp_path / "a.parquet"), text_field="t", prompt_field="p", held_out=0.0)
    assert [d[:2] for d in documents(source, "train")] == [("x", "a"), ("y", "b")]


def test_stdlib_is_split_by_file_without_tests_or_installed_packages() -> None:
    source = StdlibSource()
    names = {s: [p.name for p in source.pieces(s)] for s in ("train", "held_out")}
    together = names["train"] + names["held_out"]
    assert len(together) == len(set(together)) > 300
    assert 0.02 < len(names["held_out"]) / len(together) < 0.09
    assert not [n for n in together if {"test", "site-packages"} & set(n.split("/"))]
    root = Path(sysconfig.get_path("stdlib"))
    first = source.pieces("train")[0]
    text = next(source.read(first, "train")).text
    assert text == (root / first.name).read_bytes().decode("utf-8")
    assert names == {s: [p.name for p in source.pieces(s)] for s in ("train", "held_out")}


def test_stdlib_skips_what_is_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good.py").write_bytes(b"x = 1\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_x.py").write_bytes(b"assert x\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert [d.text for d in documents(StdlibSource(held_out=0.0), "train")] == ["x = 1\n"]
    with pytest.raises(ValueError, match=r"no \.py files for split 'held_out'"):
        StdlibSource(held_out=0.0).pieces("held_out")


def test_fingerprint_follows_every_change(tmp_path: Path) -> None:
    source = source_of("text", tmp_path)
    seen = [fingerprint(source, "train"), fingerprint(source, "held_out")]
    assert fingerprint(source, "train") == seen[0]
    os.utime(tmp_path / "000.txt", ns=(1, 1))
    seen.append(fingerprint(source, "train"))
    (tmp_path / "001.txt").write_text("longer than it was before", encoding="utf-8")
    seen.append(fingerprint(source, "train"))
    (tmp_path / "002.txt").unlink()
    seen.append(fingerprint(source, "train"))
    seen.append(fingerprint(TextFiles(source.patterns, held_out=0.2), "train"))
    assert len(set(seen)) == len(seen)


GOOD = b'{"text": "a"}\n\n{"text": "b"}\n'
BAD_LINES = [
    (b'{"text": "a\n', r"a\.jsonl:4: not JSON"),
    (b'{"body": "a"}\n', r"a\.jsonl:4: no field 'text'; there is 'body'"),
    (b'{"text": 3}\n', r"a\.jsonl:4: field 'text' is int"),
    (b"[1]\n", r"a\.jsonl:4: a line is an object, this one is list"),
    (b'{"text": "\\ud800"}\n', r"a\.jsonl:4: field 'text' has half a surrogate at 0"),
    (b'{"text": "\xff"}\n', r"a\.jsonl:4: not UTF-8 at byte 10 of the line \(invalid"),
]


@pytest.mark.parametrize("size", [9, records.RANGE_BYTES])
@pytest.mark.parametrize("line, message", BAD_LINES)
def test_a_bad_json_line_is_named(
    line: bytes, message: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "RANGE_BYTES", size)
    (tmp_path / "a.jsonl").write_bytes(GOOD + line)
    source = JsonLines(str(tmp_path / "a.jsonl"), held_out=0.0)
    with pytest.raises(ValueError, match=message):
        list(documents(source, "train"))


def test_an_undecodable_file_is_named_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\xffdef")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 at byte 3 \(0xff"):
        list(documents(TextFiles(str(tmp_path / "a.txt")), "train"))


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "no.parquet").write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"no\.parquet cannot be read as Parquet"):
        list(documents(Parquet(str(tmp_path / "no.parquet")), "train"))
    pq.write_table(pa.table({"n": [1]}), tmp_path / "n.parquet")
    source = Parquet(str(tmp_path / "n.parquet"), text_field="n", prompt_field="q")
    with pytest.raises(ValueError, match=r"'n' is no string; no column 'q'; the file has n \(int"):
        list(documents(source, "train"))
    pq.write_table(pa.table({"text": [["a", "b"]]}), tmp_path / "list.parquet")
    with pytest.raises(ValueError, match=r"'text' is no string; the file has text \(list<"):
        list(documents(Parquet(str(tmp_path / "list.parquet")), "train"))
    pq.write_table(pa.table({"text": ["a", None]}), tmp_path / "null.parquet")
    with pytest.raises(ValueError, match=r"row 1: null in 'text'"):
        list(documents(Parquet(str(tmp_path / "null.parquet")), "train"))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: TextFiles(("nowhere/*.txt", "gone.txt")).pieces("train"), "'gone.txt'"),
        (lambda: TextFiles(()), "patterns is empty"),
        (lambda: TextFiles("x", held_out=1.5), "held_out=1.5 is a fraction"),
        (lambda: StdlibSource(held_out=-1), "held_out=-1 is a fraction"),
        (lambda: StdlibSource().pieces("test"), "split='test' does not exist; use one of train"),
    ],
)
def test_bad_fields_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_all_files_held_out_is_refused(tmp_path: Path) -> None:
    source_of("text", tmp_path)
    pattern = str(tmp_path / "*.txt")
    with pytest.raises(ValueError, match="every file of patterns="):
        TextFiles(pattern, held_out_patterns=pattern).pieces("train")
