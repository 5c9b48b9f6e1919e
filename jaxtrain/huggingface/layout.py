"""Mapping of a folder's tensors to parts of our leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxtrain.families.family import Tensor
from jaxtrain.mesh.sharding import PaddedAxis
from jaxtrain.nn.module import build, take_apart
from jaxtrain.transformer.decoder import DecoderConfig


class LeafShape(NamedTuple):
    """shape: of a leaf of ours. real: the same without padded rows of the vocabulary, which are
    zero here and missing in a folder."""

    shape: tuple[int, ...]
    real: tuple[int, ...]


class TensorPiece(NamedTuple):
    """The part of a leaf that is in one tensor.

    stack_index: index along the leaf's stacked dims (layers, experts), () if it is not stacked.
    shape: of the piece. offset: where it begins along the last dim of the tensor in our [in, out]
    layout.
    """

    leaf: str
    stack_index: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int


class StoredTensor(NamedTuple):
    """A tensor of a folder: its name, shape, and pieces from left to right. order: as in
    `family.Tensor`."""

    name: str
    shape: tuple[int, ...]
    transposed: bool
    pieces: tuple[TensorPiece, ...]
    order: np.ndarray | None = None


def leaf_shapes(config: DecoderConfig) -> dict[str, LeafShape]:
    """Returns the shapes of all parameters of a model in natural layer order. Computes nothing."""
    split = take_apart(nnx.eval_shape(lambda: build(config.build, jax.random.key(0))))
    shapes = {}
    for path, leaf in split.params.items():
        dims = zip(leaf.shape, split.axes[path], strict=True)
        real = tuple(axis.real if isinstance(axis, PaddedAxis) else n for n, axis in dims)
        shapes[path] = LeafShape(tuple(leaf.shape), real)
    return shapes


def stored_tensors(
    config: DecoderConfig, rules: Sequence[Tensor], leaves: dict[str, LeafShape]
) -> list[StoredTensor]:
    """Returns every tensor of this model's folder by these rules, layer by layer."""
    orders = {rule: rule.order(config) for rule in rules if rule.order is not None}
    outer = [_stored(rule, rule.name, "", (), leaves) for rule in rules if not rule.of_layer]
    inner = [
        _stored(
            rule,
            rule.name.format(layer=layer, expert=expert),
            prefix,
            expert_index,
            leaves,
            orders.get(rule),
        )
        for layer, (prefix, layer_index) in enumerate(_layer_places(config))
        for rule in rules
        if rule.of_layer and rule.mixed in (None, f"{prefix}mlp.router" in leaves)
        for expert, expert_index in _expert_places(rule, prefix, layer_index, leaves)
    ]
    return [tensor for tensor in outer + inner if tensor is not None]


def _layer_places(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the path prefix and the stacked index of each layer's leaves in natural order."""
    yield from ((f"prefix.{i}.", ()) for i in range(len(config.prefix)))
    for row in range(config.periods):
        yield from ((f"period.{i}.", (row,)) for i in range(len(config.period)))
    yield from ((f"suffix.{i}.", ()) for i in range(len(config.suffix)))


def _expert_places(
    rule: Tensor, prefix: str, layer_index: tuple[int, ...], leaves: dict[str, LeafShape]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yields (expert, index of its leaves) if the rule is of experts, else (0, index of the
    layer)."""
    if not rule.of_expert:
        yield 0, layer_index
    elif prefix + rule.leaves[0] in leaves:
        shape = leaves[prefix + rule.leaves[0]].real
        yield from ((expert, (*layer_index, expert)) for expert in range(shape[len(layer_index)]))


def _stored(
    rule: Tensor,
    name: str,
    prefix: str,
    index: tuple[int, ...],
    leaves: dict[str, LeafShape],
    order: np.ndarray | None = None,
) -> StoredTensor | None:
    """Returns a rule's tensor, None where the model does not have its leaves."""
    paths = [prefix + leaf for leaf in rule.leaves]
    if not all(path in leaves for path in paths):
        return None
    pieces, offset = [], 0
    for path in paths:
        shape = leaves[path].real[len(index) :]
        pieces.append(TensorPiece(path, index, shape, offset))
        offset += shape[-1]
    ours = (*pieces[0].shape[:-1], offset)
    shape = transpose_last(ours) if rule.transposed else ours
    return StoredTensor(name, shape, rule.transposed, tuple(pieces), order)


def transpose_last(dims: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns `dims` with the last two exchanged."""
    return (*dims[:-2], dims[-1], dims[-2])
