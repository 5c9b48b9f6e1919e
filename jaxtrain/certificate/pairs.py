"""Pairs of answers for a certificate of a loss of pairs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxtrain.data import Data
from jaxtrain.data.dataset import Batch
from jaxtrain.validation.own_data import Wrapped


@dataclass(frozen=True)
class MadePairs:
    """`data` whose documents are taken for pairs, with reference losses that depend on the target
    alone. Tokens of rejected answers weigh a quarter: both answers are drawn from one chain, so at
    equal weights most of the gradient cancels, and Adam makes steps of the rounding that is left
    (1.3e-4 of the state in five steps, 1.5e-6 so)."""

    data: Data
    of_pairs: ClassVar[bool] = True

    def open(self, split: str, *, seed: int, cache_dir: Path) -> MadePairRows:
        return MadePairRows(self.data.open(split, seed=seed, cache_dir=cache_dir))

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "data"), name)


class MadePairRows(Wrapped):
    """A dataset with the field `reference`."""

    def rows(self, indices: np.ndarray) -> Batch:
        rows = self._dataset.rows(indices)
        last = rows["segments"].max(axis=1, keepdims=True)
        # The last document of an odd number has no partner, and becomes padding.
        segments = np.where(rows["segments"] <= last - last % 2, rows["segments"], 0)
        losses = np.log(self._dataset.vocab) + np.sin(rows["targets"])
        weights = rows["weights"] * (segments > 0) * np.where(segments % 2, 1.0, 0.25)
        made = {"reference": losses, "weights": weights}
        floats = {name: values.astype(np.float32) for name, values in made.items()}
        return {**rows, "segments": segments.astype(np.int32), **floats}
