"""Which machines a start is on, by machines that come and go as they are told."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

import pytest

from jaxtrain.machines import pauses
from jaxtrain.machines import roster as rosters
from jaxtrain.machines.layouts import MachineLayout
from jaxtrain.machines.roster import Roster


@dataclass
class Named:
    name: str
    leaving: bool = False
    where: str = ""


class Changing:
    """Machines by name: one object each, as long as it is present at every look."""

    def __init__(self, names: str, *, come_and_go: bool = True) -> None:
        self.come_and_go, self.names = come_and_go, names
        self.machines: dict[str, Named] = {}

    def present(self) -> list[Named]:
        self.machines = {name: self.machines.get(name, Named(name)) for name in self.names}
        return list(self.machines.values())


ALL = {3: MachineLayout(3)}
TWO = MachineLayout(2, description="two")
FEWER = {
    1: MachineLayout(1, description="one"),
    2: TWO,
    3: TWO,
    4: MachineLayout(4, description="four"),
}


def made(
    machines: Changing,
    layouts: dict[int, MachineLayout],
    wait_s: float = 0.3,
    rejoin_s: float = 0.2,
):
    told: list[str] = []
    return Roster(machines, layouts, wait_s, told.append, rejoin_s), told  # type: ignore[arg-type]


def names(roster: Roster) -> str:
    return "".join(each.name for each in roster.hosts)


CHOSEN = {
    "all": ("abc", ALL, "abc"),
    "a spare": ("abcd", ALL, "abc"),
    "too few": ("ab", ALL, None),
    "none": ("", FEWER, None),
    "fewer": ("abc", FEWER, "ab"),
    "one": ("c", FEWER, "c"),
    "four": ("abcde", FEWER, "abcd"),
}
"""Machines that are there, layouts, and those that a start is on."""


@pytest.mark.parametrize("name", CHOSEN)
def test_a_start_is_on_the_machines_that_are_there(name: str) -> None:
    there, layouts, wanted = CHOSEN[name]
    roster, told = made(Changing(there), layouts)
    began = time.monotonic()
    assert roster.choose(lambda: False) is (wanted is not None)
    assert names(roster) == (wanted or "")
    complete = len(there) >= max(layouts)
    assert (time.monotonic() - began > 0.25) is not complete, "missing ones are waited for"
    if wanted is None:
        assert f"{len(there)} of {max(layouts)} machines are here" in told[-1]


def test_machines_that_never_come_are_not_waited_for() -> None:
    roster, _ = made(Changing("ab", come_and_go=False), ALL, wait_s=60)
    assert not roster.choose(lambda: False)


def test_one_that_comes_is_taken_at_once() -> None:
    machines = Changing("ab")
    roster, _ = made(machines, ALL, wait_s=30)
    threading.Timer(0.2, setattr, (machines, "names", "abc")).start()
    assert roster.choose(lambda: False) and names(roster) == "abc"


def test_a_lost_one_is_waited_for_a_moment_where_the_run_can_go_on_without() -> None:
    machines = Changing("abcd")
    roster, told = made(machines, FEWER, wait_s=30)
    assert roster.choose(lambda: False) and roster.layout.machines == 4
    machines.names, began = "abd", time.monotonic()
    assert roster.choose(lambda: False) and names(roster) == "ab"
    assert 0.15 < time.monotonic() - began < 25
    assert "on 2 machines, of 4 wanted and 3 here: two" in told[-1]
    assert not roster.could_grow(), "three are as good as two"
    time.sleep(0.25)
    assert not roster.could_grow(), "however long they are there"
    machines.names = "abdc"
    assert not roster.could_grow(), "not at once"
    time.sleep(0.1)
    machines.names = "abd"
    assert not roster.could_grow()
    machines.names = "abdc"
    assert not roster.could_grow(), "it begins anew where one was gone between"
    time.sleep(0.25)
    assert roster.could_grow()


class Clock:
    """`time`, of which seconds pass as they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (rosters, pauses):
        monkeypatch.setattr(module, "time", made)
    return made


def stay(roster: Roster, clock: Clock) -> None:
    """Machines that are there now are grown onto once they have stayed."""
    for _ in range(3):
        assert not roster.could_grow()
        clock.now += 4
    assert roster.could_grow()


@pytest.mark.parametrize("seed", range(20))
def test_only_machines_that_stayed_are_grown_onto(seed: int, clock: Clock) -> None:
    """Whatever comes and goes: those there at every look for longer than ten seconds count, by a
    record of all looks; and those of the start."""
    drawn, there = random.Random(seed), [*"abcde"]
    machines = Changing("ab")
    roster, _ = made(machines, FEWER, rejoin_s=10)
    assert roster.choose(lambda: False) and names(roster) == "ab"
    looks: list[tuple[float, set[str]]] = [(0.0, {"a", "b"})]
    grew = 0
    for _ in range(120):
        clock.now += drawn.choice([0.5, 3.0, 4.0])
        machines.names = "ab" + "".join(
            name for name in there[2:] if drawn.random() < (0.5 if name == "e" else 0.8)
        )
        looks.append((clock.now, set(machines.names)))
        stayed = 0
        for name in machines.names:
            absent = [at for at, (_, seen) in enumerate(looks) if name not in seen]
            since = looks[absent[-1] + 1 if absent else 0][0]
            stayed += clock.now - since > 10
        grows = roster.could_grow()
        assert grows is (stayed >= 4)
        grew += grows
    assert 0 < grew < 120


def test_who_has_stayed_is_taken_before_who_has_just_come(clock: Clock) -> None:
    """Whatever their order is, and before one that took part and is gone."""
    machines = Changing("ab")
    roster, _ = made(machines, FEWER, rejoin_s=10)
    assert roster.choose(lambda: False)
    for machines.names in "abef", "abef", "abcdef":
        clock.now += 6
        grows = roster.could_grow()
    assert grows and roster.choose(lambda: False)
    assert sorted(names(roster)) == [*"abef"]


def test_a_machine_that_takes_the_place_of_another_has_not_stayed_for_it(clock: Clock) -> None:
    machines = Changing("abc")
    roster, _ = made(machines, FEWER, rejoin_s=10)
    assert roster.choose(lambda: False) and names(roster) == "ab"
    for turn in range(20):
        clock.now += 4
        machines.names = "abc" + "de"[turn % 2]
        assert not roster.could_grow(), "four are there at every look, and never the same"
    stay(roster, clock)


def test_a_machine_that_is_back_between_two_looks_has_not_stayed(clock: Clock) -> None:
    machines = Changing("ab")
    roster, _ = made(machines, FEWER, rejoin_s=10)
    assert roster.choose(lambda: False) and names(roster) == "ab"
    machines.names = "abcd"
    for _ in range(20):
        assert not roster.could_grow(), "present at every look, and another each second time"
        clock.now += 4
        assert not roster.could_grow()
        clock.now += 4
        del machines.machines["c"]
    stay(roster, clock)


def test_a_pause_is_no_stay(clock: Clock) -> None:
    machines = Changing("ab")
    roster, _ = made(machines, FEWER, rejoin_s=10)
    assert roster.choose(lambda: False)
    machines.names = "abcd"
    assert not roster.could_grow()
    clock.now += 600
    roster.forget_stays()
    stay(roster, clock)


def test_one_that_was_left_out_or_has_left_is_not_waited_for() -> None:
    machines = Changing("ab")
    roster, _ = made(machines, {1: MachineLayout(1), 2: MachineLayout(2)}, rejoin_s=30)
    assert roster.choose(lambda: False)
    roster.set_aside([1])
    assert roster.choose(lambda: False) and names(roster) == "a"
    machines.names, began = "bc", time.monotonic()
    roster.hosts[0].leaving = True  # type: ignore[misc]
    assert roster.choose(lambda: False) and names(roster) == "c"
    assert time.monotonic() - began < 25


def test_who_stops_waits_for_nobody() -> None:
    roster, _ = made(Changing("a"), ALL, wait_s=30)
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    assert not roster.choose(stop.is_set)


ASIDE = {
    "a spare stands in": ("abcd", ALL, [1], "acd"),
    "nobody stands in": ("abc", ALL, [1], "abc"),
    "fewer go on": ("abcd", FEWER, [3], "ab"),
    "none is known": ("abcd", FEWER, [], "abcd"),
}


@pytest.mark.parametrize("name", ASIDE)
def test_a_machine_that_computes_wrongly_is_left_out_where_that_can_be(name: str) -> None:
    there, layouts, wrong, wanted = ASIDE[name]
    roster, told = made(Changing(there), layouts)
    assert roster.choose(lambda: False)
    roster.set_aside(wrong)
    assert roster.choose(lambda: False) and names(roster) == wanted
    left_out = wanted != there and wanted != "abc"
    assert any("computed wrongly, and is left out" in line for line in told) is left_out
