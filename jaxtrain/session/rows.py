"""Opens a split for a model, after a check that it has the fields that the model reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data import BatchRamp, Dataset, batch_of
from jaxtrain.data.dataset import Batch
from jaxtrain.experiment import Experiment
from jaxtrain.models.check import positions_of, sound_description
from jaxtrain.models.layered import description_of
from jaxtrain.scoring.ended import WEIGHTS
from jaxtrain.validation.experiment import sample_length_violations
from jaxtrain.validation.own_data import (
    TARGETS,
    TRIED,
    WithinVocabulary,
    Wrapped,
    dataset_violations,
    token_violations,
)
from jaxtrain.validation.preferences import pair_rows_violations
from jaxtrain.violations import raise_violations
from jaxtrain.weights.generate import chat_vocabulary, message_ids

AHEAD = 64
"""Batches whose document counts are kept: more than any loader prefetches."""


def open_split(experiment: Experiment, split: str, cache_dir: Path, *, saved: bool = False) -> Any:
    """Returns a split of the experiment's data. A model that reads `weights` gets ones for rows
    without them. saved: the run is saved, so the dataset needs a digest.

    Raises ValueError that names the fields that the model reads and the rows lack, and what `open`
    raises.
    """
    data = experiment.data
    dataset: Any = data.open(split, seed=experiment.seed, cache_dir=cache_dir)
    sampled = split == "train" and experiment.sample is not None
    violations = dataset_violations(dataset, saved=saved, sampled=sampled)
    raise_violations(violations, f"{type(data).__name__}.open({split!r}): {type(dataset).__name__}")
    if sampled:
        raise_violations(
            sample_violations(experiment, dataset.encode, partial(chat_vocabulary, dataset))
        )
    described = description_of(experiment.model, experiment.objective)
    if described is None or len(dataset) == 0:
        return dataset
    row, reads = dataset.rows(np.arange(1)), [k for k in described.fields if k != WEIGHTS]
    lacking = [name for name in reads if name not in row]
    if lacking:
        raise ValueError(
            f"the {split} rows of {type(data).__name__} have {listed(row)} and no "
            f"{listed(lacking)}; a {type(experiment.model).__name__} reads {listed(reads)}, "
            f"[rows, ..], and where they are there weights, segments and positions"
        )
    raise_violations(
        token_violations(row, next(iter(described.fields), None)),
        f"the {split} rows of {type(data).__name__}",
    )
    if experiment.objective is not None and not hasattr(dataset, "set_reference"):
        own = dataset.rows(np.arange(min(TRIED, len(dataset))))
        raise_violations(pair_rows_violations(own), f"the {split} rows of {type(data).__name__}")
    if getattr(experiment.model, "vocab", None) == described.head.vocab:  # one table of ids
        names = {*reads[:1], TARGETS} & row.keys()  # the first has an element for each token
        ids = tuple(sorted(name for name in names if np.issubdtype(row[name].dtype, np.integer)))
        dataset = WithinVocabulary(dataset, ids, described.head.vocab, described.weights)
    unweighted = WEIGHTS in described.fields and WEIGHTS not in row
    return Weighted(dataset, described.tokens) if unweighted else dataset


def sample_violations(
    experiment: Experiment,
    encode: Callable[[str], Sequence[int]],
    vocabulary: Callable[[], Any],
) -> list[str]:
    """Returns a violation for a prompt of the sample that cannot be encoded, or passes the learned
    positions. encode: of a text. vocabulary: that of a message; it may raise ValueError."""
    sample = experiment.sample
    if sample is None:
        return []
    try:
        ids = encode(sample.prompt)
    except ValueError as error:
        return [f"evaluation.sample: {error}"]
    except Exception as error:  # a user's code
        name = type(error).__name__
        return [f"evaluation.sample: its prompt is not encoded: {name}: {error}; give another one"]
    try:
        ids = message_ids(vocabulary(), sample.prompt) if sample.chat else ids
    except ValueError as error:
        return [f"evaluation.sample: chat=True: {error}; or use chat=False"]
    if not len(ids):
        return ["evaluation.sample: its prompt becomes no tokens; give another one"]
    positions = positions_of(sound_description(experiment.model)[0])
    return sample_length_violations(sample, positions, len(ids), "a prompt of")


class Weighted(Wrapped):
    """A dataset in which each element of the field `tokens` has weight 1."""

    def __init__(self, dataset: Any, tokens: str) -> None:
        super().__init__(dataset)
        self._tokens = tokens

    def rows(self, indices: np.ndarray) -> Batch:
        rows = self._dataset.rows(indices)
        return {**rows, WEIGHTS: np.ones(rows[self._tokens].shape, np.float32)}


class CountedDocuments:
    """A dataset that counts the documents in the rows it returns, one batch per call, from step
    `start` + 1 on. Attention stays within documents, so FLOPs depend on their lengths."""

    def __init__(self, dataset: Dataset, batch: int | BatchRamp, start: int) -> None:
        self._dataset, self._batch, self._step = dataset, batch, start + 1
        self._counts: dict[int, dict[int, float]] = {}

    def rows(self, indices: np.ndarray) -> Batch:
        rows = self._dataset.rows(indices)
        lengths, counts = np.unique(document_lengths(rows["segments"]), return_counts=True)
        share = batch_of(self._batch, self._step - 1) / len(indices)  # of this process
        self._counts[self._step] = dict(
            zip(lengths.tolist(), (counts * share).tolist(), strict=True)
        )
        self._counts.pop(self._step - AHEAD, None)  # it was never read
        self._step += 1
        return rows

    def of(self, step: int) -> dict[int, float] | None:
        """Document length -> number of such documents in the batch of `step`, estimated from the
        rows of this process. Available once for each step."""
        return self._counts.pop(step, None)


def document_lengths(segments: np.ndarray) -> np.ndarray:
    """Tokens of each document in rows of `segments` [rows, seq]; 0 is padding and is left out."""
    begins = np.ones(segments.shape, bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = np.flatnonzero(begins)
    return np.diff(np.append(starts, segments.size))[segments.reshape(-1)[starts] > 0]


def listed(names: Any) -> str:
    """Returns the names of a batch's fields, for a message."""
    return ", ".join(name for name in names if name != "rows") or "nothing"
