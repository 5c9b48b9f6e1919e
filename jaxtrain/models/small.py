"""A decoder made small, with the same features; and the same one with other options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxtrain.models.block import Activation, BlockConfig, MlpConfig, MoeConfig
from jaxtrain.models.decoder_fields import DecoderFields

EMBED, HIDDEN, HEAD_DIM, VOCAB, SEQ = 64, 192, 8, 250, 16
"""EMBED and HIDDEN are rounded up to a multiple of the devices."""
EXPERTS = 8
"""At most; a token goes through half of them or less."""


def shrunk(config: DecoderFields, devices: int) -> dict[str, Any]:
    """The fields of a decoder of two periods (two to four layers), narrow, a few heads for every
    device: norms, biases, windows, grouped queries, tying and scales stay."""
    narrow = {block: _block(block, devices) for block in config.blocks}
    period = tuple(narrow[b] for b in config.period)
    prefix, suffix = (tuple(narrow[b] for b in part) for part in (config.prefix, config.suffix))
    periods = 1 if len(period) > 2 else 2
    return dict(
        vocab=VOCAB,
        embed=_multiple(EMBED, devices),
        layers=len(prefix) + len(suffix) + periods * len(period),
        period=period,
        prefix=prefix,
        suffix=suffix,
        learned_positions=None if config.learned_positions is None else SEQ,
        vocab_multiple=8 * devices,
        chunk_tokens=32,
    )


def varied(
    config: DecoderFields,
    *,
    dropout: float,
    activation: Activation | None,
    periods: int | None,
    every_expert: bool,
) -> dict[str, Any]:
    """The fields of the same decoder with these options, None for what it has."""

    def mlp(given: MlpConfig | MoeConfig) -> MlpConfig | MoeConfig:
        given = replace(given, activation=activation or given.activation)
        if not every_expert or not isinstance(given, MoeConfig):
            return given
        return replace(given, experts_per_token=given.experts)

    parts: dict[str, Any] = {
        part: tuple(
            replace(block, dropout=dropout, mlp=mlp(block.mlp)) for block in getattr(config, part)
        )
        for part in ("prefix", "period", "suffix")
    }
    if periods is not None:
        ends = len(config.prefix) + len(config.suffix)
        parts["layers"] = ends + periods * len(config.period)
    return {"dropout": dropout, **parts}


def _block(block: BlockConfig, devices: int) -> BlockConfig:
    a = block.attention
    grouped = 2 if a.key_heads < a.heads else 1
    attention = replace(
        a,
        heads=devices * grouped,
        kv_heads=devices,
        head_dim=HEAD_DIM,
        window=None if a.window is None else SEQ // 2,
    )
    mlp = replace(block.mlp, hidden=_multiple(HIDDEN, devices))
    if isinstance(mlp, MoeConfig):
        experts = min(mlp.experts, EXPERTS)
        # At least two of several: with one its share is 1, and the router has no gradient.
        chosen = min(mlp.experts_per_token, max(experts // 2, 2), experts)
        mlp = replace(mlp, experts=experts, experts_per_token=chosen)
    return replace(block, attention=attention, mlp=mlp)


def _multiple(size: int, devices: int) -> int:
    return -(-size // devices) * devices
