"""A decoder with adapters (`adapters.py`) beside some of its matrices, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxtrain.models.adapters import Adapters
from jaxtrain.models.decoder import DecoderConfig


def with_adapters(
    config: DecoderConfig, targets: tuple[str, ...], rank: int, scale: float
) -> DecoderConfig:
    """The model with adapters beside the matrices `targets`, named as leaves of the model."""
    found: dict[str, Any] = {}
    for part in ("prefix", "period", "suffix"):
        blocks = []
        for i, block in enumerate(getattr(config, part)):
            start = f"{part}.{i}."
            mine = tuple(t.removeprefix(start) for t in targets if t.startswith(start))
            adapters = Adapters(rank, scale, mine) if mine else None
            blocks.append(replace(block, adapters=adapters))
        found[part] = tuple(blocks)
    return replace(config, **found)


def without_adapters(config: DecoderConfig) -> DecoderConfig:
    """The model alone."""
    return with_adapters(config, (), 0, 0.0)
