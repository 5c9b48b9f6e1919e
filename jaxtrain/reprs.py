"""The text of values: settings as the call that makes them, reports as commands print them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from typing import Any


def short_repr(value: Any) -> str:
    """Returns a dataclass as a call: its class, and the fields that are not their defaults."""
    changed = [field for field in fields(value) if not _is_default(field, value)]
    arguments = (f"{field.name}={getattr(value, field.name)!r}" for field in changed)
    return f"{type(value).__name__}({', '.join(arguments)})"


def _is_default(field: Field[Any], value: Any) -> bool:
    default = field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    return default is not MISSING and getattr(value, field.name) == default


def aligned(rows: Sequence[Sequence[str]], left: int | None = None) -> list[str]:
    """Returns the lines of a table. left: so many columns are padded on the right, as text is, and
    those after them on the left, as numbers are; None for all."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = len(widths) if left is None else left
    return [
        "  ".join(
            cell.ljust(width) if i < texts else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


class PrintedReport:
    """A report: `str` is what its command prints, `repr` (a notebook's last line) the summary."""

    def table(self) -> str:
        raise NotImplementedError

    def summary(self) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{self.table()}\n{self.summary()}"

    def __repr__(self) -> str:
        return self.summary()
