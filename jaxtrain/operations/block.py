"""Blocks: operations one after another, side by side, and added to what they read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from jaxtrain.operations.attention import AttentionCall
from jaxtrain.operations.experts import ExpertCall
from jaxtrain.operations.node import Node, Weight
from jaxtrain.operations.operation import Operation

Block = tuple[Operation, ...]
"""Operations one after another: each reads the output of the one before it."""


@dataclass(frozen=True)
class Branches(Operation):
    """Operations side by side on one input; the operation after them reads the outputs of all.
    branches: each a chain."""

    branches: tuple[Block, ...]

    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> list[Node]:
        nodes: list[Node] = []
        ends: list[int] = []
        for branch in self.branches:
            more = expand(branch, entry, number + len(nodes), narrow=narrow)
            nodes += more
            ends.append(number + len(nodes) - 1 if more else entry)
        return [*nodes, Node(inputs=tuple(ends))]

    def parts(self) -> Iterator[Operation]:
        for branch in self.branches:
            yield from operations(branch)


@dataclass(frozen=True)
class Residual(Operation):
    """x + branch(x). branch: operations on x before it is added."""

    branch: Block

    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> list[Node]:
        nodes = expand(self.branch, entry, number, narrow=narrow)
        end = number + len(nodes) - 1 if nodes else entry
        return [*nodes, Node(inputs=(entry, end))]

    def parts(self) -> Iterator[Operation]:
        yield from operations(self.branch)


def expand(block: Block, entry: int, number: int, *, narrow: bool = False) -> list[Node]:
    """Returns the nodes of operations, each of which reads the last node of the one before it.
    Arguments: as of `Operation.nodes`."""
    nodes: list[Node] = []
    for operation in block:
        more = operation.nodes(entry, number + len(nodes), narrow=narrow)
        nodes += more
        entry = number + len(nodes) - 1 if more else entry
    return nodes


@lru_cache(maxsize=256)
def chain(blocks: tuple[Block, ...], narrow: bool = False) -> tuple[Node, ...]:
    """Returns the nodes of blocks, one block after another. The first, without inputs, is what the
    blocks read; the last is their output. narrow: layers multiply in 8 bits."""
    nodes = [Node()]
    for index, block in enumerate(blocks):
        entry = len(nodes) - 1
        more = expand(block, entry, len(nodes), narrow=narrow)
        nodes += [replace(node, block=index) for node in more]
    return tuple(nodes)


def operations(block: Block) -> Iterator[Operation]:
    """Yields the operations of a block, in order, including those within branches."""
    for operation in block:
        yield from operation.parts()


def attention_of(operation: Operation) -> AttentionCall | None:
    """Returns the operation if it is one that the kernels of `jaxtrain.attention` compute."""
    return operation if isinstance(operation, AttentionCall) else None


def mixture_of(operation: Operation) -> ExpertCall | None:
    """Returns the operation if it is one that the kernels of `jaxtrain.moe` multiply for."""
    return operation if isinstance(operation, ExpertCall) else None


def attentions(block: Block) -> Iterator[AttentionCall]:
    """Yields the attention of a block."""
    calls = map(attention_of, operations(block))
    return (call for call in calls if call is not None)


def mixtures(block: Block) -> Iterator[ExpertCall]:
    """Yields the mixtures of experts of a block."""
    calls = map(mixture_of, operations(block))
    return (call for call in calls if call is not None)


def matrices(block: Block) -> Iterator[Weight]:
    """Yields the matrices that a block multiplies tokens by. Of experts: those of one."""
    return (weight for node in chain((block,)) for weight, _ in node.products)


def deferred_matrices(block: Block) -> Iterator[Weight]:
    """Yields the matrices of a block whose gradients a pipeline's W can compute: those of `column`
    and `row`."""
    return (weight for node in chain((block,)) if node.deferred for weight, _ in node.products)


def adaptable(block: Block) -> Iterator[Weight]:
    """Yields the matrices of a block that can have adapters: all but those with one column."""
    return (weight for weight in matrices(block) if weight.columns > 1)


def leaf_names(block: Block) -> Iterator[str]:
    """Yields the parameters of a block, as `Node.leaves` names them."""
    return (name for node in chain((block,)) for name in node.leaves)
