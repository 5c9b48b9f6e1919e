"""Collectives on activations, as an operation states them: of which tokens and heads, not of which
sizes. `planner.tokens` has the bytes that they send on a mesh."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gather:
    """All-gather of tokens over the devices that split heads. width: numbers of a token. narrow:
    in 8 bits."""

    width: int
    narrow: bool = False


@dataclass(frozen=True)
class Scatter:
    """Reduce-scatter of tokens over the devices that split heads. width: numbers of a token."""

    width: int


@dataclass(frozen=True)
class Sum:
    """All-reduce in fp32 over the devices that split heads. width: numbers of a token."""

    width: int


@dataclass(frozen=True)
class HeadExchange:
    """All-to-all of tokens for heads where rows are split. heads: of all tensors together.
    head_dim: of each. back: heads for tokens."""

    heads: int
    head_dim: int
    back: bool = False


@dataclass(frozen=True)
class KeyGather:
    """Keys and values of all tokens of a row, brought to each device that has a part of the row.

    heads, head_dim: of keys.
    causal, window, queries: as in `AttentionCall`.
    """

    heads: int
    head_dim: int
    causal: bool
    window: int | None
    queries: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExpertExchange:
    """Tokens sent to the devices of their experts, and results sent back.

    experts, per_token, routing_group, rows_of_group, sums_loads: as in `ExpertCall`. width: of a
    token.
    router, matrices, shared: names of the matrices of router, each expert and the shared expert.
    """

    experts: int
    width: int
    per_token: int
    routing_group: int | None
    rows_of_group: int | None
    sums_loads: bool
    router: str
    matrices: tuple[str, ...]
    shared: tuple[str, ...]


Communication = Gather | Scatter | Sum | HeadExchange | KeyGather | ExpertExchange
