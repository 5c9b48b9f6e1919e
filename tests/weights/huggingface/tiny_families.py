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
from jaxtrain.mesh.mesh import make_mesh
from jaxtrain.mesh.sharding import named_sharding, place
from jaxtrain.models import gelu_exact, gelu_tanh
from jaxtrain.nn import LayerNorm, LinearScaling, Llama3Scaling, RMSNorm, Rope
from jaxtrain.nn.module import ModuleSplit, build, take_apart

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


FULL, WINDOWED = attention(qkv_bias=True), attention(qkv_bias=True, window=3)

MODELS: dict[str, tuple[str, DecoderConfig]] = {
    "llama": ("llama", LLAMA),
    "llama tied": ("llama", replace(LLAMA, tied=True)),
    "llama 3": (
        "llama",
        with_block(attention(rope=Rope(500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 32))), tied=True),
    ),
    "llama stretched": ("llama", with_block(attention(rope=Rope(scaling=LinearScaling(2.0))))),
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
