"""Llama 2 and 3, Mistral, Qwen 2 and 3, OLMo 2: seven Linears a layer, six readings of a config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxtrain.families.family import (
    ACTIVATIONS,
    Family,
    Tensor,
    activation_name,
    eps_of,
    find_period,
)
from jaxtrain.families.fields import Fields
from jaxtrain.families.rope import read_phi3_rope, read_rope, write_rope
from jaxtrain.nn.norm import RMSNorm
from jaxtrain.transformer.attention import AttentionConfig
from jaxtrain.transformer.block import BlockConfig
from jaxtrain.transformer.decoder import DecoderConfig
from jaxtrain.transformer.feed_forward import MlpConfig
from jaxtrain.transformer.validate import LAYERS

NORMED = ("qwen3", "qwen3_moe", "dots1")
"""Those that norm queries and keys, and may have a bias in all products of attention."""
FULL, SLIDING = "full_attention", "sliding_attention"

_ATTENTION = {
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.out",
}
_MLP = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}
NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
LAYER = "model.layers.{layer}."


def linears(named: Mapping[str, str]) -> Iterator[Tensor]:
    """Yields torch's Linears of a layer, name in the folder -> our leaf, with the biases that the
    model has."""
    for name, leaf in named.items():
        yield Tensor(f"{LAYER}{name}.weight", (leaf,), transposed=True)
        yield Tensor(f"{LAYER}{name}.bias", (f"{leaf}_bias",))


def beside_products(norms: Mapping[str, str]) -> Iterator[Tensor]:
    """Yields all tensors but Linears of layers. norms: those around the branches of a layer, name
    in the folder -> our leaf."""
    yield Tensor("model.embed_tokens.weight", ("embedding",))
    of_heads = {
        "self_attn.q_norm": "attention.query_norm",
        "self_attn.k_norm": "attention.key_norm",
    }
    for name, leaf in {**of_heads, **norms}.items():
        yield Tensor(f"{LAYER}{name}.weight", (f"{leaf}.scale",))
    yield Tensor("model.norm.weight", ("norm.scale",))
    yield Tensor("lm_head.weight", ("head",))


def tensors_with(norms: Mapping[str, str]) -> tuple[Tensor, ...]:
    """Returns the tensors of a model with seven Linears a layer. norms: as for
    `beside_products`."""
    return (*beside_products(norms), *linears(_ATTENTION), *linears(_MLP))


BESIDE_MLP = (*beside_products(NORMS), *linears(_ATTENTION))
TENSORS = tensors_with(NORMS)
BUFFERS = re.compile(r"(.*\.)?rotary_emb\.inv_freq")

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
    """Returns the config of any of these families; `kind` is its model_type."""
    embed, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    norm = RMSNorm(eps=fields.number("rms_norm_eps"))
    if kind == "llama":  # which `transformers` refuses to load, whatever head_dim says
        fields.multiple("hidden_size", divisor="num_attention_heads")
    every_bias = kind in ("llama", "olmo2", *NORMED) and fields.flag("attention_bias")
    attention = AttentionConfig(
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", otherwise=heads),
        head_dim=fields.count("head_dim", otherwise=max(embed // heads, 1)),
        rope=read_phi3_rope(fields) if kind == "phi3" else read_rope(fields),
        qk_norm=norm if kind in ("olmo2", *NORMED) else None,
        qk_norm_across_heads=kind == "olmo2",
        qkv_bias=kind == "qwen2" or (kind == "qwen2_moe" and fields.flag("qkv_bias")) or every_bias,
        out_bias=every_bias,
    )
    mlp = MlpConfig(
        hidden=fields.count("intermediate_size"),
        activation=fields.choice("hidden_act", ACTIVATIONS),
        bias=kind == "llama" and fields.flag("mlp_bias"),
    )
    layers = fields.count("num_hidden_layers", most=LAYERS)
    norms: dict[str, Any] = {"norm": norm}
    if kind == "olmo2":
        norms = {"norm": None, "post_norm": norm}
    blocks = tuple(
        BlockConfig(replace(attention, window=window), mlp, **norms)
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
    """Returns the window of each layer."""
    if kind in ("llama", "olmo2"):
        return [None] * layers
    if kind in ("mistral", "mixtral", "phi3"):
        return [fields.count_or_none("sliding_window")] * layers
    used = kind == "dots1" or fields.flag("use_sliding_window")
    window = (
        fields.count_or_none("sliding_window") if used or fields.value("sliding_window") else None
    )
    first = fields.value("max_window_layers")
    layer_types = fields.value("layer_types")
    if kind == "qwen3_moe":  # of all layers, whatever else is said
        return [window if used else None] * layers
    kinds = None
    if layer_types is None:
        if used and kind == "qwen2_moe":
            fields.problems.append("use_sliding_window=True without layer_types; give them")
        if used and not (isinstance(first, int) and first >= 0):
            fields.problems.append(f"max_window_layers={first!r}; use a whole number")
            return [None] * layers
        kinds = [SLIDING if used and window and i >= first else FULL for i in range(layers)]
    kinds = layer_kinds(fields, kinds or [FULL] * layers)
    if SLIDING in kinds and not (used and window):
        fields.problems.append(
            f"layer_types has {SLIDING} with use_sliding_window={used} and sliding_window="
            f"{window}; give both, or {FULL} for every layer"
        )
    return [window if layer_type == SLIDING else None for layer_type in kinds]


def layer_kinds(fields: Fields, otherwise: list[str]) -> list[str]:
    """Returns `layer_types`, one for each layer; `otherwise` where it is missing, FULL for all
    where it is wrong."""
    kinds, layers = fields.value("layer_types"), len(otherwise)
    if kinds is None:
        return otherwise
    valid = isinstance(kinds, list) and all(layer_type in (FULL, SLIDING) for layer_type in kinds)
    if not valid or len(kinds) != layers:
        fields.problems.append(
            f"layer_types={kinds!r}; use {FULL} or {SLIDING} for each of {layers} layers"
        )
        return [FULL] * layers
    return kinds


def plain_attention(block: BlockConfig) -> AttentionConfig:
    """Returns a block's attention; for another type the nearest that these families have."""
    attention = block.attention
    plain = isinstance(attention, AttentionConfig)
    return attention if plain else AttentionConfig(attention.heads, rope=attention.rope)


def write_llama(config: DecoderConfig, kind: str) -> dict[str, Any]:
    """Returns the config.json of the nearest Llama: fields that all its layers share are those of
    the model's first layer."""
    block = config.blocks[0]
    attentions = [plain_attention(block) for block in config.blocks]
    attention, mlp = attentions[0], block.mlp
    windows = [layer.window for layer in attentions]
    fields: dict[str, Any] = {
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "intermediate_size": mlp.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.key_heads,
        "head_dim": attention.size(config.embed),
        "hidden_act": activation_name(mlp.activation),
        "rms_norm_eps": eps_of(block),
        "tie_word_embeddings": config.tied,
        **write_rope(attention.rope),
    }
    if kind in ("llama", "olmo2", *NORMED):
        fields["attention_bias"] = attention.qkv_bias
    if kind == "llama":
        fields["mlp_bias"] = isinstance(mlp, MlpConfig) and mlp.bias
    if kind in ("mistral", "mixtral"):
        fields["sliding_window"] = windows[0]
    if kind == "qwen2_moe":
        fields["qkv_bias"] = attention.qkv_bias
    if kind.startswith("qwen") or kind == "dots1":
        first = next((i for i, window in enumerate(windows) if window), None)
        if kind != "dots1":
            fields["use_sliding_window"] = first is not None
        fields["sliding_window"] = None if first is None else windows[first]
    if kind.startswith("qwen2") or kind in ("qwen3", "dots1"):
        first = next((i for i, window in enumerate(windows) if window), None)
        fields["max_window_layers"] = config.layers if first is None else first
        fields["layer_types"] = [SLIDING if window else FULL for window in windows]
    return fields


def _family(kind: str, architecture: str, **defaults: Any) -> Family:
    return Family(
        model_type=kind,
        architecture=architecture,
        base="model.",
        tensors=TENSORS,
        buffers=BUFFERS,
        defaults={**DEFAULTS, **defaults},
        read=partial(read_llama, kind=kind),
        write=partial(write_llama, kind=kind),
    )


LLAMA = _family("llama", "LlamaForCausalLM")
MISTRAL = _family("mistral", "MistralForCausalLM", num_key_value_heads=8)
QWEN2 = _family("qwen2", "Qwen2ForCausalLM", num_key_value_heads=32)
_POST_NORMS = {
    "post_attention_layernorm": "attention_post_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
OLMO2 = _family("olmo2", "Olmo2ForCausalLM", rms_norm_eps=1e-5)
OLMO2 = replace(OLMO2, tensors=tensors_with(_POST_NORMS))
QWEN3 = _family("qwen3", "Qwen3ForCausalLM", num_key_value_heads=32, head_dim=128)
