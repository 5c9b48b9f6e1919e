"""Seconds of a call on a device; the next call is dispatched before the previous one has ended."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

ROUNDS = 3
MOST = 10_000
"""Calls of a round: each waits in a queue."""


class Timed(NamedTuple):
    """seconds: of one call, the median of the rounds' means. spread: between the slowest round and
    the quickest, over it."""

    seconds: float
    spread: float


def timed(call: Callable[[], Any], *, round_s: float) -> Timed:
    """Returns the time in rounds of `round_s` seconds or one call, after two untimed calls."""
    jax.block_until_ready(call())
    once = _round(call, 1)
    count = min(MOST, max(1, math.ceil(round_s / max(once, 1e-9))))
    return summary([_round(call, count) / count for _ in range(ROUNDS)])


def summary(rounds: list[float]) -> Timed:
    """Returns the median of the rounds' mean seconds, and their spread over the median."""
    middle = statistics.median(rounds)
    return Timed(middle, (max(rounds) - min(rounds)) / middle)


def _round(call: Callable[[], Any], count: int) -> float:
    began, last = time.perf_counter(), None
    for _ in range(count):
        last = call()
    jax.block_until_ready(last)
    return time.perf_counter() - began
