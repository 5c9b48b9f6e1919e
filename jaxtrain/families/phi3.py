"""Phi 3 and 4: Llama's layers, with queries, keys and values in one tensor and so gate and up."""

from __future__ import annotations

from typing import Any

from jaxtrain.attention.rotary.scaling import LongRope
from jaxtrain.families.family import Family, Tensor
from jaxtrain.families.fields import Fields
from jaxtrain.families.llama import (
    BUFFERS,
    LAYER,
    NORMS,
    beside_products,
    plain_attention,
    read_llama,
    write_llama,
)
from jaxtrain.transformer.decoder import DecoderConfig

_PRODUCTS = {
    "self_attn.qkv_proj": ("attention.query", "attention.key", "attention.value"),
    "self_attn.o_proj": ("attention.out",),
    "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
    "mlp.down_proj": ("mlp.down",),
}


def write_phi3(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields nearest to a config; those that all layers share from the first."""
    fields = write_llama(config, "phi3")
    attention = plain_attention(config.blocks[0])
    if attention.size(config.embed) * attention.heads == config.embed:
        del fields["head_dim"]  # no published folder has it
    # Missing, the vocabulary would need a row of this number.
    fields |= {"pad_token_id": None, "sliding_window": attention.window}
    rope = attention.rope
    if rope is not None and rope.partial_rotary_factor != 1.0:
        fields["partial_rotary_factor"] = rope.partial_rotary_factor
    if rope is None or not isinstance(rope.scaling, LongRope):
        return fields
    scaling, longest = rope.scaling, rope.scaling.factor * rope.scaling.original_seq
    object_ = dict(fields["rope_scaling"])
    fields["original_max_position_embeddings"] = object_.pop("original_max_position_embeddings")
    # As published, and version 4 takes no other: the factor is that of the longest sequence.
    if longest == int(longest) and int(longest) / scaling.original_seq == scaling.factor:
        fields["max_position_embeddings"] = int(longest)
        del object_["factor"]
    object_["type"] = object_.pop("rope_type")
    return {**fields, "rope_scaling": object_}


def read_phi3(fields: Fields) -> DecoderConfig:
    for name in ("full_attn_mod", "interpolate_factor"):  # of Phi-4-mini, and of no other value
        fields.only(name, 1)
    return read_llama(fields, "phi3")


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    base="model.",
    tensors=(
        *beside_products(NORMS),
        *(
            Tensor(f"{LAYER}{name}.weight", leaves, transposed=True)
            for name, leaves in _PRODUCTS.items()
        ),
    ),
    buffers=BUFFERS,
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
    read=read_phi3,
    write=write_phi3,
)
