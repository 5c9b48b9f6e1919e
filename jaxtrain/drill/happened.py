"""What the runs of a drill share: their environment, and what is told of one fault."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.fault_tolerance.ledger import Entry
from jaxtrain.fault_tolerance.restarts import Restarts

SOON = Restarts(most=100, first_wait_s=0.1)
"""One start follows another at once."""


def environment(folder: Path) -> dict[str, str]:
    """Of the processes of a drill in `folder`: the many starts of one program compile it once."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return {**os.environ, **cache}


@dataclass(frozen=True)
class Happened:
    """One fault. noticed_s: until the supervisor acted, None where nothing had to be done. named:
    whom it said it was, "process N" with step and phase. lost: steps taken again. resumed_s: from
    the notice to the next start's first step. violations: what is not as it should be."""

    fault: str
    noticed_s: float | None
    named: str
    lost: int
    resumed_s: float
    violations: tuple[str, ...]


def named(failure: Mapping[str, Any]) -> str:
    """Whom a failure names, as it was written down."""
    where = f"after step {failure['step']} in {failure['phase']}"
    return f"process {failure['process']}, {failure['kind']} {where}"


def resumed_s(when: float, start: Entry) -> float:
    """Seconds from `when`, a Unix time, to the first step of a start."""
    before = ("start", "join", "open", "compile", "restore")
    return start.began + sum(start.seconds.get(phase, 0.0) for phase in before) - when
