"""Which collectives of tokens a backward pass needs: all of them, unless leaves are frozen.

Demand runs downwards. A block is a chain of values, each made of those before it by one operation
of its description; a product's tokens are gathered before it or scattered after it, by values of
their own. Gradients flow down to the lowest leaf that is trained, and no further; on their way they
read values that the remat policy has kept, or that are made again from those below them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from jaxtrain.models.description import (
    ADAPTER_A,
    ADAPTER_B,
    STACK,
    AttentionCall,
    Bias,
    Block,
    ColumnParallel,
    Elementwise,
    ExpertCall,
    Operation,
    Residual,
    RowParallel,
)
from jaxtrain.planner.facts import StepFacts

KEPT: dict[str, frozenset[str]] = {
    "full": frozenset(),
    "attention": frozenset({"attention"}),
    "dots": frozenset({"columns", "rows", "router"}),
    "dots_and_attention": frozenset({"columns", "rows", "router", "attention"}),
}
"""The kinds of values that each remat policy keeps; "none" keeps all that is read."""
PRODUCTS = frozenset({"columns", "rows", "experts"})
Parallel = ColumnParallel | RowParallel


class Value(NamedTuple):
    """One value of a chain. kind: "input"; "gather" and "scatter" of tokens; "columns", "rows",
    "router" and "experts", products; "narrow", what a product in 8 bits makes of its input;
    "attention", "elementwise", "bias", "add". of: the numbers of the values it is made of. block:
    the place in the chain of the block that makes it."""

    kind: str
    of: tuple[int, ...] = ()
    operation: Operation | None = None
    block: int = 0


KINDS: dict[type, tuple[str, ...]] = {
    ColumnParallel: ("gather", "columns"),
    RowParallel: ("rows", "scatter"),
    AttentionCall: ("attention",),
    ExpertCall: ("gather", "router", "experts", "scatter"),
    Elementwise: ("elementwise",),
    Bias: ("bias",),
}
"""The values that an operation makes, one after the other; before them, of one in 8 bits, what it
makes of its input."""


@lru_cache(maxsize=256)
def chain(blocks: tuple[Block, ...], narrow: bool = False) -> tuple[Value, ...]:
    """The values of blocks, one after the other; the last is what they end with. narrow: products
    are in 8 bits."""
    values = [Value("input")]

    def make(operation: Operation, at: int, block: int) -> int:
        before = at
        first = ("narrow",) if narrow and isinstance(operation, Parallel) else ()
        for kind in (*first, *KINDS[type(operation)]):
            of = (at, before + 1) if kind == "experts" else (at,)  # what was gathered, too
            values.append(Value(kind, of, operation, block))
            at = len(values) - 1
        return at

    at = 0
    for number, block in enumerate(blocks):
        for step in block:
            if not isinstance(step, Residual):
                at = make(step, at, number)
                continue
            branch = at
            for operation in step.branch:
                branch = make(operation, branch, number)
            values.append(Value("add", (at, branch), None, number))
            at = len(values) - 1
    return tuple(values)


class Work(NamedTuple):
    """Of one turn of the remat policy's body. rows, columns: row products' output gradients are
    gathered, column products' input gradients scattered, so often; rows_again, columns_again: what
    the forward pass did, repeated. weights: whether any matrix is read. made: values made again,
    by their numbers in the chain.

    Of products in 8 bits: narrow_rows, narrow_again: how many of `rows` and `columns_again` are
    theirs; regathered: gathers of column products' inputs for their weights' gradients; maxima: of
    how many gradients each takes the greatest magnitudes together; maxima_again: of how many inputs
    it is taken again."""

    rows: int = 0
    columns: int = 0
    rows_again: int = 0
    columns_again: int = 0
    weights: bool = False
    made: frozenset[int] = frozenset()
    narrow_rows: int = 0
    narrow_again: int = 0
    regathered: int = 0
    maxima: tuple[int, ...] = ()
    maxima_again: int = 0


def works(facts: StepFacts) -> dict[str, list[tuple[Work, int]]]:
    """By path of each block outside the stack, and "period." of the stack: the work of its turns
    and how many are alike."""
    model = facts.model
    below = facts.trains(*model.entering_alone)
    found: dict[str, list[tuple[Work, int]]] = {}
    for path in model.before:
        found[path] = [(body_work(facts, [path], below=below), 1)]
        below = below or facts.trains(path)
    found[STACK] = stack_works(facts, model.periods, below=below)
    below = below or facts.trains(STACK)
    for path in model.after:
        found[path] = [(body_work(facts, [path], below=below), 1)]
        below = below or facts.trains(path)
    return found


def stack_works(facts: StepFacts, turns: int, *, below: bool) -> list[tuple[Work, int]]:
    """Of a stack, or a chunk of it. Turns of a loop are alike; written out, or of one turn, the
    first may need less."""
    loop, period = facts.loop, list(facts.model.stacked)
    if not below and not facts.trains(STACK):
        return [(Work(), turns)]
    above = body_work(facts, period, below=True)
    if not loop.unroll and turns - loop.prefetch > 1:
        return [(above, turns)]
    return [(body_work(facts, period, below=below), 1), (above, turns - 1)]


def fetched_again(facts: StepFacts, found: list[tuple[Work, int]]) -> int:
    """How often the backward pass of a stack gathers a layer's weights."""
    turns = sum(n for _, n in found)
    without = sum(n for work, n in found if not work.weights)
    fetched = facts.loop.fetched_again(turns)
    return 0 if without == turns else max(fetched - without, 0)


def body_work(facts: StepFacts, paths: Sequence[str], *, below: bool) -> Work:
    """The backward pass of the blocks at these paths. below: the gradient of their input is
    needed."""
    values = chain(tuple(facts.model.blocks[path] for path in paths), facts.narrow)
    # Whether a gradient flows down to each value, and which ones it reads on its way.
    flows, read = [below], set()
    rows = columns = narrow_rows = regathered = 0
    maxima: list[int] = []
    weights = False
    for number, value in enumerate(values[1:], start=1):
        flow = any(flows[of] for of in value.of)
        own = _trains(facts, paths[value.block], value)
        flows.append(flow or own)
        columns += flow and value.kind == "gather"
        rows += flow and value.kind == "scatter"
        if facts.narrow and isinstance(value.operation, Parallel):
            narrow_rows += flow and value.kind == "scatter"
            regathered += own and value.kind == "columns"
            if value.kind in ("columns", "rows") and (flow or own):
                maxima.append(len(value.operation.weights))
        # The gradients of experts' weights read the others of them.
        weights |= value.kind in PRODUCTS and (flow or (own and value.kind == "experts"))
        weights |= value.kind in PRODUCTS and _trains_adapter(facts, paths[value.block], value)
        read |= reads(number, value, flow=flow, own=own, narrow=facts.narrow)
    again = made_again(values, read, facts.loop.remat)
    kinds = [values[number].kind for number in again]
    weights |= not PRODUCTS.isdisjoint(kinds)
    gathers, narrow_again = count_gathers(values, again)
    return Work(
        *(rows, columns, kinds.count("scatter"), gathers, weights, frozenset(again)),
        *(narrow_rows, narrow_again, regathered, tuple(maxima), kinds.count("narrow")),
    )


def count_gathers(values: Sequence[Value], among: Iterable[int]) -> tuple[int, int]:
    """How many gathers of tokens are among those values, and how many of them in 8 bits."""
    found = [number for number in among if values[number].kind == "gather"]
    below = [values[values[number].of[0]].kind for number in found]
    return len(found), below.count("narrow")


def reads(
    number: int, value: Value, *, flow: bool = True, own: bool = True, narrow: bool = False
) -> set[int]:
    """The values that the derivative of one reads. flow: of its inputs; own: of its parameters.
    narrow: products are in 8 bits; they read what they have made of their inputs."""
    if value.kind in ("columns", "rows"):
        of = {number - 2} if narrow and value.kind == "columns" else set(value.of)
        return of if own else set()
    if value.kind == "experts":  # all of its own inside: to make that again is to make it again
        return {number, *value.of} if flow or own else set()
    if value.kind == "attention":
        return set(value.of) if flow else set()
    return set(value.of) if value.kind == "elementwise" and (flow or own) else set()


def made_again(values: Sequence[Value], read: Iterable[int], remat: str) -> set[int]:
    """What is read and not kept, and what that is made of."""
    if remat == "none":
        return set()
    found: set[int] = set()
    left = list(read)
    while left:
        number = left.pop()
        value = values[number]
        if number in found or kept(values, number, remat) or value.kind == "input":
            continue
        found.add(number)
        left += value.of
    return found


def kept(values: Sequence[Value], number: int, remat: str) -> bool:
    """Whether a policy that makes anything again keeps a value. Of row products in 8 bits it does
    so after the scatter."""
    value = values[number]
    if value.kind == "scatter" and isinstance(value.operation, RowParallel):
        below = value.of[0]
        return values[values[below].of[0]].kind == "narrow" and "rows" in KEPT[remat]
    return value.kind in KEPT[remat]


def needed_for_kept(
    blocks: tuple[Block, ...], remat: str, *, split: bool = False, narrow: bool = False
) -> frozenset[int]:
    """Numbers of the values of a body of blocks that make what its backward pass finds kept: where
    its output is not used, what comes after them is not computed. split: the inputs of products are
    kept for W, as they lie before they are gathered. narrow: products are in 8 bits."""
    values = chain(blocks, narrow)
    read = {n for i, value in enumerate(values) for n in reads(i, value, narrow=narrow)}
    if remat == "none":
        left = list(read)
    else:
        again = made_again(values, read, remat)
        used = read | {of for number in again for of in values[number].of}
        left = [number for number in used if kept(values, number, remat)]
    if split:
        inputs = [value.of[0] for value in values if value.kind in ("columns", "rows")]
        gathered = [values[n].of[0] if values[n].kind == "gather" else n for n in inputs]
        left += gathered
    found: set[int] = set()
    while left:
        number = left.pop()
        if number not in found and number:
            found.add(number)
            left += values[number].of
    return frozenset(found)


def _trains(facts: StepFacts, path: str, value: Value) -> bool:
    operation = value.operation
    if value.kind in ("columns", "rows"):
        assert isinstance(operation, ColumnParallel | RowParallel)
        return any(
            _trained(facts, path + weight.leaf + end)
            for weight in operation.weights
            for end in ("", ADAPTER_A, ADAPTER_B)
        )
    if value.kind == "experts":
        assert isinstance(operation, ExpertCall)
        return any(_trained(facts, path + leaf) for leaf in operation.leaves)
    if isinstance(operation, Elementwise | Bias) and operation.leaves:
        return facts.trains(*(path + leaf for leaf in operation.leaves))
    return False


def _trains_adapter(facts: StepFacts, path: str, value: Value) -> bool:
    """Whether a matrix A is trained, whose gradient reads B."""
    operation = value.operation
    if not isinstance(operation, ColumnParallel | RowParallel):
        return False
    return any(_trained(facts, path + weight.leaf + ADAPTER_A) for weight in operation.weights)


def _trained(facts: StepFacts, leaf: str) -> bool:
    found = facts.leaves.get(leaf)
    return found is not None and found.trained
