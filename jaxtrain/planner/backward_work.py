"""Finds the collectives on activations that a backward pass needs: all of them, unless leaves are
frozen.

Demand is followed down the nodes of a chain (`operations.block.chain`). Gradients flow down to the
lowest trained leaf, and no further. On their way they read values that the remat policy has saved,
or that are recomputed from earlier values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxtrain.models.description import ADAPTER_A, ADAPTER_B, STACK
from jaxtrain.operations.block import Block, chain
from jaxtrain.operations.collectives import Communication, ExpertExchange, Gather
from jaxtrain.operations.node import Node, Tensors
from jaxtrain.planner.facts import StepFacts


class BackwardWork(NamedTuple):
    """Backward work of one turn of the remat policy's body.

    gradients: collectives of the gradients of nodes' inputs; leaf_gradients: of their leaves.
    again: collectives of the forward pass, repeated. products_again: likewise, those that give
      products their inputs, which only the gradients of weights read if the products are saved.
    weights: True if any matrix is read. recomputed: numbers in the chain of recomputed values.
    maxima: in 8 bits, for each product of how many gradients the maximum magnitudes are taken
      together. maxima_again: the same of recomputed inputs.
    exchanges: of mixtures that are differentiated, and whether by their input. outputs_again: of
      mixtures whose outputs recomputed values are made from.
    """

    gradients: tuple[Communication, ...] = ()
    leaf_gradients: tuple[Communication, ...] = ()
    again: tuple[Communication, ...] = ()
    products_again: tuple[Communication, ...] = ()
    weights: bool = False
    recomputed: frozenset[int] = frozenset()
    maxima: tuple[Tensors, ...] = ()
    maxima_again: tuple[Tensors, ...] = ()
    exchanges: tuple[tuple[ExpertExchange, bool], ...] = ()
    outputs_again: tuple[ExpertExchange, ...] = ()


def works(facts: StepFacts) -> dict[str, list[tuple[BackwardWork, int]]]:
    """Returns the work of turns and how many are alike, by path of each block outside the stack,
    and by "period." for the stack."""
    model = facts.model
    below = facts.trains(*model.entering_alone)
    by_path: dict[str, list[tuple[BackwardWork, int]]] = {}
    for path in model.before:
        by_path[path] = [(body_work(facts, [path], below=below), 1)]
        below = below or facts.trains(path)
    by_path[STACK] = stack_works(facts, model.periods, below=below)
    below = below or facts.trains(STACK)
    for path in model.after:
        by_path[path] = [(body_work(facts, [path], below=below), 1)]
        below = below or facts.trains(path)
    return by_path


def stack_works(facts: StepFacts, turns: int, *, below: bool) -> list[tuple[BackwardWork, int]]:
    """Returns the work of a stack's turns, or of a chunk's, and how many are alike. Turns of a loop
    are alike. Without a loop, or with one turn in it, the first turn may need less."""
    loop, period = facts.loop, list(facts.model.stacked)
    if not below and not facts.trains(STACK):
        return [(BackwardWork(), turns)]
    above = body_work(facts, period, below=True)
    if not loop.unroll and turns - loop.prefetch > 1:
        return [(above, turns)]
    return [(body_work(facts, period, below=below), 1), (above, turns - 1)]


def fetched_again(facts: StepFacts, turn_works: list[tuple[BackwardWork, int]]) -> int:
    """Returns how often the backward pass of a stack gathers a layer's weights."""
    turns = sum(n for _, n in turn_works)
    without = sum(n for work, n in turn_works if not work.weights)
    fetched = facts.loop.fetched_again(turns)
    return 0 if without == turns else max(fetched - without, 0)


def body_work(facts: StepFacts, paths: Sequence[str], *, below: bool) -> BackwardWork:
    """Returns the backward work of the blocks at these paths. below: the gradient of their input is
    needed."""
    nodes = chain(tuple(facts.model.blocks[path] for path in paths), facts.narrow)
    # For each value: does a gradient flow down to it, and which values do its gradients read?
    flows, reads = [below], [set[int]()]
    gradients: list[Communication] = []
    leaf_gradients: list[Communication] = []
    maxima: list[Tensors] = []
    exchanges: list[tuple[ExpertExchange, bool]] = []
    weights = False
    for number, node in enumerate(nodes[1:], start=1):
        path = paths[node.block]
        flow = any(flows[source] for source in node.inputs)
        own = _trains(facts, path, node.leaves, ("", ADAPTER_A, ADAPTER_B))
        flows.append(flow or own)
        reads.append({*(node.input_reads if flow else ()), *(node.leaf_reads if own else ())})
        gradients += [node.input_collective] if flow and node.input_collective is not None else []
        leaf_gradients += [node.leaf_collective] if own and node.leaf_collective is not None else []
        maxima += node.scales.gradients if flow or own else ()
        exchanges += [(node.exchange, flow)] if (flow or own) and node.exchange is not None else []
        # The gradient of an expert's weight reads the expert's other weights; that of an adapter's
        # matrix A reads B.
        own_matrices = own and number in node.leaf_reads
        own_matrices |= _trains(facts, path, (w.leaf for w, _ in node.products), (ADAPTER_A,))
        weights |= bool(node.products) and (flow or own_matrices)
    again = sorted(made_again(nodes, set().union(*reads), facts.loop.remat))
    products_again = [n for n in again if _for_weights(nodes, n)]
    outputs = _outputs_again(nodes, reads, facts.loop.remat)
    return BackwardWork(
        tuple(gradients),
        tuple(leaf_gradients),
        collectives_of(nodes, (n for n in again if n not in products_again)),
        collectives_of(nodes, products_again),
        weights or any(nodes[n].products for n in again),
        frozenset(again),
        tuple(maxima),
        tuple(tensors for n in again for tensors in nodes[n].scales.inputs),
        tuple(exchanges),
        tuple(exchange for exchange, again in outputs if again),
    )


def collectives_of(nodes: Sequence[Node], numbers: Iterable[int]) -> tuple[Communication, ...]:
    """Returns the collectives of the forward pass in the nodes with these numbers."""
    collectives = (nodes[number].collective for number in numbers)
    return tuple(collective for collective in collectives if collective is not None)


def _for_weights(nodes: Sequence[Node], number: int) -> bool:
    """Returns True for a gather that W repeats, and whose output none but its products reads."""
    node = nodes[number]
    if node.deferred_gather is None or not isinstance(node.collective, Gather):
        return False
    readers = (n for n in nodes if number in (*n.inputs, *n.input_reads, *n.leaf_reads))
    return all(reader.deferred for reader in readers)


def made_again(nodes: Sequence[Node], read: Iterable[int], remat: str) -> set[int]:
    """Returns the values read but not saved, and those from which they are recomputed."""
    recomputed: set[int] = set()
    pending = list(read)
    while pending:
        number = pending.pop()
        node = nodes[number]
        if number not in recomputed and node.inputs and not node.is_saved(remat):
            recomputed.add(number)
            pending += node.inputs
    return recomputed


def outputs_again(blocks: tuple[Block, ...], remat: str) -> list[bool]:
    """Returns for each mixture of a body, all of it trained, whether recomputed values are made
    from its outputs."""
    nodes = chain(blocks)
    reads = [{*node.input_reads, *node.leaf_reads} for node in nodes]
    return [again for _, again in _outputs_again(nodes, reads, remat)]


def _outputs_again(
    nodes: Sequence[Node], reads: Sequence[set[int]], remat: str
) -> list[tuple[ExpertExchange, bool]]:
    """Returns each mixture's exchange, and whether recomputed values are made from its outputs. It
    reads its own for its gradients, which is no reason. reads: the values that the gradients of
    each node read."""
    by_others = set().union(*(read - {number} for number, read in enumerate(reads)))
    again = made_again(nodes, by_others, remat)
    exchanges = ((number, node.exchange) for number, node in enumerate(nodes))
    return [(exchange, number in again) for number, exchange in exchanges if exchange is not None]


def needed_for_saved(
    blocks: tuple[Block, ...], remat: str, *, split: bool = False, narrow: bool = False
) -> frozenset[int]:
    """Returns the numbers of the values that compute what the backward pass of a body of blocks
    reads and the policy saves. If the body's output is not used, later values are not computed.

    split: the inputs of products are saved for W, in their form before the gather. narrow: products
      are in 8 bits.
    """
    nodes = chain(blocks, narrow)
    read = {n for node in nodes for n in (*node.input_reads, *node.leaf_reads)}
    again = made_again(nodes, read, remat)
    read |= {source for number in again for source in nodes[number].inputs}
    pending = {number for number in read if nodes[number].is_saved(remat)}
    if split:
        inputs = (node.inputs[0] for node in nodes if node.deferred)
        pending |= {n if nodes[n].deferred_gather is None else nodes[n].inputs[0] for n in inputs}
    needed: set[int] = set()
    while pending:
        number = pending.pop()
        if number not in needed and nodes[number].inputs:
            needed.add(number)
            pending.update(nodes[number].inputs)
    return frozenset(needed)


def _trains(facts: StepFacts, path: str, names: Iterable[str], ends: tuple[str, ...]) -> bool:
    """Returns True if a leaf of the block at `path` is trained, or its adapter's matrix."""
    return facts.trains(*(path + name + end for name in names for end in ends))
