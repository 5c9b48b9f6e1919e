"""GPT-2 small (Radford et al. 2019; 124M parameters) on 10 billion tokens of web text, with the
recipe of GPT-3 (Brown et al. 2020, app. B: AdamW, cosine, batches of 0.5M tokens).

    jaxtrain train experiments/gpt2_124m.py --mesh meshes/h100_8.toml

What you provide, relative to where the command runs:
    data/web/*.parquet     documents in a column `text`, for example the 10-billion-token sample of
                           FineWeb; tokenised once into the cache, or beforehand by
                           `jaxtrain tokenize` and then read with TokenFiles("data/web/*.tokens")
    data/gpt2/tokenizer.json    GPT-2's tokenizer, eos <|endoftext|>

Time: about 45 minutes on 8 H100, an estimate: 8.0e18 FLOP (6 a parameter and token, causal
attention added) at 40% of the dense bf16 peak; not measured. Expected loss: about 3.3 nats a token,
which is what others report for this model and recipe on held-out FineWeb; not measured here.
"""

from jaxtrain import (
    AdamW,
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    Evaluation,
    Experiment,
    MlpConfig,
    Sample,
    SavePolicy,
    TextData,
    WarmupCosine,
    bf16,
)
from jaxtrain.data import Parquet, TokenizerFile
from jaxtrain.nn import LayerNorm
from jaxtrain.transformer import gelu_tanh


def experiment() -> Experiment:
    block = BlockConfig(
        AttentionConfig(heads=12, rope=None, qkv_bias=True, out_bias=True),
        MlpConfig(hidden=3072, activation=gelu_tanh, gated=False, bias=True),
        norm=LayerNorm(),
    )
    return Experiment(
        # The default Initialisation is GPT-2's: std 0.02, residual writes by 1 / sqrt(2 layers).
        model=DecoderConfig(
            vocab=50257,
            embed=768,
            layers=12,
            period=(block,),
            norm=LayerNorm(),
            learned_positions=1024,
            tied=True,
        ),
        data=TextData(
            Parquet("data/web/*.parquet", held_out=0.001),
            TokenizerFile("data/gpt2/tokenizer.json"),
            seq=1024,
            isolate_documents=False,
        ),
        optimizer=AdamW(
            WarmupCosine(6e-4, warmup=700, final_fraction=0.1), weight_decay=0.1, b1=0.9, b2=0.95
        ),
        steps=19_000,
        batch=512,
        microbatches=8,
        precision=bf16,
        evaluation=Evaluation(
            every=250,
            batches=20,
            final_batches=20,
            sample=Sample("The meaning of life is", tokens=100, temperature=0.8),
        ),
        checkpoints=SavePolicy(every=1000),
    )
