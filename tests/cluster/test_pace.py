"""Which of several processes the others wait for."""

from __future__ import annotations

import time

import pytest
from service import play

from jaxtrain.cluster import pace
from jaxtrain.cluster.pace import Pace, Slow, slowest

PACES = {
    "one alone": ({0: (0.5, 0.5)}, None),
    "all alike": ({0: (0.01, 0.1), 1: (0.012, 0.1)}, None),
    "one waits for its own sleep": ({0: (0.01, 0.6), 1: (0.5, 0.6)}, Slow(1, 0.5, 0.01, 0.6)),
    "three times as much of next to nothing": ({0: (0.001, 0.1), 1: (0.004, 0.1)}, None),
    "twice as much": ({0: (0.04, 0.1), 1: (0.08, 0.1)}, None),
    "one of four": (
        {0: (0.4, 0.5), 1: (0.01, 0.5), 2: (0.02, 0.5), 3: (0.03, 0.5)}, Slow(0, 0.4, 0.02, 0.5),
    ),
    "two of four wait on themselves, the worse is told": (
        {0: (0.4, 0.5), 1: (0.01, 0.5), 2: (0.02, 0.5), 3: (0.45, 0.5)}, Slow(3, 0.45, 0.02, 0.5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PACES)
def test_the_slow_one_is_named(name: str) -> None:
    paces, found = PACES[name]
    assert slowest(paces) == found


def test_the_first_process_hears_of_all(monkeypatch) -> None:
    monkeypatch.setattr(pace, "EVERY_S", 0.01)

    def act(index: int) -> tuple[Slow | None, dict[str, float]]:
        mine = Pace("a")
        for _ in range(40):
            mine.add(0.3 if index == 2 else 0.01, 0.32)
            time.sleep(0.005)
        time.sleep(0.2)
        mine.close()
        return mine.slow(), mine.metrics()

    found = play(monkeypatch, 3, act)
    slow, metrics = found[0]
    assert slow is not None and slow.process == 2 and "process 2 is slow" in str(slow)
    assert metrics == {
        "slowest_process": 2,
        "slowest_own_s": pytest.approx(0.3),
        "least_own_s": pytest.approx(0.01),
    }
    assert found[1] == (None, {})


def test_alone_there_is_nothing_to_tell() -> None:
    alone = Pace("b")
    alone.add(1.0, 1.0)
    assert alone.slow() is None and alone.metrics() == {}
    alone.close()
