"""Pictures of a schedule: a grid for the terminal, a Gantt chart, and its figures."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain.pipeline.analysis import bubble, cost, in_flight, slots, spans
from jaxtrain.pipeline.config import SAVES
from jaxtrain.pipeline.overhead import (
    executed_over_useful,
    handed_over_useful,
    published_in_flight,
    warnings,
)
from jaxtrain.pipeline.schedule import Costs, Schedule, make_schedule
from jaxtrain.pipeline.table_file import cell

STYLES = {"F": "black on bright_blue", "B": "black on bright_green", "W": "black on bright_yellow"}
COLOURS = {"F": ("#7aa6e0", "#c3d7f2"), "B": ("#7cc48f", "#c6e6ce"), "W": ("#e3c063", "#f3e3b6")}
"""Fill of even and of odd chunks."""
UNIT, LANE, MARGIN = 28, 26, 64
DRAWN, PICTURED, WIDTH = 10_000, 200_000, 120
"""Most boxes of a terminal, some seconds; of an SVG file that a browser still opens. Characters in
a line of the text."""


@dataclass(frozen=True)
class DrawnSchedule:
    """A pipeline schedule and the time of each kind of work, drawn: its text is a grid and the
    figures, and a notebook shows `svg()`."""

    schedule: Schedule
    costs: Costs = Costs()  # noqa: RUF009 (frozen)

    def __str__(self) -> str:
        out = io.StringIO()
        self.print_to(Console(file=out, width=WIDTH))
        return out.getvalue().rstrip("\n")

    def print_to(self, console: Console) -> None:
        """Prints the grid, unless it has over `DRAWN` boxes, and the figures."""
        s = self.schedule
        if s.ticks * s.stages <= DRAWN:
            for part in grid(s, console.width):
                console.print(part)
        else:
            print(f"{s.ticks} ticks of {s.stages} stages are not drawn", file=console.file)
        print(figures(s, self.costs), file=console.file)

    def svg(self) -> str:
        """Returns a Gantt chart. Raises ValueError for more boxes than a browser opens."""
        s = self.schedule
        if s.ticks * s.stages > PICTURED:
            raise ValueError(
                f"{s.ticks} ticks of {s.stages} stages are no picture; draw fewer microbatches, "
                f"for at most {PICTURED:,} boxes"
            )
        return svg(s, self.costs)

    def _repr_svg_(self) -> str | None:
        """For notebooks; None shows the text instead."""
        return self.svg() if self.schedule.ticks * self.schedule.stages <= DRAWN else None

    def as_json(self) -> dict[str, Any]:
        """JSON for scripts; its keys are stable."""
        return as_json(self.schedule, self.costs)


def schedule(
    kind: str,
    *,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    costs: Costs = Costs(),  # noqa: B008 (frozen)
) -> DrawnSchedule:
    """Returns a schedule of a pipeline, drawn, with its cost and memory. kind: gpipe, one_f_one_b,
    interleaved or zero_bubble. microbatches: of a step. chunks: of layers on each stage. costs:
    times of the work. Raises ValueError with every violation."""
    return DrawnSchedule(make_schedule(kind, stages, microbatches, chunks), costs)


def grid(schedule: Schedule, width: int) -> list[Table]:
    """Returns a table with a row for each stage and a column for each tick, in as many parts as
    `width` characters need."""
    cells = [[cell(schedule, t, s) for t in range(schedule.ticks)] for s in range(schedule.stages)]
    column = 1 + max(len(str(schedule.ticks)), *(len(text) for row in cells for text in row))
    per_part = max(1, (width - len("stage ")) // column)
    return [
        _part(cells, range(first, min(first + per_part, schedule.ticks)), column - 1)
        for first in range(0, schedule.ticks, per_part)
    ]


def _part(cells: list[list[str]], ticks: range, width: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("stage", justify="right", min_width=len("stage"))
    for tick in ticks:
        table.add_column(str(tick), no_wrap=True, min_width=width)
    for stage, row in enumerate(cells):
        texts = [Text(str(stage))]
        for tick in ticks:
            text = Text()
            for word in row[tick].split():
                text.append(word, style=STYLES[word[0]])
            texts.append(text)
        table.add_row(*texts)
    return table


def figures(schedule: Schedule, costs: Costs = Costs()) -> str:  # noqa: B008 (frozen)
    """Returns cost, bubble, useless work and memory, next to the published formulas; then the
    reasons why another table is better."""
    s = schedule
    buffers = ", ".join(f"{name} {count}" for name, count in slots(s).items())
    loops = ", ".join(f"{span.kinds} x {span.stop - span.start}" for span in spans(s))
    total = f"{cost(s, costs):g}"
    once, twice = (executed_over_useful(s, keep_residuals=keep) for keep in (True, False))
    lines = [
        f"{s.kind}: {s.stages} stages, {s.microbatches} microbatches, {s.chunks} "
        f"chunk{'s' if s.chunks > 1 else ''} a stage; {s.ticks} ticks in loops of {loops}",
        f"cost: {total} {_unit(costs)}{_published(s, costs)}",
        f"bubble: {100 * bubble(s, costs):.1f}% of the step",
        f"work done over work needed, for idle ticks work too: arithmetic of the blocks {once:.3f} "
        f'with save="residuals", {twice:.3f} with save="inputs", where B runs F again; activations '
        f"handed on {handed_over_useful(s):.3f}",
        f"inputs held at once by each stage: {' '.join(map(str, in_flight(s)))}{_elsewhere(s)}",
        f"buffers that every stage is given, of one microbatch's activations each: {buffers}",
    ]
    return "\n".join([*lines, *(f"warning: {text}" for text in warnings(s, costs))])


def as_json(schedule: Schedule, costs: Costs = Costs()) -> dict[str, Any]:  # noqa: B008 (frozen)
    """Figures for scripts. executed_over_useful: arithmetic of the blocks, by the values that F
    keeps. published_in_flight: None if there is no such figure."""
    published = published_in_flight(schedule)
    return {
        "kind": schedule.kind,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "chunks": schedule.chunks,
        "ticks": schedule.ticks,
        "cost": cost(schedule, costs),
        "bubble": bubble(schedule, costs),
        "in_flight": [int(n) for n in in_flight(schedule)],
        "slots": slots(schedule),
        "executed_over_useful": {
            save: executed_over_useful(schedule, keep_residuals=save == "residuals")
            for save in SAVES
        },
        "handed_over_useful": handed_over_useful(schedule),
        "published_in_flight": None if published is None else published[1],
        "warnings": warnings(schedule, costs),
    }


def _elsewhere(s: Schedule) -> str:
    published = published_in_flight(s)
    if published is None:
        return ""
    source, counts = published
    return f"; {source}, stages not in step: {' '.join(map(str, counts))}"


def _unit(costs: Costs) -> str:
    if costs == Costs():
        return "in units of a stage's forward pass"
    c = costs
    return f"with F {c.forward:g}, B {c.backward:g}, W {c.weight:g} and the head {c.head:g}"


def _published(s: Schedule, costs: Costs) -> str:
    if costs != Costs():
        return ""
    m, r, v = s.microbatches, s.stages, s.chunks
    return {
        "gpipe": f"; Huang et al. 2019: 3(M + R - 1) = {3 * (m + r - 1)}",
        "one_f_one_b": f"; Narayanan et al. 2021: 3(M + R - 1) = {3 * (m + r - 1)}",
        "interleaved": f"; Narayanan et al. 2021, R dividing M: 3(M + (R - 1)/V) = "
        f"{3 * (m + (r - 1) / v):g}",
        "zero_bubble": f"; in lock-step, R dividing M: 3M + 2(R - 1)/V = "
        f"{3 * m + 2 * (r - 1) / v:g}; ZB-H1 of Qi et al. 2023, stages not in step and no chunks: "
        f"3M + (R - 1) = {3 * m + r - 1}",
    }.get(s.kind, "")


def svg(schedule: Schedule, costs: Costs = Costs()) -> str:  # noqa: B008 (frozen)
    """Returns a Gantt chart: time to the right in units of `costs`, a lane for each stage. In a
    tick every stage has the same width for each kind, idle or not."""
    durations = costs.of(schedule)
    boxes, lines, now = [], [], 0.0
    for span in spans(schedule):
        for tick in range(span.start, span.stop):
            for kind in span.kinds:
                boxes += _boxes(schedule, kind, tick, now, durations[kind])
                now += durations[kind]
            x = MARGIN + UNIT * now
            lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{LANE}" y2="{{bottom}}"/>')
    bottom = LANE * (schedule.stages + 1)
    labels = [
        f'<text x="{MARGIN - 8}" y="{LANE * (s + 1) + 17}" text-anchor="end">stage {s}</text>'
        for s in range(schedule.stages)
    ]
    title = figures(schedule, costs).splitlines()[0]
    width = MARGIN + max(UNIT * now + 8, 6.5 * len(title))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{bottom + 8}" '
            'font-family="sans-serif" font-size="11">',
            f'<text x="{MARGIN}" y="17">{title}</text>',
            '<g stroke="#ddd">',
            *(line.replace("{bottom}", str(bottom)) for line in lines),
            "</g>",
            *labels,
            *boxes,
            "</svg>",
            "",
        ]
    )


def _boxes(schedule: Schedule, kind: str, tick: int, begin: float, length: float) -> list[str]:
    boxes = []
    for stage in range(schedule.stages):
        work = int(schedule.tables[kind][tick, stage])
        if work < 0:
            continue
        microbatch, chunk = divmod(work, schedule.chunks)
        x, y, width = MARGIN + UNIT * begin, LANE * (stage + 1) + 2, UNIT * length
        boxes.append(
            f"<g><title>{kind} microbatch {microbatch}, chunk {chunk}, tick {tick}</title>"
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE - 4}" stroke="#555" '
            f'fill="{COLOURS[kind][chunk % 2]}"/><text x="{x + width / 2:.1f}" y="{y + 15}" '
            f'text-anchor="middle">{microbatch}</text></g>'
        )
    return boxes
