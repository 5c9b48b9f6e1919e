"""A node of a block's graph: a value that a block computes, and all that predictions ask of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxtrain.operations.collectives import (
    Communication,
    ExpertExchange,
    Gather,
    HeadExchange,
    KeyGather,
    Scatter,
    Sum,
)
from jaxtrain.telemetry.flops import AttentionFlops

SAVED: dict[str, frozenset[str]] = {
    "full": frozenset(),
    "attention": frozenset({"attention"}),
    "dots": frozenset({"product"}),
    "dots_and_attention": frozenset({"product", "attention"}),
}
"""The values that each remat policy saves, by `Node.saved_as`; "none" saves all that is read."""
SAVED_AS = frozenset({""}).union(*SAVED.values())
"""Names under which remat policies save values; "" if none does."""


@dataclass(frozen=True)
class Weight:
    """A matrix of a block. leaf: its name in the block; rows, columns: its two dims."""

    leaf: str
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.columns


class Multiplication(NamedTuple):
    """Product of each token with a matrix. weight: the matrix. times: how many of its kind a token
    is multiplied by, of the experts it is sent to."""

    weight: Weight
    times: int = 1


class Tensors(NamedTuple):
    """Tensors whose maximum magnitudes a device takes together. count: how many. of_experts: one or
    several for each of all experts, of which a device has a part."""

    count: int
    of_experts: bool = False


class Scales(NamedTuple):
    """Tensors of a product in 8 bits that have scales. inputs: what it multiplies matrices by.
    gradients: of its outputs. adapters: True if adapters' gradients are computed from these."""

    inputs: tuple[Tensors, ...] = ()
    gradients: tuple[Tensors, ...] = ()
    adapters: bool = False


@dataclass(frozen=True, kw_only=True)
class Node:
    """One value that a block computes. Values are numbered in the order in which they are computed.

    inputs: numbers of the values it is computed from; () for the first value of all.
    leaves: parameters that get their gradients in this node, by their names in the block; a name
      that ends with a dot is the beginning of several.
    products: matrices that it multiplies by. scores: attention's products of queries, keys and
      values (`telemetry.flops.AttentionFlops`). token_flops: forward FLOPs of its other dots, for
      each token. inner_flops: those of them whose results its derivatives read.
    input_reads, leaf_reads: numbers of the values that the gradients of its inputs, and of its
      leaves, read. A node that reads its own number is computed again from within.
    saved_as: name under which remat policies save it, "product" or "attention"; "" if none does.
    collective: of the forward pass. input_collective: of the gradient of its inputs.
      leaf_collective: of the gradients of its leaves; of keys, where those of its inputs, which
      bring them too, are not needed.
    deferred: True if a pipeline's W can compute the gradients of its leaves; they are matrices in
      8 bits then, if layers multiply so. deferred_gather: of the gather before such a product, and
      of the scatter behind one: what W gathers again, inputs or gradients of outputs.
    scales: in 8 bits, the tensors that have scales.
    block: index of its block among those of a chain.
    """

    inputs: tuple[int, ...] = ()
    leaves: tuple[str, ...] = ()
    products: tuple[Multiplication, ...] = ()
    scores: AttentionFlops | None = None
    token_flops: int = 0
    inner_flops: int = 0
    input_reads: tuple[int, ...] = ()
    leaf_reads: tuple[int, ...] = ()
    saved_as: str = ""
    collective: Communication | None = None
    input_collective: Gather | Scatter | Sum | HeadExchange | KeyGather | None = None
    leaf_collective: Gather | KeyGather | None = None
    deferred: bool = False
    deferred_gather: Gather | None = None
    scales: Scales = Scales()  # noqa: RUF009 (frozen)
    block: int = 0

    def is_saved(self, remat: str) -> bool:
        """Returns True if the remat policy saves the value for a backward pass that reads it."""
        return remat == "none" or self.saved_as in SAVED[remat]

    @property
    def exchange(self) -> ExpertExchange | None:
        """Exchange of rows with the devices of their experts, if that is its collective."""
        return self.collective if isinstance(self.collective, ExpertExchange) else None

    def flops(self, rows: int, seq: int) -> int:
        """Returns the FLOPs of a forward pass over `rows` rows of `seq` tokens; attention counts
        all pairs of a query and a key."""
        scores = 0 if self.scores is None else self.scores.flops(seq * seq)
        return self.product_flops(rows, seq) + rows * (seq * self.token_flops + scores)

    def product_flops(self, rows: int, seq: int) -> int:
        """Returns those of its products with matrices."""
        return 2 * rows * seq * sum(weight.size * n for weight, n in self.products)

    def output_flops(self, rows: int, seq: int) -> int:
        """Returns those that no derivative reads: of attention, the product with the values."""
        scores = 0 if self.scores is None else self.scores.flops(seq * seq) // 2
        return rows * (seq * (self.token_flops - self.inner_flops) + scores)
