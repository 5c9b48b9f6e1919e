"""The wall time of a run by phase, over all its starts.

The run directory has a line of JSON for each start, and for each wait between two. Seconds of steps
that had to be repeated, by a later start or after a spike of the loss, are lost. Goodput is the
share of the wall time in steps that were not lost (Jiang et al. 2024, section 6.1, call it
effective training time).
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
from jaxtrain.cluster.run_lock import is_held
from jaxtrain.fault_tolerance.beginning import Beginning
from jaxtrain.files.json_lines import add_line, read_lines
from jaxtrain.files.json_text import parse_json
from jaxtrain.files.regular import read_text, write_text

NAME = "ledger.jsonl"
OPEN = "ledger_open.json"
"""File in the run directory: the entry of the current start, updated regularly."""
KEEP_S, WRITE_S = 5.0, 2.0
"""Seconds between its updates, and most seconds that the end of a start waits for one."""

KINDS = {
    "start": "init", "join": "init", "open": "init",
    "compile": "compile", "first step": "compile",
    "step": "step", "load": "data", "callback": "callback",
    "evaluate": "evaluate", "save": "save", "restore": "restore",
    "finish": "finish", "exit": "finish",
    "hang": "hang", "waiting": "waiting", LOST: "lost",
}  # fmt: skip
"""Phase of a process -> part of the ledger. Two are not phases: "hang", when all waited for a stuck
process, and "waiting", for the next start."""


class Entry(NamedTuple):
    """One start, seen by process 0, or a wait between two. began, ended: Unix times. seconds: phase
    -> seconds. first: steps before it, -1 if unknown; done: steps at its end."""

    began: float
    ended: float
    seconds: Mapping[str, float]
    first: int = -1
    done: int = 0


@dataclass(frozen=True)
class Ledger:
    """wall_s: seconds of all starts and waits. seconds: the parts, which sum to it."""

    wall_s: float
    seconds: Mapping[str, float]

    @property
    def goodput(self) -> float:
        """Share of the wall time in steps that were not lost."""
        return self.seconds.get("step", 0.0) / self.wall_s if self.wall_s else 0.0

    def __str__(self) -> str:
        parts = sorted(self.seconds.items(), key=lambda part: -part[1])
        shares = ", ".join(f"{name} {s:.1f}" for name, s in parts if s >= 0.05)
        return f"{self.wall_s:.1f} s, goodput {self.goodput:.0%} ({shares})"


def entry_of(
    now: Now, ended_clock: float, *, began: float, ended: float, still_since: float = math.inf
) -> Entry:
    """The entry of a start that ended, from the last report `now`. ended_clock: monotonic time of
    `ended`; still_since: since when any process was stuck, while this one entered no new phase.
    Time that was not reported counts as its first phase."""
    spent = dict(now.spent)
    still = min(max(now.since, still_since), max(now.since, ended_clock))
    spent[now.phase] = spent.get(now.phase, 0.0) + still - now.since
    if ended_clock > still:
        spent["hang"] = ended_clock - still
    spent["start"] = spent.get("start", 0.0) + ended - began - sum(spent.values())
    return Entry(began, ended, spent, now.first, now.step)


def add_entry(run_dir: Path, entry: Entry) -> None:
    """Adds an entry to the ledger of a run."""
    record(run_dir / NAME, entry._asdict())


class OpenEntry:
    """The entry of the current start. Every few seconds it is written beside the ledger: if this
    start and its supervisor are killed together, a later start takes it over. A thread of its own
    writes, so that a hanging disk delays nothing."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._kept = run_dir, -math.inf
        self._began, self._clock = time.time(), time.monotonic()
        self._writer: threading.Thread | None = None

    def keep(self, now: Now) -> None:
        """Writes the entry, once steps are taken: the run directory then belongs to this start."""
        busy = self._writer is not None and self._writer.is_alive()
        if now.first < 0 or busy or time.monotonic() - self._kept < KEEP_S:
            return
        first, self._kept = self._kept == -math.inf, time.monotonic()
        write = partial(self._write, self.entry(now), first=first)
        self._writer = threading.Thread(target=write, name="ledger", daemon=True)
        self._writer.start()

    def wait(self) -> None:
        """Waits for a write in progress, but not for ever."""
        if self._writer is not None:
            self._writer.join(WRITE_S)

    def close(self, now: Now, still_since: float = math.inf) -> None:
        """Ends a start that has begun to take steps: adds its entry to the ledger. still_since: as
        for `entry_of`."""
        self.wait()
        self._take_over()
        add_entry(self._run_dir, self.entry(now, still_since))

    def entry(self, now: Now, still_since: float = math.inf) -> Entry:
        """Returns the entry as it is now. still_since: as for `entry_of`."""
        clock = time.monotonic()
        ended = self._began + clock - self._clock
        return entry_of(now, clock, began=self._began, ended=ended, still_since=still_since)

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
        """Moves the open entry of an earlier start to the ledger."""
        path, ledger = self._run_dir / OPEN, self._run_dir / NAME
        with suppress(OSError, ValueError, TypeError):
            entry = Entry(**parse_json(read_text(path)))
            lines = [*_unwritten.get(ledger, ())]
            lines += read_lines(ledger) if ledger.exists() else []
            recorded = {line.get("began") for line in lines}
            if entry.began < self._began and entry.began not in recorded:
                add_entry(self._run_dir, entry)
        with suppress(OSError):
            path.unlink()


def record(path: Path, value: Mapping[str, object]) -> None:
    """Adds a line of JSON to a file of a run directory. A line that a full disk has no space for is
    written with the next line of any file: the run matters more than its log."""
    _unwritten.setdefault(path, []).append(value)
    for file, values in list(_unwritten.items()):
        try:
            while values:
                add_line(file, values[0])
                del values[0]
            del _unwritten[file]
        except (OSError, ValueError) as error:
            _reasons[file] = getattr(error, "strerror", None) or str(error)


class Records:
    """Lines for files of a run directory, which may be another run's until a start of this one has
    taken steps there: until then they are kept in memory. beginning: tells whose it is then."""

    def __init__(self, run_dir: Path, beginning: Beginning = Beginning()) -> None:  # noqa: B008
        self._run_dir, self._own, self._beginning = run_dir, False, beginning
        self._lines: list[tuple[str, Mapping[str, object]]] = []

    @property
    def begun(self) -> bool:
        """True once there was a line: a start has ended that was not refused."""
        return self._own or bool(self._lines)

    def add(self, name: str, line: Mapping[str, object]) -> None:
        """Adds a line to the file `name`."""
        self._lines.append((name, line))
        if self._own:
            self.write()

    def write(self) -> None:
        """Writes all lines: the directory is this run's."""
        self._own = True
        lines, self._lines = self._lines, []
        for name, line in lines:
            record(self._run_dir / name, line)

    def end(self) -> str:
        """Writes what is left as the launch ends, or returns why it is not written."""
        try:
            is_own = self._own or self._beginning.owns(self._run_dir)
        except (OSError, ValueError) as error:
            return f"nothing of this run is recorded: {error}"
        if not is_own:
            return "nothing of this run is recorded: it has taken no step"
        if self._lines and is_held(self._run_dir):
            return f"{self._run_dir} is in use by another run: nothing of this one is recorded"
        self.write()
        return ""


_unwritten: dict[Path, list[Mapping[str, object]]] = {}
_reasons: dict[Path, str] = {}


def unwritten() -> list[str]:
    """Returns a line for each file that lacks records of this process, with the reason."""
    return [
        f"{file} lacks {len(values)} line{'s' * (len(values) > 1)}: "
        f"{_reasons.get(file, 'not written yet')}"
        for file, values in list(_unwritten.items())  # a thread may write them meanwhile
    ]


def read_ledger(run_dir: str | Path) -> Ledger:
    """Returns the ledger of a run. Raises ValueError if there is none, or if a line is invalid."""
    return sum_up(read_entries(run_dir))


def read_entries(run_dir: str | Path) -> list[Entry]:
    """Returns starts and waits of a run, in order. Raises ValueError as `read_ledger`."""
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
    """Returns the ledger of starts and waits, given in order."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for number, entry in enumerate(entries):
        for phase, spent in entry.seconds.items():
            seconds[KINDS[phase]] += spent
        # Steps after the beginning of any later start were repeated.
        again = min((e.first for e in entries[number + 1 :] if e.first >= 0), default=entry.done)
        step_count = max(1, entry.done - entry.first)
        if entry.first >= 0 and again < entry.done:
            lost = entry.seconds.get("step", 0.0) * min(1.0, (entry.done - again) / step_count)
            seconds["step"] -= lost
            seconds["lost"] += lost
    return Ledger(sum(seconds.values()), {k: v for k, v in seconds.items() if v})
