"""Default method of context parallelism, for experiments that name none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from jaxtrain.context.methods import GatheredKeys, RingAttention, TwoLevel, Ulysses

Method = RingAttention | Ulysses | GatheredKeys | TwoLevel
"""The methods by name: a choice is a value of one of these."""


class Heads(NamedTuple):
    """Heads of an attention on one device: numbers of query and key heads, counted before a method
    trades heads for tokens."""

    heads: int
    kv_heads: int
    causal: bool


def choose(attentions: Iterable[Heads], ways: int, seq: int | None) -> Method:
    """Returns the method for a sequence split over `ways` devices.

    First choice: a ring, whose hops hide behind arithmetic, in zig-zag order if any attention is
    causal. Second choice, if the sequence does not divide into its chunks: Ulysses, if all heads
    split. Else a ring in contiguous order.
    """
    attentions = list(attentions)
    ring = RingAttention(zigzag=any(heads.causal for heads in attentions))
    for method in (ring, Ulysses()):
        sizes = [dict(heads=heads.heads, kv_heads=heads.kv_heads) for heads in attentions]
        if not any(method.violations(ways, seq=seq, **size) for size in sizes):
            return method
    return RingAttention(zigzag=False)
