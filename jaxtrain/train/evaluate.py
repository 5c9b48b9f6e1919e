"""Held-out loss, in nats a token and bits a byte."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.train.assembly import Assembly
from jaxtrain.train.batches import PlacedRows
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import make_evaluation_step

Values = dict[str, float]


class Evaluator:
    """Evaluates on the same held-out rows every time; the loss does not depend on the mesh.

    Built at the first call, or by `open`: a run that never evaluates compiles nothing for it.
    """

    def __init__(self, assembly: Assembly, mesh: jax.sharding.Mesh, *, cache_dir: Path) -> None:
        self._assembly, self._mesh, self._cache_dir = assembly, mesh, cache_dir
        self._bytes = cache(self._bytes_of)  # the same rows every time: read for it once
        self._data: Any = None

    def __call__(self, state: TrainState, *, batches: int | None) -> Values:
        """eval_loss (nats a weighted token) and, where tokens stand for bytes, bits_per_byte.

        batches: from the start of the split; None for all of it, each row once.
        """
        self.open()
        whole = -(-len(self._data) // self._size)
        chosen = range(min(whole, batches or whole))
        params = state.ema or state.params
        parts: list[Any] = []
        for i in chosen:
            rows = self._placed.rows(self._numbers(i))
            # One at a time: programs that do not wait for each other's results would run side by
            # side, and simulated devices have no thread for each of each: their collectives hang.
            jax.block_until_ready(parts[-1:])
            parts.append(self._step(params, state.rest, rows))
        total, count = (sum(map(float, column)) for column in zip(*parts, strict=True))
        values = {"eval_loss": total / count if count > 0 else 0.0}
        seen = sum(map(self._bytes, chosen))
        if seen:
            values["bits_per_byte"] = total / math.log(2) / seen
        return values

    def open(self) -> None:
        """Open the held-out data. Raises ValueError when there is none; later calls do nothing."""
        if self._data is not None:
            return
        e = self._assembly.experiment
        data = e.data.open("held_out", seed=e.seed, cache_dir=self._cache_dir)
        if len(data) == 0:
            raise ValueError(
                "the held-out split has no rows; use a shorter seq, more held-out text, or "
                "evaluation=None"
            )
        self._data = _Ended(data)
        self._size = self._assembly.largest_batch // e.microbatches
        self._placed = PlacedRows(self._data, self._assembly.batch_shardings(self._mesh), 1)
        self._step = jax.jit(make_evaluation_step(self._assembly, self._mesh))

    def _numbers(self, batch: int) -> np.ndarray:
        return np.arange(batch * self._size, (batch + 1) * self._size)

    def _bytes_of(self, batch: int) -> float:
        """Bytes of text that the batch's weighted targets stand for."""
        table = getattr(self._data.dataset, "token_bytes", None)
        if table is None:
            return 0.0
        rows = self._data.rows(self._numbers(batch))
        return float(np.sum(table[rows["targets"]] * (rows["weights"] > 0)))


class _Ended:
    """A dataset whose rows after its last are its first one with weights 0: full batches to the
    end."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        within = indices < len(self)
        rows = self.dataset.rows(np.where(within, indices, 0))
        if within.all():
            return rows
        weights = rows["weights"]
        return {**rows, "weights": weights * within.reshape(-1, *[1] * (weights.ndim - 1))}
