"""Models that `transformers` makes, and logits of theirs and ours.

Skips the test file that imports it where the extra `parity` is not installed.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_families import abstract

from jaxtrain.nn.local import Local
from jaxtrain.nn.module import put_together
from jaxtrain.transformer.decoder import DecoderConfig

WHY = "compares with transformers; pip install '.[parity]'"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch: Any = pytest.importorskip("torch", reason=WHY)
    transformers: Any = pytest.importorskip("transformers", reason=WHY)

VOCAB, SEQ = 37, 24
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
QWEN_MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
DOTS = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
    **{"n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
    **{"norm_topk_prob": True, "routed_scaling_factor": 2.5},
}
"""DeepSeek-V3's mixture: sigmoid scores, a bias, groups, a scale, shared experts."""
DEEPSEEK = {
    **{**SIZES, "num_key_value_heads": 4},
    **{"kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8},
    **{"v_head_dim": 10, "moe_intermediate_size": 12, "n_routed_experts": 8, "n_shared_experts": 2},
    **{"num_experts_per_tok": 3, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
}
DEEPSEEK_V3 = {**DEEPSEEK, "n_group": 4, "topk_group": 2, "norm_topk_prob": True}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
    **{"original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 1.2},
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16},
    **{"short_factor": [1.0, 1.1, 1.4, 2.0], "long_factor": [1.5, 3.0, 6.0, 9.0], "factor": 4.0},
}
"""Of which SEQ is too long for the short factors."""
GEMMA = {**SIZES, "head_dim": 12, "num_hidden_layers": 4, "sliding_window": 7}
PHI3 = {**SIZES, "pad_token_id": None, "partial_rotary_factor": 0.75}
PHI3_LONGROPE = {
    **{"rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5], "long_factor": [2.0, 4.0, 9.0]},
}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES),
    "llama 3 tied": (
        "LlamaConfig",
        {**SIZES, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    ),
    "llama stretched, biases": (
        "LlamaConfig",
        {
            **SIZES,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu",
        },
    ),
    "llama yarn": ("LlamaConfig", {**SIZES, "rope_parameters": YARN}),
    "llama dynamic": (
        "LlamaConfig",
        {**SIZES, "rope_parameters": DYNAMIC, "max_position_embeddings": 10},
    ),
    "llama longrope": ("LlamaConfig", {**SIZES, "rope_parameters": LONGROPE}),
    "mistral": ("MistralConfig", {**SIZES, "sliding_window": 5, "head_dim": 12}),
    "mixtral": ("MixtralConfig", {**SIZES, "num_local_experts": 4}),
    "mixtral windows": (
        "MixtralConfig",
        {**SIZES, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 5},
    ),
    "qwen 2": ("Qwen2Config", {**SIZES, "tie_word_embeddings": True}),
    "qwen 2 windows": ("Qwen2Config", {**SIZES, **QWEN_WINDOWS}),
    "qwen 3": ("Qwen3Config", {**SIZES, "head_dim": 16}),
    "gemma 2": ("Gemma2Config", {**GEMMA, "query_pre_attn_scalar": 20}),
    "gemma 2, uncapped, biases": (
        "Gemma2Config",
        {
            **GEMMA,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "gemma 3": (
        "Gemma3TextConfig",
        {
            **GEMMA,
            "num_hidden_layers": 5,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 20.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "olmo 2": ("Olmo2Config", SIZES),
    "phi 3": ("Phi3Config", {**SIZES, "pad_token_id": None, "sliding_window": 5}),
    "phi 3 longrope": (
        "Phi3Config",
        {**PHI3, "rope_parameters": PHI3_LONGROPE, "original_max_position_embeddings": 16},
    ),
    "phi 3 short": (
        "Phi3Config",
        {**PHI3, "rope_parameters": PHI3_LONGROPE, "original_max_position_embeddings": 32},
    ),
    "qwen 2 moe": ("Qwen2MoeConfig", {**SIZES, **QWEN_MOE, "shared_expert_intermediate_size": 20}),
    "qwen 3 moe, some dense": (
        "Qwen3MoeConfig",
        {**SIZES, **QWEN_MOE, "head_dim": 8, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "dots 1": ("Dots1Config", {**SIZES, **DOTS}),
    "dots 1, all mixed": (
        "Dots1Config",
        {**SIZES, **DOTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    ),
    "deepseek 2": (
        "DeepseekV2Config",
        {
            **DEEPSEEK,
            **{"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
            "rope_parameters": YARN,
        },
    ),
    "deepseek 2, queries of tokens, all mixed": (
        "DeepseekV2Config",
        {**DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 0},
    ),
    "deepseek 3": ("DeepseekV3Config", {**DEEPSEEK_V3, "rope_parameters": YARN}),
    "deepseek 3, one group, long values": (
        "DeepseekV3Config",
        {**DEEPSEEK_V3, "n_group": 1, "topk_group": 1, "v_head_dim": 24, "q_lora_rank": None},
    ),
    "gpt2": ("GPT2Config", GPT2),
    "gpt2 untied, unscaled": (
        "GPT2Config",
        {**GPT2, "tie_word_embeddings": False, "n_inner": 40, "scale_attn_weights": False},
    ),
}


def made(name: str, folder: Path, embeddings: float = 1.0) -> Any:
    """A model of theirs in a folder, as they save it. They begin biases at 0 and norms at 1, which
    would hide one that is put in another's place."""
    kind, fields = THEIRS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        model.get_input_embeddings().weight.mul_(embeddings)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn_like(buffer))
    model.save_pretrained(folder, max_shard_size="20KB")
    return model.eval()


def their_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.float().numpy()


def our_logits(config: DecoderConfig, params: dict[str, jax.Array], ids: np.ndarray) -> np.ndarray:
    model = put_together(abstract(config).static, params)
    caches = model.empty_cache(*ids.shape, jnp.float32)

    def run(ids: jax.Array, caches: Any) -> jax.Array:
        return model.decode(ids, caches, jnp.int32(0), comm=Local(jnp.float32))[0]

    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(run)(jnp.asarray(ids), caches))[..., : config.vocab]


def loaded(folder: Path) -> Any:
    """Their model of a folder, which has every tensor it needs and no other."""
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(said.values()), said
    return model.eval()


def ids(rows: int = 2) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (rows, SEQ))
