"""Names and docstrings in plain words, in every package."""

from __future__ import annotations

from pathlib import Path

import pytest
from house import Words, words
from test_architecture import LAYERS, ROOT

MOST_LITTLE_WORDS, MOST_QUESTIONS = 0.01, 0.05
"""Shares, of all names and of all docstrings."""


@pytest.fixture(scope="module")
def rooms() -> dict[str, Words]:
    return words(ROOT)


@pytest.mark.parametrize("room", LAYERS)
def test_names_say_what_they_hold(rooms: dict[str, Words], room: str) -> None:
    figures = rooms[room]
    assert len(figures.little) <= MOST_LITTLE_WORDS * figures.names, "\n".join(figures.little)


@pytest.mark.parametrize("room", LAYERS)
def test_docstrings_begin_with_what_is_returned_or_done(rooms: dict[str, Words], room: str) -> None:
    figures = rooms[room]
    allowed = MOST_QUESTIONS * figures.docstrings
    assert len(figures.questions) <= allowed, "\n".join(figures.questions)


def test_little_words_and_beginnings_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        '"""What it is."""\n'
        "def f(mine, grads):\n"
        '    """Returns one."""\n'
        "    found = size = mine\n"
        "    for each in grads:\n"
        "        print(each, found)\n"
    )
    figures = words(tmp_path)["a"]
    assert (figures.names, figures.docstrings) == (5, 2)
    assert sorted(figures.little) == ["a.py:2 mine", "a.py:4 found", "a.py:5 each"]
    assert figures.questions == ["a.py:1 What it is."]
