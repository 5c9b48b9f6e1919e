"""Communication alongside computation: two functions become one program, in which permutes of one
travel while products of the other run.

Why: a compiler for TPUs hides a permute behind a product only if the program ties the two. Without
ties it runs a chain of permutes before the first product, and everything waits. Here both functions
are traced and run operation by operation. Two optimization barriers tie each permute to a product
at its start and to one at its end. No layer, collective or remat policy knows of it. It is not
differentiated: the loop over layers (`nn/stack.py`) writes out its backward pass.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax import lax
from jaxtyping import PyTree

from jaxtrain.overlap.spans import MOST_AT_ONCE, ProductSpan, spans
from jaxtrain.overlap.tracing import TracedOperation, TracedProgram, compute, trace

Call = tuple[Callable[..., PyTree], tuple[Any, ...]]
"""A function and its arguments."""

LEAST_PART = 0.01
"""Of the FLOPs of the largest product: what has less is not long enough to hide anything."""


def alongside(work: Call, communication: Call, *, flops_per_byte: float) -> tuple[PyTree, PyTree]:
    """Returns both results; permutes of `communication` travel beside products of `work`.

    Permutes that do not depend on each other travel together as one hop, for example when several
    arrays are gathered. Hops keep their order. A product hides at most one hop. A product that
    already hides a permute of `work` is used only if the others do not suffice. `spans` chooses
    the products of each hop. A hop without a product runs as soon as its operands are there.

    flops_per_byte: FLOPs that a device computes while its link carries one byte.
    """
    working, sending = trace(*work), _Hops(trace(*communication))
    products = _products(working.operations)
    sending.deal(products, flops_per_byte)
    numbers = {product.operation.results: number for number, product in enumerate(products)}
    for operation in working.operations:
        number = numbers.get(operation.results)
        if number is None:
            working.run(operation)
            continue
        operands = sending.start_with(number, working.take(operation.operands))
        results = dict(zip(operation.results, compute(operation, operands), strict=True))
        # Unread results stay out of barriers: a compiler cannot drop what is behind one.
        read = [result for result in operation.results if result in working.read]
        working.give(read, sending.end_with(number, [results[result] for result in read]))
    return working.result(), sending.result()


class _Product(NamedTuple):
    """An operation that can hide a hop. free: it hides no permute of its own program."""

    operation: TracedOperation
    flops: int
    free: bool


def _products(operations: list[TracedOperation]) -> list[_Product]:
    """Operations that are long enough to hide a hop: kernels, and all products except those far
    smaller than the largest. A kernel without stated FLOPs counts as the least of the others. A
    permute of the program itself travels behind the first product after it."""
    flops = [operation.flops for operation in operations]
    most = max((count for count in flops if count is not None), default=0)
    least = min((count for count in flops if count and count >= LEAST_PART * most), default=0)
    products: list[_Product] = []
    permuted = False
    for operation, stated in zip(operations, flops, strict=True):
        permuted |= operation.is_permute
        if operation.has_permutes or (stated is not None and not stated >= least > 0):
            continue
        products.append(_Product(operation, least if stated is None else stated, not permuted))
        permuted = False
    return products


def _hops(permutes: list[TracedOperation]) -> list[list[TracedOperation]]:
    """Divides independent permutes into hops of at most MOST_AT_ONCE, of about equal bytes."""
    parts = -(-len(permutes) // MOST_AT_ONCE)
    by_size = sorted(permutes, key=lambda permute: -permute.sent_bytes)
    return [by_size[part::parts] for part in range(parts)]


@dataclass
class _Hops:
    """A program whose permutes start and end with the products of their spans. Operations between
    two hops run when the first hop has ended."""

    program: TracedProgram
    _spans: list[ProductSpan | None] = field(default_factory=list)
    _current: int = 0
    _travelling: list[Any] | None = None

    def __post_init__(self) -> None:
        # Depth of a value: the longest chain of permutes that it depends on.
        depth: dict[int, int] = defaultdict(int)
        between: dict[int, list[TracedOperation]] = defaultdict(list)
        permutes: dict[int, list[TracedOperation]] = defaultdict(list)
        for operation in self.program.operations:
            level = max((depth[number] for number in operation.operands), default=0)
            (permutes if operation.is_permute else between)[level].append(operation)
            depth |= {number: level + operation.is_permute for number in operation.results}
        self._hops: list[list[TracedOperation]] = []
        self._between: list[list[TracedOperation]] = [between[0]]
        for level in range(len(permutes)):
            hops = _hops(permutes[level])
            self._hops += hops
            self._between += [[]] * (len(hops) - 1) + [between[level + 1]]

    def deal(self, products: list[_Product], flops_per_byte: float) -> None:
        """Assigns each hop its span of products, and runs what precedes the first such hop."""
        numbers = [number for number, product in enumerate(products) if product.free]
        if len(numbers) < len(self._hops):
            numbers = list(range(len(products)))
        times = [
            math.ceil(sum(permute.sent_bytes for permute in hop) * flops_per_byte)
            for hop in self._hops
        ]
        dealt = spans(times, [products[number].flops for number in numbers])
        self._spans = [
            span and ProductSpan(numbers[span.first], numbers[span.last]) for span in dealt
        ]
        self._run_to_next()

    def start_with(self, product: int, operands: list[Any]) -> list[Any]:
        """Returns the operands of a product. Where a hop starts with it, they wait for the hop's
        operands."""
        span = self._span
        if span is None or span.first != product:
            return operands
        hop = self._hops[self._current]
        moved = [self.program.take(permute.operands) for permute in hop]
        moved, operands = lax.optimization_barrier((moved, operands))
        self._travelling = [compute(*call) for call in zip(hop, moved, strict=True)]
        return operands

    def end_with(self, product: int, results: list[Any]) -> list[Any]:
        """Returns the results of a product. Where a hop ends with it, they wait for its arrival."""
        span = self._span
        if span is None or span.last != product:
            return results
        arrived, results = lax.optimization_barrier((self._travelling, results))
        for permute, values in zip(self._hops[self._current], arrived, strict=True):
            self.program.give(permute.results, values)
        self._current += 1
        self._run_to_next()
        return results

    def result(self) -> PyTree:
        """Returns the program's output; all hops (groups of its permutes) must have ended."""
        assert self._current == len(self._hops), "a hop waits for a product that never came"
        return self.program.result()

    @property
    def _span(self) -> ProductSpan | None:
        return self._spans[self._current] if self._current < len(self._spans) else None

    def _run_to_next(self) -> None:
        """Runs up to the next hop that has a span."""
        while True:
            for operation in self._between[self._current]:
                self.program.run(operation)
            if self._current == len(self._hops) or self._span is not None:
                return
            for permute in self._hops[self._current]:
                self.program.run(permute)
            self._current += 1
