"""Small texts of all processes, within a bound of time."""

from __future__ import annotations

import time

import pytest
from service import Service, play

from jaxtrain.cluster.agreement import (
    MissingProcesses,
    all_gather_text,
    all_gather_union,
    coordination,
    share_failure,
    share_oserror,
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


def test_the_failure_of_one_is_told_on_all(monkeypatch) -> None:
    def fails(index: int, kind: type[Exception]) -> int:
        if index == 1:
            raise kind("no room")
        return index

    found = play(monkeypatch, 3, lambda i: share_oserror(lambda: fails(i, OSError)))
    assert [str(error) for error in found] == ["process 1: no room"] * 3
    assert all(isinstance(error, OSError) for error in found)

    found = play(monkeypatch, 3, lambda i: share_failure(lambda: fails(i, OSError)))
    assert [str(each) for each in found] == ["process 1: no room", "no room", "process 1: no room"]
    assert [type(each) for each in found] == [ValueError, OSError, ValueError]
    assert play(monkeypatch, 2, lambda i: share_failure(lambda: i)) == [0, 1]
