"""Notices: where they go, and how often the share of an operation is said."""

from __future__ import annotations

import pytest

from jaxtrain import notices
from jaxtrain.notices import EVERY_S, Share, notice, size, told_to


def test_notices_go_to_the_innermost_caller_and_else_nowhere() -> None:
    outer: list[str] = []
    inner: list[str] = []
    notice("nowhere")
    with told_to(outer.append):
        notice("a")
        with pytest.raises(KeyError), told_to(inner.append):
            notice("b")
            raise KeyError
        notice("c")
    notice("nowhere")
    assert (outer, inner) == (["a", "c"], ["b"])


def test_the_share_is_said_now_and_then_and_not_at_the_end() -> None:
    now, said = [0.0], []
    with told_to(said.append):
        share = Share("reading", clock=lambda: now[0])
        for done, at in ((1, 1.0), (2, EVERY_S), (3, EVERY_S + 1), (5, 2 * EVERY_S), (8, 99.0)):
            now[0] = at
            share(done, 8)
    assert said == ["reading: 25%", "reading: 62%"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (950, "950 B"), (8_100, "8.1 kB"), (999_600, "1.0 MB"), (12.3e9, "12 GB")],
)
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text
    assert notices.size(5e13) == "50000 GB"
