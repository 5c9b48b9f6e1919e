"""Shared by the runs of a drill: their environment, and the report of one fault."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.fault_tolerance.ledger import Entry
from jaxtrain.fault_tolerance.restarts import Restarts

SOON = Restarts(most=100, first_wait_s=0.1)
"""Restarts without a wait."""


def environment(folder: Path) -> dict[str, str]:
    """Environment of a drill's processes: the starts of a program share one compilation cache."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return {**os.environ, **cache}


@dataclass(frozen=True)
class Happened:
    """Report of one fault. noticed_s: until the supervisor acted, None if it did not. named: the
    process it blamed, "process N" with step and phase. lost: repeated steps. resumed_s: from the
    notice to the next start's first step. violations: of what is expected."""

    fault: str
    noticed_s: float | None
    named: str
    lost: int
    resumed_s: float
    violations: tuple[str, ...]


def named(failure: Mapping[str, Any]) -> str:
    """The process that a recorded failure names, with kind, step and phase."""
    place = f"after step {failure['step']} in {failure['phase']}"
    return f"process {failure['process']}, {failure['kind']} {place}"


def resumed_s(when: float, start: Entry) -> float:
    """Seconds from `when`, a Unix time, to the first step of a start."""
    preparation = ("start", "join", "open", "compile", "restore")
    return start.began + sum(start.seconds.get(phase, 0.0) for phase in preparation) - when
