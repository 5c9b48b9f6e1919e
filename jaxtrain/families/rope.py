"""Rotary embeddings in a config.json, in both spellings.

Up to version 4 `transformers` has `rope_theta` and, null for none, `rope_scaling`; from version 5
one object `rope_parameters`. Both versions read the older spelling, which is therefore written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain.attention.rotary.rope import Rope
from jaxtrain.attention.rotary.scaling import (
    DynamicNtk,
    LinearScaling,
    Llama3Scaling,
    LongRope,
    RopeScaling,
    Yarn,
)
from jaxtrain.families.fields import Fields

Kinds = Mapping[str, Callable[[Fields, Fields], RopeScaling | None]]
"""By rope_type, what reads a scaling out of the object's fields and those around it."""


def _llama3(inner: Fields, fields: Fields) -> RopeScaling:
    return Llama3Scaling(
        inner.number("factor"),
        inner.number("low_freq_factor"),
        inner.number("high_freq_factor"),
        _original(inner, fields),
    )


_MSCALES = ("mscale", "mscale_all_dim")


def _yarn(inner: Fields, fields: Fields) -> RopeScaling:
    original = _original(inner, fields)
    return Yarn(
        _factor(inner, fields, original),
        original,
        inner.number_or_none("beta_fast") or 32.0,
        inner.number_or_none("beta_slow") or 1.0,
        inner.number_or_none("attention_factor"),
        # 0 is as good as none to `transformers`.
        *(None if inner.value(k) == 0 else inner.number_or_none(k) for k in _MSCALES),
        truncate=inner.value("truncate") is None or inner.flag("truncate"),
    )


def _longrope(inner: Fields, fields: Fields) -> RopeScaling:
    original = _original(inner, fields)
    return LongRope(
        inner.numbers("short_factor"),
        inner.numbers("long_factor"),
        _factor(inner, fields, original),
        original,
        inner.number_or_none("attention_factor"),
    )


def _original(inner: Fields, fields: Fields) -> int:
    """Returns the sequence length of the first training; a field outside the object is
    preferred."""
    name = "original_max_position_embeddings"
    outside, inside = fields.count_or_none(name), inner.count_or_none(name)
    return outside or inside or fields.count("max_position_embeddings")


def _factor(inner: Fields, fields: Fields, original: int) -> float:
    factor = inner.number_or_none("factor")
    return factor or fields.count("max_position_embeddings") / original


KINDS: Kinds = {
    "default": lambda inner, fields: None,
    "linear": lambda inner, fields: LinearScaling(inner.number("factor")),
    "dynamic": lambda inner, fields: DynamicNtk(
        inner.number("factor"), fields.count("max_position_embeddings")
    ),
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


def read_rope(fields: Fields, kinds: Kinds = KINDS, *, partial: bool = False) -> Rope:
    """Returns the rotary embedding; adds its problems to `fields`. partial: a part of each head may
    be rotated."""
    objects = [fields.value(name) for name in ("rope_scaling", "rope_parameters")]
    theta, share = fields.value("rope_theta"), fields.value("partial_rotary_factor")
    fields.value("original_max_position_embeddings")  # of which a scaling asks
    object_ = next(
        (candidate for candidate in objects if candidate), {}
    )  # version 5 prefers them in this order
    if not isinstance(object_, dict):
        fields.problems.append(f"rope_scaling={object_!r}; use an object, or null for none")
        object_ = {}
    prefix = "rope_scaling." if objects[0] else "rope_parameters."
    outside = {
        "rope_theta": 10000.0 if theta is None else theta,
        "partial_rotary_factor": 1.0 if share is None else share,
    }
    return rope_of(Fields({**outside, **object_}, prefix), fields, kinds, partial=partial)


def rope_of(inner: Fields, fields: Fields, kinds: Kinds, *, partial: bool = False) -> Rope:
    """Returns the rotary embedding in `inner`, an object of config.json within `fields`, to which
    all problems are added. kinds, partial: as in `read_rope`."""
    rope, path = Rope(), inner.prefix.rstrip(".")
    try:
        theta, share = inner.number("rope_theta"), inner.number("partial_rotary_factor")
        if not partial and share != 1.0:
            inner.only("partial_rotary_factor", 1.0)
        rope = Rope(theta, _scaling(inner, fields, kinds), share if partial else 1.0)
    except ValueError as error:  # the values' own checks
        if not inner.problems:
            inner.problems.append(f"{path}: {error}")
    fields.problems += inner.problems + inner.unknown()
    return rope


def read_phi3_rope(fields: Fields) -> Rope:
    """Returns Phi 3's rotary embedding, which may rotate a part of each head; older files have two
    other names of LongRoPE."""
    names = dict.fromkeys(("longrope", "su", "yarn"), KINDS["longrope"])
    return read_rope(fields, {"default": KINDS["default"], **names}, partial=True)


def read_layer_ropes(fields: Fields) -> dict[str, Rope]:
    """Returns the rotary embeddings of Gemma 3 by `layer_types`: with `rope_theta` and its scaling
    for layers with full attention, with `rope_local_base_freq` for those with windows."""
    by_type = fields.value("rope_parameters") or {}
    scaling, names = fields.value("rope_scaling") or {}, ("full_attention", "sliding_attention")
    thetas = [fields.value(name) for name in ("rope_theta", "rope_local_base_freq")]
    fields.value("original_max_position_embeddings")
    objects = [by_type, scaling, *(by_type.values() if isinstance(by_type, dict) else [])]
    if not all(isinstance(entry, dict | None) for entry in objects) or {*by_type} - {*names}:
        fields.problems.append(
            f"rope_parameters={by_type!r} with rope_scaling={scaling!r}; use an object of objects "
            f"for {' and '.join(names)}, and an object, or null for none"
        )
        return dict.fromkeys(names, Rope())
    ropes = {}
    for name, theta, otherwise, own in zip(names, thetas, (1e6, 1e4), (scaling, {}), strict=True):
        inside = {"partial_rotary_factor": 1.0, "rope_theta": otherwise if theta is None else theta}
        inner = Fields({**inside, **(by_type.get(name) or {}), **own}, f"rope_parameters.{name}.")
        ropes[name] = rope_of(inner, fields, KINDS)
    return ropes


def _scaling(inner: Fields, fields: Fields, kinds: Kinds) -> RopeScaling | None:
    kind = inner.value("type")
    kind = inner.value("rope_type") or kind or "default"
    if isinstance(kind, str) and kind in kinds:
        return kinds[kind](inner, fields)
    inner.problems.append(f"{inner.prefix}rope_type={kind!r}; use {', '.join(kinds)}")
    inner.used.update(inner.content)  # no messages about the fields of an unknown kind
    return None


def write_rope(rope: Rope | None) -> dict[str, Any]:
    """Returns the fields of a rotary embedding; without its scaling if `transformers` does not know
    it."""
    rope = rope or Rope()
    fields: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": written(rope.scaling)}
    if isinstance(rope.scaling, DynamicNtk):  # which goes by no other length
        fields["max_position_embeddings"] = rope.scaling.original_seq
    return fields


def written(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Returns a scaling as an object; None for no scaling and for one that `transformers` does not
    know."""
    fields: dict[str, Any] | None = None
    match scaling:
        case LinearScaling(factor):
            fields = {"rope_type": "linear", "factor": factor}
        case DynamicNtk(factor):
            fields = {"rope_type": "dynamic", "factor": factor}
        case Llama3Scaling(factor, low, high):
            fields = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
            }
        case Yarn(factor, _, fast, slow):
            fields = {"rope_type": "yarn", "factor": factor, "beta_fast": fast, "beta_slow": slow}
            fields |= _set_fields(scaling, "attention_factor", "mscale", "mscale_all_dim")
            fields |= {} if scaling.truncate else {"truncate": False}
        case LongRope(short, long, factor):
            fields = {
                "rope_type": "longrope",
                "short_factor": list(short),
                "long_factor": list(long),
                "factor": factor,
                **_set_fields(scaling, "attention_factor"),
            }
    if isinstance(scaling, Llama3Scaling | Yarn | LongRope):
        fields = {**(fields or {}), "original_max_position_embeddings": scaling.original_seq}
    return fields


def _set_fields(scaling: RopeScaling, *names: str) -> dict[str, Any]:
    """Returns those of the named fields that are not None."""
    return {name: getattr(scaling, name) for name in names if getattr(scaling, name) is not None}
