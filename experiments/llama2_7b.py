"""Llama 2 7B (6.74B parameters; Touvron et al. 2023, table 1) in 4,096-token rows, 4 to a chip: the
shape of MaxText's published v5p recipe for this model, beside which its compiled step is read.

    jaxtrain compile experiments/llama2_7b.py --mesh meshes/v5p_16.toml     (no device, no data)
    jaxtrain train experiments/llama2_7b.py --mesh meshes/v5p_16.toml

What you provide, relative to where the command runs:
    data/llama2/*.tokens           token files, written by `jaxtrain tokenize`
    data/llama2/tokenizer.json     Llama 2's tokenizer, eos </s>

Time: about 11 hours on 16 TPU v5p for its 2.6 billion tokens, an estimate: 6 FLOP a parameter and
token, causal attention added, at 45% of the dense bf16 peak; not measured. Expected loss: no claim,
the run is short.
"""

from jaxtrain import (
    AdamW,
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    Execution,
    Experiment,
    LayerLoop,
    MlpConfig,
    SavePolicy,
    TextData,
    WarmupCosine,
    bf16,
)
from jaxtrain.data import TokenFiles, TokenizerFile
from jaxtrain.nn import RMSNorm


def experiment() -> Experiment:
    block = BlockConfig(
        AttentionConfig(heads=32, head_dim=128),
        MlpConfig(hidden=11_008),
        norm=RMSNorm(eps=1e-5),
    )
    return Experiment(
        model=DecoderConfig(
            vocab=32_000, embed=4096, layers=32, period=(block,), norm=RMSNorm(eps=1e-5)
        ),
        data=TextData(
            TokenFiles("data/llama2/*.tokens", held_out=0.0005),
            TokenizerFile("data/llama2/tokenizer.json", eos="</s>"),
            seq=4096,
        ),
        optimizer=AdamW(
            WarmupCosine(3e-4, warmup=2000, final_fraction=0.1), weight_decay=0.1, b1=0.9, b2=0.95
        ),
        steps=10_000,
        batch=64,
        precision=bf16,
        execution=Execution(loop=LayerLoop(unroll=False, remat="dots_and_attention")),
        checkpoints=SavePolicy(every=1000),
    )
