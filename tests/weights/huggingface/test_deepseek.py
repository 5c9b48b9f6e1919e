"""Folders of DeepSeek-V2 and V3: their config.json as published, and their order of rotary dims."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_families import MODELS, bits, latent, random_params, template, with_block

from jaxtrain.attention import Rope, Yarn
from jaxtrain.huggingface import read_config, read_params, write_folder
from jaxtrain.huggingface.config import family_and_fields
from jaxtrain.moe import Groups, SigmoidRouter, SoftmaxRouter
from jaxtrain.nn import RMSNorm
from jaxtrain.transformer import (
    BlockConfig,
    DecoderConfig,
    LatentAttentionConfig,
    MlpConfig,
    MoeConfig,
    SharedExpert,
)

YARN = {
    **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "type": "yarn"},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
}
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
LITE = {
    **{k: v for k, v in V3.items() if k not in ("n_group", "topk_group")},
    **{"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"},
    **{"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408},
    **{"num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16},
    **{"q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2, "vocab_size": 102400},
    **{"num_experts_per_tok": 6, "first_k_dense_replace": 1, "norm_topk_prob": False},
    **{"scoring_func": "softmax", "topk_method": "greedy", "routed_scaling_factor": 1.0},
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}


def attention(heads: int, mscale: float, query_latent: int | None) -> LatentAttentionConfig:
    yarn = Yarn(40.0, 4096, mscale=mscale, mscale_all_dim=mscale)
    return LatentAttentionConfig(heads, query_latent=query_latent, rope=Rope(1e4, yarn))


def mixed(a: LatentAttentionConfig, dense: int, moe: MoeConfig, first: int, **fields: Any) -> Any:
    norm = RMSNorm(1e-6)
    return DecoderConfig(
        prefix=(BlockConfig(a, MlpConfig(dense), norm),) * first,
        period=(BlockConfig(a, moe, norm),),
        norm=norm,
        **fields,
    )


PUBLISHED = {
    "V3": (
        V3,
        mixed(
            attention(128, 1.0, 1536),
            18432,
            MoeConfig(
                2048,
                experts=256,
                experts_per_token=8,
                router=SigmoidRouter(scale=2.5, bias=True, groups=Groups(8, 4, best=2)),
                shared=SharedExpert(2048),
            ),
            first=3,
            vocab=129280,
            embed=7168,
            layers=61,
        ),
    ),
    "V2-Lite": (
        LITE,
        mixed(
            attention(16, 0.707, None),
            10944,
            MoeConfig(
                1408,
                experts=64,
                experts_per_token=6,
                router=SoftmaxRouter(renormalise=False),
                shared=SharedExpert(2816),
            ),
            first=1,
            vocab=102400,
            embed=2048,
            layers=27,
        ),
    ),
}


def folder(path: Path, fields: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_published_is_these_models(tmp_path: Path, name: str) -> None:
    fields, wanted = PUBLISHED[name]
    found = read_config(folder(tmp_path, fields))
    assert found == wanted
    again = family_and_fields(found)[1]
    assert again["model_type"] == fields["model_type"] and "head_dim" not in again


WRONG = [
    (V3, {"quantization_config": {"quant_method": "fp8"}}, "quant_method='fp8': weights in blocks"),
    (V3, {"moe_layer_freq": 2}, "moe_layer_freq=2; use 1"),
    (V3, {"scoring_func": "softmax"}, "scoring_func='softmax'; use 'sigmoid'"),
    (V3, {"rope_interleave": False}, "rope_interleave=False; use True"),
    (V3, {"num_key_value_heads": 8}, "num_key_value_heads=8; use 128"),
    (V3, {"attention_bias": True}, "attention_bias=True; use False"),
    (V3, {"topk_group": 9}, "chosen=9 of count=8 groups"),
    (V3, {"qk_rope_head_dim": 0}, "qk_rope_head_dim=0; use a whole number"),
    (V3, {"kv_lora_rank": None}, "kv_lora_rank=None"),
    (LITE, {"norm_topk_prob": True}, "norm_topk_prob=True; use False"),
    (LITE, {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'; use one of greedy, group"),
    (LITE, {"topk_method": "group_limited_greedy", "topk_group": 1}, "n_group is missing"),
    (LITE, {"hidden_size": 2040}, "hidden_size=2040 is not a multiple of num_attention_heads"),
]


@pytest.mark.parametrize(("fields", "change", "said"), WRONG)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, fields: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError) as error:
        read_config(folder(tmp_path, {**fields, **change}))
    assert said in str(error.value)
    assert str(error.value).count("\n- ") == 1, "one mistake, one line"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (with_block(latent(scale=0.3)), "block.attention.scale is 0.3, there None"),
        (
            with_block(latent(norm=RMSNorm(1e-5))),
            "block.attention.norm.eps is 1e-05, there 1e-06",
        ),
        (
            with_block(replace(latent(), dropout=0.1, residual_scale=2.0)),
            "block.residual_scale is 2.0",
        ),
    ],
)
def test_a_model_that_they_have_not_is_refused(config: DecoderConfig, said: str) -> None:
    with pytest.raises(ValueError) as error:
        family_and_fields(config)
    assert f"deepseek_v2, these are in the way:\n- {said}" in str(error.value)


def test_rotary_dims_lie_in_pairs_there_and_in_halves_here(tmp_path: Path) -> None:
    config = MODELS["deepseek 3"][1]
    params = random_params(config, template(config))
    write_folder(tmp_path / "out", config, params)
    theirs = load_file(tmp_path / "out" / "model.safetensors")
    a = config.blocks[0].attention
    assert isinstance(a, LatentAttentionConfig)
    rotary = a.rope_head_dim
    down = theirs["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].T
    ours = np.asarray(params["prefix.0.attention.latent_down"])
    np.testing.assert_array_equal(down[:, : a.latent], ours[:, : a.latent])
    half = a.latent + rotary // 2
    np.testing.assert_array_equal(down[:, a.latent :: 2], ours[:, a.latent : half])
    np.testing.assert_array_equal(down[:, a.latent + 1 :: 2], ours[:, half:])
    up = theirs["model.layers.3.self_attn.q_b_proj.weight"].T.reshape(-1, a.heads, a.head_dim)
    ours = np.asarray(params["period.0.attention.query_up"][1]).reshape(up.shape)
    nope = a.nope_head_dim
    np.testing.assert_array_equal(up[..., :nope], ours[..., :nope])
    np.testing.assert_array_equal(up[..., nope::2], ours[..., nope : nope + rotary // 2])
    np.testing.assert_array_equal(up[..., nope + 1 :: 2], ours[..., nope + rotary // 2 :])


@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 2}, {"tensor": 2}])
def test_every_shard_is_read_to_the_bit(tmp_path: Path, axes: dict[str, int]) -> None:
    config = MODELS["deepseek 3"][1]
    params = random_params(config, template(config))
    write_folder(tmp_path / "out", config, params)
    found = read_params(tmp_path / "out", config, template(config, **axes))
    for path, leaf in params.items():
        assert bits(found[path]) == bits(leaf), path


def test_layers_that_predict_further_tokens_are_left_out_and_others_are_not(
    tmp_path: Path,
) -> None:
    config = MODELS["deepseek 3"][1]
    params = random_params(config, template(config))
    write_folder(tmp_path / "out", config, params)
    file = tmp_path / "out" / "model.safetensors"
    held = load_file(file)
    behind = {"model.layers.4.input_layernorm.weight": np.ones(16, np.float32)}
    save_file({**held, **behind}, file, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"layers\.4\.input_layernorm.weight .* is not in this model"
    ):
        read_params(tmp_path / "out", config, template(config))
    behind["model.layers.4.eh_proj.weight"] = np.ones((16, 32), np.float32)
    save_file({**held, **behind}, file, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="2 tensors of layers behind the model's"):
        found = read_params(tmp_path / "out", config, template(config))
    assert all(bits(found[path]) == bits(leaf) for path, leaf in params.items())
