"""A source of conversations, in JSON Lines or Parquet."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtrain.sources.document import Document, Piece
from jaxtrain.sources.records import (
    PlaceOf,
    RecordFiles,
    json_object,
    line_ranges,
    lines_of,
    parquet_records,
)
from jaxtrain.tokenizers.chat import LEARN, Conversation, checked_messages, kind_of, refuse_no_json

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)

PARQUET = ".parquet"


@dataclass(frozen=True)
class MessageFiles(RecordFiles, ABC):
    """Records that have messages: one JSON object a line, or one row of a file whose name ends in
    .parquet."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".json", ".ndjson", PARQUET)

    @property
    @abstractmethod
    def columns(self) -> list[str]:
        """Columns of Parquet that are read."""

    @abstractmethod
    def unsuitable(self, name: str, kind: pyarrow.DataType) -> str | None:
        """Returns what is wrong with a column of a type, None for nothing."""

    def split_file(self, piece: Piece) -> Iterator[Piece]:
        return iter((piece,)) if _is_parquet(piece) else line_ranges(piece)

    def records(self, piece: Piece) -> Iterator[tuple[PlaceOf, Any]]:
        if not _is_parquet(piece):
            return lines_of(piece)
        rows = parquet_records(piece, self.columns, self.unsuitable)
        return ((place, _without_nulls(row)) for place, row in rows)


@dataclass(frozen=True)
class Conversations(MessageFiles):
    """Conversations: one JSON object a line, or one row of a file whose name ends in .parquet. The
    tokenizer's chat template makes them text; only what the assistant writes is learnt.

    A message is an object with a `role` (system, user, assistant, tool, ..) and a `content`, a text
    or a list of parts; with what else the template reads, such as `tool_calls`. A conversation
    without messages of the assistant is refused, and so is one that the template refuses, each with
    file and line or row.

    messages_field: the key or column of the messages. tools_field: that of the tools that may be
    called, a list of descriptions or JSON text of one; None for no tools. learn: the assistant's
    turns that are learnt, `all` or the `last`.
    """

    messages_field: str = field(default="messages", kw_only=True)
    tools_field: str | None = field(default=None, kw_only=True)
    learn: str = field(default="all", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learn not in LEARN:
            raise ValueError(f"Conversations: learn={self.learn!r}; use {' or '.join(LEARN)}")

    @property
    def columns(self) -> list[str]:
        return [name for name in (self.messages_field, self.tools_field) if name]

    def unsuitable(self, name: str, kind: pyarrow.DataType) -> str | None:
        return _no_lists(name, kind)

    def read(self, piece: Piece, split: str) -> Iterator[Document]:
        with_tools, count = False, 0
        for document in super().read(piece, split):
            assert document.conversation is not None
            with_tools, count = with_tools or document.conversation.tools is not None, count + 1
            yield document
        if self.tools_field and count and not with_tools:
            log.warning("%s: no conversation has tools in %r", piece.path, self.tools_field)

    def document(self, record: Any) -> Document:
        record = record if isinstance(record, dict) else json_object(record)
        if self.messages_field not in record:
            have = ", ".join(map(repr, record)) or "none"
            raise ValueError(
                f"no field {self.messages_field!r}; there is {have}: name yours by messages_field"
            )
        messages = checked_messages(_parsed(record[self.messages_field]))
        tools = _tools(record.get(self.tools_field)) if self.tools_field else None
        return conversation(messages, tools, self.learn)


def conversation(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, learn: str
) -> Document:
    """Returns the document of a conversation. Raises ValueError for one in which the assistant says
    nothing."""
    written = [m for m in messages if m["role"] == "assistant"]
    if not written:
        roles = ", ".join(repr(role) for role in dict.fromkeys(m["role"] for m in messages))
        raise ValueError(
            f"no message of the assistant, so nothing in it would be learnt; roles are {roles}"
        )
    read = [m for m in messages if m["role"] != "assistant"]
    texts = (json.dumps(part, ensure_ascii=False) for part in (written, [tools, *read]))
    return Document(*texts, conversation=Conversation(messages, tools, learn))


def _is_parquet(piece: Piece) -> bool:
    return Path(piece.path).suffix == PARQUET


def _no_lists(name: str, kind: pyarrow.DataType) -> str | None:
    import pyarrow as pa

    types = pa.types
    lists = (types.is_list, types.is_large_list, types.is_string, types.is_large_string)
    return None if any(is_one(kind) for is_one in lists) else f"{name!r} is no list"


def _tools(value: object) -> list[dict[str, Any]] | None:
    tools = _parsed(value)
    if isinstance(tools, str):
        raise ValueError("tools are a text that is not JSON")
    if tools is None or tools == []:
        return None
    refuse_no_json("tools", tools)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools are a list of objects, these are {kind_of(value)}")
    return tools


def _parsed(value: object) -> object:
    """Returns a value, or what a text of JSON says."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _without_nulls(value: Any) -> Any:
    """Returns a value of JSON without keys whose value is null, which Parquet writes into every row
    that lacks them."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value
