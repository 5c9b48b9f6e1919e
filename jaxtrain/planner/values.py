"""A block as a chain of values, each computed from earlier ones by one operation of its
description.

Gathers before a product and scatters after it are values of their own.
"""

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
    """Tensors whose maximum magnitudes a device takes together. of_experts: one or several for each
    of all experts, of which a device has a part."""

    count: int
    of_experts: bool = False


class Tokens(NamedTuple):
    """Tokens that are gathered or scattered. width: numbers for each token. narrow: in 8 bits."""

    width: int
    narrow: bool = False


class Value(NamedTuple):
    """One value of a chain.

    kind: "input"; "gather" and "scatter" of tokens; the products "columns", "rows", "replicated",
      "router" and "experts"; "narrow", the quantised input of a product in 8 bits; "attention",
      "spread" (tokens traded for heads before it) and "joined" (traded back after it); "sums" over
      all heads; "elementwise", "bias", "add"; "join" of branches.
    inputs: numbers of the values from which it is computed. block: index in the chain of its block.
    """

    kind: str
    inputs: tuple[int, ...] = ()
    operation: Operation | None = None
    block: int = 0

    @property
    def width(self) -> int:
        """Numbers for each token that is gathered or scattered."""
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
        """In 8 bits: the number of tensors that each product's inputs consist of. For experts: the
        inputs of their hidden layers, and those layers' outputs."""
        if self.kind == "experts" and isinstance(self.operation, ExpertCall):
            return (Tensors(self.operation.experts, of_experts=True),) * 2
        return (Tensors(1),) if self.kind == "narrow" else ()

    @property
    def gradient_scales(self) -> tuple[Tensors, ...]:
        """In 8 bits: the number of tensors in the gradients of each product's outputs."""
        operation = self.operation
        if self.kind == "experts" and isinstance(operation, ExpertCall):
            tensors = Tensors(operation.experts, of_experts=True)
            return tensors, tensors._replace(count=tensors.count * (len(operation.weights) - 1))
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
    """Returns the values of blocks in order, one branch after another; the last is their output.
    narrow: products are in 8 bits."""
    values = [Value("input")]

    def follow(operations: tuple[Operation, ...], current: int, block: int) -> int:
        for operation in operations:
            current = make(operation, current, block)
        return current

    def make(operation: Operation, current: int, block: int) -> int:
        if isinstance(operation, Branches):
            ends = tuple(follow(branch, current, block) for branch in operation.branches)
            values.append(Value("join", ends, None, block))
            return len(values) - 1
        entry = current
        first = ("narrow",) if narrow and isinstance(operation, Parallel) else ()
        for kind in (*first, *KINDS[type(operation)]):
            inputs = (current,)
            if kind == "experts":  # what was gathered, too
                inputs = (current, entry + 1)
            elif kind == "elementwise" and isinstance(operation, NormAcrossHeads):
                inputs = (current, entry)
            values.append(Value(kind, inputs, operation, block))
            current = len(values) - 1
        return current

    current = 0
    for number, block in enumerate(blocks):
        for step in block:
            if not isinstance(step, Residual):
                current = make(step, current, number)
                continue
            branch = follow(step.branch, current, number)
            values.append(Value("add", (current, branch), None, number))
            current = len(values) - 1
    return tuple(values)


def summed(values: Sequence[Value], among: Iterable[int]) -> tuple[int, ...]:
    """Returns, for each norm over all heads in `among`, how many numbers of a token it sums."""
    operations = (values[n].operation for n in among if values[n].kind == "sums")
    return tuple(
        operation.sums for operation in operations if isinstance(operation, NormAcrossHeads)
    )


def moved(values: Sequence[Value], among: Iterable[int]) -> Moved:
    """Returns the values of `SEQUENCE` in `among`, each with its attention."""
    pairs = ((values[n].kind, values[n].operation) for n in among)
    return tuple((kind, call) for kind, call in pairs if isinstance(call, AttentionCall))


def gathered(values: Sequence[Value], among: Iterable[int]) -> tuple[Tokens, ...]:
    """Returns the tokens of the gathers in `among`."""
    gathers = (values[number] for number in among if values[number].kind == "gather")
    return tuple(Tokens(value.width, values[value.inputs[0]].kind == "narrow") for value in gathers)
