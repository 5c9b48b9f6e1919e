"""Seconds of a call on a device, which is given the next before it has done the last."""

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
    """Measured in rounds of `round_s` seconds or one call, after two calls that are not."""
    jax.block_until_ready(call())
    once = _round(call, 1)
    count = min(MOST, max(1, math.ceil(round_s / max(once, 1e-9))))
    return summary([_round(call, count) / count for _ in range(ROUNDS)])


def summary(rounds: list[float]) -> Timed:
    """Of the mean seconds of each round."""
    middle = statistics.median(rounds)
    return Timed(middle, (max(rounds) - min(rounds)) / middle)


def _round(call: Callable[[], Any], count: int) -> float:
    began, last = time.perf_counter(), None
    for _ in range(count):
        last = call()
    jax.block_until_ready(last)
    return time.perf_counter() - began
