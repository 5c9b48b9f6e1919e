"""Where the wall time of a run went, over all its starts.

A line of JSON for each start, and for each wait between two, in the run directory. Seconds of the
steps that had to be taken again, by a later start or after a spike of the loss, are lost; goodput
is the share of the wall time that went into steps that were not (Jiang et al. 2024, section 6.1,
call it effective training time).
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from jaxtrain.cluster.phases import LOST, Now
from jaxtrain.files.json_lines import add_line, read_lines
from jaxtrain.files.json_text import parse_json
from jaxtrain.files.regular import read_text, write_text

NAME = "ledger.jsonl"
OPEN = "ledger_open.json"
"""In the run directory, the entry of a start that goes on, as of a moment ago."""
KEEP_S, WRITE_S = 5.0, 2.0
"""How often it is written, and how long the end of a start waits for that."""

KINDS = {
    "start": "init", "join": "init", "open": "init",
    "compile": "compile", "first step": "compile",
    "step": "step", "load": "data", "callback": "callback",
    "evaluate": "evaluate", "save": "save", "restore": "restore", "finish": "finish",
    "hang": "hang", "waiting": "waiting", LOST: "lost",
}  # fmt: skip
"""Phase of a process -> where the ledger has its seconds; "hang" and "waiting" are none of its own:
all waited for a process that did not move, and for the next start."""


class Entry(NamedTuple):
    """One start, of process 0, or a wait between two. began, ended: Unix times. seconds: phase ->
    seconds. first, done: steps before it, -1 where it did not come to know, and at its end."""

    began: float
    ended: float
    seconds: Mapping[str, float]
    first: int = -1
    done: int = 0


@dataclass(frozen=True)
class Ledger:
    """wall_s: seconds of all starts and the waits between them. seconds: where they went; they sum
    to it."""

    wall_s: float
    seconds: Mapping[str, float]

    @property
    def goodput(self) -> float:
        """The share of the wall time in steps that were not lost."""
        return self.seconds.get("step", 0.0) / self.wall_s if self.wall_s else 0.0

    def __str__(self) -> str:
        parts = sorted(self.seconds.items(), key=lambda each: -each[1])
        shares = ", ".join(f"{name} {s:.1f}" for name, s in parts if s >= 0.05)
        return f"{self.wall_s:.1f} s, goodput {self.goodput:.0%} ({shares})"


def entry_of(
    now: Now, at: float, *, began: float, ended: float, still_since: float = math.inf
) -> Entry:
    """Of a start that ended, as far as its process has told. at: the monotonic time of `ended`;
    still_since: since when a process, this or another, did not move, and this one in no new phase.
    What it had not told yet was before its first phase."""
    spent = dict(now.spent)
    still = min(max(now.since, still_since), max(now.since, at))
    spent[now.phase] = spent.get(now.phase, 0.0) + still - now.since
    if at > still:
        spent["hang"] = at - still
    spent["start"] = spent.get("start", 0.0) + ended - began - sum(spent.values())
    return Entry(began, ended, spent, now.first, now.step)


def add_entry(run_dir: Path, entry: Entry) -> None:
    """To the ledger of a run."""
    record(run_dir / NAME, entry._asdict())


class OpenEntry:
    """The entry of a start that goes on, from now on. Every few seconds it is written beside the
    ledger as it would be now: a later start takes it over from one that was killed together with
    whoever watched it. A thread of its own writes: a disk that hangs holds nobody up."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._kept = run_dir, -math.inf
        self._began, self._clock = time.time(), time.monotonic()
        self._writer: threading.Thread | None = None

    def keep(self, now: Now) -> None:
        """Once steps are taken: the run directory is this start's."""
        busy = self._writer is not None and self._writer.is_alive()
        if now.first < 0 or busy or time.monotonic() - self._kept < KEEP_S:
            return
        first, self._kept = self._kept == -math.inf, time.monotonic()
        write = partial(self._write, self._entry(now), first=first)
        self._writer = threading.Thread(target=write, name="ledger", daemon=True)
        self._writer.start()

    def wait(self) -> None:
        """For what is on its way to the disk; not for ever."""
        if self._writer is not None:
            self._writer.join(WRITE_S)

    def close(self, now: Now, still_since: float = math.inf) -> None:
        """The start ends: its entry is added to the ledger. still_since: as for `entry_of`."""
        self.wait()
        if now.first >= 0:  # else the directory may be another's, who goes on
            self._take_over()
        add_entry(self._run_dir, self._entry(now, still_since))

    def _entry(self, now: Now, still_since: float = math.inf) -> Entry:
        at = time.monotonic()
        ended = self._began + at - self._clock
        return entry_of(now, at, began=self._began, ended=ended, still_since=still_since)

    def _write(self, entry: Entry, *, first: bool) -> None:
        if first:
            self._take_over()
        path = self._run_dir / OPEN
        with suppress(OSError, ValueError):  # the next time
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".tmp")
            write_text(unfinished, json.dumps(entry._asdict()))
            os.replace(unfinished, path)

    def _take_over(self) -> None:
        """Add what an earlier start has left to the ledger, and remove it."""
        path, ledger = self._run_dir / OPEN, self._run_dir / NAME
        with suppress(OSError, ValueError, TypeError):
            entry = Entry(**parse_json(read_text(path)))
            lines = [*_unwritten.get(ledger, ())]
            lines += read_lines(ledger) if ledger.exists() else []
            known = {line.get("began") for line in lines}
            if entry.began < self._began and entry.began not in known:
                add_entry(self._run_dir, entry)
        with suppress(OSError):
            path.unlink()


def record(path: Path, value: Mapping[str, object]) -> None:
    """A line of JSON, in a file of a run directory. What a full disk has no room for is written
    with the next line of any file: the run is worth more than what is told of it."""
    _unwritten.setdefault(path, []).append(value)
    for each, values in list(_unwritten.items()):
        with suppress(OSError, ValueError):
            while values:
                add_line(each, values[0])
                del values[0]
            del _unwritten[each]


_unwritten: dict[Path, list[Mapping[str, object]]] = {}


def read_ledger(run_dir: str | Path) -> Ledger:
    """Raises ValueError where there is none, or a line of it cannot be read."""
    return sum_up(read_entries(run_dir))


def read_entries(run_dir: str | Path) -> list[Entry]:
    """The starts and waits of a run, in their order. Raises ValueError as `read_ledger`."""
    path = Path(run_dir) / NAME
    try:
        lines = read_lines(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; a run keeps it when it ends") from error
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(Entry(**line))
            sum_up(entries[-1:])
        except (TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{path}, line {number} is no entry of a ledger: {error}") from error
    return entries


def sum_up(entries: Sequence[Entry]) -> Ledger:
    """The ledger of all starts and waits, in their order."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for number, entry in enumerate(entries):
        for phase, spent in entry.seconds.items():
            seconds[KINDS[phase]] += spent
        # Steps that any later start began before were taken again.
        again = min((e.first for e in entries[number + 1 :] if e.first >= 0), default=entry.done)
        taken = max(1, entry.done - entry.first)
        if entry.first >= 0 and again < entry.done:
            lost = entry.seconds.get("step", 0.0) * min(1.0, (entry.done - again) / taken)
            seconds["step"] -= lost
            seconds["lost"] += lost
    return Ledger(sum(seconds.values()), {k: v for k, v in seconds.items() if v})
