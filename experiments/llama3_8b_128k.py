"""Llama 3 8B with rows of 131,072 tokens, the last stage of its pretraining (Grattafiori et al.
2024, section 3.4.2), a tenth of its 800 billion tokens. Documents may be as long as a row;
attention stays within them. As it stands it begins with new weights: to go on from the run of
llama3_8b.py add `fine_tuning=FineTuning(FromRun("runs/llama3_8b"))`.

    jaxtrain train experiments/llama3_8b_128k.py --mesh meshes/v5p_512_context8.toml
    jaxtrain compile experiments/llama3_8b_128k.py --mesh meshes/v5p_512_context8.toml  (no device)

What you provide, relative to where the command runs:
    data/llama3/*.tokens           token files, written by `jaxtrain tokenize`
    data/llama3/tokenizer.json     Llama 3's tokenizer, eos <|end_of_text|>

Every chip has an eighth of a row, an early and a late part of it, and keys travel round the eight
(docs/context.md). Time: about 36 hours on 512 TPU v5p, an estimate: 1.2e22 FLOP (6 a parameter and
token; causal attention of whole rows adds twice that) at 40% of the dense bf16 peak; not measured.
Expected loss, from the weights of that run: below its 2.0 nats a token, for what stands far back
helps; not measured.
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

SEQ = 131_072


def experiment() -> Experiment:
    block = BlockConfig(
        AttentionConfig(heads=32, kv_heads=8, head_dim=128, rope=Rope(8_000_000.0)),
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
            seq=SEQ,
        ),
        optimizer=AdamW(
            WarmupCosine(3e-5, warmup=100, final_fraction=0.1), weight_decay=0.1, b1=0.9, b2=0.95
        ),
        steps=9500,
        batch=64,
        precision=bf16,
        execution=Execution(loop=LayerLoop(unroll=False, remat="attention")),
        evaluation=Evaluation(every=500, batches=2, final_batches=4),
        checkpoints=SavePolicy(every=250),
    )
