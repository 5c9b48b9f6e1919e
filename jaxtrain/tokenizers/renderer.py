"""Renders conversations by a chat template, as a program of its own: `chat.Renderer` starts it.

A template comes with a tokenizer and may be a stranger's program. jinja2's sandbox keeps it from
Python's objects, and this process bounds what the sandbox does not: processor time and memory.

Reads lines of JSON and answers each with one. The first is {"template", "tools", "tokens",
"special"}, the others are {"messages", "tools", "prompt"}; the answers are {"text", "turns",
"mark"}, or {"error"}.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxtrain.tokenizers.assistant_turns import (
    Messages,
    TurnMarkup,
    TurnSpan,
    turn_markup,
    without_generation_blocks,
)
from jaxtrain.tokenizers.spelled import beginnings, pattern_of

MEMORY_BYTES, MOST_CHARACTERS = 1 << 30, 16 << 20
"""Limits of the process's memory, and of one conversation's length."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which data and templates have what an assistant thinks before it answers."""
GENERATION = re.compile(r"\{%[-+]?\s*generation\b")
MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Characters that Unicode reserves for use inside a program: no text has them."""
WRITTEN_MARK = re.compile(r"(?<!\\)\\u(fd[de][0-9a-f])")


class Refused(ValueError):
    """The template refuses the conversation, or goes beyond a limit."""


class GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: what the assistant generates. Its text is put
    between the marks that the variables `generation_start` and `generation_end` have."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        names = ("generation_start", "generation_end")
        marks: list[Any] = [jinja2.nodes.ContextReference(), *map(jinja2.nodes.Const, names)]
        call = self.call_method("_marked", marks)
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, context: Any, start: str, end: str, caller: Any) -> str:
        return context[start] + caller() + context[end]


class TemplateProgram:
    """A compiled template. tools: the template for conversations with tools, "" for the same one.
    tokens: variables such as bos_token. special: the special tokens' texts, which stay texts where
    the conversation has them."""

    def __init__(
        self, template: str, tools: str, tokens: dict[str, str], special: Iterable[str]
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationBlocks, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        variables: dict[str, Any] = environment.globals
        variables["raise_exception"] = _refuse
        # A corpus is encoded the same on each day and at each try. `strftime_now` is left out too:
        # templates have a date of their own where it is not defined.
        del environment.globals["lipsum"], environment.filters["random"]
        self.programs = [
            environment.from_string(source) for source in (template, tools or template)
        ]
        self.blocks = [
            GENERATION.search(source) is not None for source in (template, tools or template)
        ]
        self.tokens = tokens
        self.markups: dict[bool, TurnMarkup] = {}
        self.special = sorted(special, key=len, reverse=True)
        self.spelled, self.begun = pattern_of(self.special), beginnings(self.special)
        self.longest = max(map(len, self.begun), default=0)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns {"text", "turns", "mark"}: the rendered text, [start, end) of what the assistant
        writes in it, and the character that was put into each special token that a message spells
        out, so that it is not encoded as one; None if none does."""
        written = json.dumps(request, ensure_ascii=False)
        free = [mark for mark in MARKS if mark not in written]
        if len(free) < 3:
            raise Refused("the conversation has too many of the characters U+FDD0 to U+FDEF")
        mark, *brackets = free[:3]
        messages = _escaped(_aliased(request["messages"]), self._escape(mark))
        tools = _escaped(request["tools"], self._escape(mark))

        def render(messages: Messages, prompt: bool) -> tuple[str, list[TurnSpan]]:
            return self._rendered(messages, tools, prompt, brackets)

        def text_of(messages: Messages, prompt: bool) -> str:
            return render(messages, prompt)[0]

        text, turns = render(messages, request["prompt"])
        has_tools = bool(tools)
        if has_tools not in self.markups:
            self.markups[has_tools] = turn_markup(text_of)
        markup = self.markups[has_tools]
        if request["prompt"]:
            text += "" if markup.prompted else markup.header
        elif self.blocks[has_tools]:
            if not any(start < end for start, end in turns):
                raise Refused("its {% generation %} blocks have nothing of this conversation")
        else:
            turns = without_generation_blocks(text_of, messages, text, self.special, markup)
        return {"text": text, "turns": turns, "mark": mark if mark in text else None}

    def _rendered(
        self, messages: Messages, tools: Any, prompt: bool, brackets: list[str]
    ) -> tuple[str, list[TurnSpan]]:
        start, end = brackets
        variables = {**self.tokens, "generation_start": start, "generation_end": end}
        pieces, length = [], 0
        for piece in self.programs[bool(tools)].generate(
            messages=messages, tools=tools, add_generation_prompt=prompt, **variables
        ):
            pieces.append(piece)
            length += len(piece)
            if length > MOST_CHARACTERS:
                raise Refused(f"it renders to more than {MOST_CHARACTERS:,} characters")
        text, turns = "", []
        for part in "".join(pieces).split(start):
            inside, closed, following = part.partition(end)
            if closed:
                turns.append((len(text), len(text) + len(inside)))
            text += inside + following
        return text, turns

    def _escape(self, mark: str) -> Any:
        def escape(text: str) -> str:
            # Until none is left: a token may overlap with, or lie in, another.
            while match := self.spelled.search(text):
                if len(match[0]) == 1:
                    raise Refused(
                        f"a message has {match[0]!r}, which is a special token of one character; "
                        "leave that character out"
                    )
                text = self.spelled.sub(lambda match: mark.join(match[0]), text)
            # What follows in the template could complete a token that begins here.
            sizes = range(1, min(self.longest, len(text)) + 1)
            return text + mark if any(text[-size:] in self.begun for size in sizes) else text

        return escape


def _escaped(value: Any, escape: Any) -> Any:
    """Returns a value of JSON with each text in it escaped, keys too."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, list):
        return [_escaped(item, escape) for item in value]
    if isinstance(value, dict):
        return {escape(key): _escaped(inner, escape) for key, inner in value.items()}
    return value


def _aliased(messages: Messages) -> Messages:
    """Returns messages in which reasoning is under the names that templates read."""
    reasons = [next((m[key] for key in REASONING if m.get(key)), None) for m in messages]
    return [
        m if reason is None else {"thinking": reason, **m, "reasoning_content": reason}
        for m, reason in zip(messages, reasons, strict=True)
    ]


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, **options)
    return WRITTEN_MARK.sub(lambda mark: chr(int(mark[1], 16)), text)


def _hint(error: str) -> str:
    if "strftime_now" not in error:
        return ""
    return (
        "; a corpus does not depend on the day on which it is encoded: let the template ask "
        "whether `strftime_now is defined`, and write a date of its own where it is not"
    )


def _refuse(message: str) -> NoReturn:
    raise Refused(message)


def _limit_memory() -> None:
    """Lets this process take MEMORY_BYTES more address space than its libraries have."""
    with suppress(ValueError, OSError):  # some systems have no such limit
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_time(seconds: int) -> None:
    """Lets this process use the processor for so many seconds from now on: then it is ended, also
    in the midst of an operation."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def main() -> None:
    """Answers requests until there are no more. The argument is the limit of each one's processor
    time, in seconds."""
    seconds = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ended by its parent, which ends its input
    _limit_memory()
    program = None
    for line in sys.stdin:
        try:
            _limit_time(seconds)
            request = json.loads(line)
            if program is None:
                program, answer = TemplateProgram(**request), {}
            else:
                answer = program.answer(request)
        except MemoryError:
            answer = {
                "error": f"the chat template needs more than {MEMORY_BYTES:,} bytes of memory"
            }
        except jinja2.TemplateSyntaxError as error:
            answer = {"error": f"line {error.lineno}: {error}"}
        except Refused as error:
            answer = {"error": f"the chat template refuses it: {error}"}
        except ValueError as error:
            answer = {"error": str(error)}
        except Exception as error:  # a template calls what it likes
            answer = {"error": f"the chat template fails: {error}{_hint(str(error))}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
