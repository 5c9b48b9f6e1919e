"""A family of models: conversion of its config.json to our config and back, and its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.families.fields import Fields
from jaxtrain.moe.layer import Activation
from jaxtrain.nn.norm import RMSNorm
from jaxtrain.transformer.block import BlockConfig
from jaxtrain.transformer.decoder import DecoderConfig
from jaxtrain.transformer.feed_forward import gelu_exact, gelu_tanh, silu

ACTIVATIONS: dict[str, Activation] = {
    "silu": silu,
    "swish": silu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu": gelu_exact,
}
"""By the names of `transformers`; of several names of a function the first is written."""


OrderOf = Callable[[DecoderConfig], np.ndarray]
"""Returns, for each column of a tensor in our [in, out] layout, its number in our leaf."""


class Tensor(NamedTuple):
    """A tensor of a folder; or one for every layer, or for every expert of every layer.

    name: with `{layer}` for the layer's number and `{expert}` for the expert's. leaves: our leaves
    in it, side by side along the last dim (GPT-2's c_attn has three); those of a layer are named
    within their block. transposed: its last two dims are [out, in], as in torch's Linear; ours are
    [in, out]. mixed: exists only in layers with a router (True) or without one (False); None in
    all. order: of its columns, if it differs from ours; only with one leaf. A model without these
    leaves (biases, an untied head) has no such tensor.
    """

    name: str
    leaves: tuple[str, ...]
    transposed: bool = False
    mixed: bool | None = None
    order: OrderOf | None = None

    @property
    def of_layer(self) -> bool:
        return "{layer}" in self.name

    @property
    def of_expert(self) -> bool:
        return "{expert}" in self.name


@dataclass(frozen=True)
class Family:
    """A model type of `transformers`.

    architecture: its class with a language model's head. base: prefix of all names but the head's;
    missing in a folder saved from the class without a head. tensors: as they are written;
    alternatives: the same parameters as some other folders have them. buffers: tensors that older
    versions saved and nobody needs. defaults: fields that may be missing from a config.json.
    layers_beyond: a folder may have layers beyond the model's, for multi-token prediction, which
    are left out.
    """

    model_type: str
    architecture: str
    base: str
    tensors: tuple[Tensor, ...]
    buffers: re.Pattern[str]
    defaults: Mapping[str, Any]
    read: Callable[[Fields], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    """The fields that come nearest to a config; `config.family_and_fields` reports the rest."""
    alternatives: tuple[Tensor, ...] = ()
    layers_beyond: bool = False

    def name_of(self, leaf: str) -> str:
        """Returns the name of the tensor with one leaf outside the layers."""
        return next(tensor.name for tensor in self.tensors if tensor.leaves == (leaf,))


def activation_name(activation: Activation, names: Mapping[str, Activation] = ACTIVATIONS) -> str:
    """Returns the first name of an activation in `names`, or that of SiLU."""
    return next((name for name, candidate in names.items() if candidate is activation), "silu")


def eps_of(block: BlockConfig) -> float:
    """Returns the eps of a block's norms; a config.json has one for all."""
    return (block.norm or block.post_norm or RMSNorm()).eps


BlockConfigs = tuple[BlockConfig, ...]


def find_period(blocks: BlockConfigs) -> tuple[BlockConfigs, BlockConfigs]:
    """Returns `prefix` and `period` of a DecoderConfig with these layers, with as few blocks as
    possible."""
    layers = len(blocks)
    for count in range(1, layers + 1):
        for first in range(count):
            n, remaining = count - first, blocks[first:]
            if len(remaining) % n == 0 and remaining == remaining[:n] * (len(remaining) // n):
                return blocks[:first], remaining[:n]
    raise AssertionError("the layers themselves are a period")
