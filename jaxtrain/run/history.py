"""Metrics of a run in memory, with a bound on their number."""

from __future__ import annotations

from typing import Any

Line = dict[str, Any]

LINES = 10_000
"""Most lines kept: about 10 MB."""


class History:
    """`lines`: the metrics of each step, up to `most` lines. Longer runs keep the first, every
    second (fourth, eighth, ..) step after it, and the last, so that a curve of the whole run can be
    drawn. metrics.jsonl has everything that was logged."""

    def __init__(self, most: int = LINES) -> None:
        self.lines: list[Line] = []
        self._most, self._every = max(most, 3), 1

    def add(self, line: Line) -> None:
        if self.lines and not self._on_grid(self.lines[-1]):
            self.lines.pop()  # it was kept only as the last
        self.lines.append(line)
        if len(self.lines) > self._most:
            self._every *= 2
            self.lines[:] = [
                entry for entry in self.lines if self._on_grid(entry) or entry is self.lines[-1]
            ]

    def go_back(self, step: int) -> None:
        """Drops the lines of the steps after `step`, which come again."""
        self.lines[:] = [line for line in self.lines if line["step"] <= step]
        self._every = self._every if self.lines else 1

    def _on_grid(self, line: Line) -> bool:
        return (line["step"] - self.lines[0]["step"]) % self._every == 0
