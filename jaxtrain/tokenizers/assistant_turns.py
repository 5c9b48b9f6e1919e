"""Finds what the assistant writes, where a template does not say so by generation blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Messages = list[dict[str, Any]]
Render = Callable[[Messages, bool], str]
"""(messages, whether the beginning of an answer follows) -> text."""
TurnSpan = tuple[int, int]
"""[start, end) in a text, in characters."""

UNKNOWN = (
    "the template does not tell where the assistant's turns are; put {% generation %} before, and "
    "{% endgeneration %} behind, what the assistant writes in it"
)


class TurnMarkup(NamedTuple):
    """What a template writes around an answer. header: before it, "" if it does not take a probe.
    prompted: the template writes the header for `add_generation_prompt`. end: behind it."""

    header: str = ""
    prompted: bool = True
    end: str = ""


def turn_markup(render: Render) -> TurnMarkup:
    """Returns what a template writes around an answer, by a probe."""
    question = {"role": "user", "content": "question"}
    answer = {"role": "assistant", "content": "answer"}
    try:
        bare, prompted = render([question], False), render([question], True)
        answered = render([question, answer], False)
    except Exception:  # the template's own, of any class
        return TurnMarkup()
    before, written, end = answered.rpartition("answer")
    if not written or not prompted.startswith(bare):
        return TurnMarkup()
    header = prompted[len(bare) :]
    if not header and before.startswith(bare):
        own = before[len(bare) :]
        return TurnMarkup(own, not own.strip(), end)
    return TurnMarkup(header, True, end)


def without_generation_blocks(
    render: Render, messages: Messages, text: str, special: Sequence[str], markup: TurnMarkup
) -> list[TurnSpan]:
    """Returns the assistant's turns in `text`, which is `messages` rendered: each from behind what
    the template puts before an answer up to the token that ends it, which the assistant writes too.

    Looks for what begins and ends a turn, if both have special tokens: a message has none. Else
    renders the messages up to each turn, which are then the beginning of `text`. Raises ValueError
    where they are not, as in a template that leaves earlier reasoning out.
    """
    numbers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    header, end = markup.header, markup.end
    if all(any(token in part for token in special) for part in (header, end)):
        turns = _between(text, header, end.strip())
        begins = [token for token in special if token in header]
        of_one = not any(token in text[slice(*turn)] for turn in turns or () for token in begins)
        if turns is not None and len(turns) == len(numbers) and of_one:
            return turns
    return [_by_beginnings(render, messages, text, number, special, markup) for number in numbers]


def _between(text: str, header: str, end: str) -> list[TurnSpan] | None:
    """Returns the parts of `text` between `header` and `end`, which belongs to them; None where a
    header has no end."""
    turns, place = [], 0
    while (begin := text.find(header, place)) >= 0:
        start = begin + len(header)
        stop = text.find(end, start)
        if stop < 0:
            return None
        place = stop + len(end)
        turns.append((start, place))
    return turns


def _by_beginnings(
    render: Render,
    messages: Messages,
    text: str,
    number: int,
    special: Sequence[str],
    markup: TurnMarkup,
) -> TurnSpan:
    try:
        prompt = render(messages[:number], True) if number else ""
        until = render(messages[: number + 1], False)
    except Exception as error:  # the template's own, of any class
        raise ValueError(f"{UNKNOWN}; a part of the conversation is refused: {error}") from error
    if not markup.prompted:
        prompt += markup.header
    if any(token in markup.end for token in special):  # the space behind it ends nothing
        until = until.removesuffix(markup.end[len(markup.end.rstrip()) :])
    if not (text.startswith(prompt) and text.startswith(until)):
        raise ValueError(UNKNOWN)
    return len(prompt), max(len(prompt), len(until))
