"""A source of pairs of answers to the same prompt, of which one is preferred."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxtrain.sources.conversations import MessageFiles, conversation
from jaxtrain.sources.document import Document, Piece
from jaxtrain.sources.records import json_object, value_at
from jaxtrain.tokenizers.assistant_turns import Messages
from jaxtrain.tokenizers.chat import LEARN, checked_messages, kind_of

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)

NOT_ASKED = "[null]"
"""Prompt of a conversation in which the assistant alone writes."""


@dataclass(frozen=True)
class Preferences(MessageFiles):
    """Pairs of answers, one of which is preferred, for `FineTuning(preferences=DPO())`: one JSON
    object a line, or one row of a file whose name ends in .parquet.

    Prompt and answers are texts, or lists of messages as in `Conversations`, which the tokenizer's
    chat template makes text. An answer in messages may begin with the prompt. A pair whose answers
    are the same, or empty, is refused, with file and line or row. Pairs with the same prompt, in
    its field or of messages, are held out together.

    prompt_field, chosen_field, rejected_field: keys or columns, or paths such as `meta.prompt`.
    prompt_field is None where both answers begin with the prompt. learn: the assistant's turns in
    messages that are compared, `all` or the `last`.
    """

    prompt_field: str | None = field(default="prompt", kw_only=True)
    chosen_field: str = field(default="chosen", kw_only=True)
    rejected_field: str = field(default="rejected", kw_only=True)
    learn: str = field(default="last", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.learn not in LEARN:
            raise ValueError(f"Preferences: learn={self.learn!r}; use {' or '.join(LEARN)}")

    @property
    def columns(self) -> list[str]:
        fields = (self.prompt_field, self.chosen_field, self.rejected_field)
        return [name for name in fields if name]

    def unsuitable(self, name: str, kind: pyarrow.DataType) -> str | None:
        import pyarrow as pa

        types = pa.types
        kind = kind.value_type if types.is_dictionary(kind) else kind
        fits = (types.is_list, types.is_large_list, types.is_string, types.is_large_string)
        if any(is_one(kind) for is_one in fits) or kind == pa.string_view():
            return None
        return f"{name!r} is neither a text nor a list"

    def document(self, record: Any) -> Document:
        record = record if isinstance(record, dict) else json_object(record)
        prompt: str | Messages = ""
        if self.prompt_field is not None:
            named_by = "prompt_field, or use prompt_field=None where answers begin with the prompt"
            prompt = _text_or_messages(record, self.prompt_field, named_by)
        chosen, rejected = (
            self._answer(prompt, _text_or_messages(record, name, named_by), name)
            for name, named_by in (
                (self.chosen_field, "chosen_field"),
                (self.rejected_field, "rejected_field"),
            )
        )
        if (chosen.conversation is None) != (rejected.conversation is None):
            raise ValueError("one answer is a text and the other has messages; give two of a kind")
        if _opening(chosen) != _opening(rejected):
            raise ValueError("the answers begin with other prompts; give two to the same one")
        last = [d.conversation and d.conversation.messages[-1] for d in (chosen, rejected)]
        if self.learn == "last" and None not in last and last[0] == last[1]:
            raise ValueError("the last turns are the same; use learn='all', or on_bad='skip'")
        if chosen == rejected:
            raise ValueError("both answers are the same; leave such pairs out: on_bad='skip'")
        return chosen._replace(rejected=rejected)

    def read(self, piece: Piece, split: str) -> Iterator[Document]:
        twice = count = 0
        for pair in super().read(piece, split):
            count += 1
            twice += bool(pair.prompt) and all(d.text.startswith(d.prompt) for d in pair.answers)
            yield pair
        if count and twice == count:
            log.warning(
                "%s: answers begin with %r, which then stands twice; use prompt_field=None",
                piece.path,
                self.prompt_field,
            )

    def belongs(self, document: Document, split: str) -> bool:
        has_prompt = document.prompt not in ("", NOT_ASKED)
        return super().belongs(document._replace(text="") if has_prompt else document, split)

    def _answer(self, prompt: str | Messages, answer: str | Messages, name: str) -> Document:
        if not answer:
            raise ValueError(f"{name!r} is empty; leave such pairs out: on_bad='skip'")
        if isinstance(prompt, str) and isinstance(answer, str):
            return Document(answer, prompt)
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        if not (answer[-1].get("content") or answer[-1].get("tool_calls")):
            raise ValueError(f"{name!r} ends with an empty message; leave it out: on_bad='skip'")
        return conversation([*_before(prompt, answer, name), *answer], None, self.learn)


def _opening(document: Document) -> Messages:
    """Returns the messages of a conversation before the assistant's first."""
    messages = [] if document.conversation is None else document.conversation.messages
    return [*itertools.takewhile(lambda message: message["role"] != "assistant", messages)]


def _before(prompt: str | Messages, answer: Messages, name: str) -> Messages:
    """Returns the messages of a prompt that come before those of an answer: all of an answer of the
    assistant, none or the system's of one that begins with the prompt. Raises ValueError where an
    answer begins with another prompt."""
    if not prompt:
        return []
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    system = [message for message in messages if message["role"] == "system"]
    asked = [message for message in messages if message["role"] != "system"]
    begun = [message for message in answer if message["role"] != "system"][: len(asked)]
    if begun != asked and answer[0]["role"] == "assistant":
        return messages
    if begun != asked:
        raise ValueError(
            f"{name!r} begins with a message of the {answer[0]['role']}, and not with the prompt: "
            "use prompt_field=None if answers begin with prompts of their own"
        )
    return [] if answer[0]["role"] == "system" else system


def _text_or_messages(record: dict[str, Any], name: str, named_by: str) -> str | Messages:
    """Returns the value of a field: a text, or messages, also as JSON text of them."""
    value = value_at(record, name, named_by)
    if isinstance(value, str):
        try:
            value.encode("utf-8")
            parsed = json.loads(value) if value.lstrip().startswith("[{") else None
        except UnicodeEncodeError as error:
            raise ValueError(f"{name!r} has half a surrogate at {error.start}") from error
        except (ValueError, RecursionError):
            return value
        is_chat = isinstance(parsed, list) and all(isinstance(m, dict) for m in parsed)
        return checked_messages(parsed) if is_chat and "role" in parsed[0] else value
    if not isinstance(value, list):
        raise ValueError(f"{name!r} is {kind_of(value)}; give a text, or a list of messages")
    return checked_messages(value) if value else []
