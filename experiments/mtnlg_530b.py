"""Megatron-Turing NLG (Smith et al. 2022, section 3; 529.6B parameters) on 270 billion tokens: its
rate, warm-up and initial weights; a batch of 3.1M tokens, where theirs grew to 3.9M.

    jaxtrain compile experiments/mtnlg_530b.py --mesh meshes/h100_1024_stage4_fsdp32.toml
    jaxtrain train experiments/mtnlg_530b.py --mesh meshes/h100_1024_stage4_fsdp32.toml

(Compiling needs no device and no data.) Its 105 layers do not divide by four stages of three
chunks: they lie in 108 slots, of which three stand idle.

What you provide, relative to where the command runs:
    data/mtnlg/*.tokens         token files, written by `jaxtrain tokenize`
    data/gpt2/tokenizer.json    GPT-2's tokenizer, which is theirs

Memory, by the GPU's compiler, on an H100 of 80 GB: on h100_1024_stage4.toml, with parameters whole
on each of 32 pipelines, 328 GB, 205 of them state, which `check` and `compile` refuse; with zero1()
207 GB, with zero2() 144 GB (73 of state: the parameters alone, whole in fp32, are 68). It fits
where the pipelines share them out: h100_1024_stage4_fsdp32.toml takes 23 GB; data=4 x fsdp=8 in
place of its fsdp=32 would take 53 GB.

Time: 45 to 80 days on 1024 H100, an estimate: a step is 37 s of arithmetic at 40% of the dense bf16
peak and 44 s of weights and gradients over InfiniBand (2.19 TB a GPU), at the same time or one
after the other; not measured. Expected loss: 1.85 nats a token, theirs after 270 billion; their
corpus is another.
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
)
from jaxtrain.data import TokenFiles, TokenizerFile
from jaxtrain.nn import Initialisation, LayerNorm
from jaxtrain.transformer import gelu_tanh


def experiment() -> Experiment:
    block = BlockConfig(
        AttentionConfig(heads=128, rope=None, qkv_bias=True, out_bias=True),
        MlpConfig(hidden=81_920, activation=gelu_tanh, gated=False, bias=True),
        norm=LayerNorm(),
    )
    return Experiment(
        model=DecoderConfig(
            vocab=51_200,
            embed=20_480,
            layers=105,
            period=(block,),
            norm=LayerNorm(),
            learned_positions=2048,
            tied=True,
            init=Initialisation(std=4e-3),
        ),
        data=TextData(
            TokenFiles("data/mtnlg/*.tokens", held_out=0.0005),
            TokenizerFile("data/gpt2/tokenizer.json"),
            seq=2048,
            isolate_documents=False,
        ),
        optimizer=AdamW(
            WarmupCosine(5e-5, warmup=318, final_fraction=0.1), weight_decay=0.1, b1=0.9, b2=0.95
        ),
        steps=85_800,
        batch=1536,
        # Few, of four rows on a device: each gathers every weight anew, and scatters its gradients.
        microbatches=12,
        precision=bf16,
        execution=Execution(pipeline=Pipeline("interleaved", chunks=3)),
        evaluation=Evaluation(every=1000, batches=1, final_batches=1),
        checkpoints=SavePolicy(every=500),
    )
