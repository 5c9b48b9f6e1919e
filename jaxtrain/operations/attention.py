"""Attention: scores of queries and keys in all heads, and the values weighted by them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxtrain.operations.collectives import HeadExchange, KeyGather
from jaxtrain.operations.node import Node
from jaxtrain.operations.operation import Operation
from jaxtrain.remedies import Clash, Near, multiples_near, options, smaller_axis
from jaxtrain.scores.function import ScoreFunction
from jaxtrain.telemetry.flops import AttentionFlops


@dataclass(frozen=True)
class AttentionCall(Operation):
    """Scores and values of all heads, by `Communicator.attend`. heads: of queries. kv_heads: of
    keys and values. head_dim: that the kernel gets. causal: a query sees no later key. window: as
    in `AttentionConfig`. softcap, scale: likewise. needed: head_dim of queries and keys, and of
    values, without padding of the shorter; None if neither is padded. scores: their function, None
    for none. learned: the leaves that it learns. queries: the leaves that queries alone are
    computed with; a name that ends with a dot is the beginning of several."""

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    needed: tuple[int, int] | None = None
    scores: ScoreFunction | None = None
    learned: tuple[str, ...] = ()
    queries: tuple[str, ...] = ()

    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> list[Node]:
        exchange = HeadExchange(self.heads + 2 * self.kv_heads, self.head_dim)
        keys = KeyGather(self.kv_heads, self.head_dim, self.causal, self.window, self.queries)
        exchange_back = HeadExchange(self.heads, self.head_dim, back=True)
        attended = number + 1
        return [
            Node(inputs=(entry,), collective=exchange, input_collective=exchange),
            Node(
                inputs=(number,),
                scores=self.flops,
                leaves=self.learned,
                # Its own output too, from which the weights of keys are computed again.
                input_reads=(attended, number),
                leaf_reads=(attended, number) if self.learned else (),
                saved_as="attention",
                collective=keys,
                input_collective=keys,
                leaf_collective=keys if self.learned else None,
            ),
            Node(inputs=(attended,), collective=exchange_back, input_collective=exchange_back),
        ]

    @property
    def settled_scale(self) -> float:
        """The scale of scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def flops(self) -> AttentionFlops:
        """FLOPs of one layer, for `telemetry.flops`."""
        size, value = self.needed or (self.head_dim, None)
        return AttentionFlops(self.heads, size, self.window, causal=self.causal, value_dim=value)

    def unsplit(
        self, table: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int], prefix: str = ""
    ) -> list[str]:
        violations: list[str] = []
        for name, count in (("heads", self.heads), ("kv_heads", self.kv_heads)):
            axes = table.get(name, ())
            n = math.prod(sizes[axis] for axis in axes)
            if count % n:
                fewer = smaller_axis(count, [sizes[axis] for axis in axes])
                near = options(multiples_near(count, n))
                heads, keys = Near("heads", self.heads, n), Near("kv_heads", self.kv_heads, n)
                size = Near("head_dim", self.head_dim)
                together = (heads, size) if name == "heads" else (keys, heads)
                violations.append(
                    Clash(
                        f"{prefix}{name}={count} does not split over "
                        f"{' x '.join(f'{axis}={sizes[axis]}' for axis in axes)}",
                        f"use {name}={near}{''.join(f', or {axes[-1]}={k}' for k in fewer)}",
                        sizes={name: count},
                        ways=[
                            (Near(name, count, n),),
                            *((Near(axis, sizes[axis], 0),) for axis in axes[::-1]),
                        ],
                        joint=[together, (heads, keys), (heads, keys, size)],
                    )
                )
        return violations
