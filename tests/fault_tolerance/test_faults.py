"""Faults on purpose: where they are written, and that each happens once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from jaxtrain.cluster.phases import Phases
from jaxtrain.fault_tolerance import faults, state_faults
from jaxtrain.fault_tolerance.faults import (
    FAULTS,
    Fault,
    Injector,
    faults_variable,
    missed,
    read_fault,
)
from jaxtrain.run.callback import Run
from jaxtrain.session.skips import Skips


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill@5", Fault("kill", 5)),
        ("stop@12.load:1", Fault("stop", 12, "load", 1)),
        ("exit@0.first_step:3", Fault("exit", 0, "first step", 3)),
    ],
)
def test_a_fault_is_read_as_it_is_written(text: str, fault: Fault) -> None:
    assert read_fault(text) == fault == read_fault(str(fault))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill", "KIND@STEP.PHASE:PROCESS, such as kill@20"),
        ("kil@5", "'kil' is no fault; did you mean 'kill'?"),
        ("kill@5.laod", "'laod' is no phase; did you mean 'load'?"),
    ],
)
def test_what_is_no_fault_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_fault(text)
    assert said in str(caught.value)


def test_each_happens_once_over_all_starts(tmp_path: Path, monkeypatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(faults, "_signal", sent.append)
    marks = tmp_path / "a folder"
    marks.mkdir()
    given = faults_variable([read_fault("kill@3.load"), read_fault("stop@3:1")], marks)[FAULTS]

    def start() -> None:
        phases = Phases()
        phases.listen(Injector(given, 0, tmp_path))
        for step in range(1, 6):
            phases.enter("load")
            assert bool(sent) == (step > 3), "when 3 are done, in the phase"
            phases.enter("step")
            phases.advance(step)
            if sent and step == 4:
                return

    start()
    assert len(sent) == 1
    again = Phases()
    again.listen(Injector(given, 0, tmp_path))
    again.advance(3)
    again.enter("load")
    assert len(sent) == 1
    assert faults_variable([], tmp_path) == {}


def test_a_crash_comes_in_every_start(tmp_path: Path) -> None:
    for _ in range(2):
        phases = Phases()
        given = faults_variable([read_fault("crash@2")], tmp_path)[FAULTS]
        phases.listen(Injector(given, 0, tmp_path))
        phases.advance(2)
        with pytest.raises(RuntimeError, match=r"the fault crash@2\.step:0"):
            phases.enter("step")


def test_a_slow_process_sleeps_once_in_each_of_its_steps(tmp_path: Path, monkeypatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(faults.time, "sleep", slept.append)
    phases = Phases()
    given = faults_variable([read_fault("slow@2")], tmp_path)[FAULTS]
    phases.listen(Injector(given, 0, tmp_path))
    for step in range(1, 40):
        phases.enter("step")
        for phase in ("load", "callback", "save"):
            with phases.within(phase):
                pass
        phases.advance(step)
    assert slept == [faults.SLOW_S] * faults.SLOW_STEPS


def test_a_spike_is_of_a_batch_and_of_all_processes(tmp_path: Path, monkeypatch) -> None:
    """Whichever step takes it, and however often; `nan` is of a step, and of its process."""
    struck: list[tuple[str, int]] = []
    monkeypatch.setattr(
        state_faults, "change_state", lambda kind, session: struck.append((kind, session.step))
    )
    given = faults_variable([read_fault("spike@5"), read_fault("nan@5")], tmp_path)[FAULTS]

    def take(process: int, skips: Skips) -> list[tuple[str, int]]:
        struck.clear()
        injector = Injector(given, process, tmp_path)
        for step in (*range(1, 10), *range(3, 10)):
            session = SimpleNamespace(step=step, loader=SimpleNamespace(skips=skips))
            injector.before_step(cast("Run", SimpleNamespace(_session=session)), step)
        return list(struck)

    assert take(1, Skips()) == [("spike", 6)] * 2
    assert take(1, Skips(configured=((2, 1),))) == [("spike", 5)] * 2
    assert take(0, Skips(configured=((2, 4),))) == [("nan", 6)] * 2
    assert missed([read_fault("spike@5"), read_fault("nan@5")], tmp_path) == ""


def happens(tmp_path: Path, text: str, *, starts: int = 1) -> None:
    """The fault's process comes to its step and phase, in so many starts."""
    fault = read_fault(text)
    given = faults_variable([fault], tmp_path / "files")[FAULTS]
    (tmp_path / "files").mkdir(exist_ok=True)
    for _ in range(starts):
        phases = Phases()
        phases.listen(Injector(given, fault.process, tmp_path / "run"))
        phases.advance(fault.step)
        phases.enter("step")
        with phases.within(fault.phase):
            pass


def test_an_error_is_raised_once(tmp_path: Path) -> None:
    """In the phase of what raises such, which is the run's then."""
    with pytest.raises(OSError, match=r"Input/output error: 'the fault raise@4.load:0'"):
        happens(tmp_path, "raise@4.load")
    happens(tmp_path, "raise@4.load", starts=3)


def test_a_process_leaves_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(faults.os, "_exit", codes.append)
    happens(tmp_path, "leave@4")
    happens(tmp_path, "exit@4")
    assert codes == [0, 3]


def test_a_launch_is_stopped_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its process, and awakened by one that outlives both."""
    sent: list[tuple[int, int]] = []
    started: list[tuple[list[str], bool]] = []
    monkeypatch.setattr(faults.os, "kill", lambda *given: sent.append(given))
    monkeypatch.setattr(
        faults.subprocess,
        "Popen",
        lambda command, start_new_session: started.append((command, start_new_session)),
    )
    happens(tmp_path, "pause@4", starts=2)
    launch = os.getppid()
    assert sent == [(launch, signal.SIGSTOP)]
    assert started == [(["sh", "-c", f"sleep {faults.PAUSE_S}; kill -CONT {launch}"], True)]


def test_files_that_are_shared_are_removed_but_for_the_marks(tmp_path: Path) -> None:
    """Without those each fault would happen again."""
    files = tmp_path / "files"
    (files / "below").mkdir(parents=True)
    for name in ("sample", "kill@2.step:0", "below/more"):
        (files / name).touch()
    happens(tmp_path, "clean@4", starts=2)
    assert {path.name for path in files.iterdir()} == {"kill@2.step:0", "clean@4.step:0"}
