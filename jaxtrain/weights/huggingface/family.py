"""What a family of models is: its config.json as our config and back, and its tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.transformer.block import BlockConfig
from jaxtrain.models.transformer.feed_forward import Activation, gelu_exact, gelu_tanh, silu
from jaxtrain.nn.norm import RMSNorm
from jaxtrain.weights.huggingface.fields import Fields

ACTIVATIONS: dict[str, Activation] = {
    "silu": silu,
    "swish": silu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu": gelu_exact,
}
"""By the names of `transformers`; the first of a function is the one written."""


Order = Callable[[DecoderConfig], np.ndarray]
"""Of a model's tensor, the way round we keep it, the number that each column has in ours."""


class Tensor(NamedTuple):
    """One of their tensors, or one of every layer, or of every expert of every layer.

    name: `{layer}` in it stands for the layer's number, `{expert}` for the expert's. leaves: ours
    that are in it, side by side along the last dim (GPT-2's c_attn has three); those of a layer are
    named within their block. transposed: the last two dims of theirs are [out, in], as torch's
    Linear keeps them; ours are [in, out].
    mixed: of layers that have a router (True), or that have none (False), None of both. order: of
    its columns, where that is another than ours; of one leaf.
    A model without these leaves (biases, an untied head) has no such tensor.
    """

    name: str
    leaves: tuple[str, ...]
    transposed: bool = False
    mixed: bool | None = None
    order: Order | None = None

    @property
    def of_layer(self) -> bool:
        return "{layer}" in self.name

    @property
    def of_expert(self) -> bool:
        return "{expert}" in self.name


@dataclass(frozen=True)
class Family:
    """A model type of `transformers`.

    architecture: its class with a language model's head. base: what names begin with, but for the
    head's; a folder saved from the class without a head lacks it. tensors: as they are written;
    others: all of them as some folders have them too. buffers: tensors that older versions saved
    and nobody needs. defaults: fields that may be missing from a config.json. layers_beyond: a
    folder may have layers beyond the model's, for multi-token prediction; they are left out.
    """

    model_type: str
    architecture: str
    base: str
    tensors: tuple[Tensor, ...]
    buffers: re.Pattern[str]
    defaults: Mapping[str, Any]
    read: Callable[[Fields], DecoderConfig]
    write: Callable[[DecoderConfig], dict[str, Any]]
    """The fields that come nearest to a config; `config.family_and_fields` tells what they miss."""
    others: tuple[Tensor, ...] = ()
    layers_beyond: bool = False

    def name_of(self, leaf: str) -> str:
        """The tensor that is one leaf outside the layers."""
        return next(tensor.name for tensor in self.tensors if tensor.leaves == (leaf,))


def activation_name(activation: Activation, names: Mapping[str, Activation] = ACTIVATIONS) -> str:
    """The first of `names` that is its, or that of SiLU."""
    return next((name for name, known in names.items() if known is activation), "silu")


def eps_of(block: BlockConfig) -> float:
    """Of the norms of a block, which a config.json has one for all of."""
    return (block.norm or block.post_norm or RMSNorm()).eps


Blocks = tuple[BlockConfig, ...]


def find_period(blocks: Blocks) -> tuple[Blocks, Blocks]:
    """`prefix` and `period` of a DecoderConfig with these layers, as few blocks as will do."""
    layers = len(blocks)
    for built in range(1, layers + 1):
        for first in range(built):
            n, rest = built - first, blocks[first:]
            if len(rest) % n == 0 and rest == rest[:n] * (len(rest) // n):
                return blocks[:first], rest[:n]
    raise AssertionError("the layers themselves are a period")
