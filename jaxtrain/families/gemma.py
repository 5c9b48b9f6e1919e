"""Gemma 2 and the text of Gemma 3: norms before and behind each branch, most layers with windows.

Scales of norms are stored less one, and embeddings are multiplied by the root of their width, in
the dtype that is computed in.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from jaxtrain.attention.rotary.rope import Rope
from jaxtrain.families.family import (
    ACTIVATIONS,
    Family,
    activation_name,
    eps_of,
    find_period,
)
from jaxtrain.families.fields import Fields
from jaxtrain.families.llama import (
    BUFFERS,
    FULL,
    SLIDING,
    layer_kinds,
    plain_attention,
    tensors_with,
)
from jaxtrain.families.rope import read_layer_ropes, read_rope, write_rope
from jaxtrain.nn.norm import RMSNorm
from jaxtrain.transformer.attention import AttentionConfig
from jaxtrain.transformer.block import BlockConfig
from jaxtrain.transformer.decoder import DecoderConfig
from jaxtrain.transformer.feed_forward import MlpConfig, gelu_tanh
from jaxtrain.transformer.validate import LAYERS

_GEMMA3 = "gemma3_text"
_NAMES = {"gelu_pytorch_tanh": gelu_tanh, **ACTIVATIONS}
_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}


def read_gemma(fields: Fields, kind: str) -> DecoderConfig:
    """Returns the config of either; `kind` is its model_type."""
    embed, layers = fields.count("hidden_size"), fields.count("num_hidden_layers", most=LAYERS)
    norm = RMSNorm(eps=fields.number("rms_norm_eps"), unit_offset=True)
    biased = fields.flag("attention_bias")
    attention = AttentionConfig(
        heads=fields.count("num_attention_heads"),
        kv_heads=fields.count("num_key_value_heads"),
        head_dim=fields.count("head_dim"),
        scale=fields.number("query_pre_attn_scalar") ** -0.5,
        qkv_bias=biased,
        out_bias=biased,
    )
    if kind == _GEMMA3:
        fields.multiple("hidden_size", divisor="num_attention_heads")
        fields.only(
            "attn_logit_softcapping", None
        )  # which `transformers` reads, and does not apply
        ropes = read_layer_ropes(fields)
    else:
        ropes = dict.fromkeys((FULL, SLIDING), read_rope(fields))
    windows = {FULL: None, SLIDING: fields.count("sliding_window")}
    fields.value("hidden_act")  # beside the name that counts
    mlp = MlpConfig(fields.count("intermediate_size"), fields.choice("hidden_activation", _NAMES))
    softcap = fields.number_or_none("attn_logit_softcapping") if kind == "gemma2" else None
    qk_norm = norm if kind == _GEMMA3 else None

    def block(layer_type: str) -> BlockConfig:
        own = replace(attention, softcap=softcap, qk_norm=qk_norm)
        own = replace(own, rope=ropes[layer_type], window=windows[layer_type])
        return BlockConfig(own, mlp, norm=norm, post_norm=norm)

    prefix, period = find_period(tuple(map(block, _kinds(fields, kind, layers))))
    return DecoderConfig(
        vocab=fields.count("vocab_size"),
        embed=embed,
        layers=layers,
        norm=norm,
        tied=fields.flag("tie_word_embeddings"),
        embedding_scale=embed**0.5,
        logit_softcap=fields.number_or_none("final_logit_softcapping"),
        prefix=prefix,
        period=period,
    )


def _kinds(fields: Fields, kind: str, layers: int) -> list[str]:
    """Returns the kind of attention of each layer. By default, every second layer of Gemma 2 and
    every sixth of Gemma 3 has full attention."""
    pattern = fields.count("sliding_window_pattern") if kind == _GEMMA3 else 2
    return layer_kinds(
        fields, [SLIDING if layer % pattern else FULL for layer in range(1, layers + 1)]
    )


def write_gemma(config: DecoderConfig, kind: str) -> dict[str, Any]:
    """Returns the fields nearest to a config; those that all layers share from the first."""
    block = config.blocks[0]
    attentions = [plain_attention(layer) for layer in config.blocks]
    attention, size = attentions[0], attentions[0].size(config.embed)
    windowed = [layer.window is not None for layer in attentions]
    by_kind = {layer.window is None: layer for layer in attentions}
    full, sliding = (by_kind.get(is_full, attention) for is_full in (True, False))
    scale = size**-0.5 if attention.scale is None else attention.scale
    fields: dict[str, Any] = {
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "intermediate_size": block.mlp.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.key_heads,
        "head_dim": size,
        "hidden_activation": activation_name(block.mlp.activation, _NAMES),
        "rms_norm_eps": eps_of(block),
        "attention_bias": attention.qkv_bias,
        "query_pre_attn_scalar": max(round(scale**-2), 1),
        "final_logit_softcapping": config.logit_softcap,
        "tie_word_embeddings": config.tied,
        # Missing, the vocabulary would have a row of this number, or be refused.
        "pad_token_id": None,
        **write_rope(full.rope),
        "sliding_window": sliding.window or 4096,
        "layer_types": [SLIDING if has_window else FULL for has_window in windowed],
    }
    if kind == "gemma2":
        return fields | {"attn_logit_softcapping": attention.softcap}
    return fields | {"rope_local_base_freq": (sliding.rope or Rope(1e4)).theta}


def _family(kind: str, architecture: str, **defaults: Any) -> Family:
    return Family(
        model_type=kind,
        architecture=architecture,
        base="model.",
        tensors=tensors_with(_NORMS),
        buffers=BUFFERS,
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
            **defaults,
        },
        read=partial(read_gemma, kind=kind),
        write=partial(write_gemma, kind=kind),
    )


GEMMA2 = _family(
    "gemma2", "Gemma2ForCausalLM", attn_logit_softcapping=50.0, final_logit_softcapping=30.0
)
GEMMA3 = _family(_GEMMA3, "Gemma3ForCausalLM", sliding_window_pattern=6)
