"""Leaves among the parameters that no optimizer updates. A step sums its observations as their
gradients, and a separate rule computes the next values.

Exact names from a model's description identify these leaves: a user's own parameters may have
similar names.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple, TypeVar

from jaxtrain.models.description import STACK, ModelDescription, named_by
from jaxtrain.models.routers import BIAS, TALLY, replays, routers
from jaxtrain.models.scales import scale_names

Value = TypeVar("Value")


class Buffers(NamedTuple):
    """Full names. scales: of products in 8 bits (`quantization.delayed`). tallies: counts of
    routers (`moe.tally`). biases: of routers that balance loads by them (`moe.router`). replays:
    routing that is recorded and replayed (`moe.replay`)."""

    scales: frozenset[str] = frozenset()
    tallies: frozenset[str] = frozenset()
    biases: frozenset[str] = frozenset()
    replays: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Names of all buffers."""
        return self.scales | self.of_routers

    @property
    def of_routers(self) -> frozenset[str]:
        """Buffers of routers, in fp32 at any precision: they count tokens."""
        return self.tallies | self.biases | self.replays

    @property
    def anew(self) -> frozenset[str]:
        """Buffers that each run starts anew: they are not read from another run or a folder."""
        return self.scales | self.tallies | self.replays


def buffers_of(description: ModelDescription | None, *, scaled: bool) -> Buffers:
    """Names of a model's buffers; none without a description. scaled: True if its products have
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
    """Buffers of operations whose outputs get gradients when the leaves `trained` are trained.
    These belong to the first block (or the stack) with a trained leaf, and to all later ones."""
    paths = [*description.prefix, STACK, *description.suffix]
    entering = any(
        named_by(k, description.entering_alone) or k in description.tied for k in trained
    )
    first = 0 if entering else len(paths)
    for index, path in enumerate(paths):
        if any(k.startswith(path) for k in trained):
            first = min(first, index)
    updated = tuple(paths[first:])
    return frozenset(k for k in buffers.names if k.startswith(updated))


def without_buffers(leaves: Mapping[str, Value], buffers: Buffers) -> dict[str, Value]:
    """Leaves that an optimizer updates."""
    names = buffers.names
    return {k: v for k, v in leaves.items() if k not in names}
