"""Communication alongside computation: two functions as one program, in which the permutes of the
one travel while products of the other run.

Why: a compiler for TPUs hides a permute behind a product only where the program ties the two. Left
to itself it runs a chain of permutes before the first product, and everything waits. Here both
functions are traced and run operation by operation: permutes of the second start with a product of
the first and end with one, which two optimization barriers say. No layer, collective or remat
policy knows of it. It is not differentiated: the loop over layers (`nn/stack.py`) has its backward
pass written out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax import lax
from jaxtyping import PyTree

from jaxtrain.overlap.spans import MOST_AT_ONCE, Span, spans
from jaxtrain.overlap.tracing import Operation, Program, compute, trace

Call = tuple[Callable[..., PyTree], tuple[Any, ...]]
"""A function and its arguments."""

LEAST_PART = 0.01
"""Of the FLOPs of the largest product: what has less is not long enough to hide anything."""


def alongside(work: Call, communication: Call, *, flops_per_byte: float) -> tuple[PyTree, PyTree]:
    """The results of both functions, the permutes of `communication` beside the products of `work`.

    Permutes of which none waits for another travel together: hop by hop, where several arrays are
    gathered or scattered. Hops keep their order. A product hides one hop, and one behind which a
    permute of `work` travels already hides none, as long as the others are enough; `spans` says
    which product hides which. A hop for which there is none runs as soon as it can.

    flops_per_byte: what a device computes while its link carries a byte.
    """
    working, sending = trace(*work), _Hops(trace(*communication))
    products = _products(working.operations)
    sending.deal(products, flops_per_byte)
    numbers = {each.operation.results: number for number, each in enumerate(products)}
    for operation in working.operations:
        number = numbers.get(operation.results)
        if number is None:
            working.run(operation)
            continue
        operands = sending.start_with(number, working.take(operation.operands))
        results = dict(zip(operation.results, compute(operation, operands), strict=True))
        # What nothing reads stays out of barriers, behind which a compiler would not drop it.
        read = [each for each in operation.results if each in working.read]
        working.give(read, sending.end_with(number, [results[each] for each in read]))
    return working.result(), sending.result()


class _Product(NamedTuple):
    """An operation that can hide a hop. free: no permute of its own program travels behind it."""

    operation: Operation
    flops: int
    free: bool


def _products(operations: list[Operation]) -> list[_Product]:
    """What is long enough to hide a hop: kernels, and products but for those far smaller than the
    largest. A kernel that states no FLOPs counts as the least of the others. A permute travels
    behind the first product after it."""
    flops = [each.flops for each in operations]
    most = max((each for each in flops if each is not None), default=0)
    least = min((each for each in flops if each and each >= LEAST_PART * most), default=0)
    found: list[_Product] = []
    permuted = False
    for operation, stated in zip(operations, flops, strict=True):
        permuted |= operation.is_permute
        if operation.has_permutes or (stated is not None and not stated >= least > 0):
            continue
        found.append(_Product(operation, least if stated is None else stated, not permuted))
        permuted = False
    return found


def _hops(permutes: list[Operation]) -> list[list[Operation]]:
    """Permutes of which none waits for another, in hops of at most MOST_AT_ONCE and of about as
    many bytes each."""
    parts = -(-len(permutes) // MOST_AT_ONCE)
    by_size = sorted(permutes, key=lambda each: -each.sent_bytes)
    return [by_size[part::parts] for part in range(parts)]


@dataclass
class _Hops:
    """A program whose permutes start and end where their spans say; what lies between two hops is
    run when the first has ended."""

    program: Program
    _spans: list[Span | None] = field(default_factory=list)
    _current: int = 0
    _travelling: list[Any] | None = None

    def __post_init__(self) -> None:
        # Depth of a value: how many permutes in a row it waits for.
        depth: dict[int, int] = defaultdict(int)
        between: dict[int, list[Operation]] = defaultdict(list)
        permutes: dict[int, list[Operation]] = defaultdict(list)
        for each in self.program.operations:
            at = max((depth[number] for number in each.operands), default=0)
            (permutes if each.is_permute else between)[at].append(each)
            depth |= {number: at + each.is_permute for number in each.results}
        self._hops: list[list[Operation]] = []
        self._between: list[list[Operation]] = [between[0]]
        for at in range(len(permutes)):
            hops = _hops(permutes[at])
            self._hops += hops
            self._between += [[]] * (len(hops) - 1) + [between[at + 1]]

    def deal(self, products: list[_Product], flops_per_byte: float) -> None:
        """Give each hop its span of products, and run what precedes the first that has one."""
        numbers = [number for number, each in enumerate(products) if each.free]
        if len(numbers) < len(self._hops):
            numbers = list(range(len(products)))
        times = [
            math.ceil(sum(each.sent_bytes for each in hop) * flops_per_byte) for hop in self._hops
        ]
        dealt = spans(times, [products[number].flops for number in numbers])
        self._spans = [span and Span(numbers[span.first], numbers[span.last]) for span in dealt]
        self._run_to_next()

    def start_with(self, product: int, operands: list[Any]) -> list[Any]:
        """The operands of a product, which does not run before the hop that starts with it."""
        span = self._span
        if span is None or span.first != product:
            return operands
        hop = self._hops[self._current]
        moved = [self.program.take(each.operands) for each in hop]
        moved, operands = lax.optimization_barrier((moved, operands))
        self._travelling = [compute(each, of) for each, of in zip(hop, moved, strict=True)]
        return operands

    def end_with(self, product: int, results: list[Any]) -> list[Any]:
        """The results of a product, which nobody reads before the hop that ends with it."""
        span = self._span
        if span is None or span.last != product:
            return results
        arrived, results = lax.optimization_barrier((self._travelling, results))
        for each, values in zip(self._hops[self._current], arrived, strict=True):
            self.program.give(each.results, values)
        self._current += 1
        self._run_to_next()
        return results

    def result(self) -> PyTree:
        """What the program returns."""
        assert self._current == len(self._hops), "a hop waits for a product that never came"
        return self.program.result()

    @property
    def _span(self) -> Span | None:
        return self._spans[self._current] if self._current < len(self._spans) else None

    def _run_to_next(self) -> None:
        """Run up to the next hop that has a span."""
        while True:
            for each in self._between[self._current]:
                self.program.run(each)
            if self._current == len(self._hops) or self._span is not None:
                return
            for each in self._hops[self._current]:
                self.program.run(each)
            self._current += 1
