"""Checks an opened split, of a user's own data too, before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.data.dataset import Batch, Dataset
from jaxtrain.models.check import sound_description, vocab_of
from jaxtrain.remedies import Clash, Near
from jaxtrain.violations import raise_violations

TARGETS = "targets"
TRIED = 32
"""Rows read of a split when it is opened, at most."""


def dataset_violations(dataset: Any, *, saved: bool, sampled: bool) -> list[str]:
    """Returns violations if a dataset lacks a length; `rows` that returns arrays of the requested
    number of rows; a `digest`, if it is `saved`; `encode` and `decode`, if text is `sampled`."""
    violations = _shape_violations(dataset)
    digest = getattr(dataset, "digest", None)
    if saved and not (isinstance(digest, str | int) and digest):
        present = f"digest={digest!r}" if hasattr(dataset, "digest") else "no digest"
        violations.append(
            f"it has {present}; every save keeps a digest, so that no run goes on with another "
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


OF_TOKENS = (TARGETS, "weights", "segments", "positions")
"""Fields with a number for each token."""


def token_violations(row: Batch, tokens: str | None) -> list[str]:
    """Returns violations of fields that have not a number for each token. row: a row of the data.
    tokens: the field of tokens, None for a model without."""
    if tokens not in row:
        return []
    shape = np.shape(row[tokens])[1:]
    others = {name: np.shape(row[name])[1:] for name in OF_TOKENS if name in row}
    return [
        f"{name!r} of a row is {list(other)}, and its {tokens!r} {list(shape)}; give a number for "
        "each token"
        for name, other in others.items()
        if other != shape
    ]


def check_vocabulary(model: Any, dataset: Any) -> None:
    """Raises ValueError if the data has token ids that the model has no row for."""
    vocab = vocab_of(model, sound_description(model)[0])
    ids = getattr(dataset, "vocab", None)
    if vocab is not None and ids is not None:
        raise_violations(beyond_vocabulary(ids, vocab))


def beyond_vocabulary(ids: int, vocab: int) -> list[str]:
    """Returns a violation if the data has more token `ids` than the model has rows."""
    if ids <= vocab:
        return []
    rule = f"the data has token ids up to {ids - 1} and model.vocab={vocab}"
    remedy, ways = f"use vocab={ids} or another tokenizer", [(Near("vocab", ids),)]
    return [Clash(rule, remedy, sizes={"vocab": vocab}, ways=ways, also="another tokenizer")]


def _callable(owner: Any, name: str) -> bool:
    return callable(getattr(owner, name, None))


class Wrapped:
    """A dataset whose subclass overrides `rows`; other attributes are the wrapped dataset's."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset: Any = dataset

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy under construction has no attributes
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)


class WithinVocabulary(Wrapped):
    """A dataset that refuses token ids outside a model's vocabulary.

    names: fields that hold ids. vocab: the model's. weights: field that says which targets count;
      targets with weight 0 are not checked.
    """

    def __init__(
        self, dataset: Dataset, names: tuple[str, ...], vocab: int, weights: str = "weights"
    ) -> None:
        super().__init__(dataset)
        self._names, self._vocab, self._weights = names, vocab, weights
        self.rows(np.arange(min(TRIED, len(dataset))))

    def rows(self, indices: np.ndarray) -> Batch:
        """Returns the rows. Raises ValueError naming the first row with an id outside the
        vocabulary."""
        rows = self._dataset.rows(indices)
        for name in self._names:
            ids = np.asarray(rows[name])
            if ids.size and not 0 <= ids.min() <= ids.max() < self._vocab:
                beyond = (ids < 0) | (ids >= self._vocab)
                weights = rows.get(self._weights) if name == TARGETS else None
                if weights is not None:
                    beyond &= np.asarray(weights) != 0
                if beyond.any():
                    raise ValueError(self._outside_message(name, indices, ids, beyond))
        return rows

    def _outside_message(
        self, name: str, indices: np.ndarray, ids: np.ndarray, beyond: np.ndarray
    ) -> str:
        row = int(np.argmax(beyond.reshape(len(ids), -1).any(axis=1)))
        first, most = ids[row][beyond[row]][0], int(ids[beyond].max())
        use = f"use vocab={most + 1} or more, or" if most >= self._vocab else "ids count from 0:"
        weight = ", or give it weight 0" if name == TARGETS else ""
        return (
            f"row {indices[row]} of the data has the id {first} in {name!r}, and "
            f"model.vocab={self._vocab} has 0 to {self._vocab - 1}; {use} mend that row{weight}"
        )
