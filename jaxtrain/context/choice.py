"""Which method attends where an experiment names none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from jaxtrain.context.methods import GatheredKeys, RingAttention, TwoLevel, Ulysses

Method = RingAttention | Ulysses | GatheredKeys | TwoLevel
"""The methods by name: a choice is a value of one of these."""


class Heads(NamedTuple):
    """What attention a model has, on a device before a method trades heads."""

    heads: int
    kv_heads: int
    causal: bool


def choose(found: Iterable[Heads], ways: int, seq: int | None) -> Method:
    """For a sequence cut over `ways` devices: a ring, zig-zag where any attention is causal and the
    row is cut into as many chunks, whose hops hide behind arithmetic; where it is not cut so, the
    trade of heads for which all split; else a ring in order."""
    every = list(found)
    ring = RingAttention(zigzag=any(each.causal for each in every))
    for method in (ring, Ulysses()):
        sizes = [dict(heads=each.heads, kv_heads=each.kv_heads) for each in every]
        if not any(method.violations(ways, seq=seq, **each) for each in sizes):
            return method
    return RingAttention(zigzag=False)
