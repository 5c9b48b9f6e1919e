"""What a device's memory has room for beside the program that runs on it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

MARGIN = 0.02
"""Of the memory, left free: an allocator does not find room in pieces for everything that fits."""


def working_bytes(program: jax.stages.Compiled) -> int:
    """What a compiled program takes on each device beside its arguments while it runs; results that
    take the place of a donated argument are not counted twice."""
    found: Any = program.memory_analysis()
    made = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.temp_size_in_bytes + max(0, made)


def spare_bytes(devices: Iterable[jax.Device], program: jax.stages.Compiled | None = None) -> int:
    """Bytes that are free on each of the devices, which are of this process, beside what is held
    now and what a program takes while it runs: those of the fullest. 0 where a device does not say
    what it has, as CPU devices do not; the program is not asked then."""
    free = min((_free(device.memory_stats() or {}) for device in devices), default=0)
    if free <= 0 or program is None:
        return max(0, free)
    return max(0, free - working_bytes(program))


def _free(stats: dict[str, int]) -> int:
    limit = stats.get("bytes_limit", 0)
    return round((1 - MARGIN) * limit) - stats.get("bytes_in_use", limit)
