"""Finds the values of a block that a backward pass computes again under a remat policy, and what
that sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxtrain.operations.block import Block, chain, chain_with_ends, entry_members
from jaxtrain.operations.collectives import Communication
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
      are in 8 bits, and their inputs are saved by B, not by this forward pass.
    """
    nodes = chain(blocks, narrow)
    read = {n for node in nodes for n in (*node.input_reads, *node.leaf_reads)}
    again = made_again(nodes, read, remat)
    read |= {source for number in again for source in nodes[number].inputs}
    pending = {number for number in read if nodes[number].is_saved(remat)}
    if split and not narrow:
        inputs = (node.inputs[0] for node in nodes if node.deferred)
        pending |= {n if nodes[n].deferred_gather is None else nodes[n].inputs[0] for n in inputs}
    return computed_from(nodes, pending)


def computed_from(nodes: Sequence[Node], numbers: Iterable[int]) -> frozenset[int]:
    """Returns these values and those from which they are computed, without the chain's inputs."""
    needed, pending = set[int](), {*numbers}
    while pending:
        number = pending.pop()
        if number not in needed and nodes[number].inputs:
            needed.add(number)
            pending.update(nodes[number].inputs)
    return frozenset(needed)


def block_again(
    blocks: Sequence[Block], number: int, remat: str, *, narrow: bool
) -> frozenset[int]:
    """Returns the values of one of these blocks, each a body of the remat policy, that are computed
    once more if gradients are computed after another forward pass of all: those that its backward
    pass reads and the policy saves, and what the gradients of later blocks read."""
    block, later = (blocks[number],), tuple(blocks[number + 1 :])
    nodes, ends = chain_with_ends(block, narrow)
    members = members_read(later, narrow)
    outputs = {ends.members.get(name, ends.output) for name in members if _changes(block, name)}
    return needed_for_saved(block, remat, narrow=narrow) | computed_from(nodes, outputs)


def _changes(block: tuple[Block, ...], member: str) -> bool:
    """Returns True if the member is one of a block's; "" is the one of a stream of one array."""
    return member in (entry_members(block) or [""])


def collectives_of(nodes: Sequence[Node], numbers: Iterable[int]) -> tuple[Communication, ...]:
    """Returns the collectives of the forward pass in the nodes with these numbers."""
    collectives = (nodes[number].collective for number in numbers)
    return tuple(collective for collective in collectives if collective is not None)


def members_read(blocks: tuple[Block, ...], narrow: bool) -> list[str]:
    """Returns the members of the stream from which a chain of blocks computes what its gradients
    read, if nothing in it is saved; [""] for a stream of one array that is read."""
    nodes = chain(blocks, narrow)
    read = {number for node in nodes for number in (*node.input_reads, *node.leaf_reads)}
    read |= {number for again in made_again(nodes, read, "full") for number in nodes[again].inputs}
    return [name for number, name in enumerate(entry_members(blocks) or [""]) if number in read]
