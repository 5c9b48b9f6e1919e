"""The model families of this library: the configs that a stored experiment may name."""

from __future__ import annotations

from jaxtrain.transformer.decoder import DecoderConfig

FAMILIES = (DecoderConfig,)
