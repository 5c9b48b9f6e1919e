"""Which products hide a permute: the least time exposed, against all ways there are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from jaxtrain.overlap.spans import ProductSpan, spans


def every_way(permutes: int, products: int, begin: int = 0) -> Iterator[list[ProductSpan | None]]:
    if not permutes:
        yield []
        return
    for after in every_way(permutes - 1, products, begin):
        yield [None, *after]
    for first in range(begin, products):
        for last in range(first, products):
            for after in every_way(permutes - 1, products, last + 1):
                yield [ProductSpan(first, last), *after]


def cost(
    way: Sequence[ProductSpan | None], permutes: Sequence[int], products: Sequence[int]
) -> tuple:
    exposed = used = ends = 0
    for span, time in zip(way, permutes, strict=True):
        run = () if span is None else products[span.first : span.last + 1]
        exposed += max(0, time - sum(run))
        used += len(run)
        ends += 0 if span is None else span.last
    return exposed, way.count(None), used, ends


@pytest.mark.parametrize("seed", range(40))
def test_no_other_way_is_better(seed: int) -> None:
    drawn = random.Random(seed)
    permutes = [drawn.choice([0, 1, 2, 5]) for _ in range(drawn.randrange(5))]
    products = [drawn.choice([0, 1, 3]) for _ in range(drawn.randrange(6))]
    found = spans(permutes, products)
    ways = list(every_way(len(permutes), len(products)))
    assert found in ways
    assert cost(found, permutes, products) == min(cost(way, permutes, products) for way in ways)


def test_long_permutes_get_long_products() -> None:
    """Of a gather by doubling, whose last hop is the longest, and of a scatter by halving."""
    assert spans([1, 2, 4], [4, 4, 1, 1, 3]) == [
        ProductSpan(0, 0),
        ProductSpan(1, 1),
        ProductSpan(3, 4),
    ]
    assert spans([4, 2, 1], [1, 1, 4, 4, 4]) == [
        ProductSpan(2, 2),
        ProductSpan(3, 3),
        ProductSpan(4, 4),
    ]


def test_of_no_time_each_takes_one_product() -> None:
    assert spans([0, 0, 0], [7, 7]) == [ProductSpan(0, 0), ProductSpan(1, 1), None]
