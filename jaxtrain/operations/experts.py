"""A mixture of experts: a router, and the products of the experts that it chooses for a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtrain.operations.collectives import ExpertExchange, Gather, Scatter
from jaxtrain.operations.node import Multiplication, Node, Scales, Tensors, Weight
from jaxtrain.operations.operation import Operation

if TYPE_CHECKING:
    from jaxtrain.moe.replay import Replay


@dataclass(frozen=True)
class ExpertCall(Operation):
    """A mixture of experts, by `Communicator.experts`. router: its matrix. weights: the matrices of
    one expert. experts: their number. per_token: experts that a token is sent to. shared: matrices
    of the shared expert, for every token. learns: True if the router has a gradient from the loss.
    rows_of_group: tokens that an expert takes from each `routing_group` tokens, None for all.

    tallied: True if a step counts how often each expert is chosen. sums_loads: True if each pass
    sums these counts over devices, for an auxiliary loss. bias_rate: change of the router's bias in
    a step. replay: reads routing from a record, None to route.
    """

    router: Weight
    weights: tuple[Weight, ...]
    experts: int
    per_token: int
    shared: tuple[Weight, ...] = ()
    learns: bool = True
    tallied: bool = False
    sums_loads: bool = False
    bias_rate: float = 0.0
    routing_group: int | None = None
    rows_of_group: int | None = None
    replay: Replay | None = None

    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> list[Node]:
        gathered, routed, results = range(number, number + 3)
        width, read = self.router.rows, (results, routed, gathered)
        each_expert = Tensors(self.experts, of_experts=True)
        hidden = each_expert._replace(count=self.experts * (len(self.weights) - 1))
        scales = Scales((each_expert, each_expert), (each_expert, hidden))
        return [
            Node(inputs=(entry,), collective=Gather(width), input_collective=Scatter(width)),
            Node(inputs=(gathered,), products=(Multiplication(self.router),), saved_as="product"),
            # All within: to read an inner value is to compute the mixture again.
            Node(
                inputs=(routed, gathered),
                leaves=self.leaves,
                products=(
                    *(Multiplication(weight, self.per_token) for weight in self.weights),
                    *map(Multiplication, self.shared),
                ),
                input_reads=read,
                leaf_reads=read,
                collective=ExpertExchange(
                    experts=self.experts,
                    width=width,
                    per_token=self.per_token,
                    routing_group=self.routing_group,
                    rows_of_group=self.rows_of_group,
                    sums_loads=self.sums_loads,
                    router=self.router.leaf,
                    matrices=tuple(weight.leaf for weight in self.weights),
                    shared=tuple(weight.leaf for weight in self.shared),
                ),
                scales=scales if narrow else Scales(),
            ),
            Node(inputs=(results,), collective=Scatter(width), input_collective=Gather(width)),
        ]

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of all its matrices."""
        return tuple(weight.leaf for weight in (self.router, *self.weights, *self.shared))

    @property
    def narrowed(self) -> Mapping[str, int]:
        return {weight.leaf: self.experts for weight in self.weights}

    def unsplit(
        self, table: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int], prefix: str = ""
    ) -> list[str]:
        """Each device sorts its own tokens to all experts, and has a part of each one's hidden
        units. The table is the same for all blocks: no `prefix`."""
        violations = []
        if axes := table.get("experts"):
            violations.append(
                f"the activations table splits experts over {', '.join(sorted(axes))}: in use they "
                "are whole; split their hidden units (mlp), or split experts in the params table"
            )
        for name in ("batch", "seq"):
            if shared := {*table.get(name, ())} & {*table.get("mlp", ())}:
                violations.append(
                    f"the activations table splits both {name} and mlp over "
                    f"{', '.join(sorted(shared))}: hidden units of different tokens would be "
                    "summed; split mlp over other axes"
                )
        return violations
