"""Laws of every table, over all small sizes; and what a broken one is told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxtrain.pipeline.analysis import (
    bubble,
    cost,
    cotangents,
    in_flight,
    inputs,
    slots,
    spans,
    stashes,
    violations,
)
from jaxtrain.pipeline.schedule import KINDS, Costs, Schedule, make_schedule

EVERY = [
    (kind, stages, microbatches, chunks)
    for kind in KINDS
    for stages in range(1, 9)
    for microbatches in range(1, 33)
    for chunks in range(1, 5)
    if (kind == "zero_bubble") or (kind == "interleaved") == (chunks > 1)
]


def published(kind: str, r: int, m: int, v: int) -> float:
    """Cost of the full schedule, F = 1 and B = 2 (split 1 + 1)."""
    return 3 * m + 2 * (r - 1) / v if kind == "zero_bubble" else 3 * (m + (r - 1) / v)


@pytest.mark.parametrize("kind", KINDS)
def test_every_table_is_right_and_costs_what_is_published(kind: str) -> None:
    for each, r, m, v in EVERY:
        if each != kind:
            continue
        schedule = make_schedule(kind, r, m, v)
        assert violations(schedule) == []
        # With chunks a group that is not full costs as much as one that is.
        counted = m if v == 1 else -(-m // r) * r
        short = counted - m
        found = cost(schedule)
        assert found <= published(kind, r, counted, v) + 1e-9
        if not short:
            assert found == pytest.approx(published(kind, r, m, v), abs=1e-9)
        assert bubble(schedule) == pytest.approx(1 - 3 * m / found)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "gpipe"])
def test_memory_does_not_grow_with_microbatches(kind: str) -> None:
    for stages in (1, 2, 4, 8):
        for chunks in (1, 2, 4) if kind == "zero_bubble" else (2, 4) if "inter" in kind else (1,):
            found = [make_schedule(kind, stages, m * stages, chunks) for m in (4, 5, 16)]
            assert len({tuple(slots(s).items()) for s in found}) == 1
            assert len({tuple(in_flight(s)) for s in found}) == 1


def test_memory_is_that_of_the_formulas() -> None:
    for r in range(1, 9):
        one = make_schedule("one_f_one_b", r, 4 * r)
        assert list(in_flight(one)) == [2 * (r - 1 - stage) + 1 for stage in range(r)]
        assert slots(one) == {"inputs": 2 * r - 1, "cotangents": 1}
        for m in (1, 5, 32):
            piped = make_schedule("gpipe", r, m)
            # The head's gradient would wait for its B: the head runs then, but not where B makes
            # no output again.
            assert slots(piped) == {"inputs": m, "cotangents": 1}
            kept = {"inputs": 1, "residuals": m, "cotangents": m}
            assert slots(piped, keep_residuals=True) == kept
        assert slots(make_schedule("zero_bubble", r, 4 * r))["stashes"] == r


def by_hand(schedule: Schedule) -> dict[str, list[int]]:
    """Most inputs held at once by each stage, counted by playing the table tick by tick."""
    most = [0] * schedule.stages
    held: list[set[int]] = [set() for _ in range(schedule.stages)]
    arriving: list[tuple[int, int]] = []
    last = schedule.chunks - 1
    for tick in range(schedule.ticks):
        for stage, work in arriving:
            held[stage].add(work)
        arriving = []
        for stage in range(schedule.stages):
            work = int(schedule.forward[tick, stage])
            if work >= 0:
                if stage == 0 and work % schedule.chunks == 0:
                    held[stage].add(work)
                assert work in held[stage], "its input is not there"
                if stage + 1 < schedule.stages:
                    arriving.append((stage + 1, work))
                elif work % schedule.chunks < last:
                    arriving.append((0, work + 1))
        for stage in range(schedule.stages):
            most[stage] = max(most[stage], len(held[stage]))
            held[stage].discard(int(schedule.backward[tick, stage]))
    assert not any(held)
    return {"inputs": most}


@pytest.mark.parametrize(
    ("kind", "stages", "microbatches", "chunks"),
    [
        *(("gpipe", 3, 5, 1), ("one_f_one_b", 4, 9, 1), ("interleaved", 3, 6, 3)),
        *(("interleaved", 4, 6, 2), ("zero_bubble", 4, 8, 2), ("zero_bubble", 1, 3, 2)),
    ],
)
def test_memory_is_that_of_a_player_who_follows_the_table(kind, stages, microbatches, chunks):
    schedule = make_schedule(kind, stages, microbatches, chunks)
    assert list(in_flight(schedule)) == by_hand(schedule)["inputs"]


def test_one_f_one_b_by_hand() -> None:
    schedule = make_schedule("one_f_one_b", 2, 3)
    assert schedule.forward.tolist() == [[0, -1], [1, 0], [2, 1], [-1, 2], [-1, -1]]
    assert schedule.backward.tolist() == [[-1, -1], [-1, 0], [0, 1], [1, 2], [2, -1]]
    assert [(s.kinds, s.start, s.stop) for s in spans(schedule)] == [
        ("F", 0, 1), ("FB", 1, 4), ("B", 4, 5)
    ]  # fmt: skip


def test_costs_are_of_all_chunks_together_and_the_heads_come_once_a_microbatch() -> None:
    schedule = make_schedule("interleaved", 2, 4, 2)
    costs = Costs(forward=2.0, backward=3.0, weight=1.0, head=0.5)
    assert costs.of(schedule) == {"F": 1.0, "B": 2.0}
    assert cost(schedule, costs) == pytest.approx(6.0 * (4 + 1 / 2) + 0.5 * 4)


def moved(schedule: Schedule, name: str, work: int, stage: int, tick: int) -> Schedule:
    table = getattr(schedule, name).copy()
    table[table[:, stage] == work, stage] = -1
    table[tick, stage] = work
    return replace(schedule, **{name: table})


def test_a_broken_table_is_told_where() -> None:
    right = make_schedule("one_f_one_b", 2, 3)
    assert violations(moved(right, "forward", 2, 0, 4)) == [
        "F of microbatch 2, chunk 0 on stage 1 is in tick 3, and its input comes from the stage "
        "before: not before tick 5"
    ]
    assert violations(moved(make_schedule("one_f_one_b", 2, 1), "backward", 0, 0, 1)) == [
        "B of microbatch 0, chunk 0 on stage 0 is in tick 1, and its gradient comes from the stage "
        "behind: not before tick 2"
    ]
    twice = right.forward.copy()
    twice[4, 1] = 0
    assert violations(replace(right, forward=twice)) == [
        "F on stage 1: microbatch 0, chunk 0 runs 2 times; it must run once"
    ]
    strange = right.forward.copy()
    strange[4, 1] = 7
    assert violations(replace(right, forward=strange)) == ["F on stage 1: work 7 is none of 0 .. 2"]
    assert (
        "give every table one row for each tick"
        in violations(replace(right, backward=right.backward[:-1]))[0]
    )


@pytest.mark.parametrize("name", ["forward", "backward", "weight"])
def test_no_work_may_come_sooner(name: str) -> None:
    """Every table is as early as it can be: one tick sooner breaks a law where there is room."""
    schedule = make_schedule("zero_bubble", 3, 4)
    found = 0
    for tick, stage in np.argwhere(getattr(schedule, name) >= 0):
        work = getattr(schedule, name)[tick, stage]
        if tick and getattr(schedule, name)[tick - 1, stage] == -1:
            sooner = moved(schedule, name, int(work), int(stage), int(tick) - 1)
            found += bool(violations(sooner))
    assert found >= (1 if name == "weight" else schedule.stages - 1)


def test_lifetimes_end_where_they_are_used() -> None:
    schedule = make_schedule("zero_bubble", 3, 4)
    assert (inputs(schedule).last == cotangents(schedule).last).all()
    kept = stashes(schedule)
    assert kept is not None and (kept.first == inputs(schedule).last).all()
    assert stashes(make_schedule("gpipe", 2, 2)) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1F1B", 2, 4), ("'1F1B' is no schedule; did you mean 'one_f_one_b'?",)),
        (("gpipe", 0, True), ("stages=0", "microbatches=True")),
        (("one_f_one_b", 2, 4, 2), ("has no chunks", "use interleaved")),
        (("interleaved", 2, 4), ("one_f_one_b",)),
    ],
)
def test_what_no_schedule_can_be_made_of_is_refused(arguments, words) -> None:
    with pytest.raises(ValueError) as error:
        make_schedule(*arguments)
    assert all(word in str(error.value) for word in words)
