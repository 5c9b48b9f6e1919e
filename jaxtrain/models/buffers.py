"""Leaves that rest among the parameters and that no optimizer moves: what a step sees is added up
as their gradients are, and a rule of their own makes the next value of it.

Which leaves these are is told by exact names, of what a model says of itself: a user's own
parameters may have names that look alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple, TypeVar

from jaxtrain.models.description import STACK, ModelDescription, named_by
from jaxtrain.models.routers import BIAS, TALLY, replays, routers
from jaxtrain.models.scales import scale_names

Value = TypeVar("Value")


class Buffers(NamedTuple):
    """Full names. scales: of products in 8 bits (`nn.quantized.delayed`); tallies: what a router
    sees (`moe.tally`); biases: of routers that keep loads even by them (`moe.router`); replays:
    routing that is kept, and given (`moe.replay`)."""

    scales: frozenset[str] = frozenset()
    tallies: frozenset[str] = frozenset()
    biases: frozenset[str] = frozenset()
    replays: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Of all."""
        return self.scales | self.of_routers

    @property
    def of_routers(self) -> frozenset[str]:
        """In fp32 whatever the precision: they count tokens."""
        return self.tallies | self.biases | self.replays

    @property
    def anew(self) -> frozenset[str]:
        """Those that each run begins with its own of: no other run's and no folder's is read."""
        return self.scales | self.tallies | self.replays


def buffers_of(description: ModelDescription | None, *, scaled: bool) -> Buffers:
    """Those of a model; none of one that says nothing of itself. scaled: whether its products have
    delayed scales."""
    if description is None:
        return Buffers()
    counted = list(routers(description))
    return Buffers(
        scale_names(description) if scaled else frozenset(),
        frozenset(name + TALLY for name, _ in counted),
        frozenset(name + BIAS for name, call in counted if call.bias_rate),
        frozenset(replays(description)),
    )


def moved_buffers(
    description: ModelDescription, buffers: Buffers, trained: Set[str]
) -> frozenset[str]:
    """Those of operations whose outputs' gradients are made where these leaves are trained: of a
    block (or the stack) that has one of them, or has one before it."""
    paths = [*description.before, STACK, *description.after]
    entering = any(
        named_by(k, description.entering_alone) or k in description.tied for k in trained
    )
    first = 0 if entering else len(paths)
    for at, path in enumerate(paths):
        if any(k.startswith(path) for k in trained):
            first = min(first, at)
    met = tuple(paths[first:])
    return frozenset(k for k in buffers.names if k.startswith(met))


def without_buffers(leaves: Mapping[str, Value], buffers: Buffers) -> dict[str, Value]:
    """The leaves that an optimizer moves."""
    names = buffers.names
    return {k: v for k, v in leaves.items() if k not in names}
