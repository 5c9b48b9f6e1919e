"""Files as people have them: compressed, with byte order marks and other line ends, in folders,
with nulls and nested fields; and one file that is all there is."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import turns

from jaxtrain.data import Conversations, Csv, JsonLines, Parquet, TextData, TextFiles, TokenFiles
from jaxtrain.sources import documents

ROWS = [{"text": f'text {i} \u00e9\n"quoted"', "q": f"q{i}"} for i in range(20)]


def texts(source: Any, split: str = "train") -> list[tuple[str, str]]:
    return [document[:2] for document in documents(source, split)]


def lines(rows: list[Any] = ROWS) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def table(rows: list[dict[str, str]] = ROWS) -> bytes:
    cells = [[f'"{value.replace(chr(34), chr(34) * 2)}"' for value in row.values()] for row in rows]
    return "\r\n".join(["text,q", *map(",".join, cells)]).encode()


def zst(content: bytes) -> bytes:
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:
        stream.write(content)
    return out.getvalue().to_pybytes()


PACKERS = {"": bytes, ".gz": gzip.compress, ".zst": zst, ".bz2": bz2.compress}
OPTIONS: dict[str, Any] = {"prompt_field": "q", "held_out": 0.0}


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("suffix", PACKERS)
def test_a_compressed_file_is_what_it_was(tmp_path: Path, suffix: str, mark: bytes) -> None:
    expected = [(row["text"], row["q"]) for row in ROWS]
    for name, content, kind in (("a.jsonl", lines(), JsonLines), ("a.csv", table(), Csv)):
        path = tmp_path / f"{name}{suffix}"
        path.write_bytes(PACKERS[suffix](mark + content))
        assert texts(kind(str(path), **OPTIONS)) == expected, name
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACKERS[suffix](mark + b"one\n\ntwo"))
    assert texts(TextFiles(str(path), separator="\n\n", held_out=0.0)) == [("one", ""), ("two", "")]


def test_a_file_that_only_says_it_is_compressed_is_named(tmp_path: Path) -> None:
    for name, kind in (("a.jsonl.gz", JsonLines), ("a.txt.gz", TextFiles), ("a.csv.zst", Csv)):
        (tmp_path / name).write_bytes(b"plain text, and more of it")
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            texts(kind(str(tmp_path / name), held_out=0.0))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("separator", ["\n\n", "\r\n\r\n", "\n--\n"])
def test_a_separator_is_found_with_either_line_end(
    tmp_path: Path, separator: str, end: str
) -> None:
    between = separator.replace("\r", "").replace("\n", end)
    (tmp_path / "a.txt").write_bytes(f"one.{end}more{between}two".encode())
    found = texts(TextFiles(str(tmp_path / "a.txt"), separator=separator, held_out=0.0))
    if separator.startswith("\r") and end == "\n":
        assert len(found) == 1  # asked for outright
    else:
        assert found == [(f"one.{end}more", ""), ("two", "")]


def test_a_folder_stands_for_its_files_of_that_kind(tmp_path: Path) -> None:
    (tmp_path / "b" / ".hidden").mkdir(parents=True)
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[:1]))
    (tmp_path / "b" / "c.jsonl.gz").write_bytes(gzip.compress(lines(ROWS[1:2])))
    (tmp_path / "b" / ".hidden" / "d.jsonl").write_bytes(lines(ROWS[2:3]))
    (tmp_path / "b" / "e.csv").write_bytes(table(ROWS[3:4]))
    pq.write_table(pa.Table.from_pylist(ROWS[4:5]), tmp_path / "f.parquet")
    (tmp_path / "g.md").write_text("text of a page")
    folder = str(tmp_path)
    read = {kind: texts(kind(folder, **OPTIONS)) for kind in (JsonLines, Csv, Parquet)}
    assert [len(found) for found in read.values()] == [2, 1, 1]
    assert len(texts(TextFiles(str(tmp_path / "b"), held_out=0.0))) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no file matches"):
        texts(JsonLines(str(tmp_path / "empty")))
    with pytest.raises(ValueError, match="no file matches"):
        TokenFiles(folder).files("train")


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("text")
    assert texts(TextFiles("~/a.txt", held_out=0.0)) == [("text", "")]


def test_nested_fields_and_encoded_columns(tmp_path: Path) -> None:
    rows = [{"meta": {"text": f"t{i % 2}", "n": i}, "q": f"q{i % 2}"} for i in range(4)]
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    options = {**OPTIONS, "text_field": "meta.text"}
    expected = [(row["meta"]["text"], row["q"]) for row in rows]  # type: ignore
    assert texts(JsonLines(str(tmp_path / "a.jsonl"), **options)) == expected
    plain = pa.Table.from_pylist(rows)
    encoded = plain.set_column(1, "q", plain["q"].dictionary_encode())
    pq.write_table(encoded, tmp_path / "a.parquet")
    assert pa.types.is_dictionary(pq.read_schema(tmp_path / "a.parquet").field("q").type)
    assert texts(Parquet(str(tmp_path / "a.parquet"), **options)) == expected
    with pytest.raises(ValueError, match=r"no field 'meta\.x'; there is 'meta', 'q'"):
        texts(JsonLines(str(tmp_path / "a.jsonl"), text_field="meta.x", held_out=0.0))
    with pytest.raises(ValueError, match=r"no column 'meta\.x'; the file has meta \(struct"):
        texts(Parquet(str(tmp_path / "a.parquet"), text_field="meta.x", held_out=0.0))


BAD = [{"text": "a"}, {"text": None}, {"text": 3}, {"other": "b"}, {"text": "c"}]


def test_bad_records_are_left_out_where_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(BAD) + b"{no json\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2: null in 'text'; fill it, or leave .*skip"):
        texts(JsonLines(str(path), held_out=0.0))
    assert texts(JsonLines(str(path), held_out=0.0, on_bad="skip")) == [("a", ""), ("c", "")]
    assert "4 records are left out, the first" in caplog.text and ":2: null" in caplog.text
    caplog.clear()
    table = pa.Table.from_pylist([{"text": "a"}, {"text": None}])
    pq.write_table(table, tmp_path / "a.parquet")
    assert texts(Parquet(str(tmp_path / "a.parquet"), held_out=0.0, on_bad="skip")) == [("a", "")]
    assert caplog.text.count("1 records are left out") == 1
    path.write_bytes(lines([{"messages": turns("a")}, {"messages": turns("a", "b")}]))
    assert len(texts(Conversations(str(path), held_out=0.0, on_bad="skip"))) == 1
    with pytest.raises(ValueError, match="use refuse or skip"):
        JsonLines("a", on_bad="ignore")


ROWS_OF_CSV = {
    b"text,q\na,b,c\n": r":2: the row has another number of fields",
    b"text,q\na\n": r":2: the row has another number of fields",
    b'text,q\n"a\n': "no CSV: unexpected end of data",
    b"text,q\n\xff,b\n": "is not UTF-8 at byte 7",
    b"x,q\na,b\n": r":2: no field 'text'; there is 'x', 'q'",
}


@pytest.mark.parametrize("content", ROWS_OF_CSV)
def test_bad_rows_of_csv_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(ValueError, match=ROWS_OF_CSV[content]):
        texts(Csv(str(tmp_path / "a.csv"), held_out=0.0))


def test_one_file_is_told_how_to_hold_out(tmp_path: Path) -> None:
    """And the remedies work."""
    (tmp_path / "input.txt").write_text("\n\n".join(f"Speaker {i}: words" for i in range(60)))
    source = TextFiles(str(tmp_path / "input.txt"), held_out=0.1)
    with pytest.raises(ValueError, match=r"is one document, .*separator=.*or use evaluation=None"):
        TextData(source, seq=16).open("held_out", seed=0, cache_dir=tmp_path)
    cut = TextFiles(str(tmp_path / "input.txt"), separator="\n\n", held_out=0.1)
    for split in ("train", "held_out"):
        assert len(TextData(cut, seq=16).open(split, seed=0, cache_dir=tmp_path))
    whole = TextFiles(str(tmp_path / "input.txt"), held_out=0)
    assert len(TextData(whole, seq=16).open("train", seed=0, cache_dir=tmp_path))


def test_check_reads_the_first_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(BAD[3:]))
    lacking = TextData(JsonLines(str(tmp_path / "a.jsonl"))).absent(("train", "held_out"))
    assert len(lacking) == 1 and "no field 'text'; there is 'other'" in lacking[0]
