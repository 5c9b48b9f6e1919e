"""config.json and DecoderConfig: published files, both spellings, and all that is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny_families import GPT2, LLAMA, MODELS, attention, with_block

import jaxtrain
from jaxtrain import MlpConfig, MoeConfig
from jaxtrain.attention import DynamicNtk, Llama3Scaling, LongRope, Rope, Yarn
from jaxtrain.huggingface import read_config
from jaxtrain.huggingface.config import family_and_fields
from jaxtrain.nn import LayerNorm, RMSNorm
from jaxtrain.nn.param import Initialisation
from jaxtrain.transformer.decoder import DecoderConfig

EXPERIMENTS = Path(__file__).parents[3] / "experiments"

LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
GPT2_124M = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
QWEN2_5_0_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
NEW_SPELLING = {
    "torch_dtype": None,
    "rope_theta": None,
    "rope_scaling": None,
    "dtype": "bfloat16",
    "rope_parameters": {**LLAMA_3_2_1B["rope_scaling"], "rope_theta": 500000.0},
}


def folder(path: Path, fields: Any) -> Path:
    (path / "config.json").write_text(json.dumps(fields))
    return path


def same(a: DecoderConfig, b: DecoderConfig) -> bool:
    """Equal layers and all that is outside them, whichever way they are folded and initialised."""
    forget = {"prefix": (), "suffix": (), "init": Initialisation(), "vocab_multiple": 1}
    forget |= {"chunk_tokens": 1, "dropout": 0.0}

    def blocks(config: DecoderConfig) -> tuple[Any, ...]:
        found = []
        for block in config.blocks:
            a = block.attention
            if isinstance(a, jaxtrain.AttentionConfig):
                a = replace(a, kv_heads=a.key_heads, head_dim=a.size(config.embed))
            found.append(replace(block, attention=a, dropout=0.0))
        return tuple(found)

    return replace(a, period=blocks(a), **forget) == replace(b, period=blocks(b), **forget)


@pytest.mark.parametrize(
    ("fields", "experiment"),
    [
        (LLAMA_3_2_1B, "llama3_1b"),
        ({**LLAMA_3_2_1B, **NEW_SPELLING}, "llama3_1b"),
        (GPT2_124M, "gpt2_124m"),
    ],
)
def test_published_files_are_our_presets(
    tmp_path: Path, fields: dict[str, Any], experiment: str
) -> None:
    """The presets were written from the papers and are counted to the last parameter elsewhere."""
    preset = jaxtrain.load_experiment(EXPERIMENTS / f"{experiment}.py").model
    assert same(read_config(folder(tmp_path, fields)), preset)


def test_qwen_has_biases_of_its_own_and_no_window_unless_it_says_so(tmp_path: Path) -> None:
    config = read_config(folder(tmp_path, QWEN2_5_0_5B))
    (block,) = config.period
    assert block.attention.qkv_bias and not block.attention.out_bias
    assert block.attention.window is None and block.attention.rope == Rope(1e6)
    assert (block.attention.heads, block.attention.key_heads) == (14, 2)

    used = {"use_sliding_window": True, "max_window_layers": 21}
    config = read_config(folder(tmp_path, {**QWEN2_5_0_5B, **used}))
    assert [b.attention.window for b in config.blocks] == [None] * 21 + [32768] * 3
    assert len(config.prefix) + len(config.period) == 22, "three equal layers are one stack"


def test_mixtral_as_published_and_as_its_defaults(tmp_path: Path) -> None:
    config = read_config(folder(tmp_path, MIXTRAL_8X7B))
    (block,) = config.period
    assert block.mlp == MoeConfig(14336, experts=8, experts_per_token=2)
    assert block.attention.rope == Rope(1e6) and block.attention.window is None
    unsaid = ("num_local_experts", "num_experts_per_tok", "rope_theta", "sliding_window",
              "rms_norm_eps", "num_key_value_heads", "router_aux_loss_coef")  # fmt: skip
    few = {k: v for k, v in MIXTRAL_8X7B.items() if k not in unsaid}
    assert read_config(folder(tmp_path, few)) == config


ROPE = LLAMA_3_2_1B["rope_scaling"]
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {"type": "longrope", "short_factor": [1, 2], "long_factor": [2] * 32, "factor": 32}
SCALINGS = [
    (YARN, Yarn(4.0, 32768)),
    ({**YARN, "factor": None, "beta_fast": None, "mscale": 0.7, "truncate": False},
     Yarn(4.0, 32768, mscale=0.7, truncate=False)),
    ({"rope_type": "yarn", "factor": 2}, Yarn(2.0, 131072)),
    ({"rope_type": "dynamic", "factor": 2}, DynamicNtk(2.0, 131072)),
    ({"type": "longrope", "short_factor": [1] * 32, "long_factor": [2.5] * 32, "factor": 16,
      "attention_factor": 1.2, "original_max_position_embeddings": 4096},
     LongRope((1.0,) * 32, (2.5,) * 32, 16.0, 4096, 1.2)),
]  # fmt: skip


@pytest.mark.parametrize(("given", "scaling"), SCALINGS)
def test_a_scaling_as_published(tmp_path: Path, given: dict[str, Any], scaling: Any) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        fields = {**LLAMA_3_2_1B, "rope_scaling": None, name: {**given, "rope_theta": 1e4}}
        (block,) = read_config(folder(tmp_path, fields)).period
        assert block.attention.rope == Rope(1e4, scaling)
    outside = {**fields, "original_max_position_embeddings": 2048}
    (block,) = read_config(folder(tmp_path, outside)).period
    assert getattr(block.attention.rope.scaling, "original_seq", None) == (
        131072 if isinstance(scaling, DynamicNtk) else 2048
    ), "what stands outside goes first"


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_reads_as_the_same_model(tmp_path: Path, name: str) -> None:
    kind, config = MODELS[name]
    family, fields = family_and_fields(config)
    assert family.model_type == fields["model_type"] == kind
    assert same(read_config(folder(tmp_path, fields)), config)


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA_3_2_1B, {"model_type": "mamba"}, "model_type='mamba'"),
    (LLAMA_3_2_1B, {"architectures": ["LlamaForSequenceClassification"]}, "architectures="),
    (LLAMA_3_2_1B, {"hidden_act": "relu6"}, "hidden_act='relu6'"),
    (LLAMA_3_2_1B, {"attention_bias": "yes"}, "attention_bias='yes'"),
    (LLAMA_3_2_1B, {"hidden_size": None}, "hidden_size=None"),
    (LLAMA_3_2_1B, {"hidden_size": 2.5}, "hidden_size=2.5"),
    (LLAMA_3_2_1B, {"rms_norm_eps": float("inf")}, "rms_norm_eps=inf"),
    (LLAMA_3_2_1B, {"num_attention_heads": 30}, "hidden_size=2048 is not a multiple"),
    (LLAMA_3_2_1B, {"num_key_value_heads": 5}, "heads=32 is not a multiple of kv_heads=5"),
    (LLAMA_3_2_1B, {"rope_scaling": {"type": "axial", "factor": 4.0}}, "rope_type='axial'"),
    (LLAMA_3_2_1B, {"rope_scaling": {**YARN, "beta_fast": "32"}}, "rope_scaling.beta_fast='32'"),
    (LLAMA_3_2_1B, {"rope_scaling": {**YARN, "beta_slow": 33}}, "beta_slow=33.0 must be above 0"),
    (LLAMA_3_2_1B, {"rope_scaling": {**YARN, "truncate": 1}}, "rope_scaling.truncate=1"),
    (LLAMA_3_2_1B, {"rope_scaling": {"type": "dynamic"}}, "rope_scaling.factor is missing"),
    (LLAMA_3_2_1B, {"rope_scaling": {**LONGROPE, "long_factor": [1, 0]}}, "long_factor=[1, 0]"),
    (LLAMA_3_2_1B, {"rope_scaling": LONGROPE}, "short_factor has 2 numbers and heads turn 32"),
    (LLAMA_3_2_1B, {"rope_scaling": {**ROPE, "mscale": 0.7}}, "rope_scaling.mscale=0.7"),
    (LLAMA_3_2_1B, {"rope_scaling": {**ROPE, "factor": 0.5}}, "factor=0.5"),
    (LLAMA_3_2_1B, {"rope_scaling": {**ROPE, "partial_rotary_factor": 0.5}}, "partial_rotary"),
    (LLAMA_3_2_1B, {"rope_scaling": "linear"}, "rope_scaling='linear'"),
    (LLAMA_3_2_1B, {"rope_theta": 0.5}, "theta=0.5"),
    (LLAMA_3_2_1B, {"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
    (LLAMA_3_2_1B, {"sliding_window": 512}, "sliding_window=512 is not known"),
    (LLAMA_3_2_1B, {"quantization_config": {"bits": 4}}, "quantization_config="),
    (LLAMA_3_2_1B, {"logit_scale": 0.0625}, "logit_scale=0.0625 is not known"),
    (MIXTRAL_8X7B, {"num_local_experts": 0}, "num_local_experts=0"),
    (
        MIXTRAL_8X7B,
        {"num_experts_per_tok": 9},
        "num_experts_per_tok=9 is more than num_local",
    ),
    (MIXTRAL_8X7B, {"norm_topk_prob": True}, "norm_topk_prob=True is not known"),
    (GPT2_124M, {"n_head": 7}, "n_embd=768 is not a multiple of n_head=7"),
    (GPT2_124M, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx="),
    (GPT2_124M, {"add_cross_attention": True}, "add_cross_attention=True"),
    (GPT2_124M, {"activation_function": "tanh"}, "activation_function='tanh'"),
    (QWEN2_5_0_5B, {"layer_types": ["linear_attention"] * 24}, "layer_types="),
    (QWEN2_5_0_5B, {"layer_types": ["full_attention"]}, "for each of 24 layers"),
    (QWEN2_5_0_5B, {"layer_types": ["sliding_attention"] * 24}, "use_sliding_window=False"),
]


@pytest.mark.parametrize(("fields", "change", "said"), WRONG)
def test_what_changes_the_logits_and_is_not_computed_is_refused(
    tmp_path: Path, fields: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError) as error:
        read_config(folder(tmp_path, {**fields, **change}))
    assert said in str(error.value) and str(tmp_path / "config.json") in str(error.value)
    assert str(error.value).count("\n- ") == 1, "one mistake, one line"


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    missing = {k: v for k, v in LLAMA_3_2_1B.items() if k != "vocab_size"}
    change = {"hidden_act": "relu6", "rms_norm_eps": 0, "logit_scale": 2.0, "rope_theta": "big"}
    with pytest.raises(ValueError) as error:
        read_config(folder(tmp_path, {**missing, **change}))
    for said in ("vocab_size is missing", *(f"{name}=" for name in change)):
        assert said in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", None])
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is not a model"):
        read_config(tmp_path)


INEXPRESSIBLE: list[tuple[DecoderConfig, str]] = [
    (replace(LLAMA, logit_softcap=30.0), "logit_softcap is 30.0, there None"),
    (replace(LLAMA, logit_scale=0.5), "logit_scale is 0.5"),
    (replace(LLAMA, embedding_scale=4.0), "embedding_scale is 4.0"),
    (replace(LLAMA, norm=RMSNorm(eps=1e-3)), "norm.eps is 0.001, there 1e-06"),
    (replace(LLAMA, learned_positions=8), "learned_positions is 8"),
    (with_block(attention(softcap=50.0)), "block.attention.softcap is 50.0"),
    (with_block(attention(scale=0.3)), "block.attention.scale is 0.3"),
    (with_block(attention(out_bias=True)), "block.attention.out_bias is True"),
    (with_block(attention(qk_norm=RMSNorm(eps=1e-2))), "qk_norm is a RMSNorm, there None"),
    (with_block(replace(attention(), residual_scale=0.5)), "block.residual_scale is 0.5"),
    (with_block(replace(attention(), mlp=MlpConfig(12, gated=False))), "block.mlp.gated is False"),
    (with_block(replace(attention(), mlp=MlpConfig(12, jax.nn.relu))), "block.mlp.activation is"),
    (replace(LLAMA, prefix=(attention(heads=2),), layers=3), "block.attention.heads is 4, there 2"),
    (replace(LLAMA, prefix=(attention(window=3),), layers=3), "block.attention.window is 3"),
    (with_block(replace(attention(), mlp=MoeConfig(12, 4, gated=False))), "mlp.gated is False"),
    (replace(with_block(replace(attention(), mlp=MoeConfig(12, 4))), prefix=(attention(),),
             layers=3), "block.mlp.shared is None, there a SharedExpert"),
    (replace(GPT2, norm=LayerNorm(bias=False)), "norm.bias is False"),
    (with_block(attention(rope=Rope(scaling=Llama3Scaling()), window=3, qkv_bias=True),
                logit_scale=2.0), "logit_scale is 2.0"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "said"), INEXPRESSIBLE)
def test_a_model_that_no_family_has_is_refused_with_what_is_in_the_way(
    config: DecoderConfig, said: str
) -> None:
    assert config.violations() == []
    with pytest.raises(ValueError, match="no family of llama, mistral") as error:
        family_and_fields(config)
    assert said in str(error.value)
    assert str(error.value).count("\n- ") == 1, "in the nearest family only this is in the way"


def test_what_changes_no_logits_is_in_nobodys_way() -> None:
    changed = replace(LLAMA, dropout=0.1, chunk_tokens=7, vocab_multiple=128)
    changed = replace(changed, period=(replace(LLAMA.period[0], dropout=0.3),))
    changed = replace(changed, init=Initialisation(std=0.5))
    assert family_and_fields(changed)[1] == family_and_fields(LLAMA)[1]


@pytest.mark.parametrize(("name", "every"), [("gemma 2", 2), ("gemma 3", 6)])
def test_gemma_folders_without_layer_types_see_all_in_every_second_or_sixth_layer(
    tmp_path: Path, name: str, every: int
) -> None:
    """Of Gemma 2 the first layer has a window and the second none (Gemma Team 2024, section 2); of
    Gemma 3 five have one before each that has none (Gemma Team 2025, section 2.1)."""
    _, fields = family_and_fields(MODELS[name][1])
    fields = {k: v for k, v in fields.items() if k not in ("layer_types", "sliding_window_pattern")}
    fields["num_hidden_layers"] = 2 * every + 1
    read = read_config(folder(tmp_path, fields))
    full = [i for i, block in enumerate(read.blocks, 1) if block.attention.window is None]
    assert read.layers == 2 * every + 1 and full == [every, 2 * every]
