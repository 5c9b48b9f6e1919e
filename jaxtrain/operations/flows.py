"""Follows gradients down a chain of nodes, to the leaves that are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from jaxtrain.operations.block import Block, chain_with_ends, entry_members
from jaxtrain.operations.collectives import Communication, HeadExchange, KeyGather
from jaxtrain.operations.node import Node

Leaves = frozenset[tuple[int, str]]
"""Names of leaves, each with the number of its block."""
BELOW: Leaves = frozenset({(-1, "")})
"""What a gradient flows down to that the whole chain's input needs."""


class Flow(NamedTuple):
    """Trained leaves that a node's gradients flow down to: through its inputs, and its own."""

    inputs: Leaves = frozenset()
    own: Leaves = frozenset()

    def __bool__(self) -> bool:
        return bool(self.inputs or self.own)


def gradient_flows(
    nodes: Sequence[Node],
    trains: Callable[[int, str], bool],
    *,
    below: bool | Set[int],
    traded: bool,
) -> list[Flow]:
    """Returns the flow of each node of a chain.

    trains: returns True for a trained leaf, by its block's number and its name. below: the gradient
      of the chain's input is needed; or the numbers of those of its inputs of which it is. traded:
      several devices trade tokens for heads, of queries, keys and values together, so that
      gradients of one bring those of all.
    """
    flows: list[Flow] = []
    for number, node in enumerate(nodes):
        if not node.inputs:
            needed = below if isinstance(below, bool) else number in below
            flows.append(Flow(BELOW if needed else frozenset()))
            continue
        inputs = Leaves().union(*(leaves for n in node.inputs for leaves in flows[n]))
        if traded and inputs and isinstance(node.collective, HeadExchange):
            inputs |= BELOW
        own = frozenset((node.block, name) for name in node.leaves if trains(node.block, name))
        flows.append(Flow(inputs, own))
    return flows


def members_trained(
    blocks: tuple[Block, ...],
    trains: Callable[[int, str], bool],
    entering: Set[str],
) -> frozenset[str]:
    """Returns the members of the stream that have gradients behind these blocks, if those of
    `entering` have them before."""
    (nodes, ends), names = chain_with_ends(blocks), entry_members(blocks)
    below = {number for number, name in enumerate(names) if name in entering}
    flows = gradient_flows(nodes, trains, below=below, traded=False)
    changed = {name for name in names if flows[ends.members[name]]}
    return frozenset(entering - {*names} | changed)


def sent_back(node: Node, flow: Flow) -> tuple[Communication | None, Communication | None]:
    """Returns the collective of the gradient of a node's inputs and that of the gradients of its
    leaves, None for none. Keys travel in one of the two: where gradients flow down to queries
    alone, or to its leaves, keys are needed, and their own gradients are not."""
    inputs = node.input_collective if flow.inputs else None
    leaves = node.leaf_collective if flow.own else None
    if not isinstance(inputs, KeyGather):
        return inputs, leaves
    queries = {(node.block, name) for name in inputs.queries}
    return (None, inputs) if flow.inputs <= queries else (inputs, None)
