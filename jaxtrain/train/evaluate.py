"""Held-out loss, in nats a token and bits a byte."""

from __future__ import annotations

import math
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

    Built at the first call: a run that never evaluates compiles nothing for it.
    """

    def __init__(self, assembly: Assembly, mesh: jax.sharding.Mesh, *, cache_dir: Path) -> None:
        self._assembly, self._mesh, self._cache_dir = assembly, mesh, cache_dir
        self._step: Any = None
        self._batches: list[np.ndarray] = []
        self._bytes = 0.0

    def __call__(self, state: TrainState, *, batches: int | None) -> Values:
        """eval_loss (nats a weighted token) and, where tokens stand for bytes, bits_per_byte."""
        if not self._batches:
            self._open(batches)
        params = state.ema or state.params
        parts = [self._step(params, state.rest, self._rows.rows(b)) for b in self._batches]
        total, count = (sum(map(float, column)) for column in zip(*parts, strict=True))
        values = {"eval_loss": total / count if count > 0 else 0.0}
        if self._bytes:
            values["bits_per_byte"] = total / math.log(2) / self._bytes
        return values

    def _open(self, batches: int | None) -> None:
        e = self._assembly.experiment
        data = e.data.open("held_out", seed=e.seed, cache_dir=self._cache_dir)
        self._rows = PlacedRows(data, self._assembly.batch_shardings(self._mesh), 1)
        size = self._assembly.largest_batch // e.microbatches
        whole = len(data) // size
        if whole == 0:
            raise ValueError(
                f"the held-out split has {len(data)} rows and a batch of evaluation has {size}; "
                f"use a smaller batch, a shorter seq, more held-out text, or evaluation=None"
            )
        chosen = whole if batches is None else min(batches, whole)
        self._batches = [np.arange(i * size, (i + 1) * size) for i in range(chosen)]
        table = getattr(data, "token_bytes", None)
        if table is not None:
            for rows in map(data.rows, self._batches):
                self._bytes += float(np.sum(table[rows["targets"]] * (rows["weights"] > 0)))
        step = make_evaluation_step(self._assembly, self._mesh)
        self._step = jax.jit(step)
