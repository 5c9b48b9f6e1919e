"""Which of several processes the others wait for."""

from __future__ import annotations

import time

import jax
import pytest
from service import play

from jaxtrain.cluster import pace
from jaxtrain.cluster.pace import Pace, Seconds, Slow, mean_step, slowest

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
    told = {process: Seconds(own, step, 0.0, own) for process, (own, step) in paces.items()}
    assert slowest(told) == found


def test_one_long_pause_among_steps_is_not_slow() -> None:
    """It is step after step that others wait for one; the pause is in the mean of a step."""
    quick, slow = [Seconds(0.01, 0.1, 0.0)] * 5, [Seconds(0.09, 0.1, 0.0)] * 5
    paused = [*quick[:4], Seconds(5.0, 5.1, 0.5)]
    told = mean_step(paused)
    assert told == pytest.approx(((4 * 0.01 + 5) / 5, (4 * 0.1 + 5.1) / 5, 0.1, 0.01))
    assert slowest({0: mean_step(quick), 1: told}) is None
    assert slowest({0: mean_step(quick), 1: mean_step(slow)}) is not None


def test_the_first_process_hears_of_all(monkeypatch) -> None:
    monkeypatch.setattr(pace, "EVERY_S", 0.01)

    def act(index: int) -> tuple[Slow | None, dict[str, float], list[dict[str, list[float]]]]:
        mine = Pace("a")
        for step in range(1, 41):
            mine.add(0.3 if index == 2 else 0.01, 0.32, 0.1 * step if index == 1 else 0.0)
            time.sleep(0.005)
        time.sleep(0.2)
        mine.close()
        return mine.slow(), mine.metrics(), [mine.of_each(), mine.of_each()]

    found = play(monkeypatch, 3, act)
    slow, metrics, of_each = found[0]
    assert of_each == [
        {
            "process_step_s": [0.32, 0.32, 0.32],
            "process_own_s": [0.01, 0.01, 0.3],
            "process_data_s": [0.0, 0.1, 0.0],
            "process_wait_s": [0.31, 0.21, 0.02],
        },
        {},
    ]
    assert slow is not None and slow.process == 2 and "process 2 is slow" in str(slow)
    assert metrics == {
        "slowest_process": 2,
        "slowest_own_s": pytest.approx(0.3),
        "least_own_s": pytest.approx(0.01),
    }
    assert found[1] == (None, {}, [{}, {}])


def test_numbers_of_each_process_are_given_where_they_are_new_and_not_too_often(
    monkeypatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(pace, "coordination", lambda: None)
    many = Pace("c")
    monkeypatch.setattr(jax, "process_count", lambda: 200)

    def told(own: float, processes: int = 200) -> bool:
        many.paces = {process: Seconds(own, 2 * own) for process in range(processes)}
        return bool(many.of_each())

    assert not told(1.0, processes=199), "one has not told yet"
    assert told(1.0) and not told(1.0)
    clock[0] += 9.9
    assert not told(2.0), "200 of them every 10 s"
    clock[0] += 0.2
    assert told(2.0)
    clock[0] += 99
    assert not told(2.0), "nothing is new"


def test_alone_there_is_nothing_to_tell() -> None:
    alone = Pace("b")
    alone.add(1.0, 1.0, 0.0)
    assert alone.slow() is None and alone.metrics() == alone.of_each() == {}
    alone.close()
