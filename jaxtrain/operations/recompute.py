"""Finds the values of a block that a backward pass computes again under a remat policy, and what
that sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxtrain.operations.block import Block, chain
from jaxtrain.operations.collectives import Communication, Gather
from jaxtrain.operations.node import Node


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
    again = made_again_for_others(nodes, reads, remat)
    return [number in again for number, node in enumerate(nodes) if node.exchange is not None]


def made_again_for_others(nodes: Sequence[Node], reads: Sequence[set[int]], remat: str) -> set[int]:
    """Returns the values that are recomputed for others than themselves. A mixture reads its own
    outputs for its gradients, which is no reason. reads: the values that the gradients of each
    node read."""
    by_others = set().union(*(read - {number} for number, read in enumerate(reads)))
    return made_again(nodes, by_others, remat)


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


def collectives_of(nodes: Sequence[Node], numbers: Iterable[int]) -> tuple[Communication, ...]:
    """Returns the collectives of the forward pass in the nodes with these numbers."""
    collectives = (nodes[number].collective for number in numbers)
    return tuple(collective for collective in collectives if collective is not None)


def gathered_for_weights(nodes: Sequence[Node], number: int) -> bool:
    """Returns True for a gather that W repeats, and whose output none but its products reads."""
    node = nodes[number]
    if node.deferred_gather is None or not isinstance(node.collective, Gather):
        return False
    readers = (n for n in nodes if number in (*n.inputs, *n.input_reads, *n.leaf_reads))
    return all(reader.deferred for reader in readers)
