"""Batches of a run: rows of the data, placed on devices ahead of the steps that use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jaxtrain.data import Loader
from jaxtrain.data.batch_size import row_numbers
from jaxtrain.session.rates import counts_flops
from jaxtrain.session.rows import CountedDocuments
from jaxtrain.session.skips import Skips
from jaxtrain.step.assembly import Assembly


class Batches:
    """Batches of a run that goes on after `start` steps, without those in `skips`."""

    def __init__(
        self, assembly: Assembly, mesh: jax.sharding.Mesh, dataset: Any, start: int, skips: Skips
    ) -> None:
        self._assembly, self._mesh, self._dataset = assembly, mesh, dataset
        self._waited_s = 0.0
        self._begin(start, skips)

    def _begin(self, start: int, skips: Skips) -> None:
        e, dataset = self._assembly.experiment, self._dataset
        self.skips, self._documents = skips, None
        if counts_flops(self._assembly) and "segments" in self._assembly.fields:
            dataset = self._documents = CountedDocuments(dataset, e.batch, start)
        placed = self._assembly.placed(dataset, self._mesh, e.microbatches)
        rows = row_numbers(e.batch, skips.batch, skips.shift)
        if hasattr(self._dataset, "go_to") and start < e.steps:
            # Here, and not in the loader's thread: it may take long, and be interrupted.
            self._dataset.go_to(int(rows(start)[0]))
        self._loader = Loader(placed, rows, lambda batch: batch, start=start)

    def next(self) -> tuple[int, Any]:
        """Returns (step, batch) as `Loader.next`."""
        return self._loader.next()

    def peek(self, count: int) -> list[tuple[int, Any]]:
        """Returns the next (step, batch) pairs as `Loader.peek`."""
        return self._loader.peek(count)

    def begin_at(self, step: int, skips: Skips) -> None:
        """Continues with the batch after `step` steps."""
        self._loader.close()
        self._waited_s = self.wait_s
        self._begin(step, skips)

    @property
    def wait_s(self) -> float:
        """Seconds that `next` has waited for data, in all."""
        return self._waited_s + self._loader.wait_s

    def documents(self, step: int) -> Mapping[int, float] | None:
        """Document counts of `step` by length, as `CountedDocuments.of`; None if not needed."""
        return None if self._documents is None else self._documents.of(step)

    def close(self) -> None:
        self._loader.close()
