"""Switch-C (Fedus et al. 2022, table 9) as a decoder: one expert of 2,048 for each token, in every
layer. Its 15 layers of encoder and 15 of decoder are 30 layers here, of width 2080 with 32 heads of
64, and experts of 2080 x 6144 without a gate.

    jaxtrain check experiments/switch_1_6t.py --mesh meshes/v5p_512_expert64.toml
    jaxtrain train experiments/switch_1_6t.py --mesh meshes/v5p_512_expert64.toml

What you provide, relative to where the command runs:
    data/switch/*.tokens            token files, written by `jaxtrain tokenize`
    data/switch/tokenizer.json      a tokenizer of at most 32,128 tokens

Parameters of a layer: 2,048 experts x 2 x 2080 x 6144 = 52.35 billion; attention 4 x 2080 x 2048 =
17.0 million; the router 2080 x 2048 = 4.3 million. Thirty of them and the table are
1,571,053,346,720, the paper's 1,571 billion; a token meets one expert of each layer, 1.5 billion of
them. On v5p_512_expert64 a chip has 32 experts of each layer, an eighth of each matrix at rest:
13.1 GB of parameters in fp32, and 0.05 GB of Adafactor's moments, of 102 GB.

Time and loss: not measured. Rate, batch and group of tokens that compete are ours; theirs are not
published for this model but for the capacity factor, of 1.25 or less, and the loss weight of 0.01.
"""

import jax

from jaxtrain import (
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
from jaxtrain.data import TokenFiles, TokenizerFile
from jaxtrain.mesh import ShardingRules
from jaxtrain.moe import Balance, Capacity, SoftmaxRouter
from jaxtrain.optim import Adafactor


def experiment() -> Experiment:
    block = BlockConfig(
        AttentionConfig(heads=32, head_dim=64),
        MoeConfig(
            hidden=6144,
            experts=2048,
            experts_per_token=1,
            activation=jax.nn.relu,
            gated=False,
            router=SoftmaxRouter(renormalise=False),
            capacity=Capacity(1.25, routing_group=4096),
            balance=Balance(loss_weight=0.01),
        ),
    )
    return Experiment(
        model=DecoderConfig(vocab=32_128, embed=2080, layers=30, period=(block,), tied=True),
        data=TextData(
            TokenFiles("data/switch/*.tokens", held_out=0.0005),
            TokenizerFile("data/switch/tokenizer.json"),
            seq=1024,
        ),
        optimizer=Adafactor(WarmupCosine(1e-3, warmup=10_000)),
        steps=500_000,
        batch=2048,
        precision=bf16,
        # 2080 is no multiple of 512: what is not of experts is split over fsdp alone.
        sharding=ShardingRules(params=(("embed", ("fsdp",)),)),
        execution=Execution(loop=LayerLoop(unroll=False, remat="full")),
        evaluation=Evaluation(every=1000, batches=8, final_batches=8),
        checkpoints=SavePolicy(every=1000),
    )
