"""Which collectives of tokens a backward pass needs: all of them, unless leaves are frozen.

Demand runs downwards the chain of values (`values.py`). Gradients flow down to the lowest leaf
that is trained, and no further; on their way they read values that the remat policy has kept, or
that are made again from those below them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxtrain.models.description import (
    ADAPTER_A,
    ADAPTER_B,
    STACK,
    Bias,
    Block,
    Elementwise,
    ExpertCall,
    NormAcrossHeads,
    Product,
    RowParallel,
)
from jaxtrain.planner.facts import StepFacts
from jaxtrain.planner.values import (
    PRODUCTS,
    Moved,
    Parallel,
    Tensors,
    Tokens,
    Value,
    chain,
    gathered,
    moved,
    summed,
)

KEPT: dict[str, frozenset[str]] = {
    "full": frozenset(),
    "attention": frozenset({"attention"}),
    "dots": frozenset({"columns", "rows", "replicated", "router"}),
    "dots_and_attention": frozenset({"columns", "rows", "replicated", "router", "attention"}),
}
"""The kinds of values that each remat policy keeps; "none" keeps all that is read."""


class Work(NamedTuple):
    """Of one turn of the remat policy's body. rows, columns: the output gradients of row products
    that are gathered, and the gradients of what was gathered, scattered; rows_again, columns_again:
    what the forward pass did for products, repeated; others_again: and what it gathered for others.
    weights: whether any matrix is read. made: values made again, by their numbers in the chain.

    Of products in 8 bits: regathered: column products' inputs, for their weights' gradients;
    maxima: of how many gradients each takes the greatest magnitudes together; maxima_again: of how
    many inputs it is taken again, together.

    moved: the values of `SEQUENCE` through which a gradient flows, each with its attention;
    moved_again: those that are made again. experts: mixtures
    that are differentiated, and whether by their input; experts_again: those made again. sums: of
    each norm over all heads through which a gradient flows how many numbers of a token are summed;
    sums_again: of each that is made again."""

    rows: tuple[Tokens, ...] = ()
    columns: tuple[Tokens, ...] = ()
    rows_again: tuple[Tokens, ...] = ()
    columns_again: tuple[Tokens, ...] = ()
    others_again: tuple[Tokens, ...] = ()
    weights: bool = False
    made: frozenset[int] = frozenset()
    regathered: tuple[Tokens, ...] = ()
    maxima: tuple[Tensors, ...] = ()
    maxima_again: tuple[Tensors, ...] = ()
    moved: Moved = ()
    moved_again: Moved = ()
    experts: tuple[tuple[ExpertCall, bool], ...] = ()
    experts_again: tuple[ExpertCall, ...] = ()
    sums: tuple[int, ...] = ()
    sums_again: tuple[int, ...] = ()


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
    rows: list[Tokens] = []
    columns: list[Tokens] = []
    regathered: list[Tokens] = []
    maxima: list[Tensors] = []
    weights, experts = False, []
    for number, value in enumerate(values[1:], start=1):
        flow = any(flows[of] for of in value.of)
        own = _trains(facts, paths[value.block], value)
        flows.append(flow or own)
        narrow = facts.narrow and isinstance(value.operation, Parallel)
        if flow and value.kind == "gather":
            columns.append(Tokens(value.width))
        if flow and value.kind == "scatter":
            rows.append(Tokens(value.width, narrow))
        if narrow and own and value.kind == "columns":
            regathered.append(Tokens(value.width, narrow))
        if facts.narrow and (flow or own):
            maxima += value.gradient_scales
        if isinstance(value.operation, ExpertCall) and value.kind == "experts" and (flow or own):
            experts.append((value.operation, flow))
        # The gradients of experts' weights read the others of them.
        weights |= value.kind in PRODUCTS and (flow or (own and value.kind == "experts"))
        weights |= value.kind in PRODUCTS and _trains_adapter(facts, paths[value.block], value)
        read |= reads(number, value, flow=flow, own=own, narrow=facts.narrow)
    again = made_again(values, read, facts.loop.remat)
    kinds = [values[number].kind for number in again]
    weights |= not PRODUCTS.isdisjoint(kinds)
    scattered = tuple(Tokens(values[n].width) for n in again if values[n].kind == "scatter")
    of_products = {n for n in again if isinstance(values[n].operation, Parallel)}
    return Work(
        *(tuple(rows), tuple(columns), scattered),
        *(gathered(values, of_products), gathered(values, again - of_products)),
        *(weights, frozenset(again), tuple(regathered), tuple(maxima)),
        tuple(n for number in sorted(again) for n in values[number].input_scales),
        *(moved(values, (n for n, flow in enumerate(flows) if flow)), moved(values, sorted(again))),
        *(tuple(experts), _mixtures(values, again)),
        summed(values, (n for n, flow in enumerate(flows) if flow)),
        summed(values, sorted(again)),
    )


def _mixtures(values: Sequence[Value], among: Iterable[int]) -> tuple[ExpertCall, ...]:
    found = (values[number] for number in sorted(among))
    calls = (value.operation for value in found if value.kind == "experts")
    return tuple(call for call in calls if isinstance(call, ExpertCall))


def reads(
    number: int, value: Value, *, flow: bool = True, own: bool = True, narrow: bool = False
) -> set[int]:
    """The values that the derivative of one reads. flow: of its inputs; own: of its parameters.
    narrow: products are in 8 bits; they read what they have made of their inputs."""
    if value.kind in ("columns", "rows", "replicated"):
        of = {number - 2} if narrow and value.kind == "columns" else set(value.of)
        return of if own else set()
    if value.kind == "experts":  # all of its own inside: to make that again is to make it again
        return {number, *value.of} if flow or own else set()
    if value.kind == "attention":  # and its own output, for the weights of its keys
        return {number, *value.of} if flow else set()
    if value.kind == "sums":  # of squares
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
    if value.kind in ("columns", "rows", "replicated"):
        assert isinstance(operation, Product)
        return any(
            _trained(facts, path + weight.leaf + end)
            for weight in operation.weights
            for end in ("", ADAPTER_A, ADAPTER_B)
        )
    if value.kind == "experts":
        assert isinstance(operation, ExpertCall)
        ends = ("", ADAPTER_A, ADAPTER_B)
        return any(_trained(facts, path + leaf + end) for leaf in operation.leaves for end in ends)
    own = isinstance(operation, Elementwise | NormAcrossHeads | Bias) and value.kind != "sums"
    if own and operation.leaves:
        return facts.trains(*(path + leaf for leaf in operation.leaves))
    return False


def _trains_adapter(facts: StepFacts, path: str, value: Value) -> bool:
    """Whether a matrix A is trained, whose gradient reads B."""
    operation = value.operation
    if not isinstance(operation, Product):
        return False
    return any(_trained(facts, path + weight.leaf + ADAPTER_A) for weight in operation.weights)


def _trained(facts: StepFacts, leaf: str) -> bool:
    found = facts.leaves.get(leaf)
    return found is not None and found.trained
