"""The base of all operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from jaxtrain.operations.node import Node


class Operation(ABC):
    """Work that a block does, as a frozen value. `nodes` is all that a subclass must have."""

    @abstractmethod
    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> list[Node]:
        """Returns its nodes, in order; the last computes its output.

        entry: number of the value that it reads. number: of its first node; the others follow.
        narrow: layers multiply in 8 bits.
        """

    def parts(self) -> Iterator[Operation]:
        """Yields the operations that it is made of; itself if it is made of none."""
        yield self

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
        """Leaves that are in 8 bits if layers multiply so, with their numbers of scales."""
        nodes = self.nodes(0, 1)
        return {weight.leaf: 1 for node in nodes if node.deferred for weight, _ in node.products}
