"""An experiment made small enough to run on every layout of a laptop, with the same features."""

from __future__ import annotations

from dataclasses import replace

from jaxtrain.data import BigramChain
from jaxtrain.experiment import Experiment, FineTuning, Logging
from jaxtrain.models.small import seq_of

TEXT = frozenset({"tokens", "targets", "weights"})
"""Fields of a row of text that a model may read."""


def shrink(experiment: Experiment, *, devices: int) -> Experiment:
    """The model as its `shrunk(devices)` makes it, where it has one, and in place of a corpus a
    bigram chain with some 16 tokens a row; a model without, and rows of other fields than a text's,
    as they are. A constant learning rate. Features stay: the model's, the optimizer.
    """
    rate = getattr(experiment.optimizer, "learning_rate", None)
    model, data, optimizer = experiment.model, experiment.data, experiment.optimizer
    if hasattr(model, "shrunk"):
        model = model.shrunk(devices)
        if TEXT.issuperset(model.describe().fields):
            vocab = model.describe().head.vocab
            data = BigramChain(vocab, seq_of(devices), isolate_documents=True)
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
    """Rows that every layout can cut: 2 microbatches over all devices, and 4 over what stages leave
    of them, n / s. For every s that divides half of n only where n is a power of two."""
    return (2 if devices & (devices - 1) == 0 else 4) * devices


def _tuning(tuning: FineTuning | None) -> FineTuning | None:
    """The same leaves of the small model, from its own initialisation."""
    if tuning is None:
        return None
    lora = tuning.lora
    return replace(tuning, start=None, lora=lora and replace(lora, rank=min(lora.rank, 2)))
