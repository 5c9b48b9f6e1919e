"""Whatever one process asks for is done by all, after the same step."""

from __future__ import annotations

import random
import time

import pytest
from service import play

from jaxtrain.cluster import requests
from jaxtrain.cluster.requests import AgreedRequests, Requests, requests_of


def test_alone_it_is_done_after_the_step_at_hand() -> None:
    asked = requests_of(0)
    assert type(asked) is Requests
    assert asked.due(1) == frozenset()
    asked.ask("stop")
    asked.ask("stop")
    asked.ask("save")
    assert asked.due(2) == {"stop", "save"}
    assert asked.due(3) == frozenset()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("processes", [2, 5])
def test_all_do_it_after_the_same_step(monkeypatch, processes: int, seed: int) -> None:
    """At speeds of their own, with some asking twice, at once, and from ahead."""
    monkeypatch.setattr(requests, "EVERY_S", 0.005)

    def act(index: int) -> list[tuple[int, frozenset[str]]]:
        drawn = random.Random(100 * seed + index)
        asked, done = AgreedRequests(10), []
        asks = {10 + drawn.randrange(1, 60): drawn.choice(["stop", "save"]) for _ in range(2)}
        for step in range(11, 200):
            time.sleep(drawn.random() * 0.004)
            if step in asks and index < 2:
                asked.ask(asks[step])
            if found := asked.due(step):
                done.append((step, found))
        asked.close()
        return done

    found = play(monkeypatch, processes, act)
    assert found[0] and all(each == found[0] for each in found), found
    assert all(step > 11 for step, _ in found[0])


def test_a_request_of_all_at_the_same_step_is_one(monkeypatch) -> None:
    monkeypatch.setattr(requests, "EVERY_S", 0.005)

    def act(index: int) -> list[int]:
        asked, done = AgreedRequests(0), []
        for step in range(1, 100):
            time.sleep(0.003)
            if step == 5:
                asked.ask("save")
            if asked.due(step):
                done.append(step)
        asked.close()
        return done

    found = play(monkeypatch, 3, act)
    assert found[0] == found[1] == found[2] and 1 <= len(found[0]) <= 2, found


def test_a_stop_is_not_lost_for_a_save_that_comes_soon_after(monkeypatch) -> None:
    """While a step lasts much longer than it takes to agree."""
    monkeypatch.setattr(requests, "EVERY_S", 0.005)

    def act(index: int) -> list[tuple[int, frozenset[str]]]:
        asked, done = AgreedRequests(0), []
        for step in range(1, 4):
            for what in ("stop", "save") if step == 1 and index == 0 else ():
                asked.ask(what)
                time.sleep(0.15)
            time.sleep(0.3)
            done.append((step, asked.due(step)))
        asked.close()
        return done

    for found in play(monkeypatch, 2, act):
        assert [step for step, what in found if "stop" in what] == [1]
        assert [step for step, what in found if "save" in what] == [1]


def test_one_that_comes_late_hears_what_was_asked_before(monkeypatch) -> None:
    """A meeting that it missed is held again."""
    monkeypatch.setattr(requests, "EVERY_S", 0.005)
    monkeypatch.setattr(requests, "AGREE_S", 0.2)

    def act(index: int) -> list[int]:
        time.sleep(0.7 * index)
        asked, done = AgreedRequests(0), []
        if index == 0:
            asked.ask("stop")
        for step in range(1, 400):
            time.sleep(0.01)
            if "stop" in asked.due(step):
                done.append(step)
        asked.close()
        return done

    found = play(monkeypatch, 2, act)
    assert found[0] == found[1] and len(found[0]) == 1, found


def test_a_process_that_is_gone_holds_nobody_for_long(monkeypatch) -> None:
    monkeypatch.setattr(requests, "EVERY_S", 0.005)
    monkeypatch.setattr(requests, "AGREE_S", 0.2)

    def act(index: int) -> float:
        asked = AgreedRequests(0)
        asked.ask("stop")
        began = time.monotonic()
        for step in range(1, 100):
            time.sleep(0.005)
            assert asked.due(step) == frozenset()
        asked.close()
        return time.monotonic() - began

    found = play(monkeypatch, 2, act, absent=1)
    assert found[0] < 10, "each of the 99 steps waited for it"
