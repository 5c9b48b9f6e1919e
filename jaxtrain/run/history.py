"""Metrics of a run in memory, with a bound on their number."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from jaxtrain.reprs import aligned

MetricsLine = dict[str, Any]

LINES = 10_000
"""Most lines kept: about 10 MB."""
COLUMNS = ("step", "loss", "eval_loss", "grad_norm", "learning_rate", "tokens_per_s", "step_s")
"""Metrics that a table shows, where there are any."""
ENDS = 3
"""Lines that a table shows of the beginning, and of the end."""


class MetricsTable(list[MetricsLine]):
    """Metrics, a dict for each step; printed as a table of the first and the last steps."""

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return MetricsTable(found) if isinstance(index, slice) else found

    def rows(self) -> list[list[str]]:
        """Returns the cells of the table, its header first."""
        named = {name for line in self for name in line if name.startswith("eval_loss/")}
        index = COLUMNS.index("eval_loss") + 1
        columns = (*COLUMNS[:index], *sorted(named), *COLUMNS[index:])
        columns = [name for name in columns if any(name in line for line in self)]
        shown: list[MetricsLine | None] = list(self)
        if len(self) > 2 * ENDS + 1:
            shown = [*self[:ENDS], None, *self[-ENDS:]]
        return [
            columns,
            *([_cell(line, name) for name in columns] for line in shown),
        ]

    def to_pandas(self) -> Any:
        """Returns a `pandas.DataFrame` with all metrics, indexed by step; needs pandas."""
        try:
            import pandas  # type: ignore[import-not-found]
        except ImportError as error:
            raise ImportError("history.to_pandas() needs pandas: pip install pandas") from error
        return pandas.DataFrame(list(self)).set_index("step")

    def __repr__(self) -> str:
        if not self:
            return "no metrics yet"
        return "\n".join(aligned(self.rows(), left=0))

    def _repr_html_(self) -> str:
        """Returns the table as a notebook shows it."""
        header, *rows = self.rows()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows
        )
        return f"<table><tr>{head}</tr>{body}</table>"


def _cell(line: MetricsLine | None, name: str) -> str:
    """Returns a metric as text: "..." for lines that are left out, "" for one that a step lacks."""
    if line is None:
        return "..."
    value = line.get(name)
    return "" if value is None else f"{value:d}" if name == "step" else f"{value:.4g}"


class History:
    """`lines`: the metrics of each step, up to `most` lines. Longer runs keep the first, every
    second (fourth, eighth, ..) step after it, and the last, so that a curve of the whole run can be
    drawn. metrics.jsonl has everything that was logged."""

    def __init__(self, most: int = LINES) -> None:
        self.lines = MetricsTable()
        self._most, self._every = max(most, 3), 1

    def add(self, line: MetricsLine) -> None:
        if self.lines and not self._on_grid(self.lines[-1]):
            self.lines.pop()  # it was kept only as the last
        self.lines.append(line)
        if len(self.lines) > self._most:
            self._every *= 2
            self.lines[:] = [
                entry for entry in self.lines if self._on_grid(entry) or entry is self.lines[-1]
            ]

    def add_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the metrics of an evaluation after `step` to its line."""
        if self.lines and self.lines[-1]["step"] == step:
            self.lines[-1].update(values)

    def go_back(self, step: int) -> None:
        """Drops the lines of the steps after `step`, which come again."""
        self.lines[:] = [line for line in self.lines if line["step"] <= step]
        self._every = self._every if self.lines else 1

    def _on_grid(self, line: MetricsLine) -> bool:
        return (line["step"] - self.lines[0]["step"]) % self._every == 0
