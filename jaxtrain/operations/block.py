"""Blocks: operations one after another, side by side, and added to what they read; and those that
read and change the members of a stream of several arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from jaxtrain.operations.attention import AttentionCall
from jaxtrain.operations.experts import ExpertCall
from jaxtrain.operations.node import Node, Weight
from jaxtrain.operations.operation import Operation, Values

Block = tuple[Operation, ...]
"""Operations one after another: each reads the output of the one before it."""


class Composed(Operation):
    """An operation that is made of others."""

    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> list[Node]:
        return self.expand(Values(entry, {}), number, narrow=narrow)[0]

    @abstractmethod
    def expand(
        self, values: Values, number: int, *, narrow: bool = False
    ) -> tuple[list[Node], Values]: ...

    @property
    @abstractmethod
    def blocks(self) -> tuple[Block, ...]:
        """The chains of operations that it is made of."""

    def parts(self) -> Iterator[Operation]:
        for block in self.blocks:
            yield from operations(block)

    @property
    def members(self) -> frozenset[str]:
        return members_of(operation for block in self.blocks for operation in block)


@dataclass(frozen=True)
class Branches(Composed):
    """Operations side by side on one input; the operation after them reads the outputs of all.
    branches: each a chain."""

    branches: tuple[Block, ...]

    def expand(
        self, values: Values, number: int, *, narrow: bool = False
    ) -> tuple[list[Node], Values]:
        nodes: list[Node] = []
        ends: list[int] = []
        for branch in self.branches:
            more, end = expand(branch, values, number + len(nodes), narrow=narrow)
            nodes += more
            ends.append(end.output)
        nodes.append(Node(inputs=tuple(ends)))
        return nodes, values._replace(output=number + len(nodes) - 1)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.branches


@dataclass(frozen=True)
class Residual(Composed):
    """x + branch(x). branch: operations on x before it is added."""

    branch: Block

    def expand(
        self, values: Values, number: int, *, narrow: bool = False
    ) -> tuple[list[Node], Values]:
        nodes, end = expand(self.branch, values, number, narrow=narrow)
        nodes.append(Node(inputs=(values.output, end.output)))
        return nodes, values._replace(output=number + len(nodes) - 1)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.branch,)


@dataclass(frozen=True)
class Read(Composed):
    """A member of a stream of several arrays, as the operations before have left it. It begins a
    branch: the operation after it reads the member. member: its name."""

    member: str

    def expand(
        self, values: Values, number: int, *, narrow: bool = False
    ) -> tuple[list[Node], Values]:
        return [], values._replace(output=values.members[self.member])

    @property
    def blocks(self) -> tuple[Block, ...]:
        return ()

    @property
    def members(self) -> frozenset[str]:
        return frozenset({self.member})


@dataclass(frozen=True)
class Update(Composed):
    """A member of a stream of several arrays becomes the output of operations. A block on such a
    stream consists of Updates, and none has another within. member: its name. block: the
    operations, of which the first reads it."""

    member: str
    block: Block

    def expand(
        self, values: Values, number: int, *, narrow: bool = False
    ) -> tuple[list[Node], Values]:
        entry = values._replace(output=values.members[self.member])
        nodes, (output, _) = expand(self.block, entry, number, narrow=narrow)
        return nodes, Values(output, {**values.members, self.member: output})

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.block,)

    @property
    def members(self) -> frozenset[str]:
        return super().members | {self.member}


def expand(
    block: Block, values: Values, number: int, *, narrow: bool = False
) -> tuple[list[Node], Values]:
    """Returns the nodes of operations, each of which reads the output of the one before it, and the
    values after them. number, narrow: as of `Operation.nodes`."""
    nodes: list[Node] = []
    for operation in block:
        more, values = operation.expand(values, number + len(nodes), narrow=narrow)
        nodes += more
    return nodes, values


def members_of(operations: Iterable[Operation]) -> frozenset[str]:
    """Names of the stream's members that operations read or change."""
    return frozenset[str]().union(*(operation.members for operation in operations))


def entry_members(blocks: Iterable[Block]) -> list[str]:
    """Returns the names of the members that blocks read or change, in the order of the nodes
    without inputs of their `chain`; [] for a stream of one array."""
    return sorted(frozenset[str]().union(*map(members_of, blocks)))


@lru_cache(maxsize=256)
def chain(blocks: tuple[Block, ...], narrow: bool = False) -> tuple[Node, ...]:
    """Returns the nodes of blocks, one block after another. The first, without inputs, are what the
    blocks read: one, or one for each member of a stream of several arrays, in the order of their
    names. narrow: layers multiply in 8 bits."""
    return chain_with_ends(blocks, narrow)[0]


def chain_with_ends(
    blocks: tuple[Block, ...], narrow: bool = False
) -> tuple[tuple[Node, ...], Values]:
    """Returns a `chain`, and the values behind it."""
    members = entry_members(blocks)
    nodes = [Node() for _ in members or ("",)]
    values = Values(0, {member: number for number, member in enumerate(members)})
    for index, block in enumerate(blocks):
        more, values = expand(block, values, len(nodes), narrow=narrow)
        nodes += [replace(node, block=index) for node in more]
    return tuple(nodes), values


def operations(block: Block) -> Iterator[Operation]:
    """Yields the operations of a block, in order, including those within branches."""
    for operation in block:
        yield from operation.parts()


def attention_of(operation: Operation) -> AttentionCall | None:
    """Returns the operation if kernels of `jaxtrain.attention` compute it, else None."""
    return operation if isinstance(operation, AttentionCall) else None


def mixture_of(operation: Operation) -> ExpertCall | None:
    """Returns the operation if kernels of `jaxtrain.moe` compute its products, else None."""
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
