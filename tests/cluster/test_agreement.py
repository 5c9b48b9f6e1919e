"""Small texts of all processes, within a bound of time."""

from __future__ import annotations

import gc
import os
import time
import weakref
from contextlib import suppress
from typing import Any

import pytest
from service import Service, play

from jaxtrain.cluster.agreement import (
    FailedTogether,
    MissingProcesses,
    all_gather_text,
    all_gather_union,
    coordination,
    fresh_key,
    from_first,
    share_failure,
)


def test_one_process_has_its_own_text_and_no_service() -> None:
    assert all_gather_text("a") == ["a"]
    with pytest.raises(RuntimeError, match=r"call jax\.distributed\.initialize\(\) in each"):
        coordination()


def test_all_have_all_texts_in_order_round_after_round(monkeypatch) -> None:
    def act(index: int) -> list[list[str]]:
        return [all_gather_text(text * index) for text in ("a", "b/=", "")]

    wanted = [[text * index for index in range(4)] for text in ("a", "b/=", "")]
    assert play(monkeypatch, 4, act) == [wanted] * 4
    rounds = {key.split("/")[2] for key in Service.latest.keys}
    assert rounds == {"2"}, "what all have read is not kept"


def test_who_does_not_come_is_named_in_time(monkeypatch) -> None:
    began = time.monotonic()
    found = play(monkeypatch, 4, lambda _: all_gather_text("x", within_s=0.3), absent=2)
    assert time.monotonic() - began < 25
    for error in found[:2]:
        assert isinstance(error, MissingProcesses) and error.missing == [2, 3]
        assert "waited 0.3 s for process 2, 3 of 4" in str(error)


def test_a_union_has_each_once(monkeypatch) -> None:
    found = play(monkeypatch, 3, lambda index: all_gather_union([index, 7]))
    assert found == [[0, 7, 1, 2]] * 3


class Stopped(ValueError):
    refusal = False


SHARED = {
    "a refusal": ({1: ValueError("full")}, ValueError, "process 1: full"),
    "a path": ({1: FileNotFoundError(2, "gone")}, ValueError, "process 1: [Errno 2] gone"),
    "a disk": ({1: OSError(5, "Input")}, FailedTogether, "process 1: [Errno 5] Input"),
    "no refusal": ({1: Stopped("full")}, FailedTogether, "process 1: full"),
    "any type": ({1: KeyError("x")}, FailedTogether, "process 1: KeyError: 'x'"),
    "no words": ({1: ValueError()}, ValueError, "process 1: ValueError: "),
    "of two types": (
        {0: ValueError("a"), 2: OSError(5, "b")}, FailedTogether,
        "process 0: a; process 2: [Errno 5] b",
    ),
    "the same twice": ({0: ValueError("a"), 2: ValueError("a")}, ValueError, "process 0, 2: a"),
    "the same of all": ({i: Stopped("a") for i in range(3)}, Stopped, "a"),
    "another of each": (
        {i: KeyError(i) for i in range(3)}, FailedTogether,
        "process 0: KeyError: 0; process 1: KeyError: 1; process 2: KeyError: 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("errors", "kind", "text"), SHARED.values(), ids=SHARED)
def test_the_failure_of_one_is_told_on_all_as_one_error(
    errors: dict[int, Exception],
    kind: type[Exception],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refusal stays one only where every process refuses."""

    def act(index: int) -> int:
        if index in errors:
            raise errors[index]
        return index

    found = play(monkeypatch, 3, lambda index: share_failure(lambda: act(index)))
    assert [(type(error), str(error)) for error in found] == [(kind, text)] * 3
    causes = [error if kind is Stopped else error.__cause__ for error in found]
    assert causes == [errors.get(index) for index in range(3)]


def test_each_has_its_own_result_or_that_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert play(monkeypatch, 3, lambda index: share_failure(lambda: (index,))) == [(0,), (1,), (2,)]
    assert play(monkeypatch, 3, lambda index: from_first(lambda: [index + 4])) == [[4]] * 3
    asked: list[int] = []
    found = play(
        monkeypatch, 3, lambda index: from_first(lambda: [asked.append(index), 1 // index])
    )
    assert asked == [0]
    assert {str(error) for error in found} == {
        "process 0: ZeroDivisionError: integer division or modulo by zero"
    }, "and the others are not asked"


def test_in_a_thread_failures_are_shared_under_a_key_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside other rounds; what all have done with is removed."""

    def act(index: int) -> list[str]:
        told, keys = [], [fresh_key(), fresh_key()]
        for key in keys:
            try:
                share_failure(lambda key=key: divide(index, key == keys[0]), under=key)
                told.append(key)
            except FailedTogether as error:
                told.append(str(error))
        all_gather_text("all have done with them")
        fresh_key(keys[0])
        all_gather_text("removed")
        return sorted(told)

    def divide(index: int, first: bool) -> None:
        if index == 0 and first:
            raise ZeroDivisionError("of 0")

    wanted = ["jaxtrain/share/1", "process 0: ZeroDivisionError: of 0"]
    assert play(monkeypatch, 2, act) == [wanted] * 2
    shared = {key.rpartition("/")[0] for key in Service.latest.keys if "share" in key}
    assert shared == {"jaxtrain/share/1"}


def test_what_failed_keeps_nothing_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state, say: its memory is short when a copy of it has failed."""
    held: list[weakref.ref[Any]] = []

    class State:
        pass

    def copies() -> None:
        state = State()
        held.append(weakref.ref(state))
        raise RuntimeError("out of memory")

    def act(index: int) -> None:
        with suppress(FailedTogether):
            share_failure(copies if index else lambda: None)
        assert held[0]() is None

    gc.disable()
    try:
        assert play(monkeypatch, 2, act) == [None, None]
    finally:
        gc.enable()


def test_one_process_raises_its_own_error() -> None:
    directory = os.open(".", os.O_RDONLY)
    with pytest.raises(IsADirectoryError):
        share_failure(lambda: os.read(directory, 1))
    os.close(directory)
    assert from_first(lambda: (1,)) == (1,)
