"""Where the time of a process goes: phases that sum to the wall time."""

from __future__ import annotations

import json
import random
from contextlib import suppress

import pytest

from jaxtrain.cluster.phases import LOST, PHASES, RECENT, Now, Phases


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nested_phases_are_counted_once_and_sum_to_the_wall_time() -> None:
    clock, drawn = Clock(), random.Random(0)
    phases, names = Phases(clock), list(PHASES)
    wanted = dict.fromkeys(names, 0.0)

    def spend(phase: str, depth: int) -> None:
        """At random, with phases within; what is spent here is this phase's alone."""
        for _ in range(3):
            seconds = drawn.random()
            clock.now += seconds
            wanted[phase] += seconds
            if depth:
                inner = drawn.choice(names)
                with phases.within(inner):
                    spend(inner, depth - 1)

    with phases.within("open"):
        spend("open", 4)
    assert phases.now.phase == "start"
    found = phases.spent()
    assert sum(found.values()) == pytest.approx(clock.now - 100.0)
    assert {k: found.get(k, 0.0) for k in names} == pytest.approx(wanted)


def test_a_phase_ends_with_its_block_however_that_ends() -> None:
    phases = Phases()
    phases.enter("step")
    with pytest.raises(ZeroDivisionError), phases.within("save"):
        raise ZeroDivisionError
    assert phases.now.phase == "step"
    with pytest.raises(KeyError):
        phases.enter("stepp")
    assert phases.now.phase == "step"


def test_an_error_of_a_listener_is_of_the_phase_that_it_hears_of() -> None:
    """As the drill's fault `raise` is; the phase before it comes back."""
    phases = Phases()
    phases.enter("step")

    def listener(now: Now) -> None:
        if now.phase == "load" and not now.raised:
            raise OSError

    phases.listen(listener)
    with pytest.raises(OSError), phases.within("load"):
        raise AssertionError("the block is not begun")
    assert (phases.now.phase, phases.now.failed_in) == ("step", "load")


def test_listeners_hear_of_every_change() -> None:
    clock, heard = Clock(), []
    phases = Phases(clock)
    phases.listen(heard.append)
    clock.now = 103.0
    phases.enter("step")
    for seconds in (1.0, 3.0, 9.0):
        phases.advance(phases.now.step + 1)
        phases.measure(seconds)
    phases.advance(4)  # unlike other steps
    spent = {"start": 3.0}
    assert heard == [
        Now("start", 0, 100.0, 0.0, -1, {}),
        Now("step", 0, 103.0, 0.0, -1, spent),
        Now("step", 1, 103.0, 0.0, -1, spent),
        Now("step", 2, 103.0, 1.0, -1, spent),
        Now("step", 3, 103.0, 2.0, -1, spent),
        Now("step", 4, 103.0, 3.0, -1, spent),
    ]
    phases.begin_at(9)
    assert (phases.now.first, phases.now.step) == (9, 9)
    phases.advance(10)
    assert (phases.now.first, phases.now.step) == (9, 10)
    for _ in range(RECENT):
        phases.measure(7.0)
    assert phases.now.median_s == 7.0, "of the recent steps"


def test_a_start_began_where_it_began_whatever_it_went_back_to() -> None:
    """Ten steps of two seconds from 20 on; steps that are gone back to, and those beyond the first
    that a later start takes again, are lost as they were taken."""
    clock = Clock()
    phases = Phases(clock)
    phases.begin_at(20)
    phases.enter("step")
    for step in range(21, 31):
        clock.now += 2.0
        phases.advance(step)
    phases.go_back(26)
    assert (phases.now.first, phases.now.step) == (20, 26)
    clock.now += 2.0
    phases.advance(27)
    phases.go_back(23)
    assert (phases.now.first, phases.now.step) == (20, 23)
    assert (phases.spent()["step"], phases.spent()[LOST]) == pytest.approx((6.0, 16.0))
    phases.go_back(20)
    assert (phases.now.first, phases.now.step) == (20, 20)
    assert phases.spent()["step"] == pytest.approx(0.0)


def test_steps_that_come_again_are_lost() -> None:
    """Ten steps of two seconds, of which the last four come again; and once more all."""
    clock = Clock()
    phases, began = Phases(clock), clock.now
    phases.begin_at(20)
    phases.enter("step")
    for step in range(21, 31):
        clock.now += 2.0
        phases.advance(step)
    phases.go_back(26)
    assert phases.now.step == 26 and phases.now.phase == "step"
    assert (phases.spent()["step"], phases.spent()[LOST]) == pytest.approx((12.0, 8.0))
    clock.now += 2.0
    phases.advance(27)
    phases.go_back(15)
    assert (phases.now.first, phases.now.step) == (15, 15)
    assert (phases.spent()["step"], phases.spent()[LOST]) == pytest.approx((0.0, 22.0))
    assert sum(phases.spent().values()) == pytest.approx(clock.now - began)


def test_an_error_is_of_the_phase_in_which_it_was_raised() -> None:
    """Whatever a process does on its way out; a step that follows has come over it."""
    phases = Phases()
    phases.begin_at(3)
    phases.enter("step")
    assert phases.now.failed_in == "step" and not phases.now.raised
    with suppress(OSError), phases.within("callback"), phases.within("load"):
        raise OSError
    phases.enter("finish")
    with phases.within("save"):
        assert phases.now.failed_in == phases.now.raised == "load"
    phases.fail()
    assert phases.now.failed_in == "load", "the first error counts"
    phases.advance(4)
    assert phases.now.failed_in == "finish"
    phases.enter("step")
    phases.fail()
    phases.enter("finish")
    assert phases.now.failed_in == "step"
    assert Now(*json.loads(json.dumps(phases.now))) == phases.now, "as it is sent"
