"""Conversations to token ids by a tokenizer's chat template.

Markup, which the template writes, becomes special tokens; what the messages say never does, though
it spell one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from jaxtrain.files.regular import read_text
from jaxtrain.tokenizers.settings import SETTINGS, TEMPLATE, token_text, tokenizer_settings

log = logging.getLogger(__name__)

_warned: set[str] = set()
"""Keys of templates of which this process has warned."""

CPU_SECONDS = 10
"""Limit of one conversation's processor time."""

LEARN = ("all", "last")
"""Which of the assistant's turns are learnt."""


class Conversation(NamedTuple):
    """messages: objects with `role`, and `content` or what else the template reads. tools:
    descriptions of functions, None for none. learn: the assistant's turns that are learnt, `all` or
    the `last`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    learn: str = "all"


def checked_messages(value: object) -> list[dict[str, Any]]:
    """Returns a conversation's messages, without keys whose value is null. Raises ValueError for
    the first that is none."""
    value = list(value) if isinstance(value, tuple) else value
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages are a list of one or more, these are {kind_of(value)}")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise ValueError(
                f"message {number} is {kind_of(message)}; give an object with role and content"
            )
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            have = ", ".join(map(repr, message)) or "nothing"
            reason = f"has {have}, and no role" if role is None else f"has {kind_of(role)} as role"
            raise ValueError(f"message {number} {reason}; give user, assistant, system or tool")
        if not isinstance(content, str | list | None):
            raise ValueError(
                f"the content of message {number} is {kind_of(content)}; give a text, or a list of "
                "parts"
            )
        refuse_no_json(f"message {number}", dict(message))
    return [{k: v for k, v in message.items() if v is not None} for message in value]


def refuse_no_json(name: str, value: object) -> None:
    """Raises ValueError for a value that JSON, or UTF-8, has not."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name} has half a surrogate") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} has a value that is none of JSON: {error}") from None


def kind_of(value: object) -> str:
    """Names the kind of a value of JSON."""
    if value is None or value == []:
        return "null" if value is None else "an empty list"
    names: dict[type, str] = {str: "a text", dict: "an object", list: "a list", bool: "a flag"}
    names |= dict.fromkeys((int, float), "a number")
    return names.get(type(value), f"a {type(value).__name__}")


class EncodedConversation(NamedTuple):
    ids: np.ndarray
    """[tokens] uint32."""
    learnt: np.ndarray
    """[tokens] bool: written by the assistant, in a turn that is learnt."""


@dataclass(frozen=True)
class ChatTemplate:
    """A jinja2 program that renders a conversation.

    source: its text. tokens: (name, token) of the variables that it reads, such as `bos_token`.
    tools: the template for conversations with tools, "" for the same one. path: of the file that it
    comes from, for messages.
    """

    source: str
    tokens: tuple[tuple[str, str], ...] = ()
    tools: str = ""
    path: str = field(default="", compare=False)

    @property
    def stored(self) -> str | list[dict[str, str]]:
        """The value of `chat_template` in a tokenizer_config.json."""
        if not self.tools:
            return self.source
        named = {"default": self.source, "tool_use": self.tools}
        return [{"name": name, "template": source} for name, source in named.items()]

    @property
    def key(self) -> str:
        """Equal keys render equally."""
        return hashlib.sha256(repr((self.source, self.tokens, self.tools)).encode()).hexdigest()


def folder_template(folder: Path, file: Path | None = None) -> ChatTemplate | None:
    """Returns the chat template of a tokenizer's folder, None where it has none: of
    chat_template.jinja, else of tokenizer_config.json.

    file: a template instead of the folder's; tokens are the folder's. Raises ValueError for files
    that cannot be read.
    """
    settings = tokenizer_settings(folder)
    source = settings.get("chat_template") if file is None else read_text(file)
    tools = ""
    if isinstance(source, list):  # several, by names
        named = {item.get("name"): item.get("template") for item in source if type(item) is dict}
        tools = named.get("tool_use") or ""
        source = named.get("default", tools)
    if not isinstance(source, str) or not isinstance(tools, str):
        return None
    texts = {k: token_text(value) for k, value in settings.items() if k.endswith("_token")}
    tokens = {name: text for name, text in texts.items() if text is not None}
    own = folder / (TEMPLATE if (folder / TEMPLATE).exists() else SETTINGS)
    return ChatTemplate(source, tuple(sorted(tokens.items())), tools, str(file or own))


def folder_eos(folder: Path) -> str | None:
    """Returns the eos token that a tokenizer's folder declares, None where it declares none."""
    return token_text(tokenizer_settings(folder).get("eos_token"))


class Rendered(NamedTuple):
    """turns: [start, end) of what the assistant writes, in characters of `text`. mark: a character
    in special tokens that the conversation spells, which is not part of it; None for none."""

    text: str
    turns: list[tuple[int, int]]
    mark: str | None


class Renderer:
    """A process that renders conversations by a template, until it is closed.

    special: texts of the special tokens. Raises ValueError for a template that is none.
    """

    def __init__(self, template: ChatTemplate, special: Sequence[str]) -> None:
        # The same packages as here, and this one first.
        places = [str(Path(__file__).parents[2]), *(path or os.getcwd() for path in sys.path)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jaxtrain.tokenizers.renderer", str(CPU_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            encoding="utf-8",
        )
        self.close = weakref.finalize(self, _end, self._process)
        setup = {"template": template.source, "tools": template.tools}
        try:
            self._ask({**setup, "tokens": dict(template.tokens), "special": list(special)})
        except ValueError as error:
            self.close()
            name = f"the chat template {template.path}".rstrip()
            raise ValueError(f"{name} cannot be used: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """False once it is closed, also by a template that went beyond a limit."""
        return self.close.alive

    def render(self, conversation: Conversation, *, prompt: bool = False) -> Rendered:
        """Returns a conversation as text. prompt: with the beginning of the assistant's next turn.

        Raises ValueError where the template refuses it or goes beyond a limit.
        """
        messages, tools = conversation.messages, conversation.tools
        answer = self._ask({"messages": messages, "tools": tools, "prompt": prompt})
        return Rendered(answer["text"], [(s, e) for s, e in answer["turns"]], answer["mark"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        except BaseException:
            self.close()  # its answer would be taken for that to the next request
            raise
        if not line:
            status = self._process.wait()
            self.close()
            if status == -signal.SIGXCPU:
                raise ValueError(f"the chat template computes for more than {CPU_SECONDS} s")
            raise ValueError(f"the process of the chat template has ended (status {status})")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a renderer, also one that computes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # a request that it did not read
                pipe.close()


def _learnt_turns(
    conversation: Conversation, turns: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Returns the turns that are learnt: without those of messages whose `weight` is 0."""
    answers = [m for m in conversation.messages if m.get("role") == "assistant"]
    weights = [m.get("weight", 1) for m in answers]
    if any(weight not in (0, 1) for weight in weights):
        raise ValueError(f"a message has weight {weights}; give 0 or 1")
    if all(weights) and conversation.learn == "all":
        return turns
    if len(turns) != len(answers):
        raise ValueError(
            f"the template writes {len(turns)} generation blocks for {len(answers)} messages of "
            "the assistant, which do not tell which block is whose: learn all, without weights"
        )
    chosen = [turn for turn, weight in zip(turns, weights, strict=True) if weight]
    if not chosen:
        raise ValueError("each message of the assistant has weight 0: nothing would be learnt")
    return chosen if conversation.learn == "all" else chosen[-1:]


class ChatEncoder(Renderer):
    """Encodes conversations by the chat template of a vocabulary.

    Raises ValueError where the vocabulary has none.
    """

    def __init__(self, vocabulary: Any) -> None:
        template = getattr(vocabulary, "chat", None)
        if template is None:
            raise ValueError(
                "the tokenizer has no chat template, which says how conversations become text: put "
                f"one in {TEMPLATE} beside its tokenizer.json, or name it with "
                'TokenizerFile(path, chat_template="template.jinja")'
            )
        self.vocabulary = vocabulary
        super().__init__(template, vocabulary.special)

    def encode(self, conversation: Conversation) -> EncodedConversation:
        """Returns a conversation's tokens. Where the template ends the last turn with no special
        token, eos ends it. Raises ValueError as `render`, and where nothing would be learnt."""
        text, turns, mark = self.render(conversation)
        if not any(message.get("role") == "assistant" for message in conversation.messages):
            raise ValueError("no message of the assistant, so nothing in it would be learnt")
        ids, offsets = self.vocabulary.encode_markup(text, mark)
        learnt = np.zeros(len(ids), dtype=bool)
        for start, end in _learnt_turns(conversation, turns):
            learnt |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
        if not learnt.any():
            raise ValueError("the chat template writes nothing that the assistant says in it")
        special = np.isin(ids, self.vocabulary.special_ids)
        stop = max(end for start, end in turns if start < end)
        within = offsets[:, 0] < stop
        if not special[within][-1]:
            self._warn_of_no_end()
            if not special[~within].any() and not text[stop:].strip():
                eos = np.uint32(self.vocabulary.eos)
                ids, learnt = np.append(ids, eos), np.append(learnt, learnt[within][-1])
        return EncodedConversation(ids, learnt)

    def _warn_of_no_end(self) -> None:
        key = self.vocabulary.chat.key
        if key not in _warned:
            _warned.add(key)
            log.warning(
                "the chat template %s ends no turn of the assistant with a special token that is "
                "learnt: a model that is trained so may not stop. Let it write such a token, eos "
                "for example, behind the content, and before {%% endgeneration %%} if it has that",
                self.vocabulary.chat.path,
            )

    def end_of_turn(self, asked: Conversation | None = None) -> int | None:
        """Returns the special token that the template writes behind an answer, None for none.
        asked: the conversation that is answered, None for one of its own."""
        question, answer = ({"role": role, "content": "text"} for role in ("user", "assistant"))
        asked = Conversation([question]) if asked is None else asked
        text, turns, mark = self.render(Conversation([*asked.messages, answer], asked.tools))
        ids, offsets = self.vocabulary.encode_markup(text, mark)
        stop = max((end for _, end in turns), default=0)
        for last in ids[offsets[:, 0] < stop][-1:]:
            return int(last) if last in self.vocabulary.special_ids else None
        return None

    def prompt(self, conversation: Conversation) -> list[int]:
        """Returns the tokens after which the assistant's next turn follows."""
        text, _, mark = self.render(conversation, prompt=True)
        return self.vocabulary.encode_markup(text, mark)[0].tolist()
