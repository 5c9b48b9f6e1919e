"""The yardstick of step time: a 6.3M-parameter Llama-like decoder, 4096 tokens a step.

jaxtrain bench step experiments/bench_6m.py --mesh meshes/cpu_8.toml --steps 10

Four minutes on 2 cores. `baselines/plain_loop.py` is the same model in plain jax + optax
and is measured in turn with it; the loss falls from log(4096) = 8.3 towards log(4) = 1.4 nats,
far beyond the steps of a benchmark. LOG.md has what was measured.
"""

from jaxtrain import AdamW, AttentionConfig, BlockConfig, DecoderConfig, Experiment, MlpConfig
from jaxtrain.attention import Rope
from jaxtrain.data import BigramChain
from jaxtrain.nn import RMSNorm
from jaxtrain.optim.optimizer import everything


def experiment() -> Experiment:
    norm = RMSNorm(eps=1e-5)
    block = BlockConfig(AttentionConfig(heads=8, rope=Rope(1e4)), MlpConfig(hidden=1024), norm)
    return Experiment(
        model=DecoderConfig(vocab=4096, embed=256, layers=4, period=(block,), norm=norm),
        data=BigramChain(vocab=4096, seq=256),
        optimizer=AdamW(1e-3, weight_decay=0.1, b1=0.9, b2=0.95, eps=1e-8, decay=everything),
        steps=100,
        batch=16,
        clip_norm=1.0,
        evaluation=None,
        checkpoints=None,
    )
