"""Where the wall time of a run went: everything once, and what was taken again is lost."""

from __future__ import annotations

import json
import random
from io import FileIO
from pathlib import Path

import pytest

from jaxtrain.cluster.phases import PHASES, Now
from jaxtrain.fault_tolerance import ledger
from jaxtrain.fault_tolerance.ledger import (
    KINDS,
    NAME,
    Entry,
    add_entry,
    add_line,
    entry_of,
    read_ledger,
    sum_up,
)


def test_every_phase_has_its_place() -> None:
    assert set(PHASES) == set(KINDS) - {"waiting"}


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
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_steps_that_were_taken_again_are_lost(name: str) -> None:
    entries, lost = LOST[name]
    found = sum_up(entries)
    assert found.seconds.get("lost", 0.0) == pytest.approx(lost)
    assert found.wall_s == pytest.approx(sum(sum(e.seconds.values()) for e in entries))
    assert found.goodput == pytest.approx(
        (sum(e.seconds.get("step", 0.0) for e in entries) - lost) / found.wall_s
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


def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
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
    add_line(path, {"n": 1})
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "open_regular", lambda path, mode: FullDisk(path, mode))
        add_line(path, {"n": 2})
        add_line(path, {"n": 3})
        add_line(other, {"n": 5})
    assert path.read_text() == '{"n": 1}\n'
    add_line(path, {"n": 4})
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    assert other.read_text() == '{"n": 5}\n'
    add_line(path, {"n": 6})
    assert len(path.read_text().splitlines()) == 5, "once"
