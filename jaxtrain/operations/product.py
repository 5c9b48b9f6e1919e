"""Products of tokens with matrices, split over the devices of `tensor` or replicated, and a gather
of tokens alone."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtrain.operations.collectives import Gather, Scatter
from jaxtrain.operations.node import Multiplication, Node, Scales, Tensors, Weight
from jaxtrain.operations.operation import Operation


@dataclass(frozen=True)
class ColumnParallel(Operation):
    """x @ w for weights that tensor parallelism splits by column, by one `Communicator.column`:
    tokens are gathered before it (Shoeybi et al. 2019; Korthikanti et al. 2022). weights: those of
    one gather."""

    weights: tuple[Weight, ...]

    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> list[Node]:
        width, quantised = self.weights[0].rows, _quantised(entry) if narrow else []
        split = number if narrow else entry  # as it is stored, before the gather
        gathered = number + len(quantised)
        gather = Gather(width, narrow)
        return [
            *quantised,
            Node(
                inputs=(split,),
                collective=gather,
                input_collective=Scatter(width),
                deferred_gather=gather,
            ),
            Node(
                inputs=(gathered,),
                leaves=_names(self.weights),
                products=_multiplications(self.weights),
                # In 8 bits its quantised input is stored split, and gathered again.
                leaf_reads=(split if narrow else gathered,),
                leaf_collective=gather if narrow else None,
                saved_as="product",
                deferred=True,
                scales=Scales(gradients=(Tensors(len(self.weights)),)) if narrow else Scales(),
            ),
        ]


@dataclass(frozen=True)
class RowParallel(Operation):
    """x @ w for a weight that is split by row, by `Communicator.row`: the products are summed and
    their tokens scattered after it. weight: of the product."""

    weight: Weight

    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> list[Node]:
        width, quantised = self.weight.columns, _quantised(entry) if narrow else []
        source, product = number if narrow else entry, number + len(quantised)
        return [
            *quantised,
            Node(
                inputs=(source,),
                leaves=(self.weight.leaf,),
                products=(Multiplication(self.weight),),
                leaf_reads=(source,),
                saved_as="" if narrow else "product",
                deferred=True,
                scales=Scales(gradients=(Tensors(1),), adapters=True) if narrow else Scales(),
            ),
            # In 8 bits the sum is saved, after the scatter.
            Node(
                inputs=(product,),
                saved_as="product" if narrow else "",
                collective=Scatter(width),
                input_collective=Gather(width, narrow),
                deferred_gather=Gather(width, narrow),
            ),
        ]


@dataclass(frozen=True)
class ReplicatedProduct(Operation):
    """x @ w for weights that are replicated over `tensor`, by `Communicator.multiply`: each device
    multiplies its own share of the tokens, and nothing is sent. weights: of one input."""

    weights: tuple[Weight, ...]

    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> list[Node]:
        return [
            Node(
                inputs=(entry,),
                leaves=_names(self.weights),
                products=_multiplications(self.weights),
                leaf_reads=(entry,),
                saved_as="product",
            )
        ]


@dataclass(frozen=True)
class TokenGather(Operation):
    """Values of all tokens that the heads of every device read, by `Communicator.all_tokens`.
    width: numbers of a token."""

    width: int

    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> list[Node]:
        return [
            Node(
                inputs=(entry,), collective=Gather(self.width), input_collective=Scatter(self.width)
            )
        ]


def _quantised(entry: int) -> list[Node]:
    """Returns the node that quantises the input of a product."""
    return [Node(inputs=(entry,), scales=Scales(inputs=(Tensors(1),)))]


def _names(weights: tuple[Weight, ...]) -> tuple[str, ...]:
    return tuple(weight.leaf for weight in weights)


def _multiplications(weights: tuple[Weight, ...]) -> tuple[Multiplication, ...]:
    return tuple(map(Multiplication, weights))
