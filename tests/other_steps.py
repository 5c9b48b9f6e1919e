"""Step directories that hold another step's files: of a run that saved 2, 4, 6 and 8."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path


def renamed(steps: Path) -> None:
    (steps / "4").rename(steps / "10")


def pasted(steps: Path) -> None:
    shutil.rmtree(steps / "8" / "state")
    shutil.copytree(steps / "2" / "state", steps / "8" / "state")


def swapped(steps: Path) -> None:
    for old, new in (("6", "aside"), ("8", "6"), ("aside", "8")):
        (steps / old).rename(steps / new)


DAMAGES: list[tuple[Callable[[Path], None], list[int], int]] = [
    (renamed, [10], 8),
    (pasted, [8], 6),
    (swapped, [6, 8], 4),
]
"""What is done, the steps that verify names, and the newest that is good."""
