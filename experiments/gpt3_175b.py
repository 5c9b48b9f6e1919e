"""GPT-3 (Brown et al. 2020, table 2.1; 174.6B parameters) on 300 billion tokens, in a pipeline of
eight stages: its rate, warm-up and batch of 3.2M tokens, without its batch ramp. Every layer
attends to all tokens before; in the paper every second one attends to a band of them.

    jaxtrain compile experiments/gpt3_175b.py --mesh meshes/v5p_512_stage8.toml
    jaxtrain train experiments/gpt3_175b.py --mesh meshes/v5p_512_stage8.toml

(Compiling needs no device and no data.) What you provide, relative to where the command runs:
    data/gpt3/*.tokens          token files, written by `jaxtrain tokenize`
    data/gpt2/tokenizer.json    GPT-2's tokenizer, which is GPT-3's

Memory, by the TPU's compiler, on a chip of 102 GB: 4.1 GB of state and 45.4 GB of temporaries, of
all at most 34.8 GB at one time. Time: about 40 days on 512 TPU v5p, an estimate: 3.2e23 FLOP (6 a
parameter and token, causal attention added) at 40% of the dense bf16 peak; not measured. Expected
loss: 1.73 nats a token, by their figure 3.1 (2.57 C^-0.048, C in PFLOP/s-days); their corpus is
another.
"""

from jaxtrain import (
    AdamW,
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    Evaluation,
    Execution,
    Experiment,
    MlpConfig,
    Pipeline,
    SavePolicy,
    TextData,
    WarmupCosine,
    bf16,
    fsdp,
    tensor,
)
from jaxtrain.data import TokenFiles, TokenizerFile
from jaxtrain.nn import LayerNorm
from jaxtrain.transformer import gelu_tanh


def experiment() -> Experiment:
    block = BlockConfig(
        AttentionConfig(heads=96, head_dim=128, rope=None, qkv_bias=True, out_bias=True),
        MlpConfig(hidden=49_152, activation=gelu_tanh, gated=False, bias=True),
        norm=LayerNorm(),
    )
    return Experiment(
        model=DecoderConfig(
            vocab=50_257,
            embed=12_288,
            layers=96,
            period=(block,),
            norm=LayerNorm(),
            learned_positions=2048,
            tied=True,
        ),
        data=TextData(
            TokenFiles("data/gpt3/*.tokens", held_out=0.0005),
            TokenizerFile("data/gpt2/tokenizer.json"),
            seq=2048,
            isolate_documents=False,
        ),
        optimizer=AdamW(
            WarmupCosine(0.6e-4, warmup=119, final_fraction=0.1), weight_decay=0.1, b1=0.9, b2=0.95
        ),
        steps=95_400,
        batch=1536,
        microbatches=96,
        precision=bf16,
        # Weights are gathered once a step (5.4 GB of bf16 a chip), and gradients scattered once.
        sharding=(fsdp() | tensor()).whole_until_update(),
        execution=Execution(pipeline=Pipeline("interleaved", chunks=2)),
        evaluation=Evaluation(every=1000, batches=1, final_batches=1),
        checkpoints=SavePolicy(every=500),
    )
