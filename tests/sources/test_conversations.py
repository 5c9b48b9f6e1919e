"""Conversations in files: read, masked, packed whole; bad ones refused with their place."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chats import CONVERSATIONS, turns, vocabulary, write_folder

from jaxtrain.data import (
    ByteTokenizer,
    Conversations,
    Document,
    TextData,
    TextFiles,
    TokenFiles,
    TokenizerFile,
    tokenize,
)
from jaxtrain.data.token_file import open_token_file
from jaxtrain.sources import documents
from jaxtrain.tokenizers.chat import ChatEncoder, Conversation

CALL = {"function": {"name": "sum", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "sum"}}]
CHATS = [
    *CONVERSATIONS.values(),
    [*turns("q"), {"role": "assistant", "content": "", "tool_calls": [CALL]}],
]


def write_jsonl(folder: Path, records: list[Any], name: str = "a.jsonl") -> str:
    lines = (json.dumps(record) for record in records)
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder / name)


def test_json_lines_and_parquet_are_the_same_conversations(tmp_path: Path) -> None:
    """Parquet gives every message of a file the same keys, null where a message has none."""
    records = [{"messages": messages, "tools": TOOLS} for messages in CHATS]
    path = write_jsonl(tmp_path, records)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    texts = [{k: json.dumps(v) for k, v in record.items()} for record in records]
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "texts.parquet")
    read = [
        [
            document.conversation
            for document in documents(Conversations(p, tools_field="tools", held_out=0.0), "train")
        ]
        for p in (path, str(tmp_path / "a.parquet"), str(tmp_path / "texts.parquet"))
    ]
    assert read[0] == [Conversation(messages, TOOLS, "all") for messages in CHATS]
    assert read[1] == read[0] and read[2] == read[0]


def test_copies_are_on_one_side(tmp_path: Path) -> None:
    records = [{"messages": turns(f"q{i % 40}", "a")} for i in range(80)]
    source = Conversations(write_jsonl(tmp_path, records), held_out=0.3)
    sides = [{d.prompt for d in documents(source, split)} for split in ("train", "held_out")]
    assert all(sides) and not sides[0] & sides[1] and len(sides[0] | sides[1]) == 40


def test_rows_hold_what_the_template_makes_of_each(tmp_path: Path) -> None:
    """Whole, once, with the loss on the assistant's tokens; also from a token file."""
    path = write_jsonl(tmp_path, [{"messages": messages} for messages in CHATS])
    tokenizer = TokenizerFile(str(write_folder(tmp_path / "t", "qwen 2.5")))
    source = Conversations(path, held_out=0.0)
    data = TextData(source, tokenizer, seq=160)
    dataset = data.open("train", seed=0, cache_dir=tmp_path)
    vocab = data.vocabulary(tmp_path)
    with ChatEncoder(vocab) as chat:
        encoded = [chat.encode(Conversation(messages)) for messages in CHATS]
    expected = sorted(
        (e.ids[:-1].tolist(), e.ids[1:].tolist(), e.learnt[1:].tolist()) for e in encoded
    )
    for opened in (dataset, _from_tokens(tmp_path, source, tokenizer)):
        batch = opened.rows(np.arange(len(opened)))
        read = [
            tuple(batch[name][row][inside].tolist() for name in ("tokens", "targets", "weights"))
            for row, segments in enumerate(batch["segments"])
            for segment in range(1, segments.max() + 1)
            for inside in (segments == segment,)
        ]
        assert sorted(read) == expected
        assert 0 < len(opened) < len(CHATS)
    assert not data.has_text


def _from_tokens(folder: Path, source: Conversations, tokenizer: TokenizerFile) -> Any:
    data = TextData(source, tokenizer, seq=160)
    tokenize(source, data.vocabulary(folder), folder / "x.tokens", processes=2, shard_bytes=64)
    files = TokenFiles(str(folder / "x.tokens"), held_out=0.0)
    return TextData(files, tokenizer, seq=160).open("train", seed=0, cache_dir=folder)


def test_another_template_or_rule_tokenises_again(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, [{"messages": CONVERSATIONS["three answers"]}])
    folder = write_folder(tmp_path / "t", "qwen 2.5")

    def learnt(learn: str = "all") -> tuple[int, int]:
        source = Conversations(path, held_out=0.0, learn=learn)
        data = TextData(source, TokenizerFile(str(folder)), seq=160)
        batch = data.open("train", seed=0, cache_dir=tmp_path).rows(np.arange(1))
        return int(batch["weights"].sum()), int((batch["segments"] > 0).sum())

    first, last = learnt(), learnt("last")
    assert last[0] < first[0] and last[1] == first[1]
    write_folder(tmp_path / "t", "gemma")
    assert learnt()[1] != first[1]


def test_a_file_with_a_mask_of_another_length_is_damaged(tmp_path: Path) -> None:
    from jaxtrain.data.token_file import FORMAT
    from jaxtrain.files.array_file import DamagedFile, whole, write_arrays

    parts = {
        "tokens": np.zeros(3, np.uint16),
        "offsets": np.array([0, 3]),
        "prompts": np.array([0]),
        "learnt": np.zeros(2, np.uint8),
    }
    arrays = {name: whole(part) for name, part in parts.items()}
    meta = {"format": FORMAT, "vocab": 9, "tokenizer": ""}
    write_arrays(tmp_path / "x", kind="tokens", meta=meta, arrays=arrays)
    with pytest.raises(DamagedFile, match="do not add up"):
        open_token_file(tmp_path / "x")


BAD = {
    "no messages": ({"chat": []}, r"a.jsonl:2: no field 'messages'; there is 'chat'"),
    "a text": ({"messages": "hello"}, r"a.jsonl:2: messages are a list of one or more.* a text"),
    "an empty list": ({"messages": []}, r"a.jsonl:2: .*these are an empty list"),
    "a message that is none": ({"messages": ["x"]}, r"a.jsonl:2: message 0 is a text"),
    "no role": ({"messages": [{"content": "x"}]}, r"message 0 has 'content', and no role"),
    "a number": ({"messages": [{"role": "assistant", "content": 3}]}, "of message 0 is a number"),
    "nobody answers": ({"messages": turns("x")}, r"a.jsonl:2: no message of the assistant"),
    "half a surrogate": (
        {"messages": [{"role": "assistant", "content": "\ud800"}]},
        "message 0 has half a surrogate",
    ),
    "tools": ({"messages": turns("a", "b"), "tools": [1]}, "a list of objects, these are a list"),
    "tools that are no JSON": (
        {"messages": turns("a", "b"), "tools": "{bad"},
        r"a.jsonl:2: tools are a text that is not JSON",
    ),
    "another format": (
        {"messages": [{"from": "human", "value": "x"}]},
        r"message 0 has 'from', 'value', and no role; give user",
    ),
    "a role that is none": ({"messages": [{"role": 1}]}, "message 0 has a number as role"),
    "another name of the assistant": (
        {"messages": [{"role": "model", "content": "x"}]},
        r"nothing in it would be learnt; roles are 'model'",
    ),
    "a weight": (
        {"messages": [*turns("a"), {"role": "assistant", "content": "b", "weight": 2}]},
        r"weight \[2\]; give 0 or 1",
    ),
    "no weight": (
        {"messages": [*turns("a"), {"role": "assistant", "content": "b", "weight": 0}]},
        "each message of the assistant has weight 0",
    ),
    "another role": (
        {"messages": turns("a", "b", system="s")},
        r"a.jsonl:2: the chat template refuses it: roles are user",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_conversations_are_named_by_file_and_line(tmp_path: Path, case: str) -> None:
    record, reason = BAD[case]
    path = write_jsonl(tmp_path, [{"messages": turns("a", "b")}, record])
    tokenizer = TokenizerFile(str(write_folder(tmp_path / "t", "mistral")))
    source = Conversations(path, tools_field="tools", held_out=0.0)
    with pytest.raises(ValueError, match=reason):
        TextData(source, tokenizer, seq=16).open("train", seed=0, cache_dir=tmp_path)


def test_bad_rows_of_parquet_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"messages": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"'messages' is no list; the file has messages \(int64\)"):
        list(documents(Conversations(str(tmp_path / "a.parquet"), held_out=0.0), "train"))
    rows = [{"messages": turns("a", "b")}, {"messages": turns("a")}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet: row 1: no message of the assistant"):
        list(documents(Conversations(str(tmp_path / "a.parquet"), held_out=0.0), "train"))


def test_a_tokenizer_without_templates_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"need a chat template.*use TokenizerFile"):
        TextData(Conversations("a.jsonl"), ByteTokenizer())
    with pytest.raises(ValueError, match="use all or last"):
        Conversations("a.jsonl", learn="first")
    with pytest.raises(ValueError, match=r"packing='whole' is no way to fill rows; use Whole"):
        TextData(packing="whole")  # type: ignore


def test_a_field_of_tools_that_no_line_has_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path, [{"messages": turns("a", "b"), "tools": TOOLS}])
    for name, told in (("tols", True), ("tools", False)):
        caplog.clear()
        list(documents(Conversations(path, tools_field=name, held_out=0.0), "train"))
        assert ("no conversation has tools in 'tols'" in caplog.text) == told


def test_a_turn_of_weight_0_is_not_learnt(tmp_path: Path) -> None:
    messages = turns("a", "first", "b", "second")
    messages[1]["weight"] = 0
    with ChatEncoder(vocabulary("qwen 2.5")) as chat:
        weighted = chat.encode(Conversation(messages))
        last = chat.encode(Conversation(turns("a", "first", "b", "second"), learn="last"))
    assert weighted.learnt.tolist() == last.learnt.tolist()
    assert weighted.ids.tolist() == last.ids.tolist()


def test_check_tries_the_template(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, [{"messages": turns("a", "b")}])
    folder = write_folder(tmp_path / "t", "gemma").parent

    def lacking(source: Any = Conversations(path)) -> list[str]:  # noqa: B008
        return TextData(source, TokenizerFile(str(folder))).absent(("train",))

    assert lacking() == []
    (folder / "chat_template.jinja").write_text("{% if %}")
    assert len(lacking()) == 1 and "chat_template.jinja cannot be used: line 1" in lacking()[0]
    (folder / "chat_template.jinja").unlink()
    assert len(lacking()) == 1 and "no chat template" in lacking()[0]
    (folder / "tokenizer.json").unlink()
    assert "there is no tokenizer" in lacking()[0]


def test_token_files_bring_their_template_and_bos(tmp_path: Path) -> None:
    """What `jaxtrain tokenize` writes beside them is the same tokenizer."""
    write_folder(tmp_path / "t", "gemma")
    for number, options in enumerate(({}, {"add_bos": True}, {"add_eos": False})):
        tokenizer = TokenizerFile(str(tmp_path / "t"), **options)  # type: ignore
        vocab = tokenizer.build(lambda: iter(()), corpus="", cache_dir=tmp_path)
        out = tmp_path / f"out{number}"
        out.mkdir()
        again = eval(vocab.save(out)).build(lambda: iter(()), corpus="", cache_dir=tmp_path)
        assert (again.key, again.chat, again.bos) == (vocab.key, vocab.chat, vocab.bos)


def test_tokens_of_another_template_or_rule_are_not_taken(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, [{"messages": turns("a", "b")}])
    out = tmp_path / "x.tokens"

    def written(family: str, learn: str = "all") -> None:
        tokenizer = TokenizerFile(str(write_folder(tmp_path / "t", family)), eos="</s>")
        source = Conversations(path, held_out=0.0, learn=learn)
        tokenize(source, TextData(source, tokenizer).vocabulary(tmp_path), out)

    written("gemma")
    written("gemma")
    for family, learn in (("qwen 2.5", "all"), ("gemma", "last")):
        with pytest.raises(ValueError, match="was written by another chat template; delete"):
            written(family, learn)


def test_rows_that_are_none_of_json_are_named(tmp_path: Path) -> None:
    when = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [{"messages": [*turns("a"), {"role": "assistant", "content": "b", "when": when}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"row 0: message [01] has a value that is none of JSON"):
        list(documents(Conversations(str(tmp_path / "a.parquet"), held_out=0.0), "train"))
    path = write_jsonl(tmp_path, [{"messages": turns("a", "b"), "tools": [{"name": "\ud800"}]}])
    with pytest.raises(ValueError, match=r"a\.jsonl:1: tools has half a surrogate"):
        list(documents(Conversations(path, tools_field="tools", held_out=0.0), "train"))


def test_texts_and_conversations_of_one_source_are_each_encoded(tmp_path: Path) -> None:
    tokenizer = TokenizerFile(str(write_folder(tmp_path / "t", "gemma")), eos="</s>")
    vocab = tokenizer.build(lambda: iter(()), corpus="", cache_dir=tmp_path)
    (tmp_path / "a.txt").write_text("hello")

    @dataclass(frozen=True)
    class Both(TextFiles):
        def read(self, piece: Any, split: str) -> Any:
            yield Document("hello")
            yield Document("x", conversation=Conversation(turns("a", "b")))

    file = tokenize(Both(str(tmp_path / "a.txt"), held_out=0.0), vocab, tmp_path / "x")
    assert vocab.decode(file.tokens[: file.offsets[1]]) == "hello"
    assert "start_of_turn" in "".join(vocab.token(int(i)) for i in file.tokens[file.offsets[1] :])


def test_conversations_that_the_template_refuses_are_left_out_where_that_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    messages = [turns("a", "b"), turns("c", "d", system="s"), turns("e", "f")]
    path = write_jsonl(tmp_path, [{"messages": m} for m in messages])
    tokenizer = TokenizerFile(str(write_folder(tmp_path / "t", "mistral")))
    source = Conversations(path, held_out=0.0, on_bad="skip")
    data = TextData(source, tokenizer, seq=32)
    file = tokenize(source, data.vocabulary(tmp_path), tmp_path / "x")
    assert len(file.prompts) == 2
    assert "1 conversations are left out, the first: " in caplog.text
    assert "a.jsonl:2: the chat template refuses it: roles are" in caplog.text


def test_a_template_that_never_ends_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would leave out all that follow."""
    monkeypatch.setattr("jaxtrain.tokenizers.chat.CPU_SECONDS", 1)
    folder = write_folder(tmp_path / "t", "gemma").parent
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(loop)
    path = write_jsonl(tmp_path, [{"messages": turns("a", "b")}] * 3)
    source = Conversations(path, held_out=0.0, on_bad="skip")
    vocab = TextData(source, TokenizerFile(str(folder))).vocabulary(tmp_path)
    with pytest.raises(ValueError, match="for more than 1 s"):
        tokenize(source, vocab, tmp_path / "x")


def test_eos_behind_a_turn_of_weight_0_is_not_learnt() -> None:
    messages = turns("a", "b", "c", "d")
    messages[3]["weight"] = 0
    with ChatEncoder(vocabulary("by hand")) as chat:
        ids, learnt = chat.encode(Conversation(messages))
    assert ids[-1] == chat.vocabulary.eos and not learnt[-1] and learnt.any()
