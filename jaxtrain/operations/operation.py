"""The base of all operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jaxtrain.operations.node import Node


class Values(NamedTuple):
    """Numbers of the values that an operation may read. output: that of the operation before it.
    members: of a stream of several arrays, by name."""

    output: int
    members: Mapping[str, int]


class Operation(ABC):
    """Work that a block does, as a frozen value. `nodes` is all that a subclass must have."""

    @abstractmethod
    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> list[Node]:
        """Returns its nodes, in order; the last computes its output.

        entry: number of the value that it reads. number: of its first node; the others follow.
        narrow: layers multiply in 8 bits.
        """

    def expand(
        self, values: Values, number: int, *, narrow: bool = False
    ) -> tuple[list[Node], Values]:
        """Returns its nodes, and the values after it. number, narrow: as of `nodes`."""
        nodes = self.nodes(values.output, number, narrow=narrow)
        return nodes, values._replace(output=number + len(nodes) - 1)

    def parts(self) -> Iterator[Operation]:
        """Yields the operations that it is made of; itself if it is made of none."""
        yield self

    @property
    def members(self) -> frozenset[str]:
        """Names of the stream's members that it reads or changes."""
        return frozenset()

    def unsplit(
        self, table: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int], prefix: str = ""
    ) -> list[str]:
        """Returns violations: what of it does not split.

        table: the mesh axes of several devices that split each logical axis of activations. sizes:
        of all mesh axes. prefix: begins each violation.
        """
        return []

    @property
    def narrowed(self) -> Mapping[str, int]:
        """The leaves that are in 8 bits where layers multiply in 8 bits -> their number of
        scales."""
        nodes = self.nodes(0, 1)
        return {weight.leaf: 1 for node in nodes if node.deferred for weight, _ in node.products}
