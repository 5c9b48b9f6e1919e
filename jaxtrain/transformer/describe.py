"""Description of a decoder's block."""

from __future__ import annotations

from jaxtrain.operations.attention import AttentionCall
from jaxtrain.operations.block import Block, Branches, Residual
from jaxtrain.operations.elementwise import Bias, Elementwise, NormAcrossHeads
from jaxtrain.operations.experts import ExpertCall
from jaxtrain.operations.node import Weight
from jaxtrain.operations.operation import Operation
from jaxtrain.operations.product import (
    ColumnParallel,
    ReplicatedProduct,
    RowParallel,
    TokenGather,
)
from jaxtrain.transformer.attention import AttentionConfig
from jaxtrain.transformer.block import BlockConfig
from jaxtrain.transformer.latent import LatentAttentionConfig
from jaxtrain.transformer.mixture import MoeConfig


def describe_block(config: BlockConfig, embed: int) -> Block:
    """Returns the operations of a block of a model of width `embed`, in their order."""
    a = config.attention
    latent = isinstance(a, LatentAttentionConfig)
    attention = _describe_latent(a, embed) if latent else _describe_attention(a, embed)
    return (
        Residual(_normed(config, "attention", attention)),
        Residual(_normed(config, "mlp", _describe_mlp(config, embed))),
    )


def _describe_attention(a: AttentionConfig, embed: int) -> tuple[Operation, ...]:
    size = a.size(embed)
    wide, narrow = a.heads * size, a.key_heads * size
    into = {"query": wide, "key": narrow, "value": narrow}
    columns = ColumnParallel(tuple(Weight(f"attention.{k}", embed, n) for k, n in into.items()))
    biases = tuple(f"attention.{k}_bias" for k in into) if a.qkv_bias else ()
    norms = () if a.qk_norm is None else ("attention.query_norm.", "attention.key_norm.")
    learns = a.scores is not None and a.scores.trained
    across = (NormAcrossHeads(norms, sums=2),) if a.qk_norm_across_heads else ()
    return (
        columns,
        Elementwise(biases if across else (*biases, *norms)),
        *across,
        AttentionCall(
            a.heads,
            a.key_heads,
            size,
            window=a.window,
            softcap=a.softcap,
            scale=a.scale,
            scores=a.scores,
            learned=("attention.score_values",) if learns else (),
            queries=("attention.query", "attention.query_bias", "attention.query_norm."),
        ),
        RowParallel(Weight("attention.out", wide, embed)),
        *([Bias(("attention.out_bias",))] if a.out_bias else []),
    )


def _describe_latent(a: LatentAttentionConfig, embed: int) -> tuple[Operation, ...]:
    def named(leaf: str, rows: int, columns: int) -> tuple[Weight, ...]:
        return (Weight(f"attention.{leaf}", rows, columns),)

    wide = a.heads * a.head_dim
    of_queries = tuple(f"attention.query{end}" for end in ("", "_down", "_norm.", "_up"))
    queries: tuple[Operation, ...] = (ColumnParallel(named("query", embed, wide)),)
    if a.query_latent is not None:
        queries = (
            ReplicatedProduct(named("query_down", embed, a.query_latent)),
            Elementwise(("attention.query_norm.",)),
            ColumnParallel(named("query_up", a.query_latent, wide)),
        )
    up = a.heads * (a.nope_head_dim + a.value_head_dim)
    expanded = (
        Elementwise(("attention.latent_norm.",)),
        ColumnParallel(named("latent_up", a.latent, up)),
    )
    keys = (
        ReplicatedProduct(named("latent_down", embed, a.latent + a.rope_head_dim)),
        Branches((expanded, (TokenGather(a.rope_head_dim),))),
    )
    size, needed = max(a.head_dim, a.value_head_dim), (a.head_dim, a.value_head_dim)
    return (
        Branches((queries, keys)),
        AttentionCall(
            a.heads, a.heads, size, scale=a.scoring_scale(), needed=needed, queries=of_queries
        ),
        RowParallel(*named("out", a.heads * a.value_head_dim, embed)),
    )


def _normed(config: BlockConfig, name: str, branch: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """Returns a branch with its norms before and after it."""
    first = () if config.norm is None else (Elementwise((f"{name}_norm.",)),)
    behind = () if config.post_norm is None else (Elementwise((f"{name}_post_norm.",)),)
    return (*first, *branch, *behind)


def _describe_mlp(config: BlockConfig, embed: int) -> tuple[Operation, ...]:
    mlp = config.mlp
    names = ("mlp.gate", "mlp.up") if mlp.gated else ("mlp.up",)
    into = tuple(Weight(name, embed, mlp.hidden) for name in names)
    down = Weight("mlp.down", mlp.hidden, embed)
    if isinstance(mlp, MoeConfig):
        return (_describe_experts(mlp, embed, (*into, down)),)
    biases = tuple(f"{name}_bias" for name in names) if mlp.bias else ()
    out = [Bias(("mlp.down_bias",))] if mlp.bias else []
    return (ColumnParallel(into), Elementwise(biases), RowParallel(down), *out)


def _describe_experts(mlp: MoeConfig, embed: int, weights: tuple[Weight, ...]) -> ExpertCall:
    shared: tuple[Weight, ...] = ()
    if mlp.shared is not None:
        wide = mlp.shared.hidden
        for weight in weights:
            leaf = weight.leaf.replace("mlp.", "mlp.shared.")
            into = weight.rows == embed and not leaf.endswith("down")
            shared += (Weight(leaf, *((embed, wide) if into else (wide, embed))),)
        if mlp.shared.weighed:
            shared += (Weight("mlp.shared_router", embed, 1),)
    balance, capacity, n = mlp.balance, mlp.capacity, mlp.experts_per_token
    return ExpertCall(
        Weight("mlp.router", embed, mlp.experts),
        weights,
        mlp.experts,
        n,
        shared=shared,
        learns=n > 1 or mlp.experts == 1 or not mlp.router.renormalise,
        tallied=balance is not None,
        sums_loads=balance is not None and balance.loss_weight > 0,
        bias_rate=0.0 if balance is None else balance.bias_rate,
        routing_group=None if capacity is None else capacity.routing_group,
        rows_of_group=None if capacity is None else capacity.rows(mlp.experts, n),
        replay=mlp.replay,
    )
