"""During which products a permute travels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_AT_ONCE = 4
"""Permutes that travel together. A TPU's compiler has five under way at most, and waits for some
before it starts more; one may be a product's own."""

LONGEST = 32
"""Products in a span at the most: so many hide any hop that is worth hiding, and the time to choose
grows with it."""


def bundle_count(devices: int, *, doubling: bool) -> int:
    """In how many bundles the leaves of a layer travel over so many devices, whose collectives take
    a permute for each doubling, or for each other device: enough for two hops a permute where a
    layer has about as many products, so that each hop is short; else for one."""
    others = devices - 1
    steps = others.bit_length() if doubling else others
    return MOST_AT_ONCE * (2 if steps <= 5 else 1)


class Span(NamedTuple):
    """Products in a row, by number: the first and the last."""

    first: int
    last: int


class _Dealt(NamedTuple):
    """Spans of the first permutes, and what they come to; less is better, in this order."""

    exposed: int = 0
    """Time of permutes beyond that of their products."""
    alone: int = 0
    """Permutes without a product."""
    used: int = 0
    """Products in spans."""
    ends: int = 0
    """The sum of the last products' numbers."""
    last: tuple[_Dealt, Span | None] | None = None

    def then(self, time: int, span: Span | None, hidden: int = 0) -> _Dealt:
        exposed = self.exposed + max(0, time - hidden)
        if span is None:
            return _Dealt(exposed, self.alone + 1, self.used, self.ends, (self, None))
        used = self.used + span.last - span.first + 1
        return _Dealt(exposed, self.alone, used, self.ends + span.last, (self, span))


def spans(permutes: Sequence[int], products: Sequence[int]) -> list[Span | None]:
    """For each permute the products that hide it; None where it has none.

    Both are in the order in which they run; a span is of products in a row, and no product is in
    two. Of all ways the one that leaves least time exposed; of these that with fewest permutes
    alone, then with fewest products in spans, then with the earliest ends.

    permutes, products: what each takes, in one unit of time.
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
                choices.append(best[first].then(time, Span(first, n - 1), hidden))
                if hidden >= time:
                    break  # a longer span hides no more
            following.append(min(choices, key=lambda dealt: dealt[:4]))
        best = following
    found, dealt = [], best[-1]
    while dealt.last is not None:
        dealt, span = dealt.last
        found.append(span)
    return found[::-1]
