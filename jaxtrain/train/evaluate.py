"""Held-out loss, in nats a token and bits a byte."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.train.assembly import Assembly
from jaxtrain.train.batches import PlacedRows
from jaxtrain.train.pipelined import evaluated_at_once
from jaxtrain.train.state import TrainState, averaged
from jaxtrain.train.step import make_evaluation_step

Values = dict[str, float]


class Evaluator:
    """Evaluates on the same held-out rows every time; the loss does not depend on the mesh.

    Built at the first call, or by `open`: a run that never evaluates compiles nothing for it.
    """

    def __init__(self, assembly: Assembly, mesh: jax.sharding.Mesh, *, cache_dir: Path) -> None:
        self._assembly, self._mesh, self._cache_dir = assembly, mesh, cache_dir
        self._bytes = cache(self._bytes_of)  # the same rows every time: read for it once
        self._dispatcher = ThreadPoolExecutor(1)
        self._at_once = evaluated_at_once(assembly)
        self._data: Any = None

    def __call__(self, state: TrainState, *, batches: int | None) -> Values:
        """eval_loss (nats a weighted token) and, where tokens stand for bytes, bits_per_byte.

        batches: from the start of the split; None for all of it, each row once.
        """
        self.open()
        whole = -(-len(self._data) // self._size)
        chosen = range(min(whole, batches or whole))
        params = averaged(state)
        parts: list[Any] = []
        for first in chosen[:: self._at_once]:
            numbers = self._numbers(first, self._at_once)
            # Batches behind the last are rows of weight 0.
            rows = self._placed.rows(
                np.where(numbers < len(chosen) * self._size, numbers, len(self._data))
            )
            for part in parts[-1:]:
                part.result()
            parts.append(self._dispatcher.submit(self._run, params, state.rest, rows))
        found = [part.result() for part in parts]
        total, count = (sum(map(float, column)) for column in zip(*found, strict=True))
        values = {"eval_loss": total / count if count > 0 else 0.0}
        seen = sum(map(self._bytes, chosen))
        if seen:
            values["bits_per_byte"] = total / math.log(2) / seen
        return values

    def wait(self) -> None:
        """Return when nothing is evaluated: an interrupt of a call leaves a program on its way."""
        self._dispatcher.submit(int).result()

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
        where = self._assembly.batch_shardings(self._mesh)
        self._placed = PlacedRows(self._data, where, self._at_once)
        self._step = jax.jit(make_evaluation_step(self._assembly, self._mesh))

    def _run(self, *arguments: Any) -> Any:
        """One at a time: programs that do not wait for each other's results would run side by side,
        and simulated devices have no thread for each of each: their collectives hang."""
        return jax.block_until_ready(self._step(*arguments))

    def _numbers(self, batch: int, batches: int = 1) -> np.ndarray:
        return np.arange(batch * self._size, (batch + batches) * self._size)

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
