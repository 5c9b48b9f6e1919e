"""DeepSeek-V2 and V3: latent attention, and a mixture of experts after a few dense layers.

Their rotary dims lie in pairs side by side, ours in halves: the columns that make them are put in
our order when they are read, and back when they are written. What V3's published folders have
beyond its layers, for multi-token prediction, is left out, as `transformers` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jaxtrain.families.family import (
    ACTIVATIONS,
    Family,
    OrderOf,
    Tensor,
    activation_name,
    eps_of,
    find_period,
)
from jaxtrain.families.fields import Fields
from jaxtrain.families.llama import LAYER
from jaxtrain.families.mixtures import (
    BIAS,
    FUSED,
    ROUTER,
    SHARED,
    expert_tensors,
    feed_forward,
    read_experts,
    read_sigmoid_mixture,
    write_experts,
)
from jaxtrain.families.rope import read_rope, write_rope
from jaxtrain.moe.router import Groups, SoftmaxRouter
from jaxtrain.nn.norm import RMSNorm
from jaxtrain.transformer.block import BlockConfig
from jaxtrain.transformer.decoder import DecoderConfig
from jaxtrain.transformer.feed_forward import MlpConfig
from jaxtrain.transformer.latent import LatentAttentionConfig
from jaxtrain.transformer.mixture import MoeConfig, SharedExpert
from jaxtrain.transformer.validate import LAYERS

LATENT_NORM = RMSNorm(1e-6)
"""Of latents, whatever rms_norm_eps says."""


def _attention_of(config: DecoderConfig) -> LatentAttentionConfig:
    attention = config.blocks[0].attention
    return (
        attention
        if isinstance(attention, LatentAttentionConfig)
        else LatentAttentionConfig(attention.heads)
    )


def _paired(dims: int) -> np.ndarray:
    """Returns for each rotary dim of a folder, where pairs are side by side, its number in ours."""
    return np.arange(dims).reshape(2, -1).T.ravel()


def _query_order(config: DecoderConfig) -> np.ndarray:
    a = _attention_of(config)
    head = np.concatenate([np.arange(a.nope_head_dim), a.nope_head_dim + _paired(a.rope_head_dim)])
    return (a.head_dim * np.arange(a.heads)[:, None] + head).ravel()


def _latent_order(config: DecoderConfig) -> np.ndarray:
    a = _attention_of(config)
    return np.concatenate([np.arange(a.latent), a.latent + _paired(a.rope_head_dim)])


def _linear(name: str, leaf: str, order: OrderOf | None = None) -> Tensor:
    return Tensor(
        f"{LAYER}self_attn.{name}.weight", (f"attention.{leaf}",), transposed=True, order=order
    )


BESIDE_EXPERTS = (
    Tensor("model.embed_tokens.weight", ("embedding",)),
    _linear("q_proj", "query", _query_order),
    _linear("q_a_proj", "query_down"),
    _linear("q_b_proj", "query_up", _query_order),
    _linear("kv_a_proj_with_mqa", "latent_down", _latent_order),
    _linear("kv_b_proj", "latent_up"),
    _linear("o_proj", "out"),
    Tensor(f"{LAYER}self_attn.q_a_layernorm.weight", ("attention.query_norm.scale",)),
    Tensor(f"{LAYER}self_attn.kv_a_layernorm.weight", ("attention.latent_norm.scale",)),
    Tensor(f"{LAYER}input_layernorm.weight", ("attention_norm.scale",)),
    Tensor(f"{LAYER}post_attention_layernorm.weight", ("mlp_norm.scale",)),
    *feed_forward("", "", mixed=False),
    ROUTER,
    Tensor("model.norm.weight", ("norm.scale",)),
    Tensor("lm_head.weight", ("head",)),
)


def _read(fields: Fields, kind: str, mixture: Callable[[Fields], MoeConfig]) -> DecoderConfig:
    """Returns a config of model_type `kind`, whose layers with experts are like `mixture`."""
    for name in ("aux_loss_alpha", "ep_size", "num_nextn_predict_layers", "seq_aux"):
        fields.value(name)  # of training, serving, and of layers that are left out
    for name in ("attention_bias", "mlp_bias"):
        fields.only(name, False)
    fields.only("moe_layer_freq", 1)
    _refuse_quantized(fields)
    if kind == "deepseek_v2":
        fields.multiple("hidden_size", divisor="num_attention_heads")
    norm, attention = RMSNorm(fields.number("rms_norm_eps")), _read_attention(fields)
    moe = replace(mixture(fields), activation=fields.choice("hidden_act", ACTIVATIONS))
    dense = MlpConfig(fields.count("intermediate_size"), moe.activation)
    layers, first = (
        fields.count("num_hidden_layers", most=LAYERS),
        fields.whole("first_k_dense_replace"),
    )
    blocks = tuple(
        BlockConfig(attention, dense if layer < first else moe, norm) for layer in range(layers)
    )
    prefix, period = find_period(blocks)
    return DecoderConfig(
        vocab=fields.count("vocab_size"),
        embed=fields.count("hidden_size"),
        layers=layers,
        norm=norm,
        tied=fields.flag("tie_word_embeddings"),
        prefix=prefix,
        period=period,
    )


def _read_attention(fields: Fields) -> LatentAttentionConfig:
    heads, nope = fields.count("num_attention_heads"), fields.count("qk_nope_head_dim")
    rotary = fields.count("qk_rope_head_dim")
    fields.only("num_key_value_heads", heads)
    fields.only("head_dim", rotary)
    fields.only("qk_head_dim", nope + rotary)
    fields.only("rope_interleave", True)
    return LatentAttentionConfig(
        heads,
        latent=fields.count("kv_lora_rank"),
        nope_head_dim=nope,
        rope_head_dim=rotary,
        value_head_dim=fields.count("v_head_dim"),
        query_latent=fields.count_or_none("q_lora_rank"),
        rope=read_rope(fields),
        norm=LATENT_NORM,
    )


def _refuse_quantized(fields: Fields) -> None:
    quantization = fields.value("quantization_config")
    if quantization is not None:
        method = (
            quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        )
        fields.problems.append(
            f"quantization_config has quant_method={method!r}: weights in blocks of 8 bits are not "
            "read here; convert the folder to bfloat16 first, as its authors' fp8_cast_bf16.py "
            "does, and remove quantization_config"
        )


def _softmax_mixture(fields: Fields) -> MoeConfig:
    """Returns DeepSeek-V2's mixture: `transformers` never renormalises shares, whatever
    norm_topk_prob says."""
    moe = read_experts(fields, "n_routed_experts")
    fields.only("norm_topk_prob", False)
    fields.only("scoring_func", "softmax")
    methods = {"greedy": False, "group_limited_greedy": True}
    groups = None
    if fields.choice("topk_method", methods):
        groups = Groups(fields.count("n_group"), fields.count("topk_group"))
    else:
        for name in ("n_group", "topk_group"):
            fields.value(name)
    scale = fields.number("routed_scaling_factor")
    router = SoftmaxRouter(renormalise=False, scale=scale, groups=groups)
    shared = SharedExpert(moe.hidden * fields.count("n_shared_experts"))
    return replace(moe, router=router, shared=shared)


def _sigmoid_mixture(fields: Fields) -> MoeConfig:
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    return read_sigmoid_mixture(fields)


def _write(config: DecoderConfig, kind: str) -> dict[str, Any]:
    """Returns the fields nearest to a config; those of several layers from the first of its
    kind."""
    a, blocks = _attention_of(config), config.blocks
    mixed = [layer for layer, block in enumerate(blocks) if isinstance(block.mlp, MoeConfig)]
    first = mixed[0] if mixed else len(blocks)
    moe = blocks[first].mlp if mixed else MoeConfig(1, experts=1, experts_per_token=1)
    assert isinstance(moe, MoeConfig)
    groups = moe.router.groups
    fields = {
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "intermediate_size": blocks[0].mlp.hidden if first else moe.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.heads,
        "kv_lora_rank": a.latent,
        "q_lora_rank": a.query_latent,
        "qk_nope_head_dim": a.nope_head_dim,
        "qk_rope_head_dim": a.rope_head_dim,
        "v_head_dim": a.value_head_dim,
        "hidden_act": activation_name(moe.activation if mixed else blocks[0].mlp.activation),
        "rms_norm_eps": eps_of(blocks[0]),
        "tie_word_embeddings": config.tied,
        **write_experts(moe),
        "first_k_dense_replace": first,
        **write_rope(a.rope),
    }
    if kind == "deepseek_v2":
        limited = {"n_group": groups.count, "topk_group": groups.chosen} if groups else {}
        method = "group_limited_greedy" if groups else "greedy"
        return fields | {"norm_topk_prob": False, "topk_method": method, **limited}
    return fields | {"num_nextn_predict_layers": 0}


def _family(
    kind: str,
    architecture: str,
    mixture: Callable[[Fields], MoeConfig],
    tensors: tuple[Tensor, ...],
    **defaults: Any,
) -> Family:
    unfused = (*BESIDE_EXPERTS, *tensors)
    return Family(
        model_type=kind,
        architecture=architecture,
        base="model.",
        tensors=(*unfused, *expert_tensors()),
        alternatives=(*unfused, *FUSED),
        buffers=re.compile(r"(.*\.)?rotary_emb\.inv_freq"),
        defaults={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            **defaults,
        },
        read=partial(_read, kind=kind, mixture=mixture),
        write=partial(_write, kind=kind),
        layers_beyond=kind == "deepseek_v3",
    )


DEEPSEEK_V2 = _family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    _softmax_mixture,
    SHARED["dots1"][:-1],
    n_routed_experts=64,
    n_shared_experts=2,
    moe_intermediate_size=1407,
    routed_scaling_factor=1.0,
    topk_method="greedy",
    first_k_dense_replace=0,
)
DEEPSEEK_V3 = _family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _sigmoid_mixture,
    (*SHARED["dots1"][:-1], BIAS),
    n_routed_experts=256,
    n_shared_experts=1,
    moe_intermediate_size=2048,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
)
