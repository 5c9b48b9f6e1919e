"""Mixtral 8x7B (46.7B parameters, of which a token meets 12.9B; Jiang et al. 2024, table 1) on 1
trillion tokens. Its recipe is not published: rate, batch and context are those of Llama 2 70B
(Touvron et al. 2023, 2.2).

    jaxtrain train experiments/mixtral_8x7b.py --mesh meshes/v5p_512.toml

What you provide, relative to where the command runs:
    data/mixtral/*.tokens           token files, written by `jaxtrain tokenize`
    data/mixtral/tokenizer.json     Mixtral's tokenizer, eos </s>

Time: about 9 days on 512 TPU v5p, an estimate: 8.1e22 FLOP (6 a parameter met and token, causal
attention added) at 45% of the dense bf16 peak; not measured. Expected loss: not known; the law of
Hoffmann et al. 2022 is of dense models.
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
    MoeConfig,
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
        AttentionConfig(heads=32, kv_heads=8, head_dim=128, rope=Rope(1_000_000.0)),
        MoeConfig(hidden=14_336, experts=8, experts_per_token=2),
        norm=RMSNorm(eps=1e-5),
    )
    return Experiment(
        model=DecoderConfig(
            vocab=32_000, embed=4096, layers=32, period=(block,), norm=RMSNorm(eps=1e-5)
        ),
        data=TextData(
            TokenFiles("data/mixtral/*.tokens", held_out=0.0005),
            TokenizerFile("data/mixtral/tokenizer.json", eos="</s>"),
            seq=4096,
        ),
        optimizer=AdamW(
            WarmupCosine(1.5e-4, warmup=2000, final_fraction=0.1), weight_decay=0.1, b1=0.9, b2=0.95
        ),
        steps=240_000,
        batch=1024,
        microbatches=1,
        precision=bf16,
        execution=Execution(loop=LayerLoop(unroll=False, remat="attention")),
        evaluation=Evaluation(every=1000, batches=8, final_batches=8),
        checkpoints=SavePolicy(every=1000),
    )
