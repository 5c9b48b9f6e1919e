"""Llama 3.2 1B (1.24B parameters) from scratch on 50 billion tokens, with the recipe of TinyLlama
(Zhang et al. 2024), a model of this size whose recipe is published; that of Llama 3.2 1B is not.

    jaxtrain train experiments/llama3_1b.py --mesh meshes/h100_8.toml
    jaxtrain train experiments/llama3_1b.py --mesh meshes/h200_1.toml --steps 100 --run-dir h200

What you provide, relative to where the command runs:
    data/llama3/*.tokens           token files, written by `jaxtrain tokenize`
    data/llama3/tokenizer.json     Llama 3's tokenizer, eos <|end_of_text|>

Time: about 36 hours on 8 H100, an estimate: 4.1e20 FLOP (6 a parameter and token, causal attention
added) at 40% of the dense bf16 peak; not measured. Expected loss: about 2.4 nats a token, by the
law of Hoffmann et al. 2022 (eq. 10); their corpus and tokenizer are others, so this is rough.
"""

from jaxtrain import (
    AdamW,
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    Evaluation,
    Experiment,
    MlpConfig,
    SavePolicy,
    TextData,
    WarmupCosine,
    bf16,
)
from jaxtrain.attention import Llama3Scaling, Rope
from jaxtrain.data import TokenFiles, TokenizerFile
from jaxtrain.nn import RMSNorm


def experiment() -> Experiment:
    scaling = Llama3Scaling(
        factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq=8192
    )
    block = BlockConfig(
        AttentionConfig(heads=32, kv_heads=8, head_dim=64, rope=Rope(500_000.0, scaling)),
        MlpConfig(hidden=8192),
        norm=RMSNorm(eps=1e-5),
    )
    return Experiment(
        model=DecoderConfig(
            vocab=128_256,
            embed=2048,
            layers=16,
            period=(block,),
            norm=RMSNorm(eps=1e-5),
            tied=True,
        ),
        data=TextData(
            TokenFiles("data/llama3/*.tokens", held_out=0.001),
            TokenizerFile("data/llama3/tokenizer.json", eos="<|end_of_text|>"),
            seq=4096,
        ),
        optimizer=AdamW(
            WarmupCosine(4e-4, warmup=2000, final_fraction=0.1), weight_decay=0.1, b1=0.9, b2=0.95
        ),
        steps=24_000,
        batch=512,
        microbatches=32,
        precision=bf16,
        evaluation=Evaluation(every=500, batches=2, final_batches=2),
        checkpoints=SavePolicy(every=1000),
    )
