"""A decoder made small, with the same features; and the same decoder with other options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxtrain.attention.rotary.rope import Rope
from jaxtrain.attention.rotary.scaling import DynamicNtk, LongRope
from jaxtrain.moe.layer import Activation
from jaxtrain.moe.router import Groups
from jaxtrain.nn.param import Initialisation
from jaxtrain.transformer.attention import AttentionConfig
from jaxtrain.transformer.block import BlockConfig
from jaxtrain.transformer.decoder_fields import DecoderFields
from jaxtrain.transformer.feed_forward import MlpConfig
from jaxtrain.transformer.latent import LatentAttentionConfig
from jaxtrain.transformer.mixture import MoeConfig

EMBED, HIDDEN, HEAD_DIM, LATENT, VOCAB, SEQ = 64, 192, 8, 16, 250, 16
"""EMBED, HIDDEN and LATENT are rounded up to a multiple of the devices."""
GROUP = 2
"""Tokens of a routing group: as few as compete."""
EXPERTS, OF_EXPERT = 8, 32
"""Most experts, of which a token uses half or less; and hidden units of each, which are multiplied
in blocks of few rows. Both are rounded up as HIDDEN is."""


def shrunk(config: DecoderFields, devices: int) -> dict[str, Any]:
    """Fields of a narrow decoder with two periods and the layers before and after them, and a few
    heads for every device. Norms, biases, windows, rotary embeddings, grouped queries, tying and
    scales stay."""
    narrow = {block: _block(block, devices) for block in config.blocks}
    period = tuple(narrow[b] for b in config.period)
    prefix, suffix = (tuple(narrow[b] for b in part) for part in (config.prefix, config.suffix))
    if len(period) > 2:  # one layer of each kind, in their order
        period = tuple(dict.fromkeys(period))
        prefix, suffix = (tuple(dict.fromkeys(part)) for part in (prefix, suffix))
    periods, group = 1 if len(period) > 2 else 2, GROUP if config.limited else 1
    embed = _multiple(EMBED, devices)
    return dict(
        vocab=VOCAB,
        embed=embed,
        init=_init(config.init, config.embed / embed),
        layers=len(prefix) + len(suffix) + periods * len(period),
        period=period,
        prefix=prefix,
        suffix=suffix,
        learned_positions=None if config.learned_positions is None else seq_of(devices, group),
        vocab_multiple=8 * devices,
        chunk_tokens=32,
    )


def varied(
    config: DecoderFields,
    *,
    dropout: float,
    activation: Activation | None,
    periods: int | None,
    kept_routing: int | None,
) -> dict[str, Any]:
    """Fields of the same decoder with these options, None for its own."""

    def mlp(layer: MlpConfig | MoeConfig) -> MlpConfig | MoeConfig:
        layer = replace(layer, activation=activation or layer.activation)
        if not isinstance(layer, MoeConfig):
            return layer
        return replace(layer, kept_routing=kept_routing)

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


def _init(init: Initialisation, narrower: float) -> Initialisation:
    """Keeps the size of products that have `narrower` times fewer terms: a norm would magnify the
    rounding of values near zero."""
    return init if init.std is None else replace(init, std=init.std * max(narrower, 1.0) ** 0.5)


def _block(block: BlockConfig, devices: int) -> BlockConfig:
    of_experts = isinstance(block.mlp, MoeConfig)
    mlp = replace(block.mlp, hidden=_multiple(OF_EXPERT if of_experts else HIDDEN, devices))
    if isinstance(mlp, MoeConfig):
        experts = _multiple(min(mlp.experts, EXPERTS), devices)
        # At least two of several: with one its share is 1, and the router has no gradient.
        chosen = min(mlp.experts_per_token, max(experts // 2, 2), experts)
        mlp = _mixture(replace(mlp, experts=experts, experts_per_token=chosen), devices)
    return replace(block, attention=_attention(block.attention, devices), mlp=mlp)


def _attention(
    a: AttentionConfig | LatentAttentionConfig, devices: int
) -> AttentionConfig | LatentAttentionConfig:
    """Latent attention's values stay longer or shorter than queries, or equal."""
    if isinstance(a, LatentAttentionConfig):
        other = (a.value_head_dim > a.head_dim) - (a.value_head_dim < a.head_dim)
        return replace(
            a,
            heads=devices,
            latent=_multiple(LATENT, devices),
            nope_head_dim=HEAD_DIM,
            rope_head_dim=HEAD_DIM // 2,
            value_head_dim=HEAD_DIM + HEAD_DIM // 2 + 2 * other,
            query_latent=a.query_latent and _multiple(2 * LATENT, devices),
            rope=_rope(a.rope, HEAD_DIM // 2),
        )
    return replace(
        a,
        heads=devices * (2 if a.key_heads < a.heads else 1),
        kv_heads=devices,
        head_dim=HEAD_DIM,
        window=None if a.window is None else SEQ // 2,
        rope=a.rope and _rope(a.rope, HEAD_DIM),
    )


def _rope(rope: Rope, head_dim: int) -> Rope:
    """Rotary embedding for heads of `head_dim` dims; if it depends on a row's length, its switch is
    within small rows."""
    turned = max(rope.turned_dims(head_dim) // 2, 1)
    scaling = rope.scaling
    if isinstance(scaling, LongRope):
        short, long = scaling.short_factor, scaling.long_factor
        every = max(len(short) // turned, 1)
        few = [(factors[::every] * turned)[:turned] for factors in (short, long)]
        scaling = replace(scaling, short_factor=few[0], long_factor=few[1])
    if isinstance(scaling, LongRope | DynamicNtk):
        scaling = replace(scaling, original_seq=SEQ // 2)
    return replace(rope, scaling=scaling, partial_rotary_factor=2 * turned / head_dim)


def _mixture(mlp: MoeConfig, devices: int) -> MoeConfig:
    """A mixture with small parts: two groups of experts, of which one is open if it has enough
    experts; tokens compete with those of `GROUP`."""
    groups = mlp.router.groups
    if groups is not None and mlp.experts % 2:
        groups = None
    elif groups is not None:
        half = mlp.experts // 2
        groups = Groups(2, 1 if mlp.experts_per_token <= half else 2, min(groups.best, half))
    shared, capacity = mlp.shared, mlp.capacity
    return replace(
        mlp,
        router=replace(mlp.router, groups=groups),
        shared=shared and replace(shared, hidden=_multiple(EMBED, devices)),
        capacity=capacity and replace(capacity, routing_group=GROUP),
    )


def seq_of(devices: int, group: int = 1) -> int:
    """Tokens of a row: complete chunks, two for each device, wherever it is cut, each of complete
    routing groups of `group` tokens."""
    return _multiple(SEQ, 2 * devices * group)


def _multiple(size: int, devices: int) -> int:
    return -(-size // devices) * devices
