"""A block as a chain of values, each made of those before it by one operation of its description; a
product's tokens are gathered before it or scattered after it, by values of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from jaxtrain.models.description import (
    AttentionCall,
    Bias,
    Block,
    Branches,
    ColumnParallel,
    Elementwise,
    ExpertCall,
    NormAcrossHeads,
    Operation,
    ReplicatedProduct,
    Residual,
    RowParallel,
    TokenGather,
)

PRODUCTS = frozenset({"columns", "rows", "replicated", "experts"})
Parallel = ColumnParallel | RowParallel
SEQUENCE = frozenset({"spread", "attention", "joined"})
"""The kinds of values that send something where rows are cut."""
Moved = tuple[tuple[str, AttentionCall], ...]
"""(kind, attention)."""


class Tensors(NamedTuple):
    """Tensors of which a device takes the greatest magnitudes together. of_experts: one of each of
    all experts, or several, and not of every device's."""

    count: int
    of_experts: bool = False


class Tokens(NamedTuple):
    """Tokens that are gathered or scattered. width: the numbers of each; narrow: in 8 bits."""

    width: int
    narrow: bool = False


class Value(NamedTuple):
    """One value of a chain. kind: "input"; "gather" and "scatter" of tokens; "columns", "rows",
    "replicated", "router" and "experts", products; "narrow", what a product in 8 bits makes of its
    input; "attention", with what trades tokens for heads before it, "spread", and back after it,
    "joined"; "sums" over all heads; "elementwise", "bias", "add", and "join" of branches. of: the
    numbers of the values it is made of. block: the place in the chain of the block that makes it.
    """

    kind: str
    of: tuple[int, ...] = ()
    operation: Operation | None = None
    block: int = 0

    @property
    def width(self) -> int:
        """Of tokens that are gathered or scattered."""
        match self.operation:
            case ColumnParallel((first, *_)):
                return first.rows
            case RowParallel(weight):
                return weight.columns
            case ExpertCall(router):
                return router.rows
            case TokenGather(width):
                return width
        raise AssertionError(f"{self.kind} moves no tokens")

    @property
    def input_scales(self) -> tuple[Tensors, ...]:
        """In 8 bits: of how many tensors each product's inputs consist; experts' are of their
        hidden layers, and of what comes out of these."""
        if self.kind == "experts" and isinstance(self.operation, ExpertCall):
            return (Tensors(self.operation.experts, of_experts=True),) * 2
        return (Tensors(1),) if self.kind == "narrow" else ()

    @property
    def gradient_scales(self) -> tuple[Tensors, ...]:
        """In 8 bits: of how many tensors the gradients of each product's outputs consist."""
        operation = self.operation
        if self.kind == "experts" and isinstance(operation, ExpertCall):
            each = Tensors(operation.experts, of_experts=True)
            return each, each._replace(count=each.count * (len(operation.weights) - 1))
        narrow = isinstance(operation, Parallel) and self.kind in ("columns", "rows")
        return (Tensors(len(operation.weights)),) if narrow else ()


KINDS: dict[type, tuple[str, ...]] = {
    ColumnParallel: ("gather", "columns"),
    RowParallel: ("rows", "scatter"),
    ReplicatedProduct: ("replicated",),
    TokenGather: ("gather",),
    AttentionCall: ("spread", "attention", "joined"),
    ExpertCall: ("gather", "router", "experts", "scatter"),
    Elementwise: ("elementwise",),
    NormAcrossHeads: ("sums", "elementwise"),
    Bias: ("bias",),
}
"""The values that an operation makes, one after the other; before them, of one in 8 bits, what it
makes of its input."""


@lru_cache(maxsize=256)
def chain(blocks: tuple[Block, ...], narrow: bool = False) -> tuple[Value, ...]:
    """The values of blocks, one after the other, those of branches branch after branch; the last
    is what they end with. narrow: products are in 8 bits."""
    values = [Value("input")]

    def follow(operations: tuple[Operation, ...], at: int, block: int) -> int:
        for operation in operations:
            at = make(operation, at, block)
        return at

    def make(operation: Operation, at: int, block: int) -> int:
        if isinstance(operation, Branches):
            ends = tuple(follow(branch, at, block) for branch in operation.branches)
            values.append(Value("join", ends, None, block))
            return len(values) - 1
        before = at
        first = ("narrow",) if narrow and isinstance(operation, Parallel) else ()
        for kind in (*first, *KINDS[type(operation)]):
            of = (at,)
            if kind == "experts":  # what was gathered, too
                of = (at, before + 1)
            elif kind == "elementwise" and isinstance(operation, NormAcrossHeads):
                of = (at, before)
            values.append(Value(kind, of, operation, block))
            at = len(values) - 1
        return at

    at = 0
    for number, block in enumerate(blocks):
        for step in block:
            if not isinstance(step, Residual):
                at = make(step, at, number)
                continue
            branch = follow(step.branch, at, number)
            values.append(Value("add", (at, branch), None, number))
            at = len(values) - 1
    return tuple(values)


def summed(values: Sequence[Value], among: Iterable[int]) -> tuple[int, ...]:
    """Of each norm over all heads among those numbers how many numbers of a token it sums."""
    found = (values[n].operation for n in among if values[n].kind == "sums")
    return tuple(each.sums for each in found if isinstance(each, NormAcrossHeads))


def moved(values: Sequence[Value], among: Iterable[int]) -> Moved:
    """The values of `SEQUENCE` among those numbers, each with its attention."""
    found = ((values[n].kind, values[n].operation) for n in among)
    return tuple((kind, each) for kind, each in found if isinstance(each, AttentionCall))


def gathered(values: Sequence[Value], among: Iterable[int]) -> tuple[Tokens, ...]:
    """Those that are gathered among those values."""
    found = (values[number] for number in among if values[number].kind == "gather")
    return tuple(Tokens(each.width, values[each.of[0]].kind == "narrow") for each in found)
