"""Choice of the products during which a permute travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_AT_ONCE = 4
"""Permutes in a hop. A TPU's compiler keeps at most five in flight and waits for some before it
starts more; one of the five may belong to the product."""

LONGEST = 32
"""Largest number of products in a span. More would hide no hop that is worth hiding, and the time
to choose grows with it."""


def bundle_count(devices: int, *, doubling: bool) -> int:
    """Number of bundles in which the leaves of a layer travel between `devices`.

    A collective takes one permute for each doubling of the devices, or one for each other device.
    With up to 5 permutes there are two hops for each, which a layer's products can hide; with more
    there is one."""
    peers = devices - 1
    steps = peers.bit_length() if doubling else peers
    return MOST_AT_ONCE * (2 if steps <= 5 else 1)


class ProductSpan(NamedTuple):
    """Consecutive products, by number: the first and the last."""

    first: int
    last: int


class _Dealt(NamedTuple):
    """Spans of the first permutes, with their costs in order of importance; less is better."""

    exposed: int = 0
    """Time of permutes beyond the time of their products."""
    alone: int = 0
    """Permutes without a product."""
    used: int = 0
    """Products in spans."""
    ends: int = 0
    """The sum of the last products' numbers."""
    last: tuple[_Dealt, ProductSpan | None] | None = None

    def then(self, time: int, span: ProductSpan | None, hidden: int = 0) -> _Dealt:
        exposed = self.exposed + max(0, time - hidden)
        if span is None:
            return _Dealt(exposed, self.alone + 1, self.used, self.ends, (self, None))
        used = self.used + span.last - span.first + 1
        return _Dealt(exposed, self.alone, used, self.ends + span.last, (self, span))


def spans(permutes: Sequence[int], products: Sequence[int]) -> list[ProductSpan | None]:
    """Returns for each permute the products that hide it, or None.

    Permutes and products are in the order in which they run. A span consists of consecutive
    products, and no product is in two spans. The choice leaves least time exposed; ties go to the
    fewest permutes without a span, then to the fewest products in spans, then to the earliest ends.

    permutes, products: the time of each, in one unit.
    """
    # best[n]: the spans of the permutes so far among the first n products.
    best = [_Dealt()] * (len(products) + 1)
    for time in permutes:
        following: list[_Dealt] = []
        for n in range(len(products) + 1):
            choices = [best[n].then(time, None), *following[-1:]]
            hidden = 0
            for first in reversed(range(max(0, n - LONGEST), n)):
                hidden += products[first]
                choices.append(best[first].then(time, ProductSpan(first, n - 1), hidden))
                if hidden >= time:
                    break  # a longer span hides no more
            following.append(min(choices, key=lambda dealt: dealt[:4]))
        best = following
    chosen, dealt = [], best[-1]
    while dealt.last is not None:
        dealt, span = dealt.last
        chosen.append(span)
    return chosen[::-1]
