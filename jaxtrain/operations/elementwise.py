"""Operations without a product: functions of each token, norms over all heads, biases."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtrain.operations.collectives import Sum
from jaxtrain.operations.node import Node
from jaxtrain.operations.operation import Operation


@dataclass(frozen=True)
class Elementwise(Operation):
    """A function of each token by itself whose derivative needs its input: a norm, an activation.
    leaves: prefixes of the names of its parameters."""

    leaves: tuple[str, ...] = ()

    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> list[Node]:
        read = (entry,)
        return [Node(inputs=read, leaves=self.leaves, input_reads=read, leaf_reads=read)]


@dataclass(frozen=True)
class NormAcrossHeads(Operation):
    """Norms over all heads, which tensor parallelism splits: `sums` numbers of each token are
    summed over devices, by one `Communicator.sum_over_heads`. leaves: as in `Elementwise`."""

    leaves: tuple[str, ...]
    sums: int

    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> list[Node]:
        total, read = Sum(self.sums), (number, entry)
        return [
            Node(inputs=(entry,), input_reads=(entry,), collective=total, input_collective=total),
            Node(inputs=read, leaves=self.leaves, input_reads=read, leaf_reads=read),
        ]


@dataclass(frozen=True)
class Bias(Operation):
    """A parameter that is added: its derivative needs no input. leaves: as in `Elementwise`."""

    leaves: tuple[str, ...]

    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> list[Node]:
        return [Node(inputs=(entry,), leaves=self.leaves)]
