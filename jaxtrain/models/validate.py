"""What is wrong with a decoder's fields."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from jaxtrain.models.decoder_fields import DecoderFields
from jaxtrain.models.transformer.attention import AttentionConfig
from jaxtrain.models.transformer.block import BlockConfig
from jaxtrain.models.transformer.latent import LatentAttentionConfig
from jaxtrain.models.transformer.mixture import MoeConfig, SharedExpert
from jaxtrain.moe.router import Balance, Capacity, SigmoidRouter, SoftmaxRouter
from jaxtrain.nn.norm import NormConfig, RMSNorm
from jaxtrain.nn.rotary.rope import Rope

LAYERS, EXPERTS, ALL_EXPERTS, SIZE = 2**14, 2**14, 2**20, 2**31 - 1
"""At most: ten times the deepest and the most divided models known; and what an index of 32 bits
counts. What claims more is no model, and would be listed layer by layer."""


def violations(config: DecoderFields) -> list[str]:
    """Each wrong field with its remedy."""
    if found := _layers_unknown(config):
        return found
    fixed, n = len(config.prefix) + len(config.suffix), len(config.period)
    if n == 0 or (config.layers - fixed) % max(n, 1) or config.layers - fixed < n:
        near = fixed + max(1, (config.layers - fixed) // max(n, 1)) * max(n, 1)
        found.append(
            f"layers={config.layers} is not prefix + suffix ({fixed}) plus a multiple of the "
            f"period ({n} blocks); use layers={near} or {near + max(n, 1)}"
        )
        return found
    for name in ("vocab", "embed", "vocab_multiple"):
        if not _whole(getattr(config, name)):
            found.append(f"{name}={getattr(config, name)}; use a whole number of at least 1")
    optional = {"chunk_tokens": _whole, "learned_positions": _whole, "logit_softcap": _positive}
    for name, holds in optional.items():
        value = getattr(config, name)
        if value is not None and not holds(value):
            found.append(f"{name}={value}; use {NEEDED[holds]}, or None")
    found += _beyond_any(config)
    found += _scale_violations(config) + _norm_problems("norm", config.norm)
    if not _whole(config.embed):
        return found  # heads are told against it
    for at, block in enumerate(dict.fromkeys(config.blocks)):
        where, counts = f"block {at}", _counts(block)
        if missing := [f"{name}={count}" for name, count in counts.items() if not _whole(count)]:
            found.append(f"{where}: {', '.join(missing)}; use a whole number of at least 1")
            continue
        found += _mlp_violations(block, where)
        found += _norm_violations(block, where)
        found += _attention_violations(block.attention, config.embed, where)
        if not _finite(block.residual_scale):
            found.append(f"{where}: residual_scale={block.residual_scale}; use a finite number")
        if not _share(block.dropout):
            found.append(f"{where}: dropout={block.dropout}; use a share in [0, 1)")
    if config.learned_positions is None and any(b.attention.rope is None for b in config.blocks):
        found.append("some block has no rope and there are no learned positions; set either")
    if not _share(config.dropout):
        found.append(f"dropout={config.dropout}; use a share in [0, 1)")
    return found


def _attention_violations(
    a: AttentionConfig | LatentAttentionConfig, embed: int, where: str
) -> list[str]:
    """What is wrong with a block's attention, whose counts are sound."""
    found = []
    kinds = {"head_dim": _whole, "window": _whole, "softcap": _positive, "scale": _positive}
    for name, holds in kinds.items():
        value = getattr(a, name, None)
        if value is not None and not holds(value):
            found.append(f"{where}: {name}={value}; use {NEEDED[holds]}, or None")
    if isinstance(a, LatentAttentionConfig):
        return found + _latent_violations(a, where)
    if a.head_dim is not None and not _whole(a.head_dim):
        return found
    if a.head_dim is None and embed % a.heads:
        found.append(
            f"{where}: embed={embed} is not a multiple of heads={a.heads}; "
            f"set head_dim or use embed={embed // a.heads * a.heads or a.heads}"
        )
    if a.heads % a.key_heads:
        fitting = max(k for k in range(1, min(a.heads, a.key_heads) + 1) if a.heads % k == 0)
        found.append(
            f"{where}: heads={a.heads} is not a multiple of kv_heads={a.key_heads}; use "
            f"kv_heads={fitting}"
        )
    if a.rope is not None:
        found += [f"{where}: rope: {each}" for each in a.rope.violations(a.size(embed))]
    if a.qk_norm_across_heads and not isinstance(a.qk_norm, RMSNorm):
        found.append(
            f"{where}: qk_norm_across_heads={a.qk_norm_across_heads!r} with qk_norm="
            f"{a.qk_norm!r}; use an RMSNorm, or False"
        )
    return found


def _norm_violations(block: BlockConfig, where: str) -> list[str]:
    a, norms = block.attention, {"norm": block.norm, "post_norm": block.post_norm}
    if isinstance(a, AttentionConfig):
        norms["qk_norm"] = a.qk_norm
    elif isinstance(a.norm, NormConfig):
        norms["attention.norm"] = a.norm
    given = {f"{where}: {name}": norm for name, norm in norms.items() if norm is not None}
    found = [each for name, norm in given.items() for each in _norm_problems(name, norm)]
    if block.norm is None and block.post_norm is None:
        found.append(
            f"{where}: norm=None without post_norm leaves its branches without any norm; use "
            "post_norm=RMSNorm(), as OLMo 2 does"
        )
    return found


def _norm_problems(name: str, norm: Any) -> list[str]:
    if not isinstance(norm, NormConfig):
        return [f"{name}={norm!r}; use RMSNorm(), or LayerNorm()"]
    eps = f"{name}: eps={norm.eps}; use {NEEDED[_positive]}, such as 1e-5"
    return [] if _positive(norm.eps) else [eps]


def _latent_violations(a: LatentAttentionConfig, where: str) -> list[str]:
    found = [
        f"{where}: {name}={value!r}; latent attention has one: use {such}"
        for name, value, kind, such in (
            ("rope", a.rope, Rope, "Rope()"),
            ("norm", a.norm, NormConfig, "RMSNorm(1e-6)"),
        )
        if not isinstance(value, kind)
    ]
    if not found:
        found += [f"{where}: rope: {each}" for each in a.rope.violations(a.rope_head_dim)]
    return found


def _mlp_violations(block: BlockConfig, where: str) -> list[str]:
    mlp, found = block.mlp, []
    if not callable(mlp.activation):
        found.append(
            f"{where}: mlp.activation={mlp.activation!r}; use a function of an array, such as silu"
        )
    for name in ("gated", "bias"):
        if not isinstance(value := getattr(mlp, name, False), bool):
            found.append(f"{where}: mlp.{name}={value!r}; use True or False")
    return found + (_moe_violations(mlp, where) if isinstance(mlp, MoeConfig) else [])


def _moe_violations(mlp: MoeConfig, where: str) -> list[str]:
    """What is wrong with the parts of a mixture of experts, whose counts are sound."""
    experts, chosen = mlp.experts, mlp.experts_per_token
    if chosen > experts:
        return [
            f"{where}: mlp.experts_per_token={chosen} are more than mlp.experts={experts}; use at "
            "most that many"
        ]
    kinds = {
        "router": (SoftmaxRouter | SigmoidRouter, "SoftmaxRouter() or SigmoidRouter()"),
        "shared": (SharedExpert | None, "SharedExpert(hidden), or None"),
        "capacity": (Capacity | None, "Capacity(1.25), or None"),
        "balance": (Balance | None, "Balance(loss_weight=0.01), or None"),
    }
    for name, (kind, instead) in kinds.items():
        if not isinstance(value := getattr(mlp, name), kind):
            return [f"{where}: mlp.{name}={value!r}; use {instead}"]
    found = {"router": mlp.router.violations(experts, chosen)}
    if mlp.shared is not None:
        sound = _whole(mlp.shared.hidden) and mlp.shared.hidden <= SIZE
        wrong = f"hidden={mlp.shared.hidden}; use a whole number of at least 1"
        found["shared"] = [] if sound else [wrong]
    if mlp.capacity is not None:
        found["capacity"] = mlp.capacity.violations()
    if mlp.balance is not None and not found["router"]:
        found["balance"] = mlp.balance.violations(mlp.router)
    return [f"{where}: mlp.{name}.{each}" for name, some in found.items() for each in some]


def _counts(block: BlockConfig) -> dict[str, Any]:
    """The fields of a block that count something, by name."""
    a, mlp = block.attention, block.mlp
    counts = {"heads": a.heads, "mlp.hidden": mlp.hidden}
    if isinstance(a, LatentAttentionConfig):
        names = ("latent", "nope_head_dim", "rope_head_dim", "value_head_dim", "query_latent")
        counts |= {name: getattr(a, name) for name in names}
        if a.query_latent is None:
            del counts["query_latent"]
    else:
        counts["kv_heads"] = a.key_heads
    if isinstance(mlp, MoeConfig):
        counts |= {"mlp.experts": mlp.experts, "mlp.experts_per_token": mlp.experts_per_token}
    return counts


def _layers_unknown(config: DecoderFields) -> list[str]:
    """What keeps the layers from being counted at all."""
    found = []
    if not isinstance(config.layers, int) or isinstance(config.layers, bool):
        found.append(f"layers={config.layers!r}; use a whole number")
    for name in ("period", "prefix", "suffix"):
        blocks = getattr(config, name)
        if not isinstance(blocks, tuple) or not all(hasattr(b, "attention") for b in blocks):
            found.append(f"{name}={blocks!r}; use a tuple of BlockConfig, such as (block,)")
    return found or too_many("layers", config.layers, LAYERS)


def _beyond_any(config: DecoderFields) -> list[str]:
    """Counts that no model has."""
    found = []
    for name in ("vocab", "embed", "vocab_multiple", "chunk_tokens", "learned_positions"):
        found += too_many(name, getattr(config, name), SIZE)
    for at, block in enumerate(dict.fromkeys(config.blocks)):
        optional = {k: getattr(block.attention, k, None) for k in ("head_dim", "window")}
        sizes = _counts(block) | optional
        for name, size in sizes.items():
            most = EXPERTS if name.startswith("mlp.experts") else SIZE
            found += too_many(f"block {at}: {name}", size, most)
    experts = [getattr(block.mlp, "experts", 0) for block in config.blocks]
    whole = all(isinstance(each, int) for each in experts)
    return found + (
        too_many("mlp.experts of all layers", sum(experts), ALL_EXPERTS) if whole else []
    )


def too_many(name: str, value: object, most: int) -> list[str]:
    """That a count is beyond any model's; of what is no count nothing is said."""
    if not isinstance(value, int) or value <= most:
        return []
    shown = value if value < 10**20 else "a number of more than 20 digits"
    return [f"{name}={shown} is more than any model has; use {most} or less"]


def _scale_violations(config: DecoderFields) -> list[str]:
    """Numbers that would make every loss NaN or infinite."""
    scales = {
        "embedding_scale": config.embedding_scale,
        "logit_scale": config.logit_scale,
        "init.std": config.init.std,
        "init.embedding_std": config.init.embedding_std,
    }
    return [
        f"{name}={value}; use a finite number, such as 1.0"
        for name, value in scales.items()
        if not _finite(value) and not (value is None and name.startswith("init"))
    ]


def _whole(value: object) -> bool:
    """Whether it counts something: a whole number from 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _finite(value: object) -> TypeGuard[float]:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _positive(value: object) -> bool:
    return _finite(value) and value > 0


NEEDED = {_whole: "a whole number of at least 1", _positive: "a positive number"}


def _share(value: object) -> bool:
    return _finite(value) and 0.0 <= value < 1.0
