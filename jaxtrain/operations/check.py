"""Checks that the nodes of an operation are a graph, and that blocks read members that there
are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import get_args

from jaxtrain.operations.block import Block, Composed, Read, Update, members_of
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
    if isinstance(operation, Composed):
        return _wrong_blocks(operation)
    try:
        nodes = operation.nodes(ENTRY, NUMBER)
    except Exception as error:  # a user's code
        return f"{operation!r}: nodes() raises {type(error).__name__}: {error}"
    if not isinstance(nodes, list) or not nodes or not all(isinstance(n, Node) for n in nodes):
        return f"{operation!r}: nodes() returns {nodes!r}; return a list of Node, the output last"
    for number, node in enumerate(nodes, start=NUMBER):
        if reason := _wrong_node(node, number):
            return f"{operation!r}: nodes({ENTRY}, {NUMBER}) has number {number} with {reason}"
    leaves = {leaf for node in nodes for leaf in node.leaves}
    products = [weight.leaf for node in nodes for weight, _ in node.products]
    if unowned := [leaf for leaf in products if leaf not in leaves]:
        return (
            f"{operation!r}: products by {', '.join(unowned)}, in the leaves of none of its nodes"
        )
    return ""


def _wrong_blocks(operation: Composed) -> str:
    """Returns the reason why the blocks that an operation is made of are none."""
    name = type(operation).__name__
    if not isinstance(operation.blocks, tuple):
        return f"{name} has {operation.blocks!r} as its branches; write a tuple of tuples: ((..,),)"
    for block in operation.blocks:
        if not isinstance(block, tuple):
            return f"{name} has {block!r} in the place of a tuple of operations: write (..,)"
        for inner in block:
            if reason := wrong_nodes(inner):
                return f"within {name}: {reason}"
        if late := [inner for inner in block[1:] if isinstance(inner, Read)]:
            return f"within {name}: {late[0]!r} follows other operations; begin a branch with it"
    return ""


def wrong_members(block: Block, stream: Iterable[str]) -> str:
    """Returns the reason why a block does not fit the members of its stream, () for one array; ""
    if it does."""
    names = [*stream]
    if late := [operation for operation in block if isinstance(operation, Read)]:
        return f"{late[0]!r} stands by itself; begin a branch with it, or an Update"
    has = f"the stream has {', '.join(map(repr, names)) or 'no members'}"
    if unknown := sorted(map(repr, members_of(block) - {*names})):
        return f"it reads {', '.join(unknown)}, and {has}: name a member of it, or add it to stream"
    for number, operation in enumerate(block):
        if names and not isinstance(operation, Update):
            return (
                f"operation {number}, {type(operation).__name__}, is of no member, and {has}; use "
                f"Update({names[0]!r}, (...,)), or that of another one"
            )
        for inner in _updates_within(operation):
            return (
                f"operation {number}, {type(operation).__name__}, has an Update of "
                f"{inner.member!r} within; write one Update after the other"
            )
    return ""


def _updates_within(operation: Operation) -> Iterator[Update]:
    for block in operation.blocks if isinstance(operation, Composed) else ():
        for inner in block:
            if isinstance(inner, Update):
                yield inner
            yield from _updates_within(inner)


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
