"""Canonical configs, for comparing the functions that two models compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from jaxtrain.nn.param import Initialisation
from jaxtrain.transformer.attention import AttentionConfig
from jaxtrain.transformer.block import BlockConfig
from jaxtrain.transformer.decoder import DecoderConfig
from jaxtrain.transformer.latent import LatentAttentionConfig
from jaxtrain.transformer.mixture import MoeConfig


def essence(config: Any) -> Any:
    """Canonical config of a decoder: defaults filled in, fields that cannot change logits reset;
    for comparing two models. None for another kind of model."""
    if not isinstance(config, DecoderConfig):
        return None

    def block(layer: BlockConfig) -> BlockConfig:
        attention = _attention(layer.attention, config.embed)
        mlp = layer.mlp
        if isinstance(mlp, MoeConfig):
            mlp = replace(mlp, balance=None)
        return replace(layer, attention=attention, mlp=mlp, dropout=0.0)

    return replace(
        config,
        prefix=(),
        period=tuple(map(block, config.blocks)),
        suffix=(),
        dropout=0.0,
        init=Initialisation(),
        vocab_multiple=1,
        chunk_tokens=1,
    )


def _attention(
    a: AttentionConfig | LatentAttentionConfig, embed: int
) -> AttentionConfig | LatentAttentionConfig:
    if isinstance(a, LatentAttentionConfig):
        usual = replace(a, scale=None)
        return usual if usual.scoring_scale() == a.scale else a
    size = a.size(embed)
    scale = None if a.scale == size**-0.5 else a.scale
    return replace(a, kv_heads=a.key_heads, head_dim=size, scale=scale)


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yields the fields in which two configs differ, with both values; those of all layers are
    named `block`."""
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        if len(ours) != len(theirs):
            yield path, f"{len(ours)} of them", f"{len(theirs)} of them"
        for a, b in zip(ours, theirs, strict=False):
            yield from differences(a, b, "block")
    elif is_dataclass(ours) and type(ours) is type(theirs):
        for field in fields(ours):
            a, b = getattr(ours, field.name), getattr(theirs, field.name)
            yield from differences(a, b, f"{path}.{field.name}".lstrip("."))
    elif ours != theirs:
        show = _shown if type(ours) is type(theirs) else _kind
        yield path, show(ours), show(theirs)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}" if is_dataclass(value) else _shown(value)


def _shown(value: Any) -> str:
    return getattr(value, "__name__", None) or repr(value)
