"""Pauses of one's own, which are nobody's silence: by clocks that jump."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxtrain.cluster.exit_codes import REFUSED
from jaxtrain.machines import agent, agents, pauses, roster
from jaxtrain.machines.agents import GONE_S, TOLD_S, Agents
from jaxtrain.machines.channel import Gone
from jaxtrain.machines.layouts import MachineLayout
from jaxtrain.machines.pauses import PAUSE_S, Pauses


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that passes only as a test says: `clock.now`."""
    made = SimpleNamespace(now=1000.0, oversleeps=[])
    """oversleeps: seconds by which the next sleeps are too long."""

    def sleep(seconds: float) -> None:
        made.now += seconds + (made.oversleeps.pop(0) if made.oversleeps else 0.0)

    time = SimpleNamespace(monotonic=lambda: made.now, sleep=sleep)
    for module in (agent, agents, pauses, roster):
        monkeypatch.setattr(module, "time", time)
    return made


@pytest.mark.parametrize("seed", range(20))
def test_the_time_since_a_moment_is_without_the_pauses_behind_it(
    seed: int, clock: SimpleNamespace
) -> None:
    """By adding up the time between looks that is no pause."""
    drawn, every = random.Random(seed), 0.5
    looks, awake = Pauses(every), [(clock.now, 0.0)]
    """Moments, and the time awake until each."""
    for _ in range(30):
        gap = drawn.choice([every, every + 0.9 * PAUSE_S, every + 1.1 * PAUSE_S, 3.0, 600.0])
        late = gap - every if gap - every > PAUSE_S else 0.0
        awake.append((clock.now + gap - late, awake[-1][1] + gap - late))
        awake.append((clock.now + gap - 0.3 * late, awake[-1][1]))
        clock.now += gap
        awake.append((clock.now, awake[-1][1]))
        assert looks.look() == pytest.approx(late)
    for moment, before in awake:
        assert clock.now - looks.moved(moment) == pytest.approx(awake[-1][1] - before)


class Ticks:
    """`threading.Event`, each wait on which takes one of `gaps`; then it is set."""

    def __init__(self, clock: SimpleNamespace, gaps: list[float]) -> None:
        self._clock, self._gaps = clock, iter(gaps)

    def wait(self, _: float) -> bool:
        gap = next(self._gaps, None)
        self._clock.now += gap or 0.0
        return gap is None


SILENT = [TOLD_S] * (int(GONE_S / TOLD_S) + 1)
"""Waits of which the last is too long a silence."""


@pytest.mark.parametrize(
    ("gaps", "lost"),
    [
        ([TOLD_S, 600.0, TOLD_S, 600.0], False),
        (SILENT[:-1], False),
        (SILENT, True),
        ([600.0, *SILENT], True),
        ([TOLD_S + 0.9 * PAUSE_S] * 5, True),
    ],
)
def test_a_paused_launch_loses_no_machine(
    clock: SimpleNamespace, gaps: list[float], lost: bool
) -> None:
    closed: list[bool] = []
    channel = SimpleNamespace(close=lambda: closed.append(True))
    machine = SimpleNamespace(heard=clock.now, gone=False, say=lambda _: None, channel=channel)
    launch = SimpleNamespace(
        _closed=Ticks(clock, gaps), _lock=threading.Lock(), _machines={"a": machine}
    )
    Agents._watch(launch)  # type: ignore[arg-type]
    assert bool(closed) is lost


class Quiet:
    """A channel by which nothing comes; each look at it takes one of `gaps`, then it says that the
    run is over."""

    def __init__(self, clock: SimpleNamespace, gaps: list[float]) -> None:
        self._clock, self._gaps = clock, iter(gaps)

    def receive(self, _: float) -> dict[str, Any] | None:
        gap = next(self._gaps, None)
        self._clock.now += gap or 0.0
        return {"do": "leave", "code": 0} if gap is None else None

    def send(self, _: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("gaps", "gone"),
    [
        ([0.1, 600.0, 0.1, 600.0], False),
        ([1.0] * 10, False),
        ([1.0] * 11, True),
        ([600.0, *[1.0] * 11], True),
    ],
)
def test_a_paused_agent_keeps_its_launch(
    clock: SimpleNamespace, gaps: list[float], gone: bool
) -> None:
    made = agent.Agent(("", 0), b"", name="a", program=[], wait_s=0, tell=print)
    channel: Any = Quiet(clock, gaps)
    if gone:
        with pytest.raises(Gone, match="nothing was heard of it for 10 s"):
            made._serve(channel)
    else:
        assert made._serve(channel) == 0


def test_an_agent_leaves_after_as_many_refusals_in_a_row_as_a_lost_one_is_noticed_in(
    clock: SimpleNamespace,
) -> None:
    """Twice that time awake; a launch that took it in between begins the count anew."""
    tries = int(2 * GONE_S / agent.AGAIN_S)
    made = agent.Agent(("", 0), b"", name="a", program=[], wait_s=0, tell=print)
    for taken in (True, False):
        for _ in range(tries):
            assert made._refused("there is a machine named a") is None
            clock.now += 600.0  # a pause is no try
        if taken:
            made._taken()
            made._is_taken = False
    assert made._refused("there is a machine named a") == REFUSED


PAUSED = pytest.mark.parametrize(
    ("oversleeps", "paused"), [([600.0, 0.0], True), ([1.5] * 30, False)]
)
"""Of sleeps while something is waited for, for 30 seconds awake: what comes after a pause of the
one who waits has come in time, and what comes after many long sleeps has not."""


@PAUSED
def test_a_paused_launch_waits_for_its_machines_as_long_as_it_said(
    clock: SimpleNamespace, oversleeps: list[float], paused: bool
) -> None:
    clock.oversleeps = [*oversleeps]
    told: list[str] = []
    machine = SimpleNamespace(name="a", leaving=False)

    def present() -> list[Any]:
        return [] if clock.oversleeps else [machine]

    machines = SimpleNamespace(present=present, come_and_go=True)
    made = roster.Roster(machines, {1: MachineLayout(1)}, 30.0, told.append)  # type: ignore[arg-type]
    assert made.choose(lambda: False) is paused
    assert any("after 30 s" in line for line in told) is not paused


@PAUSED
def test_a_paused_agent_looks_for_its_launch_as_long_as_it_said(
    clock: SimpleNamespace,
    oversleeps: list[float],
    paused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock.oversleeps = [*oversleeps]
    channel = SimpleNamespace(send=lambda _: None, host="::1")

    def connect(address: Any, key: bytes) -> Any:
        if clock.oversleeps:
            raise OSError("refused")
        return channel

    monkeypatch.setattr(agent, "connect", connect)
    settings: dict[str, Any] = dict(name="a", program=(), wait_s=30.0, tell=lambda _: None)
    found = agent.Agent(("::1", 1), b"", **settings)._reach()
    assert (found is channel) is paused


@pytest.mark.parametrize(("gaps", "lost"), [([TOLD_S, 600.0], False), (SILENT, True)], ids=str)
def test_a_paused_launch_takes_no_process_for_lost_that_it_ended(
    clock: SimpleNamespace, gaps: list[float], lost: bool
) -> None:
    machine = SimpleNamespace(heard=clock.now)
    remote = agents._Remote(machine, 1, 0, lambda _: None)  # type: ignore[arg-type]
    ended = Ticks(clock, gaps)
    ended.set = lambda: None  # type: ignore[attr-defined]
    remote._ended = ended  # type: ignore[assignment]
    remote.join()
    assert remote._lost is lost


def test_what_came_before_a_sleep_is_no_pause(clock: SimpleNamespace) -> None:
    """Such as a try to connect, which may take long."""
    looks, began = Pauses(1.0), clock.now
    clock.now += 600
    looks.sleep()
    assert looks.moved(began) == began
    clock.oversleeps = [600.0]
    looks.sleep()
    assert clock.now - looks.moved(began) == pytest.approx(602.0)


def test_an_agents_folder_is_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    purposes: list[str] = []

    @contextmanager
    def folder(purpose: str) -> Iterator[Path]:
        purposes.append(purpose)
        yield tmp_path

    monkeypatch.setattr(agent, "temporary_folder", folder)
    monkeypatch.setattr(agent.Agent, "_reach", lambda _: None)
    settings: dict[str, Any] = dict(name="a", program=(), wait_s=30.0, tell=lambda _: None)
    agent.Agent(("::1", 1), b"", **settings).run()
    assert purposes == ["agent"]
