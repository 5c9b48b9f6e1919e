"""Rotary embeddings in a config.json, in both spellings.

Up to version 4 `transformers` has `rope_theta` and, null for none, `rope_scaling`; from version 5
one object `rope_parameters`. Both versions read the older spelling, which is therefore written.
"""

from __future__ import annotations

from typing import Any

from jaxtrain.nn.rotary import LinearScaling, Llama3Scaling, Rope, RopeScaling
from jaxtrain.weights.huggingface.fields import Fields


def read_rope(fields: Fields) -> Rope:
    """The rotary embedding, its problems among those of `fields`."""
    fields.only("partial_rotary_factor", 1.0)
    found = [fields.value(name) for name in ("rope_scaling", "rope_parameters")]
    theta = fields.value("rope_theta")
    object_ = next((each for each in found if each), {})  # version 5 prefers them in this order
    if not isinstance(object_, dict):
        fields.problems.append(f"rope_scaling={object_!r}; use an object, or null for none")
        object_ = {}
    where = "rope_scaling." if found[0] else "rope_parameters."
    inner = Fields({"rope_theta": 10000.0 if theta is None else theta, **object_}, where)
    rope = Rope()
    try:
        rope = Rope(inner.number("rope_theta"), _scaling(inner, fields))
    except ValueError as error:  # the values' own checks
        if not inner.problems:
            inner.problems.append(f"{where.rstrip('.')}: {error}")
    fields.problems += inner.problems + inner.unknown()
    return rope


def _scaling(inner: Fields, fields: Fields) -> RopeScaling | None:
    inner.only("partial_rotary_factor", 1.0)
    kind = inner.value("type")
    kind = inner.value("rope_type") or kind or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(inner.number("factor"))
    if kind == "llama3":
        original = inner.count_or_none("original_max_position_embeddings")
        return Llama3Scaling(
            inner.number("factor"),
            inner.number("low_freq_factor"),
            inner.number("high_freq_factor"),
            original or fields.count("max_position_embeddings"),
        )
    inner.problems.append(f"{inner.where}rope_type={kind!r}; use default, linear or llama3")
    inner.taken.update(inner.given)  # of a kind that nobody knows no field is known
    return None


def write_rope(rope: Rope | None) -> dict[str, Any]:
    """The fields of a rotary embedding; of a scaling unknown there, none."""
    scaling: dict[str, Any] | None = None
    match rope.scaling if rope else None:
        case LinearScaling(factor):
            scaling = {"rope_type": "linear", "factor": factor}
        case Llama3Scaling(factor, low, high, original):
            scaling = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    return {"rope_theta": rope.theta if rope else Rope().theta, "rope_scaling": scaling}
