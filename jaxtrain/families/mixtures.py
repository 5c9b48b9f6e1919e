"""Qwen2-MoE, Qwen3-MoE and dots.llm1: layers of which some are dense, and others have experts.

Published folders have every expert's matrices as tensors of their own, and so all versions of
`transformers` write them; version 5 keeps gate and up of all experts fused in memory, and saves
them so when told to: read here too. dots.llm1 has the mixture of DeepSeek-V3: sigmoid scores, a
bias, groups, a scale, shared experts, after a few dense layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from jaxtrain.families.family import Family, Tensor, find_period
from jaxtrain.families.fields import Fields
from jaxtrain.families.llama import (
    BESIDE_MLP,
    BUFFERS,
    DEFAULTS,
    LAYER,
    read_llama,
    write_llama,
)
from jaxtrain.moe.router import Groups, SigmoidRouter, SoftmaxRouter
from jaxtrain.transformer.block import BlockConfig
from jaxtrain.transformer.decoder import DecoderConfig
from jaxtrain.transformer.mixture import MoeConfig, SharedExpert
from jaxtrain.transformer.validate import EXPERTS, LAYERS

_MLP = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def feed_forward(name: str, leaf: str, *, mixed: bool) -> Iterator[Tensor]:
    """Yields the three matrices of a feed-forward network, stored under `name` and held as `leaf`:
    in layers that have experts (`mixed`), or in those that have none."""
    for theirs, ours in _MLP.items():
        full = f"{LAYER}mlp.{name}{theirs}.weight"
        yield Tensor(full, (f"mlp.{leaf}{ours}",), transposed=True, mixed=mixed)


ROUTER = Tensor(f"{LAYER}mlp.gate.weight", ("mlp.router",), transposed=True, mixed=True)
BIAS = Tensor(f"{LAYER}mlp.gate.e_score_correction_bias", ("mlp.router_bias",), mixed=True)
SHARED_ROUTER = Tensor(
    f"{LAYER}mlp.shared_expert_gate.weight", ("mlp.shared_router",), transposed=True, mixed=True
)
BESIDE_EXPERTS = (*BESIDE_MLP, *feed_forward("", "", mixed=False), ROUTER)
SHARED = {
    "qwen2_moe": (*feed_forward("shared_expert.", "shared.", mixed=True), SHARED_ROUTER),
    "qwen3_moe": (),
    "dots1": (*feed_forward("shared_experts.", "shared.", mixed=True), BIAS),
}
"""What a mixture has beside its experts and its router, by model_type."""
FUSED = (
    Tensor(f"{LAYER}mlp.experts.gate_up_proj", ("mlp.gate", "mlp.up"), transposed=True, mixed=True),
    Tensor(f"{LAYER}mlp.experts.down_proj", ("mlp.down",), transposed=True, mixed=True),
)


def _read(fields: Fields, kind: str, mixture: Callable[[Fields], MoeConfig]) -> DecoderConfig:
    """Returns a config of model_type `kind`, whose layers with experts are like `mixture`."""
    config, moe = read_llama(fields, kind), mixture(fields)
    moe = replace(moe, activation=config.blocks[0].mlp.activation)
    dense = _dense_layers(fields, kind, config.layers)
    if fields.problems:
        return config

    def routed(number: int, block: BlockConfig) -> BlockConfig:
        return block if number in dense else replace(block, mlp=moe)

    prefix, period = find_period(tuple(routed(*layer) for layer in enumerate(config.blocks)))
    return replace(config, prefix=prefix, period=period, suffix=())


def _dense_layers(fields: Fields, kind: str, layers: int) -> set[int]:
    if kind == "dots1":
        return set(range(fields.whole("first_k_dense_replace")))
    step = fields.count("decoder_sparse_step", most=LAYERS)
    named = fields.value("mlp_only_layers") or []
    if not isinstance(named, list) or not all(isinstance(layer, int) for layer in named):
        fields.problems.append(f"mlp_only_layers={named!r}; use a list of layers' numbers")
        return set()
    return {layer for layer in range(layers) if layer in named or (layer + 1) % step}


def read_experts(fields: Fields, name: str) -> MoeConfig:
    """Returns a mixture's sizes. name: of the field with the number of experts."""
    moe = MoeConfig(
        hidden=fields.count("moe_intermediate_size"),
        experts=fields.count(name, most=EXPERTS),
        experts_per_token=fields.count("num_experts_per_tok"),
    )
    if moe.experts_per_token > moe.experts == fields.content.get(name):
        fields.problems.append(
            f"num_experts_per_tok={moe.experts_per_token} is more than {name}={moe.experts}; "
            "use at most that many"
        )
    return moe


def _qwen(fields: Fields, kind: str) -> MoeConfig:
    # Version 5 calls Qwen3's as Mixtral's are.
    later = fields.value("num_local_experts") is not None
    fields.value("num_experts")
    shared = None
    if kind == "qwen2_moe":
        shared = SharedExpert(fields.count("shared_expert_intermediate_size"), weighed=True)
    router = SoftmaxRouter(renormalise=fields.flag("norm_topk_prob"))
    moe = read_experts(fields, "num_local_experts" if later else "num_experts")
    return replace(moe, router=router, shared=shared)


def read_sigmoid_mixture(fields: Fields) -> MoeConfig:
    """Returns the mixture of DeepSeek-V3."""
    moe = read_experts(fields, "n_routed_experts")
    groups, chosen = fields.count("n_group", otherwise=1), fields.count("topk_group", otherwise=1)
    router = SigmoidRouter(
        renormalise=fields.flag("norm_topk_prob"),
        scale=fields.number("routed_scaling_factor"),
        bias=True,
        groups=Groups(groups, chosen, best=2) if groups > 1 else None,
    )
    shared = SharedExpert(moe.hidden * fields.count("n_shared_experts"))
    return replace(moe, router=router, shared=shared)


def _write(config: DecoderConfig, kind: str) -> dict[str, Any]:
    """Returns the fields nearest to a config; those of several layers from the first of its
    kind."""
    blocks = config.blocks
    mixed = [layer for layer, block in enumerate(blocks) if isinstance(block.mlp, MoeConfig)]
    # Without any experts this declares all layers mixed: such a model is another family's.
    dense = [layer for layer in range(len(blocks)) if mixed and layer not in mixed]
    moe = blocks[mixed[0]].mlp if mixed else MoeConfig(1, experts=1, experts_per_token=1)
    assert isinstance(moe, MoeConfig)
    fields = write_llama(config, kind)
    fields["intermediate_size"] = blocks[dense[0]].mlp.hidden if dense else moe.hidden
    if kind == "dots1":
        return fields | {**write_experts(moe), "first_k_dense_replace": len(dense)}
    fields |= _write_choice(moe)
    fields |= {"num_experts": moe.experts, "decoder_sparse_step": 1, "mlp_only_layers": dense}
    shared = _shared_hidden(moe)
    return fields | ({"shared_expert_intermediate_size": shared} if kind == "qwen2_moe" else {})


def write_experts(moe: MoeConfig) -> dict[str, Any]:
    """The fields of a mixture as DeepSeek names them."""
    groups = moe.router.groups
    return {
        **_write_choice(moe),
        "n_routed_experts": moe.experts,
        "n_shared_experts": max(_shared_hidden(moe) // moe.hidden, 1),
        "n_group": 1 if groups is None else groups.count,
        "topk_group": 1 if groups is None else groups.chosen,
        "routed_scaling_factor": moe.router.scale,
    }


def _write_choice(moe: MoeConfig) -> dict[str, Any]:
    return {
        "moe_intermediate_size": moe.hidden,
        "num_experts_per_tok": moe.experts_per_token,
        "norm_topk_prob": moe.router.renormalise,
    }


def _shared_hidden(moe: MoeConfig) -> int:
    return moe.hidden if moe.shared is None else moe.shared.hidden


def expert_tensors() -> tuple[Tensor, ...]:
    """The matrices of every expert, each a tensor of its own."""
    return tuple(
        Tensor(f"{LAYER}mlp.experts.{{expert}}.{theirs}.weight", (f"mlp.{ours}",), True, True)
        for theirs, ours in _MLP.items()
    )


def _family(
    kind: str, architecture: str, mixture: Callable[[Fields], MoeConfig], **defaults: Any
) -> Family:
    unfused = (*BESIDE_EXPERTS, *SHARED[kind])
    return Family(
        model_type=kind,
        architecture=architecture,
        base="model.",
        tensors=(*unfused, *expert_tensors()),
        alternatives=(*unfused, *FUSED),
        buffers=BUFFERS,
        defaults={**DEFAULTS, **defaults},
        read=partial(_read, kind=kind, mixture=mixture),
        write=partial(_write, kind=kind),
    )


_STEPS: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}
QWEN2_MOE = _family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    partial(_qwen, kind="qwen2_moe"),
    **_STEPS,
    num_key_value_heads=16,
    qkv_bias=True,
    moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632,
    num_experts_per_tok=4,
    num_experts=60,
    norm_topk_prob=False,
)
QWEN3_MOE = _family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    partial(_qwen, kind="qwen3_moe"),
    **_STEPS,
    num_key_value_heads=4,
    moe_intermediate_size=768,
    num_experts_per_tok=8,
    num_experts=128,
    norm_topk_prob=False,
)
DOTS1 = _family(
    "dots1",
    "Dots1ForCausalLM",
    read_sigmoid_mixture,
    num_key_value_heads=32,
    max_window_layers=62,
    n_group=1,
    topk_group=1,
    norm_topk_prob=False,
    routed_scaling_factor=1.0,
    first_k_dense_replace=0,
)
