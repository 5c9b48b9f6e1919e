"""Checks that the nodes of an operation are a graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from jaxtrain.operations.collectives import Communication, ExpertExchange, Gather, KeyGather
from jaxtrain.operations.node import SAVED_AS, Node
from jaxtrain.operations.operation import Operation

ANY = get_args(Communication)
KINDS: dict[str, tuple[type, ...]] = {
    "collective": ANY,
    "input_collective": tuple(kind for kind in ANY if kind is not ExpertExchange),
    "leaf_collective": (Gather, KeyGather),
    "deferred_gather": (Gather,),
}
"""Collectives that a field of a node may have."""
ENTRY, NUMBER = 3, 17
"""Numbers with which an operation is tried: unlike the first ones, and not one after the other."""


def wrong_nodes(operation: object) -> str:
    """Returns the reason why a value is no operation of a block, or why the nodes of one of its
    parts are no graph; "" if they are one."""
    if not isinstance(operation, Operation):
        return f"{operation!r} is no jaxtrain.operations.Operation"
    try:
        hash(operation)
    except TypeError as error:
        return f"{operation!r}: {error}; an operation is a frozen dataclass of tuples and numbers"
    try:
        parts = list(operation.parts())
    except AttributeError:
        return f"{operation!r} holds a value that is no jaxtrain.operations.Operation"
    for part in parts:
        try:
            nodes = part.nodes(ENTRY, NUMBER)
        except Exception as error:  # a user's code
            return f"{part!r}: nodes() raises {type(error).__name__}: {error}"
        if not isinstance(nodes, list) or not nodes or not all(isinstance(n, Node) for n in nodes):
            return f"{part!r}: nodes() returns {nodes!r}; return a list of Node, the output last"
        for number, node in enumerate(nodes, start=NUMBER):
            if reason := _wrong_node(node, number):
                return f"{part!r}: nodes({ENTRY}, {NUMBER}) has number {number} with {reason}"
        leaves = {leaf for node in nodes for leaf in node.leaves}
        products = [weight.leaf for node in nodes for weight, _ in node.products]
        if unowned := [leaf for leaf in products if leaf not in leaves]:
            return f"{part!r}: products by {', '.join(unowned)}, in the leaves of none of its nodes"
    return ""


def _wrong_node(node: Node, number: int) -> str:
    for name, last in (("inputs", number - 1), ("input_reads", number), ("leaf_reads", number)):
        if strange := _strange(getattr(node, name), last):
            return (
                f"{name}={getattr(node, name)} has {strange}, which is neither `entry` nor one of "
                f"`number` to the node {'itself' if last == number else 'before it'}"
            )
    if not node.inputs:
        return "inputs=(); a node is computed from `entry` or from a node before it"
    if node.saved_as not in SAVED_AS:
        words = ", ".join(map(repr, sorted(SAVED_AS)))
        return f"saved_as={node.saved_as!r}; remat policies know {words}"
    if (node.leaf_collective or node.deferred) and not node.leaves:
        return "leaves=(), and their gradients sent or deferred; name the leaves"
    if not 0 <= node.inner_flops <= node.token_flops:
        return f"inner_flops={node.inner_flops} of token_flops={node.token_flops}"
    for name, kinds in KINDS.items():
        if not isinstance(getattr(node, name), (*kinds, type(None))):
            words = ", ".join(kind.__name__ for kind in kinds)
            return f"{name}={getattr(node, name)!r}; give one of {words}, or None"
    return ""


def _strange(numbers: Iterable[int], last: int) -> str:
    """Returns the numbers that an operation cannot read."""
    return ", ".join(str(n) for n in numbers if n != ENTRY and not NUMBER <= n <= last)
