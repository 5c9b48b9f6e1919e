"""Follows gradients down a chain of nodes, to the leaves that are trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from jaxtrain.operations.block import Block, chain_with_ends, entry_members
from jaxtrain.operations.collectives import Communication, HeadExchange, KeyGather
from jaxtrain.operations.node import Node, Tensors

TrainedLeaves = frozenset[tuple[int, str]]
"""Names of leaves, each with the number of its block."""
BELOW: TrainedLeaves = frozenset({(-1, "")})
"""What a gradient flows down to that the whole chain's input needs."""


class Flow(NamedTuple):
    """Trained leaves that a node's gradients flow down to: through its inputs, and its own.
    observed: its leaves, if scales of a product in 8 bits are to see the gradients of them all."""

    inputs: TrainedLeaves = frozenset()
    own: TrainedLeaves = frozenset()
    observed: TrainedLeaves = frozenset()

    def __bool__(self) -> bool:
        return any(self)


def gradient_flows(
    nodes: Sequence[Node],
    trains: Callable[[int, str], bool],
    *,
    below: bool | Set[int],
    traded: bool,
    observes: Callable[[Node], bool] = lambda node: False,
) -> list[Flow]:
    """Returns the flow of each node of a chain.

    trains: returns True for a trained leaf, by its block's number and its name. below: True if the
      gradients of all inputs of the chain are needed, or the numbers of the input nodes whose
      gradients are needed. traded: devices exchange tokens for heads, in one exchange for queries,
      keys and values, so that a gradient of one of the three brings those of all. observes: returns
      True for a node with scales that see the gradients of all its outputs.
    """
    flows: list[Flow] = []
    for number, node in enumerate(nodes):
        if not node.inputs:
            needed = below if isinstance(below, bool) else number in below
            flows.append(Flow(BELOW if needed else frozenset()))
            continue
        inputs = TrainedLeaves().union(*(leaves for n in node.inputs for leaves in flows[n]))
        if traded and inputs and isinstance(node.collective, HeadExchange):
            inputs |= BELOW
        leaves = [(node.block, name) for name in node.leaves]
        own = frozenset(leaf for leaf in leaves if trains(*leaf))
        flows.append(Flow(inputs, own, frozenset(leaves if observes(node) else ())))
    return flows


def rounded_gradients(
    node: Node, flow: Flow, trains_itself: Callable[[str], bool]
) -> tuple[Tensors, ...]:
    """Returns those of a node's gradients whose scales are needed: what its products read in 8
    bits. trains_itself: True for the name of a matrix that is trained, not its adapter alone."""
    gradients = node.scales.gradients
    if flow.inputs:
        return gradients
    if node.exchange is not None:
        *inner, last = node.exchange.matrices
        if any(map(trains_itself, inner)):
            return gradients
        return gradients[:1] if trains_itself(last) else ()
    needed = flow.own if node.scales.adapters else any(map(trains_itself, node.leaves))
    return gradients if needed else ()


def rescaled(
    node: Node, flow: Flow, trains_itself: Callable[[str], bool], *, outputs: bool
) -> tuple[Tensors, ...]:
    """Returns those of a recomputed node's inputs in 8 bits that have scales again: of experts that
    of their last matrices only where these are multiplied by again, or have gradients. outputs:
    gradients of other nodes read its outputs."""
    inputs, exchange = node.scales.inputs, node.exchange
    if exchange is None or flow.inputs or outputs:
        return inputs
    last = any(map(trains_itself, (exchange.router, exchange.matrices[-1])))
    return inputs if last else inputs[:-1]


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


def sent_back(
    node: Node, flow: Flow, *, split: bool = False
) -> tuple[Communication | None, Communication | None]:
    """Returns the collective of the gradient of a node's inputs and that of the gradients of its
    leaves, None for none. split: a pipeline's W computes the latter where it can.

    Keys travel in one of the two: where gradients flow down to queries alone, or to its leaves,
    keys are needed, and their own gradients are not.
    """
    inputs = node.input_collective if flow.inputs else None
    leaves = node.leaf_collective if flow.own and not (split and node.deferred) else None
    if not isinstance(inputs, KeyGather):
        return inputs, leaves
    queries = {(node.block, name) for name in inputs.queries}
    return (None, inputs) if flow.inputs <= queries else (inputs, None)
