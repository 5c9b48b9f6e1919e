"""Pairs of answers in files: texts and messages; bad ones refused with their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import turns

from jaxtrain.data import Document, Preferences
from jaxtrain.sources import documents

USER, GOOD, BAD = (
    {"role": r, "content": c} for r, c in zip("uaa", ("q", "yes", "no"), strict=True)
)
USER["role"], GOOD["role"], BAD["role"] = "user", "assistant", "assistant"


def write(folder: Path, records: list[Any]) -> str:
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
    return str(path)


def only(folder: Path, record: Any, **fields: Any) -> Document:
    source = Preferences(write(folder, [record]), held_out=0.0, **fields)
    (document,) = documents(source, "train")
    return document


def test_texts(tmp_path: Path) -> None:
    pair = only(tmp_path, {"prompt": "q", "chosen": "yes", "rejected": "no"})
    assert [(d.prompt, d.text, d.conversation) for d in pair.answers] == [
        ("q", "yes", None),
        ("q", "no", None),
    ]
    begin = only(tmp_path, {"chosen": "q yes", "rejected": "q no"}, prompt_field=None)
    assert [(d.prompt, d.text) for d in begin.answers] == [("", "q yes"), ("", "q no")]
    named = {"a": {"b": "q"}, "good": "[1]", "bad": '[{"x": 1}]'}
    fields = {"prompt_field": "a.b", "chosen_field": "good", "rejected_field": "bad"}
    texts = only(tmp_path, named, **fields)
    assert [d.text for d in texts.answers] == ["[1]", '[{"x": 1}]'], "JSON, but no messages"


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        ([USER], [GOOD], [BAD]),
        ("q", [GOOD], [BAD]),
        ("q", [USER, GOOD], [USER, BAD]),
        ([USER], "yes", "no"),
        (json.dumps([USER]), json.dumps([GOOD]), json.dumps([BAD])),
        ([USER], [USER, GOOD], [USER, BAD]),
        ([USER], [USER, GOOD], [BAD]),
    ],
    ids=[
        *("messages", "text", "answers with a text", "texts of answers", "JSON"),
        *("answers with messages", "one with it"),
    ],
)
def test_messages(tmp_path: Path, prompt: Any, chosen: Any, rejected: Any) -> None:
    pair = only(tmp_path, {"prompt": prompt, "chosen": chosen, "rejected": rejected})
    found = [d.conversation for d in pair.answers]
    assert [c.messages for c in found if c] == [[USER, GOOD], [USER, BAD]]
    assert [c.learn for c in found if c] == ["last", "last"]
    whole = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
    begin = only(tmp_path, whole, prompt_field=None, learn="all")
    assert [d.conversation.learn for d in begin.answers if d.conversation] == ["all", "all"]


SYSTEM = {"role": "system", "content": "be kind"}


@pytest.mark.parametrize("begun", [[], [USER], [SYSTEM, USER]], ids=str)
def test_a_prompt_stands_once_with_its_system(tmp_path: Path, begun: Any) -> None:
    pair = {"prompt": [SYSTEM, USER], "chosen": [*begun, GOOD], "rejected": [*begun, BAD]}
    found = [d.conversation for d in only(tmp_path, pair).answers]
    assert [c.messages for c in found if c] == [[SYSTEM, USER, GOOD], [SYSTEM, USER, BAD]]


def test_a_prompt_may_begin_with_the_assistant(tmp_path: Path) -> None:
    hello = {"role": "assistant", "content": "hi"}
    for begun in ([], [hello, USER]):
        pair = {"prompt": [hello, USER], "chosen": [*begun, GOOD], "rejected": [*begun, BAD]}
        found = [d.conversation for d in only(tmp_path, pair).answers]
        assert [c.messages for c in found if c] == [[hello, USER, GOOD], [hello, USER, BAD]]


def test_equal_last_turns_are_refused_where_they_alone_are_compared(tmp_path: Path) -> None:
    more = [USER, GOOD]
    pair = {"chosen": [USER, GOOD, *more], "rejected": [USER, BAD, *more]}
    with pytest.raises(ValueError, match="the last turns are the same; use learn='all'"):
        only(tmp_path, pair, prompt_field=None)
    assert only(tmp_path, pair, prompt_field=None, learn="all").rejected


def test_texts_with_the_prompt_twice_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun = {"prompt": "q", "chosen": "q yes", "rejected": "q no"}
    list(documents(Preferences(write(tmp_path, [begun] * 2), held_out=0.0), "train"))
    assert "answers begin with 'prompt', which then stands twice" in caplog.text
    caplog.clear()
    list(documents(Preferences(write(tmp_path, [begun, PAIR]), held_out=0.0), "train"))
    assert not caplog.text


def test_parquet_is_the_same(tmp_path: Path) -> None:
    records: list[Any] = [
        {"prompt": [USER], "chosen": [GOOD | {"name": "a"}], "rejected": [BAD]},
        {"prompt": [USER, *turns("q", "a", "b")[1:]], "chosen": [GOOD], "rejected": [BAD]},
    ]
    sources = [Preferences(write(tmp_path, records), held_out=0.0)]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "pairs.parquet")
    texts = [{k: json.dumps(v) for k, v in record.items()} for record in records]
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "texts.parquet")
    sources += [
        Preferences(str(tmp_path / f"{n}.parquet"), held_out=0.0) for n in ("pairs", "texts")
    ]
    read = [
        [[d._replace(place=None, rejected=None) for d in pair.answers] for pair in every]
        for every in (documents(source, "train") for source in sources)
    ]
    assert read[0] == read[1] == read[2] and len(read[0]) == 2
    pq.write_table(pa.Table.from_pylist([{"prompt": 1, "chosen": "a"}]), tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match="'prompt' is neither a text nor a list; no column 'rej"):
        list(documents(Preferences(str(tmp_path / "bad.parquet"), held_out=0.0), "train"))


PAIR = {"prompt": "q", "chosen": "yes", "rejected": "no"}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (PAIR | {"rejected": "yes"}, "both answers are the same"),
        (PAIR | {"rejected": ""}, "'rejected' is empty"),
        (PAIR | {"chosen": []}, "'chosen' is empty"),
        (PAIR | {"chosen": None}, "'chosen' is null; give a text, or a list of messages"),
        (PAIR | {"chosen": "\ud800"}, "half a surrogate"),
        ({"prompt": "q", "chosen": "a"}, "no field 'rejected'; .* name yours by rejected_field"),
        ({"chosen": "a", "rejected": "b"}, "name yours by prompt_field, or use prompt_field=None"),
        (PAIR | {"chosen": [USER, GOOD]}, "one answer is a text and the other has messages"),
        (
            PAIR | {"chosen": [USER | {"content": "?"}, GOOD], "rejected": [BAD]},
            "'chosen' begins with a message of the user, and not with the prompt",
        ),
        (PAIR | {"chosen": [{"content": "x"}], "rejected": [BAD]}, "no role"),
        (
            PAIR | {"chosen": [GOOD | {"content": ""}], "rejected": [BAD]},
            "'chosen' ends with an empty message",
        ),
    ],
)
def test_a_pair_that_is_none_is_refused_or_left_out(
    tmp_path: Path, record: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, [PAIR, record])
    with pytest.raises(ValueError, match=f"pairs.jsonl:2: .*{says}"):
        list(documents(Preferences(path, held_out=0.0), "train"))
    (pair,) = documents(Preferences(path, held_out=0.0, on_bad="skip"), "train")
    assert pair.text == "yes" and "1 records are left out" in caplog.text


def test_pairs_of_a_prompt_are_on_one_side(tmp_path: Path) -> None:
    records = [PAIR | {"prompt": f"q{i % 40}", "chosen": f"yes {i}"} for i in range(120)]
    source = Preferences(write(tmp_path, records), held_out=0.3)
    sides = [[d.prompt for d in documents(source, split)] for split in ("train", "held_out")]
    assert len(sides[0]) + len(sides[1]) == 120
    assert all(sides) and not {*sides[0]} & {*sides[1]}
    begin = Preferences(write(tmp_path, records), held_out=0.3, prompt_field=None)
    assert 0 < sum(1 for _ in documents(begin, "held_out")) < 120
    answers = [{"chosen": [GOOD | {"content": str(i)}], "rejected": [BAD]} for i in range(60)]
    alone = Preferences(write(tmp_path, answers), held_out=0.3, prompt_field=None)
    assert 0 < sum(1 for _ in documents(alone, "held_out")) < 60


def test_answers_to_other_prompts_are_refused(tmp_path: Path) -> None:
    pair = {"chosen": [USER, GOOD], "rejected": [USER | {"content": "?"}, BAD]}
    with pytest.raises(ValueError, match="the answers begin with other prompts"):
        only(tmp_path, pair, prompt_field=None)


def test_which_turns_are_compared_is_checked() -> None:
    with pytest.raises(ValueError, match="learn='first'; use all or last"):
        Preferences("a.jsonl", learn="first")
