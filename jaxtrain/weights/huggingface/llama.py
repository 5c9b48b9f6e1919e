"""Llama 2 and 3, Mistral, Qwen 2 and Qwen 3: one set of tensors, five readings of a config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxtrain.models.block import AttentionConfig, BlockConfig, MlpConfig
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.models.validate import LAYERS
from jaxtrain.nn.norm import RMSNorm
from jaxtrain.weights.huggingface.family import (
    ACTIVATIONS,
    Family,
    Tensor,
    activation_name,
    find_period,
)
from jaxtrain.weights.huggingface.fields import Fields
from jaxtrain.weights.huggingface.rope import read_rope, write_rope

FULL, SLIDING = "full_attention", "sliding_attention"

_ATTENTION = {
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.out",
}
_MLP = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}
_NORMS = {
    "input_layernorm": "attention_norm.scale",
    "self_attn.q_norm": "attention.query_norm.scale",
    "self_attn.k_norm": "attention.key_norm.scale",
    "post_attention_layernorm": "mlp_norm.scale",
}
LAYER = "model.layers.{layer}."


def linears(named: Mapping[str, str]) -> Iterator[Tensor]:
    """Torch's Linears of a layer, theirs -> ours, with the biases that the model has."""
    for name, leaf in named.items():
        yield Tensor(f"{LAYER}{name}.weight", (leaf,), transposed=True)
        yield Tensor(f"{LAYER}{name}.bias", (f"{leaf}_bias",))


BESIDE_MLP = (
    Tensor("model.embed_tokens.weight", ("embedding",)),
    *linears(_ATTENTION),
    *(Tensor(f"{LAYER}{name}.weight", (leaf,)) for name, leaf in _NORMS.items()),
    Tensor("model.norm.weight", ("norm.scale",)),
    Tensor("lm_head.weight", ("head",)),
)
TENSORS = (*BESIDE_MLP, *linears(_MLP))

DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def read_llama(fields: Fields, kind: str) -> DecoderConfig:
    """The config of any of them; `kind` is its model_type."""
    embed, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    norm = RMSNorm(eps=fields.number("rms_norm_eps"))
    if kind == "llama":  # which `transformers` refuses to load, whatever head_dim says
        fields.multiple("hidden_size", of="num_attention_heads")
    every_bias = kind in ("llama", "qwen3") and fields.flag("attention_bias")
    attention = AttentionConfig(
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", otherwise=heads),
        head_dim=fields.count("head_dim", otherwise=max(embed // heads, 1)),
        rope=read_rope(fields),
        qk_norm=norm if kind == "qwen3" else None,
        qkv_bias=kind == "qwen2" or every_bias,
        out_bias=every_bias,
    )
    mlp = MlpConfig(
        hidden=fields.count("intermediate_size"),
        activation=fields.choice("hidden_act", ACTIVATIONS),
        bias=kind == "llama" and fields.flag("mlp_bias"),
    )
    layers = fields.count("num_hidden_layers", most=LAYERS)
    blocks = tuple(
        BlockConfig(replace(attention, window=window), mlp, norm=norm)
        for window in _windows(fields, kind, layers)
    )
    prefix, period = find_period(blocks)
    return DecoderConfig(
        vocab=fields.count("vocab_size"),
        embed=embed,
        layers=layers,
        norm=norm,
        tied=fields.flag("tie_word_embeddings"),
        prefix=prefix,
        period=period,
    )


def _windows(fields: Fields, kind: str, layers: int) -> list[int | None]:
    """The window of each layer."""
    if kind == "llama":
        return [None] * layers
    if kind in ("mistral", "mixtral"):
        return [fields.count_or_none("sliding_window")] * layers
    window = fields.count_or_none("sliding_window")
    used = fields.flag("use_sliding_window")
    first = fields.value("max_window_layers")
    kinds = fields.value("layer_types")
    if kinds is None:
        if used and not (isinstance(first, int) and first >= 0):
            fields.problems.append(f"max_window_layers={first!r}; use a whole number")
            return [None] * layers
        kinds = [SLIDING if used and window and i >= first else FULL for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or set(kinds) - {FULL, SLIDING}:
        fields.problems.append(
            f"layer_types={kinds!r}; use {FULL} or {SLIDING} for each of {layers} layers"
        )
        return [None] * layers
    if SLIDING in kinds and not (used and window):
        fields.problems.append(
            f"layer_types has {SLIDING} with use_sliding_window={used} and sliding_window="
            f"{window}; give both, or {FULL} for every layer"
        )
    return [window if each == SLIDING else None for each in kinds]


def write_llama(config: DecoderConfig, kind: str) -> dict[str, Any]:
    """The fields nearest to a config, those that all layers share taken from the first."""
    block = config.blocks[0]
    attention, mlp = block.attention, block.mlp
    windows = [block.attention.window for block in config.blocks]
    fields: dict[str, Any] = {
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "intermediate_size": mlp.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.key_heads,
        "head_dim": attention.size(config.embed),
        "hidden_act": activation_name(mlp.activation),
        "rms_norm_eps": block.norm.eps,
        "tie_word_embeddings": config.tied,
        **write_rope(attention.rope),
    }
    if kind in ("llama", "qwen3"):
        fields["attention_bias"] = attention.qkv_bias
    if kind == "llama":
        fields["mlp_bias"] = isinstance(mlp, MlpConfig) and mlp.bias
    if kind in ("mistral", "mixtral"):
        fields["sliding_window"] = windows[0]
    if kind.startswith("qwen"):
        first = next((i for i, window in enumerate(windows) if window), None)
        fields["use_sliding_window"] = first is not None
        fields["sliding_window"] = None if first is None else windows[first]
        fields["max_window_layers"] = config.layers if first is None else first
        fields["layer_types"] = [SLIDING if window else FULL for window in windows]
    return fields


def _family(kind: str, architecture: str, **defaults: Any) -> Family:
    return Family(
        model_type=kind,
        architecture=architecture,
        base="model.",
        tensors=TENSORS,
        buffers=re.compile(r"(.*\.)?rotary_emb\.inv_freq"),
        defaults={**DEFAULTS, **defaults},
        read=partial(read_llama, kind=kind),
        write=partial(write_llama, kind=kind),
    )


LLAMA = _family("llama", "LlamaForCausalLM")
MISTRAL = _family("mistral", "MistralForCausalLM", num_key_value_heads=8)
QWEN2 = _family("qwen2", "Qwen2ForCausalLM", num_key_value_heads=32)
QWEN3 = _family("qwen3", "Qwen3ForCausalLM", num_key_value_heads=32, head_dim=128)
