"""What an opened split must have, of data of a user's own too: told before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.data.dataset import Batch, Dataset

TRIED = 32
"""Rows that are read of a split when it is opened, at most."""


def dataset_violations(dataset: Any, *, saved: bool, sampled: bool) -> list[str]:
    """What a dataset lacks: a length, `rows` that gives arrays of as many rows as it is asked for,
    a `digest` where it is `saved`, `encode` and `decode` where text is `sampled`."""
    violations = _shape_violations(dataset)
    digest = getattr(dataset, "digest", None)
    if saved and not (isinstance(digest, str) and digest):
        violations.append(
            f"it has digest={digest!r}, which every save keeps so that no run goes on with another "
            "corpus; give it a text that changes with its rows, or use checkpoints=None"
        )
    missing = [name for name in ("encode", "decode") if not _callable(dataset, name)]
    if sampled and missing:
        violations.append(
            f"it has no {' and no '.join(f'{name}()' for name in missing)}, which a sample of "
            "text needs; add what jaxtrain.data.Dataset has, or use evaluation.sample=None"
        )
    return violations


def _shape_violations(dataset: Any) -> list[str]:
    missing = [] if _callable(type(dataset), "__len__") else ["len(), the rows of an epoch"]
    missing += [] if _callable(dataset, "rows") else ["rows(indices)"]
    if missing:
        return [
            f"it has no {' and no '.join(missing)}; give an object that reads any row by its "
            "number, as jaxtrain.data.Dataset has it: a stream could not go on where a run stopped"
        ]
    if len(dataset) == 0:
        return []
    batch = dataset.rows(np.arange(2) % len(dataset))
    if not isinstance(batch, Mapping) or not batch:
        return [f"rows([0, 1]) gave {type(batch).__name__}; give a dict of arrays [rows, ...]"]
    wrong = [
        f"{name!r} a {type(values).__name__} of shape {np.shape(values)}"
        for name, values in batch.items()
        if not hasattr(values, "dtype") or np.shape(values)[:1] != (2,)
    ]
    return [f"rows([0, 1]) gave {', '.join(wrong)}; give arrays [2, ...]"] if wrong else []


def _callable(owner: Any, name: str) -> bool:
    return callable(getattr(owner, name, None))


class WithinVocabulary:
    """A dataset whose token ids are those of a model: others would train on what is not there.

    names: of the fields that hold ids. vocab: of the model.
    """

    def __init__(self, dataset: Dataset, names: tuple[str, ...], vocab: int) -> None:
        self._dataset, self._names, self._vocab = dataset, names, vocab
        self.rows(np.arange(min(TRIED, len(dataset))))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def rows(self, indices: np.ndarray) -> Batch:
        """The rows. Raises ValueError naming the first that has an id beyond the vocabulary."""
        rows = self._dataset.rows(indices)
        for name in self._names:
            ids = rows[name]
            if ids.size and not 0 <= ids.min() <= ids.max() < self._vocab:
                beyond = (ids < 0) | (ids >= self._vocab)
                row = int(np.argmax(beyond.reshape(len(ids), -1).any(axis=1)))
                raise ValueError(
                    f"row {indices[row]} of the data has the id {ids[beyond][0]} in {name!r}, and "
                    f"model.vocab={self._vocab} has 0 to {self._vocab - 1}; use "
                    f"vocab={max(int(ids.max()) + 1, self._vocab)} or more, or mend that row"
                )
        return rows
