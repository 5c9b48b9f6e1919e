"""Makes an experiment small enough to run on every layout of a laptop, with the same features."""

from __future__ import annotations

import math
from dataclasses import replace

from jaxtrain.certificate.pairs import MadePairs
from jaxtrain.data import BigramChain
from jaxtrain.experiment import Experiment, FineTuning, Logging
from jaxtrain.transformer.small import seq_of

LARGEST_SCALE = 2.0
"""Of alpha / rank; at 4 gradients in bf16 were 6e-2 apart, at 16 in fp32 norms 2e-3."""
TEXT = frozenset({"tokens", "targets", "weights"})
"""Fields of a row of text that a model may read."""


def shrink(experiment: Experiment, *, devices: int) -> Experiment:
    """Returns a small experiment with a constant learning rate. The model's and the optimizer's
    features stay.

    The model becomes its `shrunk(devices)`, if it has one, and a corpus becomes a bigram chain with
    16 tokens a row, or as many more as divide over devices and experts' routing groups; for a loss
    of pairs its documents are pairs. A model
    without it, and rows with other fields than a text's, stay as they are.
    """
    rate = getattr(experiment.optimizer, "learning_rate", None)
    model, data, optimizer = experiment.model, experiment.data, experiment.optimizer
    if hasattr(model, "shrunk"):
        model = model.shrunk(devices)
        if TEXT.issuperset(model.describe().fields):
            described = model.describe()
            groups = [call.routing_group or 1 for call in described.expert_calls]
            seq = seq_of(devices, math.lcm(*groups))
            data = BigramChain(described.head.vocab, seq, isolate_documents=True)
            data = data if experiment.objective is None else MadePairs(data)
    return replace(
        experiment,
        model=model,
        data=data,
        optimizer=optimizer if rate is None else replace(optimizer, learning_rate=1e-3),
        batch=_batch(devices),
        steps=1000,
        evaluation=None,
        checkpoints=None,
        logging=Logging(),
        fine_tuning=_tuning(experiment.fine_tuning),
    )


def _batch(devices: int) -> int:
    """Returns the rows that every layout can split: 2 microbatches over all devices, and 4 over the
    n / s devices of a stage. Every s divides half of n only if n is a power of two."""
    return (2 if devices & (devices - 1) == 0 else 4) * devices


def _tuning(tuning: FineTuning | None) -> FineTuning | None:
    """Returns the same leaves of the small model, from its own initialisation.

    The scale of adapters is at most LARGEST_SCALE: since B is drawn, a large one makes products
    larger than their matrices, and enlarges rounding.
    """
    if tuning is None:
        return None
    lora = tuning.lora
    if lora is not None:
        rank = min(lora.rank, 2)
        scale = min(lora.alpha / lora.rank, LARGEST_SCALE)
        lora = replace(lora, rank=rank, alpha=scale * rank)
    return replace(tuning, start=None, lora=lora)
