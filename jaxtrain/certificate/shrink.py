"""An experiment made small enough to run on every layout of a laptop, with the same features."""

from __future__ import annotations

from dataclasses import replace

from jaxtrain.data import BigramChain
from jaxtrain.experiment import Experiment, FineTuning, Logging
from jaxtrain.models.block import BlockConfig, MoeConfig

EMBED, HIDDEN, HEAD_DIM, VOCAB, SEQ = 64, 192, 8, 250, 16
"""EMBED and HIDDEN are rounded up to a multiple of the devices."""
EXPERTS = 8
"""At most; a token goes through half of them or less."""


def shrink(experiment: Experiment, *, devices: int) -> Experiment:
    """Two periods (two to four layers), narrow, a few heads for every device; 16 tokens a row of a
    bigram chain in place of the corpus; a constant learning rate. Features stay: norms, biases,
    windows, grouped queries, tying, scales, the optimizer.
    """
    model = experiment.model
    narrow = {block: _block(block, devices) for block in model.blocks}
    period = tuple(narrow[b] for b in model.period)
    prefix, suffix = (tuple(narrow[b] for b in part) for part in (model.prefix, model.suffix))
    periods = 1 if len(period) > 2 else 2
    small = replace(
        model,
        vocab=VOCAB,
        embed=_multiple(EMBED, devices),
        layers=len(prefix) + len(suffix) + periods * len(period),
        period=period,
        prefix=prefix,
        suffix=suffix,
        learned_positions=None if model.learned_positions is None else SEQ,
        vocab_multiple=8 * devices,
        chunk_tokens=32,
    )
    rate = getattr(experiment.optimizer, "learning_rate", None)
    optimizer = experiment.optimizer
    return replace(
        experiment,
        model=small,
        data=BigramChain(vocab=VOCAB, seq=SEQ, isolate_documents=True),
        optimizer=optimizer if rate is None else replace(optimizer, learning_rate=1e-3),
        batch=_batch(devices),
        steps=1000,
        evaluation=None,
        checkpoints=None,
        logging=Logging(),
        fine_tuning=_tuning(experiment.fine_tuning),
    )


def _batch(devices: int) -> int:
    """Rows that every layout can cut: 2 microbatches over all devices, and 4 over what stages leave
    of them, n / s. For every s that divides half of n only where n is a power of two."""
    return (2 if devices & (devices - 1) == 0 else 4) * devices


def _tuning(tuning: FineTuning | None) -> FineTuning | None:
    """The same leaves of the small model, from its own initialisation."""
    if tuning is None:
        return None
    lora = tuning.lora
    return replace(tuning, start=None, lora=lora and replace(lora, rank=min(lora.rank, 2)))


def _block(block: BlockConfig, devices: int) -> BlockConfig:
    a = block.attention
    grouped = 2 if a.key_heads < a.heads else 1
    attention = replace(
        a,
        heads=devices * grouped,
        kv_heads=devices,
        head_dim=HEAD_DIM,
        window=None if a.window is None else SEQ // 2,
    )
    mlp = replace(block.mlp, hidden=_multiple(HIDDEN, devices))
    if isinstance(mlp, MoeConfig):
        experts = min(mlp.experts, EXPERTS)
        # At least two of several: with one its share is 1, and the router has no gradient.
        chosen = min(mlp.experts_per_token, max(experts // 2, 2), experts)
        mlp = replace(mlp, experts=experts, experts_per_token=chosen)
    return replace(block, attention=attention, mlp=mlp)


def _multiple(size: int, devices: int) -> int:
    return -(-size // devices) * devices
