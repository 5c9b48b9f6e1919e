"""Finds the token collectives that a backward pass needs: all of them, unless leaves are frozen.

Demand is followed down the chain of values (`values.py`). Gradients flow down to the lowest trained
leaf, and no further. On their way they read values that the remat policy has kept, or that are
recomputed from earlier values.
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
    """Backward work of one turn of the remat policy's body.

    rows, columns: the output gradients of row products, which are gathered, and the gradients of
      gathered values, which are scattered. rows_again, columns_again: the forward pass's
      collectives for products, repeated. others_again: its other gathers, repeated.
    weights: True if any matrix is read. recomputed: numbers in the chain of recomputed values.

    For products in 8 bits: regathered: column products' inputs, for their weights' gradients.
    maxima: for each product, of how many gradients the maximum magnitudes are taken together.
    maxima_again: the same of recomputed inputs.

    moved: values of `SEQUENCE` through which a gradient flows, each with its attention;
      moved_again: those recomputed. experts: mixtures that are differentiated, and whether by their
      input; experts_again: those recomputed. sums: for each norm over all heads through which a
      gradient flows, how many numbers of a token are summed; sums_again: the same of recomputed
      norms.
    """

    rows: tuple[Tokens, ...] = ()
    columns: tuple[Tokens, ...] = ()
    rows_again: tuple[Tokens, ...] = ()
    columns_again: tuple[Tokens, ...] = ()
    others_again: tuple[Tokens, ...] = ()
    weights: bool = False
    recomputed: frozenset[int] = frozenset()
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
    """Returns the work of turns and how many are alike, by path of each block outside the stack,
    and by "period." for the stack."""
    model = facts.model
    below = facts.trains(*model.entering_alone)
    by_path: dict[str, list[tuple[Work, int]]] = {}
    for path in model.before:
        by_path[path] = [(body_work(facts, [path], below=below), 1)]
        below = below or facts.trains(path)
    by_path[STACK] = stack_works(facts, model.periods, below=below)
    below = below or facts.trains(STACK)
    for path in model.after:
        by_path[path] = [(body_work(facts, [path], below=below), 1)]
        below = below or facts.trains(path)
    return by_path


def stack_works(facts: StepFacts, turns: int, *, below: bool) -> list[tuple[Work, int]]:
    """Returns the work of a stack's turns, or of a chunk's, and how many are alike. Turns of a loop
    are alike. Without a loop, or with one turn in it, the first turn may need less."""
    loop, period = facts.loop, list(facts.model.stacked)
    if not below and not facts.trains(STACK):
        return [(Work(), turns)]
    above = body_work(facts, period, below=True)
    if not loop.unroll and turns - loop.prefetch > 1:
        return [(above, turns)]
    return [(body_work(facts, period, below=below), 1), (above, turns - 1)]


def fetched_again(facts: StepFacts, turn_works: list[tuple[Work, int]]) -> int:
    """Returns how often the backward pass of a stack gathers a layer's weights."""
    turns = sum(n for _, n in turn_works)
    without = sum(n for work, n in turn_works if not work.weights)
    fetched = facts.loop.fetched_again(turns)
    return 0 if without == turns else max(fetched - without, 0)


def body_work(facts: StepFacts, paths: Sequence[str], *, below: bool) -> Work:
    """Returns the backward work of the blocks at these paths. below: the gradient of their input is
    needed."""
    values = chain(tuple(facts.model.blocks[path] for path in paths), facts.narrow)
    # For each value: does a gradient flow down to it? read: the values that gradients read.
    flows, read = [below], set()
    rows: list[Tokens] = []
    columns: list[Tokens] = []
    regathered: list[Tokens] = []
    maxima: list[Tensors] = []
    weights, experts = False, []
    for number, value in enumerate(values[1:], start=1):
        flow = any(flows[source] for source in value.inputs)
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
        # The gradient of an expert's weight reads the expert's other weights.
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
    chosen = (values[number] for number in sorted(among))
    calls = (value.operation for value in chosen if value.kind == "experts")
    return tuple(call for call in calls if isinstance(call, ExpertCall))


def reads(
    number: int, value: Value, *, flow: bool = True, own: bool = True, narrow: bool = False
) -> set[int]:
    """Returns the values that the derivative of a value reads. flow: the derivative by its inputs;
    own: by its parameters. narrow: products are in 8 bits and read their quantised inputs."""
    if value.kind in ("columns", "rows", "replicated"):
        sources = {number - 2} if narrow and value.kind == "columns" else set(value.inputs)
        return sources if own else set()
    if value.kind == "experts":  # its inner values: to recompute them is to recompute it
        return {number, *value.inputs} if flow or own else set()
    if value.kind == "attention":  # its own output too, for the attention weights
        return {number, *value.inputs} if flow else set()
    if value.kind == "sums":  # of squares
        return set(value.inputs) if flow else set()
    return set(value.inputs) if value.kind == "elementwise" and (flow or own) else set()


def made_again(values: Sequence[Value], read: Iterable[int], remat: str) -> set[int]:
    """Returns the values read but not kept, and those from which they are recomputed."""
    if remat == "none":
        return set()
    recomputed: set[int] = set()
    pending = list(read)
    while pending:
        number = pending.pop()
        value = values[number]
        if number in recomputed or kept(values, number, remat) or value.kind == "input":
            continue
        recomputed.add(number)
        pending += value.inputs
    return recomputed


def kept(values: Sequence[Value], number: int, remat: str) -> bool:
    """Returns True if a remat policy that recomputes anything keeps a value. Row products in 8 bits
    are kept after the scatter."""
    value = values[number]
    if value.kind == "scatter" and isinstance(value.operation, RowParallel):
        below = value.inputs[0]
        return values[values[below].inputs[0]].kind == "narrow" and "rows" in KEPT[remat]
    return value.kind in KEPT[remat]


def needed_for_kept(
    blocks: tuple[Block, ...], remat: str, *, split: bool = False, narrow: bool = False
) -> frozenset[int]:
    """Returns the numbers of the values that compute what the backward pass of a body of blocks
    keeps. If the body's output is not used, later values are not computed.

    split: the inputs of products are kept for W, in their form before the gather. narrow: products
      are in 8 bits.
    """
    values = chain(blocks, narrow)
    read = {n for i, value in enumerate(values) for n in reads(i, value, narrow=narrow)}
    if remat == "none":
        pending = list(read)
    else:
        again = made_again(values, read, remat)
        used = read | {source for number in again for source in values[number].inputs}
        pending = [number for number in used if kept(values, number, remat)]
    if split:
        inputs = [value.inputs[0] for value in values if value.kind in ("columns", "rows")]
        product_inputs = [values[n].inputs[0] if values[n].kind == "gather" else n for n in inputs]
        pending += product_inputs
    needed: set[int] = set()
    while pending:
        number = pending.pop()
        if number not in needed and number:
            needed.add(number)
            pending += values[number].inputs
    return frozenset(needed)


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
    """Returns True if a matrix A is trained. Its gradient reads B."""
    operation = value.operation
    if not isinstance(operation, Product):
        return False
    return any(_trained(facts, path + weight.leaf + ADAPTER_A) for weight in operation.weights)


def _trained(facts: StepFacts, leaf: str) -> bool:
    leaf_facts = facts.leaves.get(leaf)
    return leaf_facts is not None and leaf_facts.trained
