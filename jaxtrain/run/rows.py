"""A split opened for a model: it has what the model reads, or that is told before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data import BatchRamp, Dataset, batch_of
from jaxtrain.experiment import Experiment
from jaxtrain.models.layered import description_of
from jaxtrain.step.batches import Batch, fields_of
from jaxtrain.validation.own_data import TARGETS, WithinVocabulary, Wrapped, dataset_violations
from jaxtrain.violations import raise_violations

AHEAD = 64
"""Batches that are kept count of at once: more than any loader holds."""
WEIGHTS = "weights"


def open_split(experiment: Experiment, split: str, cache_dir: Path, *, saved: bool = False) -> Any:
    """The split of the experiment's data. For a model that reads `weights`, rows without get them:
    ones, for each token. saved: what is opened is known again by its digest.

    Raises ValueError naming the fields that the model reads and the rows do not have, and what
    `open` raises.
    """
    data = experiment.data
    dataset: Any = data.open(split, seed=experiment.seed, cache_dir=cache_dir)
    sampled = split == "train" and experiment.sample is not None
    violations = dataset_violations(dataset, saved=saved, sampled=sampled)
    raise_violations(violations, f"{type(data).__name__}.open({split!r}): {type(dataset).__name__}")
    described = description_of(experiment.model)
    if described is None or len(dataset) == 0:
        return dataset
    row, reads = dataset.rows(np.arange(1)), [k for k in described.fields if k != WEIGHTS]
    lacking = [name for name in reads if name not in row]
    if lacking:
        raise ValueError(
            f"the {split} rows of {type(data).__name__} have {_list(row)} and no "
            f"{_list(lacking)}; a {type(experiment.model).__name__} reads {_list(reads)}, "
            f"[rows, ..], and where they are there weights, segments and positions"
        )
    if getattr(experiment.model, "vocab", None) == described.head.vocab:  # one table of ids
        names = {*reads[:1], TARGETS} & row.keys()  # the first has an element for each token
        ids = tuple(sorted(name for name in names if np.issubdtype(row[name].dtype, np.integer)))
        dataset = WithinVocabulary(dataset, ids, described.head.vocab, described.weights)
    unweighted = WEIGHTS in described.fields and WEIGHTS not in row
    return Weighted(dataset, described.tokens) if unweighted else dataset


class Weighted(Wrapped):
    """A dataset in which each element of the field `tokens` weighs one."""

    def __init__(self, dataset: Any, tokens: str) -> None:
        super().__init__(dataset)
        self._tokens = tokens

    def rows(self, indices: np.ndarray) -> Batch:
        rows = self._dataset.rows(indices)
        return {**rows, WEIGHTS: np.ones(rows[self._tokens].shape, np.float32)}


class Ended:
    """A dataset whose rows after its last are its first one with weights 0: full batches to the
    end."""

    def __init__(self, dataset: Any, weights: str = WEIGHTS) -> None:
        self.dataset, self._weights = dataset, weights

    def __len__(self) -> int:
        return len(self.dataset)

    def rows(self, indices: np.ndarray) -> Batch:
        within = indices < len(self)
        rows = self.dataset.rows(np.where(within, indices, 0))
        if within.all():
            return rows
        weights = rows[self._weights]
        return {**rows, self._weights: weights * within.reshape(-1, *[1] * (weights.ndim - 1))}


class Documents:
    """A dataset that counts the documents in the rows it gives, a batch after the other from that
    of step `start` + 1 on: attention stays within them, so FLOPs depend on their lengths."""

    def __init__(self, dataset: Dataset, batch: int | BatchRamp, start: int) -> None:
        self._dataset, self._batch, self._step = dataset, batch, start + 1
        self._found: dict[int, dict[int, float]] = {}

    def rows(self, indices: np.ndarray) -> Batch:
        rows = self._dataset.rows(indices)
        lengths, counts = np.unique(document_lengths(rows["segments"]), return_counts=True)
        share = batch_of(self._batch, self._step - 1) / len(indices)  # of this process
        self._found[self._step] = dict(
            zip(lengths.tolist(), (counts * share).tolist(), strict=True)
        )
        self._found.pop(self._step - AHEAD, None)  # nobody asked
        self._step += 1
        return rows

    def of(self, step: int) -> dict[int, float] | None:
        """Length of a document -> how many the batch of that step had, by the rows of this process;
        once for each step."""
        return self._found.pop(step, None)


def document_lengths(segments: np.ndarray) -> np.ndarray:
    """Tokens of each document in rows of `segments` [rows, seq]; 0 is padding, and counts as
    none."""
    begins = np.ones(segments.shape, bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    at = np.flatnonzero(begins)
    return np.diff(np.append(at, segments.size))[segments.reshape(-1)[at] > 0]


def refuse_other_fields(held_out: Dataset, experiment: Experiment, fields: Any) -> None:
    """Raises ValueError naming what a held-out row lacks, or has in another shape or dtype, of the
    `fields` of a training batch."""
    found = fields_of(held_out, experiment.data)
    problems = [
        f"{name}: {_field(found.get(name))} for the {_field(field)} of training rows"
        for name, field in fields.items()
        if found.get(name) != field
    ]
    if problems:
        raise ValueError(
            f"the held-out rows of {type(experiment.data).__name__} are not what the model is "
            f"trained on: {'; '.join(problems)}; give both splits the same fields, or use "
            "evaluation=None"
        )


def refuse_cut_off(rows: int, piece: int, batch: int, fields: Any, weights: str = WEIGHTS) -> None:
    """Raises ValueError where an evaluation would read beyond the last of `rows` held-out rows, in
    pieces of `piece`, and there are no weights to say which of them count."""
    if weights in fields:
        return
    most = rows // batch
    raise ValueError(
        f"an evaluation would read {-(-rows // piece) * piece} rows, in pieces of {piece}, of a "
        f"held-out split of {rows}: those behind its end need weights of 0, and rows have "
        f"{_list(fields)} and no {weights}; "
        + (f"use Evaluation(batches={most}, final_batches={most}) or fewer, " if most else "use ")
        + f"a held-out split of a multiple of {piece} rows, or give rows weights, float32, by "
        f"which the model's loss multiplies"
    )


def _field(field: Any) -> str:
    return "none" if field is None else f"{np.dtype(field[1]).name}{list(field[0])}"


def _list(names: Any) -> str:
    return ", ".join(name for name in names if name != "rows") or "nothing"
