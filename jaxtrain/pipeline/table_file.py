"""A schedule as a text file: a line for each tick, a cell for each stage.

    # 2 stages, 3 microbatches
    F0,
    F1, F0 B0
    F2 B0, F1 B1
    B1, F2 B2
    B2,

A cell holds the stage's work in that tick: F, B or W with the microbatch, and its chunk after a dot
if there are chunks (F3.1). Lines that begin with # and empty lines are ignored. Without any W, B
also computes the weights' gradients.
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median_low

import numpy as np

from jaxtrain.files.stores import local_path
from jaxtrain.pipeline.analysis import violations
from jaxtrain.pipeline.schedule import Schedule
from jaxtrain.violations import raise_violations

_WORK = re.compile(r"([FBW])(\d{1,9})(?:\.(\d{1,9}))?")


def read_schedule(path: str | Path) -> Schedule:
    """Returns the schedule in a file, its kind the file's name; the cells determine microbatches
    and chunks.

    Raises ValueError with every line that cannot be read, or else with every reason why no step can
    follow it (`analysis.violations`); OSError if there is no file.
    """
    path = local_path("table", path)
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [
        (number, [cell.strip() for cell in line.split(",")])
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    schedule, problems = _parse(path.stem, rows)
    raise_violations(problems or violations(schedule), str(path))
    return schedule


def _parse(kind: str, rows: list[tuple[int, list[str]]]) -> tuple[Schedule, list[str]]:
    stages = _width([len(cells) for _, cells in rows])
    problems = [] if rows else ["no tick is in it; write a line for each, such as: F0, F1 B0"]
    parsed: list[tuple[int, int, str, int, int]] = []
    for tick, (number, cells) in enumerate(rows):
        if len(cells) != stages:
            problems.append(f"line {number} has {len(cells)} cells, and the table {stages} stages")
        for stage, cell in enumerate(cells):
            works = [(word, _WORK.fullmatch(word)) for word in cell.split()]
            for word, match in works:
                if match is None:
                    problems.append(f"line {number}: {word!r} is no work; write F3, B0 or W2.1")
                else:
                    parsed.append((tick, stage, match[1], int(match[2]), int(match[3] or 0)))
            letters = [match[1] for _, match in works if match]
            if len(set(letters)) < len(letters):
                problems.append(f"line {number}: {cell!r} does one kind of work twice in a tick")
    chunks = 1 + max((chunk for *_, chunk in parsed), default=0)
    microbatches = 1 + max((m for *_, m, _ in parsed), default=0)
    if (works := microbatches * chunks) > len(rows):
        problems.append(
            f"{microbatches} microbatches of {chunks} chunks are {works} works of a kind for every "
            f"stage, which does one in a tick, and there are {len(rows)} ticks"
        )
    tables = {letter: np.full((len(rows), stages), -1) for letter in "FBW"}
    for tick, stage, letter, microbatch, chunk in parsed:
        if stage < stages:
            tables[letter][tick, stage] = microbatch * chunks + chunk
    weight = tables["W"] if (tables["W"] >= 0).any() else None
    return (
        Schedule(kind, stages, microbatches, chunks, tables["F"], tables["B"], weight),
        problems,
    )


def _width(widths: list[int]) -> int:
    """The width of more than half of the lines, else the largest width."""
    usual = median_low(widths) if widths else 0
    return usual if 2 * widths.count(usual) > len(widths) else max(widths, default=0)


def cell(schedule: Schedule, tick: int, stage: int) -> str:
    """Work of a stage in a tick, in the notation of the file."""
    words = []
    for letter, table in schedule.tables.items():
        work = int(table[tick, stage])
        if work >= 0:
            microbatch, chunk = divmod(work, schedule.chunks)
            words.append(f"{letter}{microbatch}" + (f".{chunk}" if schedule.chunks > 1 else ""))
    return " ".join(words)


def written(schedule: Schedule) -> str:
    """Text that `read_schedule` reads back to equal tables."""
    head = f"# {schedule.kind}: {schedule.stages} stages, {schedule.microbatches} microbatches"
    rows = (
        ", ".join(cell(schedule, tick, stage) for stage in range(schedule.stages)).rstrip()
        for tick in range(schedule.ticks)
    )
    return "\n".join([head, *rows]) + "\n"
