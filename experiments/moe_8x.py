"""A small mixture of eight experts on the source of Python's standard library, byte by byte:
stdlib_lm.py's model, whose dense layers have 512 hidden units, with experts of 256, two for each
token. A token meets as many parameters, 1.8M, of 5.4M.

    jaxtrain train experiments/moe_8x.py --mesh meshes/cpu_1.toml
    jaxtrain train experiments/moe_8x.py --mesh meshes/cpu_8.toml

Time: some 5 minutes on 2 CPU cores with other work beside it; a step has the products of
stdlib_lm.py's, and a fixed number of blocks of rows for the worst of loads, a quarter more.
Expected held-out loss: 1.49 to 1.51 nats a byte by seed, that of its dense twin (`dense`) 1.48 to
1.49; with each method of balance in experiments/LOG.md.
"""

from jaxtrain import (
    AdamW,
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    Evaluation,
    Experiment,
    MlpConfig,
    MoeConfig,
    TextData,
    WarmupCosine,
)
from jaxtrain.data import ByteTokenizer, StdlibSource
from jaxtrain.moe import Balance

STEPS = 380


def of_layer(layer: MlpConfig | MoeConfig, steps: int = STEPS) -> Experiment:
    """The experiment with this feed-forward layer in all four blocks."""
    block = BlockConfig(AttentionConfig(heads=6), layer)
    return Experiment(
        model=DecoderConfig(
            vocab=257, embed=192, layers=4, period=(block,), tied=True, vocab_multiple=64
        ),
        data=TextData(StdlibSource(), ByteTokenizer(), seq=256),
        optimizer=AdamW(WarmupCosine(4e-3, warmup=40), weight_decay=0.1),
        steps=steps,
        batch=16,
        evaluation=Evaluation(every=100, batches=8),
    )


def dense(steps: int = STEPS) -> Experiment:
    """As many parameters for each token."""
    return of_layer(MlpConfig(hidden=512), steps)


def experiment() -> Experiment:
    return of_layer(MoeConfig(hidden=256, experts=8, balance=Balance(loss_weight=0.01)))
