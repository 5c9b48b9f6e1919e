"""Memory of a device that the program running on it leaves free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

MARGIN = 0.02
"""Fraction of the memory that stays free: free memory may be in pieces that are too small."""


def working_bytes(program: jax.stages.Compiled) -> int:
    """Bytes that a compiled program needs on each device while it runs, its arguments not counted;
    results in the place of a donated argument are not counted twice."""
    memory: Any = program.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes + max(0, results)


def spare_bytes(devices: Iterable[jax.Device], program: jax.stages.Compiled | None = None) -> int:
    """Free bytes on the fullest of this process's `devices`, less what `program` needs to run.

    0 if a device does not report its memory, as CPU devices do not."""
    free = min((_free(device.memory_stats() or {}) for device in devices), default=0)
    if free <= 0 or program is None:
        return max(0, free)
    return max(0, free - working_bytes(program))


def _free(stats: dict[str, int]) -> int:
    limit = stats.get("bytes_limit", 0)
    return round((1 - MARGIN) * limit) - stats.get("bytes_in_use", limit)
