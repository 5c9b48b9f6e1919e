"""Llama 3 8B (8.03B parameters; Grattafiori et al. 2024, tables 3 and 4) on 1 trillion of its 15
trillion tokens: its peak rate, context and batch of 4M tokens, and a shorter warm-up.

    jaxtrain train experiments/llama3_8b.py --mesh meshes/v5p_512.toml
    jaxtrain train experiments/llama3_8b.py --mesh meshes/h100_64.toml
    jaxtrain check experiments/llama3_8b.py --mesh meshes/h100_64.toml --data-elsewhere

What you provide, relative to where the command runs:
    data/llama3/*.tokens           token files, written by `jaxtrain tokenize`
    data/llama3/tokenizer.json     Llama 3's tokenizer, eos <|end_of_text|>

Time: about 6 days on 512 TPU v5p or 25 days on 64 H100, an estimate: 5.5e22 FLOP (6 a parameter and
token, causal attention added) at 45% and 40% of the dense bf16 peak; not measured. Expected loss:
about 2.0 nats a token, by the law of Hoffmann et al. 2022 (eq. 10); their corpus and tokenizer are
others, so this is rough.
"""

from jaxtrain import (
    AdamW,
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    Evaluation,
    Execution,
    Experiment,
    LayerLoop,
    MlpConfig,
    SavePolicy,
    TextData,
    WarmupCosine,
    bf16,
)
from jaxtrain.attention import Rope
from jaxtrain.data import TokenFiles, TokenizerFile
from jaxtrain.nn import RMSNorm


def experiment() -> Experiment:
    block = BlockConfig(
        AttentionConfig(heads=32, kv_heads=8, head_dim=128, rope=Rope(500_000.0)),
        MlpConfig(hidden=14_336),
        norm=RMSNorm(eps=1e-5),
    )
    return Experiment(
        model=DecoderConfig(
            vocab=128_256, embed=4096, layers=32, period=(block,), norm=RMSNorm(eps=1e-5)
        ),
        data=TextData(
            TokenFiles("data/llama3/*.tokens", held_out=0.0005),
            TokenizerFile("data/llama3/tokenizer.json", eos="<|end_of_text|>"),
            seq=8192,
        ),
        optimizer=AdamW(
            WarmupCosine(3e-4, warmup=2000, final_fraction=0.1), weight_decay=0.1, b1=0.9, b2=0.95
        ),
        steps=240_000,
        batch=512,
        microbatches=2,
        precision=bf16,
        # Only attention's output is kept beside each block's input: of four rows of 8192 tokens
        # about 17 GB on each H100 of h100_64.toml.
        execution=Execution(loop=LayerLoop(unroll=False, remat="attention")),
        evaluation=Evaluation(every=1000, batches=8, final_batches=8),
        checkpoints=SavePolicy(every=1000),
    )
