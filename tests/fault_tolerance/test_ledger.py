"""Where the wall time of a run went: everything once, and what was taken again is lost."""

from __future__ import annotations

import json
import random
import threading
import time
from io import FileIO
from pathlib import Path

import pytest

from jaxtrain.cli.train import KeepLedger
from jaxtrain.cluster.phases import LOST as LOST_WITHIN
from jaxtrain.cluster.phases import PHASES, Now, Phases
from jaxtrain.fault_tolerance import ledger
from jaxtrain.fault_tolerance.ledger import (
    KINDS,
    NAME,
    OPEN,
    Entry,
    OpenEntry,
    Records,
    add_entry,
    entry_of,
    read_entries,
    read_ledger,
    record,
    sum_up,
    unwritten,
)
from jaxtrain.fault_tolerance.supervisor import Supervisor
from jaxtrain.files import json_lines


def test_every_phase_has_its_place() -> None:
    assert set(PHASES) == set(KINDS) - {"hang", "waiting", LOST_WITHIN}


PLACES = {
    "init": ["start", "join", "open"],
    "compile": ["compile", "first step"],
    "step": ["step"],
    "data": ["load"],
    "callback": ["callback"],
    "evaluate": ["evaluate"],
    "save": ["save"],
    "restore": ["restore"],
    "finish": ["finish", "exit"],
    "hang": ["hang"],
    "waiting": ["waiting"],
    "lost": ["lost"],
}


def test_seconds_of_a_phase_are_of_its_kind_and_only_steps_are_good() -> None:
    """The whole table, as one reads it in a ledger."""
    assert sorted(phase for phases in PLACES.values() for phase in phases) == sorted(KINDS)
    for kind, phases in PLACES.items():
        for phase in phases:
            ledger = sum_up([Entry(0.0, 2.0, {phase: 2.0})])
            assert dict(ledger.seconds) == {kind: 2.0}, phase
            assert ledger.goodput == (phase == "step"), phase


def start(first: int, done: int, step_s: float, **more: float) -> Entry:
    return Entry(0.0, 0.0, {"step": step_s, **more}, first, done)


LOST = {
    "nothing": ([start(0, 10, 5.0)], 0.0),
    "goes on where it stopped": ([start(0, 10, 5.0), start(10, 20, 5.0)], 0.0),
    "back to the newest save": ([start(0, 10, 5.0), start(8, 20, 6.0)], 1.0),
    "twice": ([start(0, 10, 5.0), start(8, 10, 2.0), start(8, 20, 6.0)], 1.0 + 2.0),
    "one that came to no step": (
        [start(0, 10, 5.0), Entry(0.0, 0.0, {"start": 3.0}), start(8, 20, 6.0)], 1.0,
    ),
    "further back still, for a damaged save": (
        [start(0, 10, 5.0), start(8, 12, 4.0), start(4, 20, 8.0)], 3.0 + 4.0,
    ),
    "before its own first step was done": ([start(10, 10, 5.0), start(5, 20, 6.0)], 5.0),
    "of a spike": ([start(0, 10, 5.0, lost=2.0), start(8, 20, 6.0, lost=1.0)], 2.0 + 1.0 + 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_steps_that_were_taken_again_are_lost(name: str) -> None:
    entries, lost = LOST[name]
    found = sum_up(entries)
    assert found.seconds.get("lost", 0.0) == pytest.approx(lost)
    assert found.wall_s == pytest.approx(sum(sum(e.seconds.values()) for e in entries))
    assert found.goodput == pytest.approx(
        (sum(e.seconds.get(k, 0.0) for e in entries for k in ("step", "lost")) - lost)
        / found.wall_s
    )


def test_it_sums_to_the_wall_time_whenever_a_process_last_told(tmp_path: Path) -> None:
    drawn, wall = random.Random(0), 0.0
    for first in range(5):
        spent = {phase: drawn.random() for phase in ("start", "open", "step")}
        now = Now("save", 7, 100.0, 0.1, first, spent)
        lasted = sum(spent.values()) + 2.0 + drawn.random()
        add_entry(tmp_path, entry_of(now, 102.0, began=50.0, ended=50.0 + lasted))
        add_entry(tmp_path, Entry(0.0, 1.5, {"waiting": 1.5}))
        wall += lasted + 1.5
    found = read_ledger(tmp_path)
    assert found.wall_s == pytest.approx(wall) == pytest.approx(sum(found.seconds.values()))
    assert found.seconds["save"] == pytest.approx(5 * 2.0)
    assert found.seconds["waiting"] == pytest.approx(5 * 1.5)
    assert "goodput" in str(found)


HANGS = {
    "in the phase it is in": (50.0, 40.0, {"step": 10.0 + 10.0, "hang": 50.0}),
    "another's, before its own last phase began": (30.0, 40.0, {"step": 10.0, "hang": 60.0}),
    "none": (float("inf"), 40.0, {"step": 10.0 + 60.0}),
    "its clock was behind": (99.0, 101.0, {"step": 10.0}),
}


@pytest.mark.parametrize("name", HANGS)
def test_what_is_spent_without_a_move_is_a_hang_and_no_step(name: str) -> None:
    """Of a process that ended at 100, in a step since 40."""
    still, since, wanted = HANGS[name]
    now = Now("step", 7, since, 0.1, 0, {"step": 10.0})
    entry = entry_of(now, 100.0, began=0.0, ended=95.0, still_since=still)
    start = 95.0 - sum(wanted.values())
    assert entry.seconds == pytest.approx({**wanted, "start": start})
    found = sum_up([entry])
    assert found.wall_s == pytest.approx(95.0) == pytest.approx(sum(found.seconds.values()))
    assert found.goodput == pytest.approx(wanted["step"] / 95.0)
    lost = sum_up([entry, Entry(0.0, 0.0, {"step": 1.0}, 0, 9)])
    assert lost.seconds.get("hang", 0.0) == pytest.approx(wanted.get("hang", 0.0))
    assert lost.seconds["lost"] == pytest.approx(wanted["step"])


def test_a_line_cut_off_in_the_writing_costs_that_line_alone(tmp_path: Path) -> None:
    for step in (3, 5):
        add_entry(tmp_path, start(0, step, 1.0 * step))
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes()[:-9])
    assert read_ledger(tmp_path).wall_s == 3.0
    add_entry(tmp_path, start(3, 9, 6.0))
    assert read_ledger(tmp_path).wall_s == 9.0


def test_a_folder_that_takes_no_lines_costs_the_lines_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    add_entry(tmp_path / "file", start(0, 3, 3.0))
    (tmp_path / NAME).symlink_to(tmp_path / "file")
    add_entry(tmp_path, start(0, 3, 3.0))
    assert not (tmp_path / "file").read_bytes()


def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_ledger(tmp_path)
    (tmp_path / NAME).write_text('{"began": 1\n{"began": 1}\n')
    with pytest.raises(ValueError, match="line 1 is no JSON object"):
        read_ledger(tmp_path)
    (tmp_path / NAME).write_text('{"began": 1}\n')
    with pytest.raises(ValueError, match="line 1 is no entry of a ledger"):
        read_ledger(tmp_path)


class FullDisk(FileIO):
    def write(self, data: bytes) -> int:
        return super().write(data[: len(data) // 2])


def test_a_line_that_a_disk_has_no_room_for_comes_with_the_next(
    tmp_path: Path, monkeypatch
) -> None:
    """Of any file, and half of it is not left behind."""
    path, other = tmp_path / "lines.jsonl", tmp_path / "others.jsonl"
    record(path, {"n": 1})
    with monkeypatch.context() as patch:
        patch.setattr(json_lines, "open_regular", lambda path, mode: FullDisk(path, mode))
        record(path, {"n": 2})
        record(path, {"n": 3})
        record(other, {"n": 5})
    assert path.read_text() == '{"n": 1}\n'
    record(path, {"n": 4})
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    assert other.read_text() == '{"n": 5}\n'
    record(path, {"n": 6})
    assert len(path.read_text().splitlines()) == 5, "once"


def test_a_start_that_is_killed_with_its_watch_is_in_the_ledger_of_the_next(tmp_path: Path) -> None:
    """As it was when it was kept last, and before the next one, once that takes steps."""
    now = Now("step", 7, time.monotonic(), 0.1, 2, {"open": 3.0, "step": 5.0})
    killed = OpenEntry(tmp_path)
    killed.keep(now._replace(first=-1))
    assert not list(tmp_path.iterdir()), "it may be refused: the directory is another's"
    killed.keep(now)
    killed.wait()
    refused = OpenEntry(tmp_path)
    refused.keep(now._replace(first=-1))
    assert not (tmp_path / NAME).exists() and (tmp_path / OPEN).exists()
    later = OpenEntry(tmp_path)
    later.keep(now._replace(step=9, first=5))
    later.wait()
    (entry,) = read_entries(tmp_path)
    assert (entry.first, entry.done) == (2, 7) and entry.seconds["open"] == 3.0
    assert sum(entry.seconds.values()) == pytest.approx(entry.ended - entry.began)
    later.close(now._replace(step=11, first=5))
    assert [(e.first, e.done) for e in read_entries(tmp_path)] == [(2, 7), (5, 11)]
    assert not (tmp_path / OPEN).exists()
    assert read_ledger(tmp_path).seconds["lost"] > 0, "steps 6 and 7 were taken twice"


def test_an_entry_is_taken_over_once_and_from_an_earlier_start_alone(tmp_path: Path) -> None:
    now = Now("step", 7, time.monotonic(), 0.1, 2, {"step": 5.0})
    early, late = OpenEntry(tmp_path), OpenEntry(tmp_path)
    late.keep(now)
    late.wait()
    left = (tmp_path / OPEN).read_text()
    early.close(now)
    assert len(read_entries(tmp_path)) == 1, "its own"
    for _ in range(2):  # killed after it was added, before it was removed
        (tmp_path / OPEN).write_text(left)
        OpenEntry(tmp_path).close(now._replace(first=7))
    assert [e.first for e in read_entries(tmp_path)] == [2, 2, 7, 7]
    (tmp_path / OPEN).write_text("{")
    OpenEntry(tmp_path).close(now)
    assert len(read_entries(tmp_path)) == 5


def test_an_entry_is_kept_every_few_seconds(tmp_path: Path, monkeypatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(ledger.time, "monotonic", lambda: clock[0])
    entry = OpenEntry(tmp_path)
    steps = []
    for step in range(12):
        entry.keep(Now("step", step, clock[0], 0.1, 0, {}))
        entry.wait()
        steps.append(json.loads((tmp_path / OPEN).read_text())["done"])
        clock[0] += 1
    assert steps == [0] * 5 + [5] * 5 + [10] * 2


def test_a_start_that_took_no_step_leaves_what_another_keeps(tmp_path: Path) -> None:
    """It may have been started by mistake on the directory of a run that goes on."""
    now = Now("step", 7, time.monotonic(), 0.1, 0, {"step": 5.0})
    goes_on, mistaken = OpenEntry(tmp_path), OpenEntry(tmp_path)
    goes_on.keep(now)
    goes_on.wait()
    records = Records(tmp_path)
    records.add(NAME, mistaken.entry(now._replace(first=-1))._asdict())
    assert not (tmp_path / NAME).exists() and records.begun
    assert records.end() == ""
    assert (tmp_path / OPEN).exists() and [e.first for e in read_entries(tmp_path)] == [-1]
    goes_on.close(now._replace(step=20))
    assert [(e.first, e.done) for e in read_entries(tmp_path)] == [(-1, 7), (0, 20)]


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch) -> None:
    """Neither who keeps an entry, while a write is on its way, nor the end of a start."""
    hangs, written = threading.Event(), []

    def write(path: Path, text: str) -> None:
        written.append(text)
        hangs.wait(60)

    monkeypatch.setattr(ledger, "write_text", write)
    monkeypatch.setattr(ledger, "WRITE_S", 0.01)
    monkeypatch.setattr(ledger, "KEEP_S", 0.0)
    entry, now = OpenEntry(tmp_path), Now("step", 7, time.monotonic(), 0.1, 0, {"step": 5.0})
    for _ in range(5):
        entry.keep(now)
    entry.close(now)
    assert len(written) == 1 and len(read_entries(tmp_path)) == 1
    hangs.set()


def test_an_entry_that_waits_for_room_is_not_taken_over(tmp_path: Path, monkeypatch) -> None:
    """Of a start that ended while nothing could be written, or removed."""
    now = Now("step", 7, time.monotonic(), 0.1, 0, {"step": 5.0})
    first = OpenEntry(tmp_path)
    first.keep(now)
    first.wait()
    left = (tmp_path / OPEN).read_text()

    def refuse(path: Path, value: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as readonly:
        readonly.setattr(ledger, "add_line", refuse)
        first.close(now._replace(step=9))
        lacks = f"{tmp_path / NAME} lacks 1 line: Read-only file system"
        assert lacks in unwritten()
    (tmp_path / OPEN).write_text(left)
    second = OpenEntry(tmp_path)
    second.keep(now._replace(first=5))
    second.close(now._replace(first=5, step=12))
    assert [(e.first, e.done) for e in read_entries(tmp_path)] == [(0, 9), (5, 12)]
    assert lacks not in unwritten()


def test_a_ledger_that_cannot_be_written_is_told_of_as_the_run_ends(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    def refuse(path: Path, value: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(ledger, "add_line", refuse)
    monkeypatch.setattr(ledger, "_unwritten", {})
    phases = Phases()
    kept = KeepLedger(tmp_path, phases, writes=True)
    phases.begin_at(3)
    kept.keep()
    lacks = f"{tmp_path / NAME} lacks 1 line: Read-only file system"
    assert capsys.readouterr().err == f"jaxtrain: {lacks}\n"
    record(tmp_path / NAME, {})
    assert unwritten() == [f"{tmp_path / NAME} lacks 2 lines: Read-only file system"]
    ledger._unwritten[tmp_path / "b"] = [{}]  # as another thread is about to write it
    assert unwritten()[1] == f"{tmp_path / 'b'} lacks 1 line: not written yet"
    del ledger._unwritten[tmp_path / "b"], ledger._unwritten[tmp_path / NAME][1]
    supervisor = Supervisor.__new__(Supervisor)
    supervisor.run_dir, supervisor._records = tmp_path, Records(tmp_path)
    assert supervisor._ledger().endswith(f"; {lacks}")


def test_a_run_without_a_supervisor_keeps_its_own(tmp_path: Path) -> None:
    """From its first step on; none of several but the first, and none that is watched."""
    for mine in (False, True):
        phases = Phases()
        kept = KeepLedger(tmp_path, phases, writes=mine)
        assert not list(tmp_path.iterdir())
        phases.begin_at(3)
        if kept._entry is not None:
            kept._entry.wait()
        assert (tmp_path / OPEN).exists() is mine
        phases.advance(4)
        kept.keep()
        assert (tmp_path / NAME).exists() is mine and not (tmp_path / OPEN).exists()
    assert [(e.first, e.done) for e in read_entries(tmp_path)] == [(3, 4)]
