"""Which part of which of our leaves every tensor of a folder is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxtrain.mesh.sharding import PaddedAxis
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.nn.module import build, take_apart
from jaxtrain.weights.huggingface.family import Tensor


class LeafShape(NamedTuple):
    """shape: of a leaf of ours. real: the same without padded rows of the vocabulary, which are
    zero here and not in a folder."""

    shape: tuple[int, ...]
    real: tuple[int, ...]


class Piece(NamedTuple):
    """What a tensor has of one leaf. at: the leaf's index along the dims it is stacked over, layers
    and experts, () of one that is not. shape: of the piece. offset: where it begins along the last
    dim of the tensor the way round we keep it."""

    leaf: str
    at: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int


class Stored(NamedTuple):
    """A tensor of a folder: its name, shape, and pieces from left to right. order: as of
    `family.Tensor`."""

    name: str
    shape: tuple[int, ...]
    transposed: bool
    pieces: tuple[Piece, ...]
    order: np.ndarray | None = None


def leaf_shapes(config: DecoderConfig) -> dict[str, LeafShape]:
    """All parameters of a model in natural layer order. Nothing is computed."""
    split = take_apart(nnx.eval_shape(lambda: build(config.build, jax.random.key(0))))
    found = {}
    for path, leaf in split.params.items():
        dims = zip(leaf.shape, split.axes[path], strict=True)
        real = tuple(axis.real if isinstance(axis, PaddedAxis) else n for n, axis in dims)
        found[path] = LeafShape(tuple(leaf.shape), real)
    return found


def stored_tensors(
    config: DecoderConfig, rules: Sequence[Tensor], leaves: dict[str, LeafShape]
) -> list[Stored]:
    """Every tensor of this model's folder by these rules, those of a layer together."""
    orders = {rule: rule.order(config) for rule in rules if rule.order is not None}
    outer = [_stored(rule, rule.name, "", (), leaves) for rule in rules if not rule.of_layer]
    inner = [
        _stored(
            rule,
            rule.name.format(layer=layer, expert=expert),
            prefix,
            where,
            leaves,
            orders.get(rule),
        )
        for layer, (prefix, at) in enumerate(_layer_places(config))
        for rule in rules
        if rule.of_layer and rule.mixed in (None, f"{prefix}mlp.router" in leaves)
        for expert, where in _expert_places(rule, prefix, at, leaves)
    ]
    return [tensor for tensor in outer + inner if tensor is not None]


def _layer_places(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """For each layer in natural order the beginning of its leaves' paths and their index."""
    yield from ((f"prefix.{i}.", ()) for i in range(len(config.prefix)))
    for row in range(config.periods):
        yield from ((f"period.{i}.", (row,)) for i in range(len(config.period)))
    yield from ((f"suffix.{i}.", ()) for i in range(len(config.suffix)))


def _expert_places(
    rule: Tensor, prefix: str, at: tuple[int, ...], leaves: dict[str, LeafShape]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The index of each expert's leaves, if the rule is of experts; else of the layer's."""
    if not rule.of_expert:
        yield 0, at
    elif prefix + rule.leaves[0] in leaves:
        shape = leaves[prefix + rule.leaves[0]].real
        yield from ((expert, (*at, expert)) for expert in range(shape[len(at)]))


def _stored(
    rule: Tensor,
    name: str,
    prefix: str,
    at: tuple[int, ...],
    leaves: dict[str, LeafShape],
    order: np.ndarray | None = None,
) -> Stored | None:
    """A rule's tensor, None where the model has not its leaves."""
    paths = [prefix + leaf for leaf in rule.leaves]
    if not all(path in leaves for path in paths):
        return None
    pieces, offset = [], 0
    for path in paths:
        shape = leaves[path].real[len(at) :]
        pieces.append(Piece(path, at, shape, offset))
        offset += shape[-1]
    whole = (*pieces[0].shape[:-1], offset)
    shape = transpose_last(whole) if rule.transposed else whole
    return Stored(name, shape, rule.transposed, tuple(pieces), order)


def transpose_last(dims: tuple[Any, ...]) -> tuple[Any, ...]:
    """The last two exchanged."""
    return (*dims[:-2], dims[-1], dims[-2])
