"""Rows behind a dataset's last one, which do not count."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxtrain.data.dataset import Batch
from jaxtrain.step.batches import DOCUMENTS

WEIGHTS = "weights"
"""Field of a batch that losses are multiplied by."""


class Ended:
    """A dataset padded after its last row with copies of the first one, of weight 0 and, where rows
    have documents, of none."""

    def __init__(self, dataset: Any, weights: str = WEIGHTS) -> None:
        self.dataset, self._weights = dataset, weights

    def __len__(self) -> int:
        return len(self.dataset)

    def rows(self, indices: np.ndarray) -> Batch:
        within = indices < len(self)
        rows = self.dataset.rows(np.where(within, indices, 0))
        if within.all():
            return rows
        for name in (self._weights, *({DOCUMENTS} & rows.keys())):
            real = within.reshape(-1, *[1] * (rows[name].ndim - 1))
            rows = {**rows, name: (rows[name] * real).astype(rows[name].dtype)}
        return rows
