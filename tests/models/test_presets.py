"""The fields of `DecoderConfig` reach the published models, to the last parameter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import jaxtrain
from jaxtrain import AttentionConfig, BlockConfig, DecoderConfig, MlpConfig
from jaxtrain.attention import Llama3Scaling, Rope
from jaxtrain.nn import LayerNorm, RMSNorm
from jaxtrain.nn.module import take_apart
from jaxtrain.transformer import gelu_tanh

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def gpt(layers: int, embed: int, heads: int, *, seq: int = 1024) -> DecoderConfig:
    """GPT-2 and GPT-3 (Radford et al. 2019, Brown et al. 2020)."""
    block = BlockConfig(
        AttentionConfig(heads=heads, rope=None, qkv_bias=True, out_bias=True),
        MlpConfig(4 * embed, activation=gelu_tanh, gated=False, bias=True),
        norm=LayerNorm(),
    )
    return DecoderConfig(
        vocab=50257,
        embed=embed,
        layers=layers,
        period=(block,),
        norm=LayerNorm(),
        learned_positions=seq,
        tied=True,
    )


def llama(
    layers: int,
    embed: int,
    heads: tuple[int, int],
    hidden: int,
    vocab: int,
    *,
    tied: bool = False,
    attention: dict[str, Any] | None = None,
) -> DecoderConfig:
    """RMSNorm, RoPE, SwiGLU, grouped queries; `heads` of queries and of keys."""
    fields = {"heads": heads[0], "kv_heads": heads[1], **(attention or {})}
    block = BlockConfig(AttentionConfig(**fields), MlpConfig(hidden))
    return DecoderConfig(vocab=vocab, embed=embed, layers=layers, period=(block,), tied=tied)


QWEN2, QWEN3 = {"qkv_bias": True}, {"qk_norm": RMSNorm(eps=1e-6), "head_dim": 128}
MISTRAL = {"window": 4096}


def gemma(layers: int, embed: int, heads: tuple[int, int], hidden: int) -> DecoderConfig:
    """Gemma (2024): head_dim 256, GEGLU, norm scales stored less one, embeddings x sqrt(embed)."""
    block = BlockConfig(
        AttentionConfig(heads=heads[0], kv_heads=heads[1], head_dim=256),
        MlpConfig(hidden, activation=gelu_tanh),
        norm=RMSNorm(eps=1e-6, unit_offset=True),
    )
    return DecoderConfig(
        vocab=256_000,
        embed=embed,
        layers=layers,
        period=(block,),
        norm=RMSNorm(eps=1e-6, unit_offset=True),
        tied=True,
        embedding_scale=embed**0.5,
    )


def gemma2(layers: int, embed: int, heads: tuple[int, int], hidden: int) -> DecoderConfig:
    """Gemma 2 (2024) without its norms after each branch: a window in every other layer, scores and
    logits capped softly."""
    blocks = tuple(
        BlockConfig(
            AttentionConfig(
                heads=heads[0], kv_heads=heads[1], head_dim=256, window=window, softcap=50.0
            ),
            MlpConfig(hidden, activation=gelu_tanh),
            norm=RMSNorm(eps=1e-6, unit_offset=True),
        )
        for window in (4096, None)
    )
    return DecoderConfig(
        vocab=256_000,
        embed=embed,
        layers=layers,
        period=blocks,
        norm=RMSNorm(eps=1e-6, unit_offset=True),
        tied=True,
        embedding_scale=embed**0.5,
        logit_softcap=30.0,
    )


PUBLISHED: dict[str, tuple[DecoderConfig, int]] = {
    "GPT-2": (gpt(12, 768, 12), 124_439_808),
    "GPT-2 medium": (gpt(24, 1024, 16), 354_823_168),
    "GPT-2 large": (gpt(36, 1280, 20), 774_030_080),
    "GPT-2 XL": (gpt(48, 1600, 25), 1_557_611_200),
    "Llama 2 7B": (llama(32, 4096, (32, 32), 11_008, 32_000), 6_738_415_616),
    "Llama 2 13B": (llama(40, 5120, (40, 40), 13_824, 32_000), 13_015_864_320),
    "Llama 2 70B": (llama(80, 8192, (64, 8), 28_672, 32_000), 68_976_648_192),
    "Llama 3 8B": (llama(32, 4096, (32, 8), 14_336, 128_256), 8_030_261_248),
    "Llama 3 70B": (llama(80, 8192, (64, 8), 28_672, 128_256), 70_553_706_496),
    "Llama 3.2 1B": (llama(16, 2048, (32, 8), 8192, 128_256, tied=True), 1_235_814_400),
    "Llama 3.2 3B": (llama(28, 3072, (24, 8), 8192, 128_256, tied=True), 3_212_749_824),
    "Mistral 7B": (
        llama(32, 4096, (32, 8), 14_336, 32_000, attention=MISTRAL),
        7_241_732_096,
    ),
    "Qwen 2 0.5B": (
        llama(24, 896, (14, 2), 4864, 151_936, tied=True, attention=QWEN2),
        494_032_768,
    ),
    "Qwen 2 1.5B": (
        llama(28, 1536, (12, 2), 8960, 151_936, tied=True, attention=QWEN2),
        1_543_714_304,
    ),
    "Qwen 2 7B": (
        llama(28, 3584, (28, 4), 18_944, 152_064, attention=QWEN2),
        7_615_616_512,
    ),
    "Qwen 3 0.6B": (
        llama(28, 1024, (16, 8), 3072, 151_936, tied=True, attention=QWEN3),
        596_049_920,
    ),
    "Qwen 3 8B": (
        llama(36, 4096, (32, 8), 12_288, 151_936, attention=QWEN3),
        8_190_735_360,
    ),
    "Gemma 2B": (gemma(18, 2048, (8, 1), 16_384), 2_506_172_416),
    "Gemma 7B": (gemma(28, 3072, (16, 16), 24_576), 8_537_680_896),
    # Gemma 2's second norm of each branch, two [2304] a layer, is not among our fields.
    "Gemma 2 2B, less post-norms": (
        gemma2(26, 2304, (8, 4), 9216),
        2_614_341_888 - 26 * 2 * 2304,
    ),
}
"""Parameters as in the weights each lab has published, shared ones once."""


def counted(config: DecoderConfig) -> int:
    """Elements of all parameters; padded rows of the vocabulary are no parameters."""
    model = nnx.eval_shape(lambda: config.build(jax.random.key(0)))
    leaves = nnx.to_flat_state(nnx.state(model, nnx.Param))
    padding = (config.padded_vocab - config.vocab) * config.embed * (1 if config.tied else 2)
    return sum(math.prod(leaf.get_value().shape) for _, leaf in leaves) - padding


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    config, published = PUBLISHED[name]
    assert config.violations() == []
    assert counted(config) == published


def test_gpt3_is_as_large_as_its_table_says() -> None:
    """Brown et al. 2020, table D.1: 174,600 million."""
    assert counted(gpt(96, 12_288, 96, seq=2048)) == pytest.approx(174_600e6, abs=50e6)


@pytest.mark.parametrize(
    ("file", "name"),
    [("gpt2_124m", "GPT-2"), ("llama3_1b", "Llama 3.2 1B"), ("llama3_8b", "Llama 3 8B")],
)
def test_experiment_files_are_these_models(file: str, name: str) -> None:
    model = jaxtrain.load_experiment(EXPERIMENTS / f"{file}.py").model
    assert counted(model) == PUBLISHED[name][1]
    assert model.padded_vocab % 8 == 0, "the vocabulary splits over tensor=8"


@pytest.mark.parametrize(
    ("file", "head_dim", "theta", "scaling"),
    [
        ("llama3_1b", 64, 500_000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192)),
        ("llama3_8b", 128, 500_000.0, None),
    ],
)
def test_llama_presets_turn_as_published(
    file: str, head_dim: int, theta: float, scaling: Llama3Scaling | None
) -> None:
    """Frequencies count no parameters, so a wrong one would not show above."""
    model = jaxtrain.load_experiment(EXPERIMENTS / f"{file}.py").model
    ((rope, size),) = model.ropes
    assert rope == Rope(theta, scaling) and size == head_dim
    assert {b.attention.size(model.embed) for b in model.blocks} == {head_dim}
    found = rope.frequencies(head_dim, 1)
    plain = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    factor = 1.0 if scaling is None else scaling.factor
    np.testing.assert_allclose(found[[0, -1]], [1.0, plain[-1] / factor], rtol=1e-12)


@pytest.mark.slow
def test_gpt2_starts_as_published() -> None:
    """std 0.02, matrices that write to the residual stream by 1 / sqrt(2 layers), biases 0."""
    preset = jaxtrain.load_experiment(EXPERIMENTS / "gpt2_124m.py").model
    init, residual = preset.init, 0.02 / math.sqrt(2 * 12)
    assert init.matrix_std(768, layers=12) == init.table_std(768) == 0.02
    assert init.matrix_std(3072, layers=12, residual=True) == pytest.approx(residual)
    small = DecoderConfig(
        vocab=64, embed=96, layers=12, period=preset.period, norm=preset.norm, init=init, tied=True,
        learned_positions=64, vocab_multiple=64,
    )  # fmt: skip
    params = jax.jit(lambda: take_apart(small.build(jax.random.key(0))).params)()
    stds = dict.fromkeys(("attention.query", "mlp.up"), 0.02)
    stds |= dict.fromkeys(("attention.out", "mlp.down"), residual)
    for name, std in stds.items():
        assert float(np.std(params[f"period.0.{name}"])) == pytest.approx(std, rel=0.02), name
    biases = [value for name, value in params.items() if name.endswith("bias")]
    assert len(biases) == 2 + 4 + 2 + 1 and not any(map(np.any, biases))
