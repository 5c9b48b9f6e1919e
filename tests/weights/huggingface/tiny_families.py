"""Models of a few hundred parameters, one or more of each family, and their parameters at random.

Where a family leaves a choice (tied, biases, scaling, windows) both sides of it are in the table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain import (
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    MlpConfig,
    MoeConfig,
    fsdp,
    mesh_from_axes,
    tensor,
)
from jaxtrain.attention import DynamicNtk, LinearScaling, Llama3Scaling, LongRope, Rope, Yarn
from jaxtrain.mesh.mesh import make_mesh
from jaxtrain.mesh.sharding import named_sharding, place
from jaxtrain.moe import Groups, SigmoidRouter, SoftmaxRouter
from jaxtrain.nn import LayerNorm, RMSNorm
from jaxtrain.nn.module import ModuleSplit, build, take_apart
from jaxtrain.transformer import LatentAttentionConfig, SharedExpert, gelu_exact, gelu_tanh

NORM = RMSNorm(eps=1e-6)
ATTENTION = AttentionConfig(heads=4, kv_heads=2, head_dim=4)
BLOCK = BlockConfig(ATTENTION, MlpConfig(hidden=12), norm=NORM)
LLAMA = DecoderConfig(
    vocab=11, embed=16, layers=2, period=(BLOCK,), norm=NORM, vocab_multiple=16, chunk_tokens=64
)
GPT_NORM = LayerNorm()
GPT2 = replace(
    LLAMA,
    period=(
        BlockConfig(
            AttentionConfig(heads=4, rope=None, qkv_bias=True, out_bias=True),
            MlpConfig(hidden=20, activation=gelu_tanh, gated=False, bias=True),
            norm=GPT_NORM,
        ),
    ),
    norm=GPT_NORM,
    learned_positions=8,
    tied=True,
)


def attention(**fields: Any) -> BlockConfig:
    """The block with another attention."""
    return replace(BLOCK, attention=replace(ATTENTION, **fields))


def with_block(block: BlockConfig, **fields: Any) -> DecoderConfig:
    return replace(LLAMA, period=(block,), **fields)


def latent(**fields: Any) -> BlockConfig:
    """The block with latent attention."""
    sizes: dict[str, Any] = {"nope_head_dim": 4, "rope_head_dim": 6, "value_head_dim": 6}
    return replace(BLOCK, attention=LatentAttentionConfig(4, 8, **{**sizes, **fields}))


FULL, WINDOWED = attention(qkv_bias=True), attention(qkv_bias=True, window=3)

QWEN_MOE = MoeConfig(
    6,
    experts=5,
    router=SoftmaxRouter(renormalise=False),
    shared=SharedExpert(10, weighed=True),
)
DOTS = MoeConfig(
    6,
    experts=8,
    router=SigmoidRouter(scale=2.5, bias=True, groups=Groups(4, 2, best=2)),
    shared=SharedExpert(12),
)

OLMO_BLOCK = replace(attention(qk_norm=NORM, qk_norm_across_heads=True), norm=None, post_norm=NORM)
LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 32)
OFFSET = RMSNorm(eps=1e-6, unit_offset=True)


def gemma(
    *kinds: str, full_rope: Rope | None = None, final: float | None = None, **fields: Any
) -> DecoderConfig:
    """Two turns of layers that see 3 tokens or all; in Gemma 3 the latter have a rope of theirs."""
    fields = {"head_dim": 6, "scale": 9**-0.5, **fields}
    windows = [
        {"window": 3} if kind == "window 3" else {"rope": full_rope or Rope()} for kind in kinds
    ]
    mlp = MlpConfig(hidden=12, activation=gelu_tanh)
    return replace(
        LLAMA,
        layers=2 * len(kinds),
        period=tuple(
            replace(attention(**{**fields, **own}), mlp=mlp, norm=OFFSET, post_norm=OFFSET)
            for own in windows
        ),
        norm=OFFSET,
        tied=True,
        embedding_scale=16**0.5,
        logit_softcap=final,
    )


LONG_ROPE = LongRope((1.0, 1.5), (2.0, 6.0), factor=4.0, original_seq=16)

MODELS: dict[str, tuple[str, DecoderConfig]] = {
    "llama": ("llama", LLAMA),
    "llama tied": ("llama", replace(LLAMA, tied=True)),
    "llama 3": (
        "llama",
        with_block(attention(rope=Rope(500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 32))), tied=True),
    ),
    "llama stretched": ("llama", with_block(attention(rope=Rope(scaling=LinearScaling(2.0))))),
    "llama yarn": (
        "llama",
        with_block(attention(rope=Rope(scaling=Yarn(4.0, 16, truncate=False)))),
    ),
    "llama dynamic": ("llama", with_block(attention(rope=Rope(scaling=DynamicNtk(2.0, 32))))),
    "llama longrope": ("llama", with_block(attention(rope=Rope(scaling=LONG_ROPE)))),
    "llama biases": (
        "llama",
        with_block(
            replace(
                attention(qkv_bias=True, out_bias=True),
                mlp=MlpConfig(hidden=12, activation=gelu_exact, bias=True),
            )
        ),
    ),
    "mistral": ("mistral", with_block(attention(window=3))),
    "mistral heads": ("mistral", with_block(attention(heads=6, kv_heads=2))),
    "mixtral": ("mixtral", with_block(replace(BLOCK, mlp=MoeConfig(hidden=12, experts=4)))),
    "mixtral windows": (
        "mixtral",
        with_block(
            replace(
                attention(window=3),
                mlp=MoeConfig(hidden=10, experts=3, experts_per_token=1, activation=gelu_tanh),
            ),
            tied=True,
        ),
    ),
    "qwen 2": ("qwen2", with_block(FULL, tied=True)),
    "qwen 2 windows": (
        "qwen2",
        replace(LLAMA, layers=4, prefix=(FULL,), period=(WINDOWED,), suffix=(WINDOWED,)),
    ),
    "qwen 3": ("qwen3", with_block(attention(qk_norm=NORM, head_dim=6))),
    "qwen 3 alternating": (
        "qwen3",
        replace(
            LLAMA,
            layers=4,
            period=(attention(qk_norm=NORM), attention(qk_norm=NORM, window=3)),
        ),
    ),
    "olmo 2": ("olmo2", with_block(OLMO_BLOCK)),
    "olmo 2 biases": (
        "olmo2",
        with_block(
            replace(
                OLMO_BLOCK,
                attention=replace(
                    OLMO_BLOCK.attention, qkv_bias=True, out_bias=True, rope=Rope(5e5, LLAMA3)
                ),
            )
        ),
    ),
    "gemma 2": ("gemma2", gemma("window 3", "full", softcap=50.0, final=30.0)),
    "gemma 2, all layers alike, biases": (
        "gemma2",
        gemma("full", scale=10**-0.5, qkv_bias=True, out_bias=True),
    ),
    "gemma 3": (
        "gemma3_text",
        replace(
            gemma(
                "window 3",
                "full",
                qk_norm=OFFSET,
                full_rope=Rope(1e6, LinearScaling(8.0)),
                final=20.0,
            ),
            layers=5,
            prefix=gemma("window 3", qk_norm=OFFSET).period,
        ),
    ),
    "phi 3": (
        "phi3",
        with_block(attention(head_dim=8, rope=Rope(1e4, LONG_ROPE, 0.5), window=5), tied=True),
    ),
    "phi 3, a factor of its own": (
        "phi3",
        with_block(
            attention(
                heads=2,
                kv_heads=1,
                head_dim=8,
                rope=Rope(1e4, replace(LONG_ROPE, factor=2.7, attention_factor=1.1), 0.5),
            )
        ),
    ),
    "qwen 2 moe": ("qwen2_moe", with_block(replace(FULL, mlp=QWEN_MOE))),
    "qwen 2 moe, without biases, windows": (
        "qwen2_moe",
        replace(
            LLAMA,
            period=(replace(BLOCK, mlp=QWEN_MOE), replace(attention(window=3), mlp=QWEN_MOE)),
        ),
    ),
    "qwen 3 moe, one dense": (
        "qwen3_moe",
        replace(
            LLAMA,
            layers=3,
            prefix=(attention(qk_norm=NORM),),
            period=(
                replace(attention(qk_norm=NORM), mlp=MoeConfig(6, experts=5, experts_per_token=3)),
            ),
        ),
    ),
    "qwen 3 moe, windows": (
        "qwen3_moe",
        with_block(replace(attention(qk_norm=NORM, window=3), mlp=replace(QWEN_MOE, shared=None))),
    ),
    "dots 1": (
        "dots1",
        replace(
            LLAMA,
            layers=3,
            prefix=(attention(qk_norm=NORM),),
            period=(replace(attention(qk_norm=NORM), mlp=DOTS),),
        ),
    ),
    "dots 1, all mixed": (
        "dots1",
        with_block(
            replace(
                attention(qk_norm=NORM, qkv_bias=True, out_bias=True, window=3),
                mlp=replace(DOTS, router=replace(DOTS.router, groups=None, renormalise=False)),
            )
        ),
    ),
    "deepseek 2, groups": (
        "deepseek_v2",
        replace(
            LLAMA,
            layers=3,
            prefix=(latent(query_latent=6),),
            period=(
                replace(
                    latent(query_latent=6),
                    mlp=replace(
                        DOTS,
                        router=SoftmaxRouter(renormalise=False, scale=2.0, groups=Groups(4, 2)),
                    ),
                ),
            ),
        ),
    ),
    "deepseek 2, dense": ("deepseek_v2", with_block(latent(value_head_dim=10), tied=True)),
    "deepseek 3": (
        "deepseek_v3",
        replace(
            LLAMA,
            layers=4,
            prefix=(latent(query_latent=6),) * 2,
            period=(replace(latent(query_latent=6), mlp=DOTS),),
        ),
    ),
    "deepseek 3, stretched": (
        "deepseek_v3",
        with_block(
            replace(
                latent(rope=Rope(scaling=Yarn(4.0, 16, mscale=0.7, mscale_all_dim=1.2))),
                mlp=replace(DOTS, router=replace(DOTS.router, groups=None, renormalise=False)),
            )
        ),
    ),
    "gpt2": ("gpt2", GPT2),
    "gpt2 untied": ("gpt2", replace(GPT2, tied=False)),
}
"""Name -> the model_type it is written as, and the model."""


def abstract(config: DecoderConfig) -> ModuleSplit:
    return take_apart(nnx.eval_shape(lambda: build(config.build, jax.random.key(0))))


def template(
    config: DecoderConfig, dtype: Any = jnp.float32, **axes: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Every leaf as fsdp() | tensor() lets it rest on a mesh; on one device without axes."""
    spec = mesh_from_axes(**(axes or {"data": 1}))
    mesh, split = make_mesh(spec), abstract(config)
    places, violations = place(split.params, split.axes, fsdp() | tensor(), sizes=dict(mesh.shape))
    assert not violations
    return {
        path: jax.ShapeDtypeStruct(
            leaf.shape, dtype, sharding=named_sharding(mesh, places[path].params)
        )
        for path, leaf in split.params.items()
    }


def random_params(
    config: DecoderConfig, where: dict[str, jax.ShapeDtypeStruct], seed: int = 0
) -> dict[str, jax.Array]:
    """Every element its own number, padded rows of the vocabulary zero."""
    rng = np.random.default_rng(seed)
    found = {}
    for path, leaf in where.items():
        values = rng.normal(size=leaf.shape).astype(np.float32)
        if path in ("embedding", "head"):
            values[config.vocab :] = 0.0
        found[path] = jax.device_put(values.astype(leaf.dtype), leaf.sharding)
    return found


def bits(array: Any) -> bytes:
    return np.asarray(array).tobytes()
