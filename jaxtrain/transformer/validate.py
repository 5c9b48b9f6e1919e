"""Violations of a decoder's fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.attention.rotary.rope import Rope
from jaxtrain.moe.router import Balance, Capacity, SigmoidRouter, SoftmaxRouter
from jaxtrain.nn.norm import NormConfig, RMSNorm
from jaxtrain.remedies import Clash, Near, NearSizes, under
from jaxtrain.scores.function import ScoreFunction
from jaxtrain.transformer.attention import AttentionConfig
from jaxtrain.transformer.block import BlockConfig
from jaxtrain.transformer.decoder_fields import DecoderFields
from jaxtrain.transformer.latent import LatentAttentionConfig
from jaxtrain.transformer.mixture import MoeConfig, SharedExpert

LAYERS, EXPERTS, ALL_EXPERTS, SIZE = 2**14, 2**14, 2**20, 2**31 - 1
"""Upper limits: ten times the deepest and the most divided models known, and the range of a 32-bit
index. A larger config is no model, and would be listed layer by layer."""


def violations(config: DecoderFields) -> list[str]:
    """Returns each wrong field with its remedy; remedies of clashes are not tried yet."""
    if problems := _layers_unknown(config):
        return problems
    fixed, n = len(config.prefix) + len(config.suffix), len(config.period)
    if (config.layers - fixed) % n or config.layers - fixed < n:
        near = fixed + max(1, (config.layers - fixed) // n) * n
        problems.append(
            f"layers={config.layers} is not prefix + suffix ({fixed}) plus a multiple of the "
            f"period ({n} blocks); use layers={near} or {near + n}"
        )
        return problems
    for name in ("vocab", "embed", "vocab_multiple"):
        if not _whole(getattr(config, name)):
            problems.append(f"{name}={getattr(config, name)}; use a whole number of at least 1")
    optional = {"chunk_tokens": _whole, "learned_positions": _whole, "logit_softcap": _positive}
    for name, holds in optional.items():
        value = getattr(config, name)
        if value is not None and not holds(value):
            problems.append(f"{name}={value}; use {NEEDED[holds]}, or None")
    problems += _beyond_any(config)
    problems += _scale_violations(config) + _norm_problems("norm", config.norm)
    if not _whole(config.embed):
        return problems  # heads are checked against it
    problems += _of_blocks(config)
    if not _share(config.dropout):
        problems.append(f"dropout={config.dropout}; use a share in [0, 1)")
    return problems


def _of_blocks(config: DecoderFields) -> list[str]:
    """Violations of blocks, each cause once; distinct blocks are numbered in their order."""
    causes: dict[str, list[int]] = {}
    for number, block in enumerate(dict.fromkeys(config.blocks)):
        for violation in _block_violations(block, config.embed):
            causes.setdefault(violation, []).append(number)
    return [line for cause, numbers in causes.items() for line in under(_blocks(numbers), [cause])]


def _blocks(numbers: list[int]) -> str:
    """`block 0: `, or `blocks 0, 1 and 3 more: `."""
    if len(numbers) == 1:
        return f"block {numbers[0]}: "
    many = f"{len(numbers) - 2} more" if len(numbers) > 3 else f"{numbers[-1]}"
    return f"blocks {', '.join(map(str, numbers[: 2 if len(numbers) > 2 else 1]))} and {many}: "


def _block_violations(block: BlockConfig, embed: int) -> list[str]:
    """Violations of a block, without its number."""
    counts = _counts(block)
    if missing := [f"{name}={count}" for name, count in counts.items() if not _whole(count)]:
        return [f"{', '.join(missing)}; use a whole number of at least 1"]
    violations = _mlp_violations(block) + _norm_violations(block)
    violations += _attention_violations(block.attention, embed)
    if not _finite(block.residual_scale):
        violations.append(f"residual_scale={block.residual_scale}; use a finite number")
    if not _share(block.dropout):
        violations.append(f"dropout={block.dropout}; use a share in [0, 1)")
    return violations


def _attention_violations(a: AttentionConfig | LatentAttentionConfig, embed: int) -> list[str]:
    """Violations of a block's attention, whose counts are valid."""
    violations: list[str] = []
    kinds = {"head_dim": _whole, "window": _whole, "softcap": _positive, "scale": _positive}
    for name, holds in kinds.items():
        value = getattr(a, name, None)
        if value is not None and not holds(value):
            violations.append(f"{name}={value}; use {NEEDED[holds]}, or None")
    if isinstance(a, LatentAttentionConfig):
        return violations + _latent_violations(a)
    violations += _score_violations(a)
    if a.head_dim is not None and not _whole(a.head_dim):
        return violations
    sizes = {"embed": embed, "heads": a.heads, "head_dim": a.head_dim}
    heads, size = Near("heads", a.heads), Near("head_dim", max(a.size(embed), 1))
    uneven = a.head_dim is None and embed % a.heads != 0
    if uneven:
        near = embed // a.heads * a.heads or a.heads
        violations.append(
            Clash(
                f"embed={embed} is not a multiple of heads={a.heads}",
                f"use embed={near}, or set head_dim",
                sizes=sizes,
                ways=[(Near("embed", embed, a.heads),), (size,), (heads,)],
                joint=[(heads, size)],
            )
        )
    if a.heads % a.key_heads:
        fitting = max(k for k in range(1, min(a.heads, a.key_heads) + 1) if a.heads % k == 0)
        of_keys = Near("kv_heads", a.key_heads)
        violations.append(
            Clash(
                f"heads={a.heads} is not a multiple of kv_heads={a.key_heads}",
                f"use kv_heads={fitting}",
                sizes={"heads": a.heads, "kv_heads": a.kv_heads},
                ways=[(of_keys,), (Near("heads", a.heads, a.key_heads),)],
                joint=[(heads, of_keys), (heads, of_keys, size)],
            )
        )
    if a.rope is not None and not uneven:
        derived = f"embed={embed} // heads={a.heads} = {a.size(embed)} dims"
        embeds = Near("embed", embed, a.heads)
        violations += _unturned(
            a.rope,
            size=a.size(embed),
            described=derived if a.head_dim is None else f"head_dim={a.head_dim}",
            sizes=sizes,
            ways=[(size,)] if a.head_dim is not None else [(embeds,), (size,), (heads,)],
        )
    if a.qk_norm_across_heads and not isinstance(a.qk_norm, RMSNorm):
        violations.append(
            f"qk_norm_across_heads={a.qk_norm_across_heads!r} with qk_norm="
            f"{a.qk_norm!r}; use an RMSNorm, or False"
        )
    return violations


def _score_violations(a: AttentionConfig) -> list[str]:
    if a.scores is None:
        return []
    if not isinstance(a.scores, ScoreFunction):
        return [
            f"scores={a.scores!r}; use Alibi(), RelativeBias(), a frozen dataclass derived from "
            "jaxtrain.scores.ScoreFunction, or None"
        ]
    kind = type(a.scores)
    if "__dataclass_params__" not in vars(kind):
        return [
            f"scores={a.scores!r}: put @dataclass(frozen=True) above class {kind.__name__}, so "
            "that a run records its fields"
        ]
    if a.scores.trained and kind.of_heads is ScoreFunction.of_heads:
        return [
            f"scores={a.scores!r} has trained=True and no of_heads(heads); return from it the "
            "values that the heads begin with"
        ]
    try:
        values = np.asarray(a.scores.of_heads(a.heads))
    except Exception as error:  # whatever a user's method raises
        return [f"scores={a.scores!r}: of_heads({a.heads}) raises {type(error).__name__}: {error}"]
    if values.shape[:1] != (a.heads,) or (a.scores.trained and values.ndim > 2):
        needed = f"[{a.heads}] or [{a.heads}, n]" if a.scores.trained else f"[{a.heads}, ...]"
        return [
            f"scores={a.scores!r}: of_heads({a.heads}) has the shape {[*values.shape]}; return "
            f"{needed}, values for each head"
        ]
    return _call_violations(a.scores, values)


def _call_violations(function: ScoreFunction, values: np.ndarray) -> list[str]:
    """Violations of a function of scores. It is called for shapes: an array would take devices."""
    score, place = (jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, jnp.int32))
    kind = jax.dtypes.canonicalize_dtype(jnp.float32 if function.trained else values.dtype)
    head = jax.ShapeDtypeStruct(values.shape[1:], kind)
    try:
        out = jax.eval_shape(function, score, head, place, place)
    except Exception as error:  # whatever a user's function raises
        line = (str(error).splitlines() or [""])[0]
        return [
            f"scores={function!r}, called with score, head {[*head.shape]}, query and key, raises "
            f"{type(error).__name__}: {line}; use jax.numpy alone, and jnp.where in the place of if"
        ]
    dtype = getattr(out, "dtype", None)
    if dtype is None or out.shape != () or not jnp.issubdtype(dtype, jnp.floating):
        result = type(out).__name__ if dtype is None else f"{dtype}{[*out.shape]}"
        return [
            f"scores={function!r} returns {result} of a score, head {[*head.shape]}, query and "
            "key; return a floating scalar, the changed score"
        ]
    return []


def _unturned(
    rope: Rope,
    *,
    size: int,
    described: str,
    sizes: Mapping[str, int | None],
    ways: Sequence[NearSizes],
) -> list[str]:
    """Reasons why heads of this size cannot be turned. described: the size in terms of fields."""
    violations: list[str] = []
    for violation in rope.violations(size):
        rule, _, remedy = violation.partition("; ")
        other = rule.replace(f"head_dim={size}", described)
        rule = other if described in other else f"{other} ({described})"
        violations.append(Clash(f"rope: {rule}", remedy, sizes=sizes, ways=ways))
    return violations


def _norm_violations(block: BlockConfig) -> list[str]:
    a, norms = block.attention, {"norm": block.norm, "post_norm": block.post_norm}
    if isinstance(a, AttentionConfig):
        norms["qk_norm"] = a.qk_norm
    elif isinstance(a.norm, NormConfig):
        norms["attention.norm"] = a.norm
    present = {name: norm for name, norm in norms.items() if norm is not None}
    problems = [line for name, norm in present.items() for line in _norm_problems(name, norm)]
    if block.norm is None and block.post_norm is None:
        problems.append(
            "norm=None without post_norm leaves its branches without any norm; use "
            "post_norm=RMSNorm(), as OLMo 2 does"
        )
    return problems


def _norm_problems(name: str, norm: Any) -> list[str]:
    if not isinstance(norm, NormConfig):
        return [f"{name}={norm!r}; use RMSNorm(), or LayerNorm()"]
    eps = f"{name}: eps={norm.eps}; use {NEEDED[_positive]}, such as 1e-5"
    return [] if _positive(norm.eps) else [eps]


def _latent_violations(a: LatentAttentionConfig) -> list[str]:
    violations = [
        f"{name}={value!r}; latent attention has one: use {such}"
        for name, value, kind, such in (
            ("rope", a.rope, Rope, "Rope()"),
            ("norm", a.norm, NormConfig, "RMSNorm(1e-6)"),
        )
        if not isinstance(value, kind)
    ]
    if not violations:
        size = a.rope_head_dim
        sizes: dict[str, int | None] = {"rope_head_dim": size, "latent": a.latent}
        violations += _unturned(
            a.rope,
            size=size,
            described=f"rope_head_dim={size}",
            sizes=sizes,
            ways=[(Near("rope_head_dim", size),)],
        )
    return violations


def _mlp_violations(block: BlockConfig) -> list[str]:
    mlp, violations = block.mlp, []
    if not callable(mlp.activation):
        violations.append(
            f"mlp.activation={mlp.activation!r}; use a function of an array, such as silu"
        )
    for name in ("gated", "bias"):
        if not isinstance(value := getattr(mlp, name, False), bool):
            violations.append(f"mlp.{name}={value!r}; use True or False")
    return violations + (_moe_violations(mlp) if isinstance(mlp, MoeConfig) else [])


def _moe_violations(mlp: MoeConfig) -> list[str]:
    """Violations of the parts of a mixture of experts, whose counts are valid."""
    experts, chosen = mlp.experts, mlp.experts_per_token
    if chosen > experts:
        return [
            f"mlp.experts_per_token={chosen} are more than mlp.experts={experts}; use "
            f"experts_per_token={experts} or less"
        ]
    kinds = {
        "router": (SoftmaxRouter | SigmoidRouter, "SoftmaxRouter() or SigmoidRouter()"),
        "shared": (SharedExpert | None, "SharedExpert(hidden), or None"),
        "capacity": (Capacity | None, "Capacity(1.25), or None"),
        "balance": (Balance | None, "Balance(loss_weight=0.01), or None"),
    }
    for name, (kind, instead) in kinds.items():
        if not isinstance(value := getattr(mlp, name), kind):
            return [f"mlp.{name}={value!r}; use {instead}"]
    violations = {"router": mlp.router.violations(experts, chosen)}
    if mlp.shared is not None:
        sound = _whole(mlp.shared.hidden) and mlp.shared.hidden <= SIZE
        wrong = f"hidden={mlp.shared.hidden}; use a whole number of at least 1"
        violations["shared"] = [] if sound else [wrong]
    if mlp.capacity is not None:
        violations["capacity"] = mlp.capacity.violations()
    if mlp.balance is not None and not violations["router"]:
        violations["balance"] = mlp.balance.violations(mlp.router)
    return [f"mlp.{name}.{line}" for name, lines in violations.items() for line in lines]


def _counts(block: BlockConfig) -> dict[str, Any]:
    """Fields of a block that are counts, by name."""
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
    """Violations that prevent counting the layers."""
    violations = []
    if not isinstance(config.layers, int) or isinstance(config.layers, bool):
        violations.append(f"layers={config.layers!r}; use a whole number")
    for name in ("period", "prefix", "suffix"):
        blocks = getattr(config, name)
        if not isinstance(blocks, tuple) or not all(hasattr(b, "attention") for b in blocks):
            violations.append(f"{name}={blocks!r}; use a tuple of BlockConfig, such as (block,)")
            continue
        try:
            hash(blocks)
        except TypeError as error:
            violations.append(f"{name}: a block has a field of {error}; use numbers and tuples")
    if config.period == ():
        violations.append("period=() has no block to repeat; use period=(block,)")
    return violations or too_many("layers", config.layers, LAYERS)


def _beyond_any(config: DecoderFields) -> list[str]:
    """Counts that are larger than any model's."""
    violations = []
    for name in ("vocab", "embed", "vocab_multiple", "chunk_tokens", "learned_positions"):
        violations += too_many(name, getattr(config, name), SIZE)
    for number, block in enumerate(dict.fromkeys(config.blocks)):
        optional = {k: getattr(block.attention, k, None) for k in ("head_dim", "window")}
        sizes = _counts(block) | optional
        for name, size in sizes.items():
            most = EXPERTS if name.startswith("mlp.experts") else SIZE
            violations += too_many(f"block {number}: {name}", size, most)
    experts = [getattr(block.mlp, "experts", 0) for block in config.blocks]
    countable = all(isinstance(count, int) for count in experts)
    return violations + (
        too_many("mlp.experts of all layers", sum(experts), ALL_EXPERTS) if countable else []
    )


def too_many(name: str, value: object, most: int) -> list[str]:
    """Violation for a count that is larger than any model's; none for other values."""
    if not isinstance(value, int) or value <= most:
        return []
    shown = value if value < 10**20 else "a number of more than 20 digits"
    return [f"{name}={shown} is more than any model has; use {most} or less"]


def _scale_violations(config: DecoderFields) -> list[str]:
    """Scales that would make every loss NaN or infinite."""
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
    """True for a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _finite(value: object) -> TypeGuard[float]:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value)


def _positive(value: object) -> bool:
    return _finite(value) and value > 0


NEEDED = {_whole: "a whole number of at least 1", _positive: "a positive number"}


def _share(value: object) -> bool:
    return _finite(value) and 0.0 <= value < 1.0
