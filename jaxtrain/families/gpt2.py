"""GPT-2: matrices kept as [in, out], queries, keys and values in one of them."""

from __future__ import annotations

import re
from typing import Any

from jaxtrain.families.family import (
    ACTIVATIONS,
    Family,
    Tensor,
    activation_name,
    eps_of,
)
from jaxtrain.families.fields import Fields
from jaxtrain.nn.norm import LayerNorm
from jaxtrain.transformer.attention import AttentionConfig
from jaxtrain.transformer.block import BlockConfig
from jaxtrain.transformer.decoder import DecoderConfig
from jaxtrain.transformer.feed_forward import MlpConfig

_QKV = ("attention.query", "attention.key", "attention.value")
_LAYER = "transformer.h.{layer}."

TENSORS = (
    Tensor("transformer.wte.weight", ("embedding",)),
    Tensor("transformer.wpe.weight", ("positions",)),
    Tensor(f"{_LAYER}ln_1.weight", ("attention_norm.scale",)),
    Tensor(f"{_LAYER}ln_1.bias", ("attention_norm.bias",)),
    Tensor(f"{_LAYER}attn.c_attn.weight", _QKV),
    Tensor(f"{_LAYER}attn.c_attn.bias", tuple(f"{leaf}_bias" for leaf in _QKV)),
    Tensor(f"{_LAYER}attn.c_proj.weight", ("attention.out",)),
    Tensor(f"{_LAYER}attn.c_proj.bias", ("attention.out_bias",)),
    Tensor(f"{_LAYER}ln_2.weight", ("mlp_norm.scale",)),
    Tensor(f"{_LAYER}ln_2.bias", ("mlp_norm.bias",)),
    Tensor(f"{_LAYER}mlp.c_fc.weight", ("mlp.up",)),
    Tensor(f"{_LAYER}mlp.c_fc.bias", ("mlp.up_bias",)),
    Tensor(f"{_LAYER}mlp.c_proj.weight", ("mlp.down",)),
    Tensor(f"{_LAYER}mlp.c_proj.bias", ("mlp.down_bias",)),
    Tensor("transformer.ln_f.weight", ("norm.scale",)),
    Tensor("transformer.ln_f.bias", ("norm.bias",)),
    Tensor("lm_head.weight", ("head",)),
)


def read_gpt2(fields: Fields) -> DecoderConfig:
    embed = fields.count("n_embd")
    norm = LayerNorm(eps=fields.number("layer_norm_epsilon"))
    heads = fields.count("n_head")
    fields.multiple("n_embd", divisor="n_head")
    attention = AttentionConfig(
        heads=heads,
        rope=None,
        scale=None if fields.flag("scale_attn_weights") else 1.0,
        qkv_bias=True,
        out_bias=True,
    )
    mlp = MlpConfig(
        hidden=fields.count("n_inner", otherwise=4 * embed),
        activation=fields.choice("activation_function", ACTIVATIONS),
        gated=False,
        bias=True,
    )
    return DecoderConfig(
        vocab=fields.count("vocab_size"),
        embed=embed,
        layers=fields.count("n_layer"),
        period=(BlockConfig(attention, mlp, norm=norm),),
        norm=norm,
        learned_positions=fields.count("n_positions"),
        tied=fields.flag("tie_word_embeddings"),
    )


def write_gpt2(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields nearest to a config; those that all layers share from the first."""
    block = config.blocks[0]
    return {
        "vocab_size": config.vocab,
        "n_positions": config.learned_positions or 1,
        "n_embd": config.embed,
        "n_layer": config.layers,
        "n_head": block.attention.heads,
        "n_inner": block.mlp.hidden,
        "activation_function": activation_name(block.mlp.activation),
        "layer_norm_epsilon": eps_of(block),
        "scale_attn_weights": block.attention.scale != 1.0,
        "tie_word_embeddings": config.tied,
        # Missing, they would be 0.1.
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    base="transformer.",
    tensors=TENSORS,
    buffers=re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"),
    defaults={
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
    },
    read=read_gpt2,
    write=write_gpt2,
)
