"""Results of parts: a line of JSON for each, and the same as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from jaxtrain.bench_gpu.parts import MODEL, groups_of, within
from jaxtrain.bench_gpu.setting import Row
from jaxtrain.files.json_lines import add_line, read_lines

LINES, TABLES = "results.jsonl", "table.md"
DONE, SKIPPED, FAILED = "done", "skipped", "failed"


@dataclass(frozen=True)
class PartResult:
    """state: `done`, `skipped` or `failed`, with the reason in `why`. device: the measured one,
    None where the part ended earlier. dry: at sizes that mean nothing. rows: the reported ones,
    also before a failure."""

    part: str
    state: str
    device: str | None
    dry: bool
    seconds: float
    rows: list[Row]
    why: str | None = None

    @property
    def reason(self) -> str:
        """Why the part is not done, in one line: the last line of a process's output."""
        lines = (self.why or "").strip().split("\n")
        return lines[-1] if lines[0].startswith("process ") else lines[0]


def read_results(out: Path) -> dict[str, PartResult]:
    """Returns the latest result of each part. Raises ValueError for a file in another format."""
    path = out / LINES
    if not path.exists():
        return {}
    try:
        results = [PartResult(**line) for line in read_lines(path)]
    except TypeError as error:
        raise ValueError(f"{path} holds no results of bench gpu: {error}") from error
    return {result.part: result for result in results}


def add_result(out: Path, result: PartResult) -> None:
    """Appends a result, and writes the tables again."""
    add_line(out / LINES, asdict(result))
    (out / TABLES).write_text(tables(read_results(out).values()) + "\n", encoding="utf-8")


def tables(results: Iterable[PartResult]) -> str:
    """A table for each group in markdown, and below it the parts without one."""
    groups: dict[str, list[PartResult]] = {}
    for result in results:
        groups.setdefault(groups_of(result.part)[0], []).append(result)
    return "\n\n".join(_group(name, members) for name, members in groups.items())


def over_torch(results: Mapping[str, PartResult]) -> float | None:
    """Returns our tokens a second over torch's, each the mean of its turns; None until both have
    one."""

    def pace(library: str) -> list[float]:
        group = f"{MODEL}/turn/{library}"
        rows = [
            row for part, result in results.items() if within(part, group) for row in result.rows
        ]
        return [row["tokens_per_s"] for row in rows if "tokens_per_s" in row]

    ours, theirs = pace("jaxtrain"), pace("torch")
    return fmean(ours) / fmean(theirs) if ours and theirs else None


def _group(name: str, results: list[PartResult]) -> str:
    several = len({result.part for result in results}) > 1
    rows = [
        ({"part": result.part} if several else {}) | row
        for result in results
        for row in _joined(result.rows)
    ]
    lines = [f"## {name}{' (dry run)' if any(r.dry for r in results) else ''}"]
    if rows:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        lines += ["", _line(columns), _line(["---"] * len(columns))]
        lines += [_line([_cell(row.get(column)) for column in columns]) for row in rows]
    if (ratio := over_torch({r.part: r for r in results})) is not None:
        lines += ["", f"tokens a second over torch's, in turn: {ratio:.3f}"]
    reasons = [r for r in results if r.state != DONE]
    lines += [""] * bool(reasons)
    lines += [f"- {r.part} {r.state}: {r.reason}" for r in reasons]
    return "\n".join(lines)


def _joined(rows: list[Row]) -> list[Row]:
    """Returns rows with the same name joined into one."""
    by_name: dict[str, Row] = {}
    for row in rows:
        by_name.setdefault(row["row"], {}).update(row)
    return list(by_name.values())


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def devices(results: Mapping[str, PartResult]) -> set[str]:
    """Returns the devices on which the results were measured."""
    return {result.device for result in results.values() if result.device is not None}
