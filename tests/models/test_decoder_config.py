"""Shapes, counts, initial values and refusals of decoders: nothing is trained here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import numpy as np
import pytest
from dense_decoder import natural_layers
from flax import nnx

from jaxtrain.mesh.sharding import ShardingRules, fsdp, table, tensor
from jaxtrain.nn.module import build, take_apart
from jaxtrain.nn.norm import LayerNorm, RMSNorm
from jaxtrain.nn.param import Initialisation
from jaxtrain.scores import Alibi, ScoreFunction
from jaxtrain.transformer.attention import AttentionConfig
from jaxtrain.transformer.block import BlockConfig
from jaxtrain.transformer.decoder import DecoderConfig
from jaxtrain.transformer.feed_forward import MlpConfig, gelu_tanh
from jaxtrain.transformer.latent import LatentAttentionConfig
from jaxtrain.transformer.mixture import MoeConfig
from jaxtrain.validation.split import unsplit

ROWS, SEQ, VOCAB = 2, 8, 13
NORM = RMSNorm()
BIASED = {"qkv_bias": True, "out_bias": True}


@dataclass(frozen=True)
class OfTwoHeads(ScoreFunction):
    def of_heads(self, heads: int) -> np.ndarray:
        return np.zeros(2)


@dataclass(frozen=True)
class Cubes(ScoreFunction):
    trained: ClassVar[bool] = True

    def of_heads(self, heads: int) -> np.ndarray:
        return np.zeros((heads, 2, 2))


def decoder(*period, layers=2, **fields):
    return DecoderConfig(
        **{"vocab": VOCAB, "embed": 8, "layers": layers, "period": period, "vocab_multiple": 8,
           "chunk_tokens": 8, **fields}
    )  # fmt: skip


def block(
    heads=4, hidden=12, *, mlp=None, norm=NORM, residual_scale=1.0, dropout=0.0, post_norm=None,
    **fields,
):  # fmt: skip
    mlp, attention = mlp or MlpConfig(hidden), AttentionConfig(heads, **fields)
    return BlockConfig(attention, mlp, norm, residual_scale, dropout, post_norm)


def latent(**fields):
    return BlockConfig(LatentAttentionConfig(4, **fields), MlpConfig(12))


def abstract(config):
    return take_apart(nnx.eval_shape(lambda: build(config.build, jax.random.key(0))))


def initial(config, seed=0):
    """Parameters as training starts with them."""
    return jax.jit(lambda key: take_apart(build(config.build, key)).params)(jax.random.key(seed))


def attention(heads, kv_heads=None, **fields):
    return AttentionConfig(heads, kv_heads, **fields)


GPT2 = DecoderConfig(
    vocab=50257, embed=768, layers=12, norm=LayerNorm(), learned_positions=1024, tied=True,
    period=(BlockConfig(attention(12, rope=None, **BIASED),
                        MlpConfig(3072, gelu_tanh, gated=False, bias=True), LayerNorm()),),
)  # fmt: skip


def gated(vocab, embed, layers, hidden, attention, **fields):
    mlp = hidden if isinstance(hidden, MoeConfig) else MlpConfig(hidden)
    return DecoderConfig(vocab, embed, layers, (BlockConfig(attention, mlp),), **fields)


KNOWN = [
    ("gpt2", GPT2, 124_439_808),
    ("llama-3-8b", gated(128256, 4096, 32, 14336, attention(32, 8)), 8_030_261_248),
    ("llama-2-7b", gated(32000, 4096, 32, 11008, attention(32)), 6_738_415_616),
    ("mistral-7b", gated(32000, 4096, 32, 14336, attention(32, 8, window=4096)), 7_241_732_096),
    (
        "mixtral-8x7b",
        gated(32000, 4096, 32, MoeConfig(14336, experts=8), attention(32, 8)),
        46_702_792_704,
    ),
    (
        "qwen2-0.5b",
        gated(151936, 896, 24, 4864, attention(14, 2, qkv_bias=True), tied=True),
        494_032_768,
    ),
    (
        "qwen3-0.6b",
        gated(151936, 1024, 28, 3072, attention(16, 8, head_dim=128, qk_norm=RMSNorm()), tied=True),
        596_049_920,
    ),
]


@pytest.mark.parametrize(("name", "config", "count"), KNOWN, ids=[k[0] for k in KNOWN])
def test_parameter_counts_of_published_models(name, config, count):
    config = replace(config, vocab_multiple=1)
    split = abstract(config)
    assert sum(int(np.prod(p.shape)) for p in split.params.values()) == count
    assert split.model_state == {}
    for path, leaf in split.params.items():
        assert len(split.axes[path]) == len(leaf.shape), path
        assert (split.axes[path][0] == "layers") == path.startswith("period."), path


def test_initial_values_follow_the_rule_and_names():
    config = decoder(block(heads=8, hidden=256, qkv_bias=True), layers=4, embed=128, vocab=250,
                     init=Initialisation(std=0.05))  # fmt: skip
    params = initial(config, 3)
    std = {k: float(v.std()) for k, v in params.items()}
    for name in ("attention.query", "attention.value", "mlp.gate", "mlp.up"):
        np.testing.assert_allclose(std[f"period.0.{name}"], 0.05, rtol=0.03)
    for name in ("attention.out", "mlp.down"):  # they write to the residual stream
        np.testing.assert_allclose(std[f"period.0.{name}"], 0.05 / 8**0.5, rtol=0.03)
    np.testing.assert_allclose(std["embedding"], 0.05 * (250 / 256) ** 0.5, rtol=0.03)
    assert not np.any(np.asarray(params["embedding"])[250:])
    matrices = {k: np.asarray(v) for k, v in params.items() if v.ndim == 3}
    flat = [layer.reshape(-1)[:512] for m in matrices.values() for layer in m]
    correlation = np.corrcoef(np.stack(flat)) - np.eye(len(flat))
    assert np.abs(correlation).max() < 0.3, "two matrices were drawn alike"
    # Layer i is drawn from its number: a deeper model begins with the same layers, but for scale.
    deeper = initial(replace(config, layers=16), 3)
    name = "period.0.attention.query"
    np.testing.assert_array_equal(deeper[name][:4], params[name])
    # and how the layers are cut into prefix, period and suffix does not matter.
    (b,) = config.period
    cut = replace(config, prefix=(b,), suffix=(b,))
    again = initial(cut, 3)
    for ours, theirs in zip(
        natural_layers(config, params), natural_layers(cut, again), strict=True
    ):
        for path in ours:
            np.testing.assert_array_equal(ours[path], theirs[path], err_msg=path)


def test_std_by_fan_in():
    config = decoder(block(heads=8, hidden=256), embed=128, layers=1,
                     init=Initialisation(std=None, scale_residual=False))  # fmt: skip
    params = initial(config)
    for name, fan_in in (("attention.out", 128), ("mlp.up", 128), ("mlp.down", 256)):
        np.testing.assert_allclose(params[f"period.0.{name}"].std(), fan_in**-0.5, rtol=0.03)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (decoder(block(), layers=0), ["layers=0 is not prefix + suffix (0) plus a multiple of the "
                                      "period (1 blocks); use layers=1 or 2"]),
        (decoder(block(), block(), layers=6, prefix=(block(),)),
         ["layers=6 is not prefix + suffix (1) plus a multiple of the period (2 blocks); use "
          "layers=5 or 7"]),
        (decoder(layers=2), ["period=() has no block to repeat; use period=(block,)"]),
        (decoder(block(), vocab=0, chunk_tokens=0, vocab_multiple=-1),
         ["vocab=0; use a whole number of at least 1",
          "vocab_multiple=-1; use a whole number of at least 1",
          "chunk_tokens=0; use a whole number of at least 1, or None"]),
        (decoder(block(heads=3), embed=8),
         ["block 0: embed=8 is not a multiple of heads=3; use embed=6 or 12, or head_dim=2 or 4, "
          "or heads=2 or 4"]),
        (decoder(block(kv_heads=3)),
         ["block 0: heads=4 is not a multiple of kv_heads=3; use kv_heads=2 or 4"]),
        (decoder(block(head_dim=3)), 
         ["block 0: rope: rotary embedding turns pairs of dims, and of head_dim=3 it would turn 3; "
          "use head_dim=2 or 4"]),
        (decoder(latent(latent=0), latent(query_latent=0), latent(rope_head_dim=5),
                 latent(rope=None, norm=None), latent(scale=0.0), layers=5, learned_positions=8),
         ["block 0: latent=0; use a whole number of at least 1",
          "block 1: query_latent=0; use a whole number of at least 1",
          "block 2: rope: rotary embedding turns pairs of dims, and of rope_head_dim=5 it would "
          "turn 5; use rope_head_dim=4 or 6",
          "block 3: rope=None; latent attention has one: use Rope()",
          "block 3: norm=None; latent attention has one: use RMSNorm(1e-6)",
          "block 4: scale=0.0; use a positive number, or None"]),
        (decoder(block(norm=None), block(norm=RMSNorm(eps=0.0), post_norm=True), layers=2,
                 norm=RMSNorm),
         [f"norm={RMSNorm!r}; use RMSNorm(), or LayerNorm()",
          "block 0: norm=None without post_norm leaves its branches without any norm; use "
          "post_norm=RMSNorm(), as OLMo 2 does",
          "block 1: norm: eps=0.0; use a positive number, such as 1e-5",
          "block 1: post_norm=True; use RMSNorm(), or LayerNorm()"]),
        (decoder(block(qk_norm=LayerNorm(), qk_norm_across_heads=True)),
         ["block 0: qk_norm_across_heads=True with qk_norm=LayerNorm(eps=1e-05, bias=True); use "
          "an RMSNorm, or False"]),
        (decoder(block(), block(dropout=1.0), dropout=-0.1),
         ["block 1: dropout=1.0; use a share in [0, 1)", "dropout=-0.1; use a share in [0, 1)"]),
        (decoder(block(scores=Alibi)),
         [f"block 0: scores={Alibi!r}; use Alibi(), RelativeBias(), a frozen dataclass derived "
          "from jaxtrain.scores.ScoreFunction, or None"]),
        (decoder(block(scores=OfTwoHeads(), heads=4), block(scores=Cubes(), heads=4), layers=2),
         ["block 0: scores=OfTwoHeads(): of_heads(4) has the shape [2]; return [4, ...], values "
          "for each head",
          "block 1: scores=Cubes(): of_heads(4) has the shape [4, 2, 2]; return [4] or [4, n], "
          "values for each head"]),
        (decoder(block(heads=0), block(kv_heads=0), block(hidden=0), block(window=0), layers=5,
                 learned_positions=0, suffix=(block(head_dim=0, softcap=-1.0),), logit_softcap=0.0),
         ["learned_positions=0; use a whole number of at least 1, or None",
          "logit_softcap=0.0; use a positive number, or None",
          "block 0: heads=0, kv_heads=0; use a whole number of at least 1",
          "block 1: kv_heads=0; use a whole number of at least 1",
          "block 2: mlp.hidden=0; use a whole number of at least 1",
          "block 3: window=0; use a whole number of at least 1, or None",
          "block 4: head_dim=0; use a whole number of at least 1, or None",
          "block 4: softcap=-1.0; use a positive number, or None"]),
        (decoder(block(mlp=MoeConfig(4, 0)), block(mlp=MoeConfig(4, 2, 3)),
                 block(mlp=MoeConfig(4, 2, True)), layers=3),
         ["block 0: mlp.experts=0; use a whole number of at least 1",
          "block 1: mlp.experts_per_token=3 are more than mlp.experts=2; use "
          "experts_per_token=2 or less",
          "block 2: mlp.experts_per_token=True; use a whole number of at least 1"]),
        (decoder(block(mlp=MlpConfig(4, "silu", bias=1)), block(mlp=MoeConfig(4, 2, gated=None))),
         ["block 0: mlp.activation='silu'; use a function of an array, such as silu",
          "block 0: mlp.bias=1; use True or False",
          "block 1: mlp.gated=None; use True or False"]),
        (decoder(block(window=2.5, scale=float("nan")), layers=1, learned_positions=True,
                 embedding_scale=float("nan"), logit_scale="1"),
         ["learned_positions=True; use a whole number of at least 1, or None",
          "embedding_scale=nan; use a finite number, such as 1.0",
          "logit_scale=1; use a finite number, such as 1.0",
          "block 0: window=2.5; use a whole number of at least 1, or None",
          "block 0: scale=nan; use a positive number, or None"]),
        (decoder(block(), embed=None), ["embed=None; use a whole number of at least 1"]),
        (decoder(block(), layers=None), ["layers=None; use a whole number"]),
    ],
)  # fmt: skip
def test_violations(config, said):
    assert config.violations() == said


WITH_EXPERTS = ShardingRules(activations=table({"experts": "fsdp"}))
OVER_TOKENS = ShardingRules(activations=table({"batch": ("data", "fsdp"), "mlp": "fsdp"}))


@pytest.mark.parametrize(
    ("config", "rules", "sizes", "explicit", "said"),
    [
        (decoder(block(heads=4, kv_heads=2)), tensor(), {"tensor": 2, "fsdp": 4}, True, []),
        (decoder(block(heads=6, head_dim=2)), tensor(), {"tensor": 4}, True,
         ["heads=6 does not split over tensor=4; use heads=4 or 8, or tensor=2",
          "kv_heads=6 does not split over tensor=4; use kv_heads=4 or 8, or tensor=2"]),
        (decoder(block(heads=8, kv_heads=1, head_dim=2)), tensor(), {"tensor": 2}, True,
         ["kv_heads=1 does not split over tensor=2; use kv_heads=2, or tensor=1"]),
        (decoder(block(heads=6, head_dim=2)), fsdp(), {"fsdp": 4}, True, []),
        (decoder(latent()), tensor(), {"tensor": 8}, True,
         ["heads=4 does not split over tensor=8; use heads=8, or tensor=4",
          "kv_heads=4 does not split over tensor=8; use kv_heads=8, or tensor=4"]),
        (decoder(block(mlp=MoeConfig(4, 2))), WITH_EXPERTS, {"fsdp": 2}, True,
         ["the activations table splits experts over fsdp: in use they are whole; split their "
          "hidden units (mlp), or split experts in the params table"]),
        (decoder(block(mlp=MoeConfig(4, 2))), WITH_EXPERTS, {"fsdp": 1}, True, []),
        (decoder(block(mlp=MoeConfig(4, 2))), OVER_TOKENS, {"fsdp": 2, "data": 2}, False,
         ["the activations table splits both batch and mlp over fsdp: hidden units of different "
          "tokens would be summed; split mlp over other axes"]),
        (decoder(block()), OVER_TOKENS, {"fsdp": 2, "data": 2}, False, []),
    ],
)  # fmt: skip
def test_mesh_violations(config, rules, sizes, explicit, said):
    assert unsplit(config.describe(), rules, sizes, explicit=explicit) == said


def test_explicit_mode_wants_one_split():
    mixed = ShardingRules(
        activations=table({"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"})
    )
    config, sizes = decoder(block()), {"tensor": 2}
    (said,) = unsplit(config.describe(), mixed, sizes, explicit=True)
    assert "'vocab': ()" in said and "use the tensor() preset, or execution.mode='gspmd'" in said
    assert unsplit(config.describe(), mixed, sizes, explicit=False) == []


def test_flops_count_every_matmul_parameter_once_a_token():
    """2 FLOPs a parameter and token; of the tables the head's real rows only, of experts those that
    a token goes through (Mixtral: 2 of 8)."""
    varied = decoder(
        block(kv_heads=2, hidden=16), block(head_dim=6, mlp=MlpConfig(10, gated=False)),
        layers=7, prefix=(block(hidden=4),), suffix=(block(heads=2, head_dim=2), block(window=4)),
    )  # fmt: skip
    names = ("query", "key", "value", "out", "gate", "up", "down", "router")
    for config in (varied, *(config for _, config, _ in KNOWN)):
        params = abstract(config).params
        axes = abstract(config).axes
        matrices = sum(
            int(np.prod(p.shape)) // (4 if "experts" in axes[k][:-1] else 1)
            for k, p in params.items()
            if len(p.shape) > 1 and k.split(".")[-1] in names
        )
        flops = config.flops(seq=SEQ, sequences=ROWS)
        assert flops.matmul == 2 * ROWS * SEQ * (matrices + config.vocab * config.embed)
