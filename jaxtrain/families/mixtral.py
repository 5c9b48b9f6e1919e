"""Mixtral: Mistral's layers, each with a mixture of experts.

Every expert's matrices are tensors of their own, `block_sparse_moe.experts.0.w1`; so they are in
all published folders, and so versions 4 and 5 of `transformers` write them. Version 5 keeps them
fused in memory, and can save them so (`save_original_format=False`), which is read here too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxtrain.families.family import Tensor
from jaxtrain.families.fields import Fields
from jaxtrain.families.llama import (
    BESIDE_MLP,
    LAYER,
    MISTRAL,
    read_llama,
    write_llama,
)
from jaxtrain.transformer.block import BlockConfig
from jaxtrain.transformer.decoder import DecoderConfig
from jaxtrain.transformer.mixture import MoeConfig
from jaxtrain.transformer.validate import EXPERTS

_MOE = f"{LAYER}block_sparse_moe."
_EXPERT = {"w1": "mlp.gate", "w3": "mlp.up", "w2": "mlp.down"}

TENSORS = (
    *BESIDE_MLP,
    Tensor(f"{_MOE}gate.weight", ("mlp.router",), transposed=True),
    *(
        Tensor(f"{_MOE}experts.{{expert}}.{name}.weight", (leaf,), transposed=True)
        for name, leaf in _EXPERT.items()
    ),
)
FUSED = (
    *BESIDE_MLP,
    Tensor(f"{LAYER}mlp.gate.weight", ("mlp.router",), transposed=True),
    Tensor(f"{LAYER}mlp.experts.gate_up_proj", ("mlp.gate", "mlp.up"), transposed=True),
    Tensor(f"{LAYER}mlp.experts.down_proj", ("mlp.down",), transposed=True),
)


def read_mixtral(fields: Fields) -> DecoderConfig:
    config = read_llama(fields, "mixtral")
    dense = config.blocks[0].mlp
    moe = MoeConfig(
        hidden=dense.hidden,
        experts=fields.count("num_local_experts", most=EXPERTS),
        experts_per_token=fields.count("num_experts_per_tok"),
        activation=dense.activation,
    )
    if moe.experts_per_token > moe.experts == fields.content.get("num_local_experts"):
        fields.problems.append(
            f"num_experts_per_tok={moe.experts_per_token} is more than "
            f"num_local_experts={moe.experts}; use at most that many"
        )

    def routed(blocks: tuple[BlockConfig, ...]) -> tuple[BlockConfig, ...]:
        return tuple(replace(block, mlp=moe) for block in blocks)

    return replace(config, prefix=routed(config.prefix), period=routed(config.period))


def write_mixtral(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields of config.json that are nearest to a config. Fields that have one value
    for all layers are taken from the first layer."""
    mlp = config.blocks[0].mlp
    experts, chosen = 1, 1
    if isinstance(mlp, MoeConfig):
        experts, chosen = mlp.experts, mlp.experts_per_token
    return {
        **write_llama(config, "mixtral"),
        "num_local_experts": experts,
        "num_experts_per_tok": chosen,
    }


MIXTRAL = replace(
    MISTRAL,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    tensors=TENSORS,
    alternatives=FUSED,
    defaults={
        **MISTRAL.defaults,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    read=read_mixtral,
    write=write_mixtral,
)
