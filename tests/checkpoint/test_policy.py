"""When a run saves and what it keeps, against closed forms and brute force."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.checkpoint import Best, Keep, LocalTier, Minutes, SavePolicy
from jaxtrain.checkpoint.policy import (
    EVALUATED_BATCHES,
    FARTHEST,
    UNMEASURED_S,
    SaveClock,
    daly_interval,
)
from jaxtrain.checkpoint.retention import Retention


def wasted(interval: float, save: float, mtbf: float) -> float:
    """Expected time per unit of work with failures at random (exponential), Daly 2006, eq. 20 with
    no time to restart: a segment of work and its save is repeated until it passes."""
    return mtbf * (math.exp((interval + save) / mtbf) - 1) / interval


@pytest.mark.parametrize("mtbf", [600.0, 3600.0, 86400.0])
@pytest.mark.parametrize("share", [1e-4, 1e-3, 1e-2, 0.1])
def test_the_interval_is_the_one_that_wastes_least(mtbf: float, share: float) -> None:
    save = mtbf * share
    found = daly_interval(save, mtbf)
    best = min(wasted(found * factor, save, mtbf) for factor in (0.5, 0.8, 0.9, 1.1, 1.25, 2))
    assert wasted(found, save, mtbf) < best
    assert found == pytest.approx(math.sqrt(2 * save * mtbf), rel=math.sqrt(2 * share))


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_the_interval_is_within_a_hundredth_of_the_best(share: float) -> None:
    """Where a save takes a good part of a machine's life, Young's first order is a third off."""
    grid = np.linspace(0.05, 1.5, 20_000)
    exact = grid[np.argmin([wasted(interval, share, 1.0) for interval in grid])]
    assert daly_interval(share, 1.0) == pytest.approx(exact, rel=0.01)
    if share == 0.5:
        assert abs(math.sqrt(2 * share) / exact - 1) > 0.3


def test_where_saves_take_longer_than_machines_live_it_is_their_life() -> None:
    assert daly_interval(1300.0, 600.0) == 600.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def steps_saved(every: int | Minutes, step_s: float, steps: int, **known: float) -> list[int]:
    clock = Clock()
    saves = SaveClock(every, known.get("mtbf_s"), clock)
    saves.save_s = known.get("save_s")
    found = []
    for step in range(1, steps + 1):
        clock.now += step_s
        if saves.due(step):
            found.append(step)
            saves.saved(step)
    return found


def test_steps_are_counted() -> None:
    assert steps_saved(7, 1.0, 30) == [7, 14, 21, 28]


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on process 0 of two; how often the other is asked."""
    looks: list[int] = []
    monkeypatch.setattr("jax.process_count", lambda: 2)
    monkeypatch.setattr("jaxtrain.checkpoint.policy._of_process_0", lambda *v: looks.append(1) or v)
    return looks


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("step_s", [0.01, 0.5, 7.0, 200.0])
@pytest.mark.parametrize("minutes", [0.5, 10.0])
def test_minutes_are_kept_to_the_step(
    step_s: float, minutes: float, processes: int, request: pytest.FixtureRequest
) -> None:
    """Never early, and late by less than a step."""
    if processes == 2:
        request.getfixturevalue("two_processes")
    every = max(1, math.ceil(60 * minutes / step_s - 1e-9))
    found = steps_saved(Minutes(minutes), step_s, 4 * every + 1)
    gaps = [b - a for a, b in itertools.pairwise([0, *found])]
    assert len(gaps) >= 3 and all(every <= gap <= every + 1 for gap in gaps)


def test_others_are_asked_seldom(two_processes: list[int]) -> None:
    """It is a collective among hosts."""
    assert len(steps_saved(Minutes(10), 0.1, 6001)) == 1
    assert len(two_processes) < 6001 / FARTHEST + 10


def test_steps_that_slow_down_are_saved_in_time(two_processes: list[int]) -> None:
    clock = Clock()
    saves = SaveClock(Minutes(10), None, clock)
    for step in range(1, 1000):  # 1 s a step at first, and then 60 s
        clock.now += 1.0 if step < 5 else 60.0
        if saves.due(step):
            break
    assert clock.now <= 600 + FARTHEST * 60


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({}, UNMEASURED_S),
        ({"save_s": 5.0}, UNMEASURED_S),
        ({"mtbf_s": 3600.0}, UNMEASURED_S),
        ({"save_s": 5.0, "mtbf_s": 3600.0}, daly_interval(5.0, 3600.0)),
        ({"save_s": 5.0, "mtbf_s": 4.0}, 5.0),
    ],
)
def test_without_minutes_the_interval_is_what_is_measured(
    known: dict[str, float], expected: float
) -> None:
    clock = SaveClock(Minutes(), known.get("mtbf_s"))
    clock.save_s = known.get("save_s")
    assert clock.interval_s() == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_kept(seed: int) -> None:
    draw = random.Random(seed)
    steps: dict[int, dict[str, float]] = {}
    for step in sorted(draw.sample(range(1, 200), 12)):
        value = draw.choice([draw.random(), math.nan, math.inf, None])
        steps[step] = {} if value is None else {"eval_loss": value}
    latest, every, n = draw.randint(1, 4), draw.choice([None, 10]), draw.randint(1, 3)
    greatest = draw.random() < 0.5
    kept = Keep(latest, every, Best("eval_loss", n, greatest)).select(steps)
    order = sorted(steps)
    assert set(order[-latest:]) <= kept
    rated = [s for s in order if math.isfinite(steps[s].get("eval_loss", math.nan))]
    rest = kept - set(order[-latest:]) - {s for s in order if every and s % every == 0}
    assert rest <= set(rated)
    for s in rated:
        better = [
            t
            for t in rated
            if (steps[t]["eval_loss"] > steps[s]["eval_loss"]) == greatest and t != s
        ]
        if len(better) < n:
            assert s in kept, "among the best"
        elif s in rest:
            raise AssertionError("kept without being among the best")


@pytest.mark.parametrize("seed", range(10))
def test_the_best_are_those_of_every_number_of_batches_alone(seed: int) -> None:
    """What a step is compared with has as many batches: the others may as well not be there."""
    draw, n = random.Random(seed), 1 + seed % 2
    steps: dict[int, dict[str, float]] = {}
    for step in draw.sample(range(1, 100), 15):
        over = draw.choice([{}, {EVALUATED_BATCHES: 0}, {EVALUATED_BATCHES: 8}])
        steps[step] = {"eval_loss": draw.random() + 10 * len(over), **over}
    steps[100] = {}
    keep, alone = Keep(1, best=Best("eval_loss", n, seed % 3 == 0)), {100}
    for batches in (None, 0, 8):
        alike = {s: m for s, m in steps.items() if m.get(EVALUATED_BATCHES) == batches}
        alone |= keep.select({**alike, 100: {}})
    assert keep.select(steps) == alone
    assert len(alone) == 1 + 3 * n


def test_room_is_asked_for_the_best_of_every_number_of_batches(tmp_path: Path) -> None:
    retention = Retention(Keep(2, best=Best("eval_loss", 3)), tmp_path)
    assert retention.bytes_needed(10) == (2 + 3 + 1) * 10
    for step, batches in enumerate([8, 8, 0, None], 1):
        (tmp_path / str(step)).mkdir()
        over = {} if batches is None else {EVALUATED_BATCHES: batches}
        retention.metrics[step] = {"eval_loss": 1.0, **over}
        groups = [1, 1, 2, 3][step - 1]
        assert retention.bytes_needed(10) == (2 + 3 * groups + 1) * 10


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Minutes(0), "minutes=0"),
        (lambda: Minutes(-1.0), "minutes=-1"),
        (lambda: Keep(latest=0, every=-1), "latest=0 counts from 1; every=-1"),
        (lambda: Best("eval_loss", n=0), "n=0"),
        (lambda: SavePolicy(every="10 minutes"), "every='10 minutes'.*Minutes"),
        (lambda: SavePolicy(local=50), r"local=50.*LocalTier\(every=50\)"),
        (lambda: Minutes(True), "minutes=True"),
        (lambda: Minutes("5"), "minutes='5'"),
        (lambda: Keep(best="eval_loss"), r"best='eval_loss'.*Best\("),
        (lambda: Best("eval_loss", n=1.5), r"n=1\.5"),
        (lambda: LocalTier(every=0, directory=5), "every=0.*directory=5"),
        (lambda: LocalTier(directory="/x/{user}"), r"\{user\}.*\{process\}"),
    ],
)
def test_what_means_nothing_is_refused(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()  # type: ignore[operator]
