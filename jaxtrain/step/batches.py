"""From rows of a dataset to global arrays on a mesh; each process reads just its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain.data import BatchRamp, Dataset, batch_of, rows_of_step
from jaxtrain.data.loader import Rows

Batch = dict[str, np.ndarray]
DOCUMENTS = "segments"
"""The field that says which document each token is of."""


def fields_of(dataset: Dataset, data: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
    """What a batch holds: name -> (shape of one row, dtype), from one row read.

    Without isolated documents segment ids and positions are dropped: they would say nothing, and
    attention without segment ids is cheaper.
    """
    row = dataset.rows(np.arange(1))
    if not getattr(data, "isolate_documents", True):
        row = {k: v for k, v in row.items() if k not in ("segments", "positions")}
    fields = {name: (v.shape[1:], v.dtype) for name, v in row.items()}
    return fields | {"rows": ((), np.dtype(np.int32))}


def token_fields(data: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
    """`fields_of` packed text, unopened; segments and positions where documents are isolated."""
    names = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
    if data.isolate_documents:
        names |= {"segments": np.int32, "positions": np.int32}
    fields: dict[str, tuple[tuple[int, ...], Any]] = {
        name: ((data.seq,), dtype) for name, dtype in names.items()
    }
    fields["rows"] = ((), np.int32)
    return fields


class PlacedRows:
    """A dataset whose rows arrive as global arrays [microbatches, rows, ...] on the mesh.

    Microbatch m is a run of consecutive rows, the same on every mesh. `rows` holds each row's
    number within its batch: with it dropout masks do not depend on the mesh. orders: of fields of
    which a device's part of a row is no run of it, which place of a row lies where
    (`Assembly.row_orders`).
    """

    def __init__(
        self,
        dataset: Rows,
        shardings: Mapping[str, Any],
        microbatches: int,
        orders: Mapping[str, np.ndarray] = {},
    ) -> None:
        self._dataset, self._shardings, self._micro = dataset, dict(shardings), microbatches
        self._orders = orders

    def rows(self, numbers: np.ndarray) -> dict[str, jax.Array]:
        """The batch of these global row numbers; only this process's rows are read."""
        shape = (self._micro, len(numbers) // self._micro)
        mine = np.zeros(shape, bool)
        where = self._shardings["rows"].addressable_devices_indices_map(shape)
        for index in where.values():
            mine[index] = True
        chosen = np.flatnonzero(mine)
        read = {**self._dataset.rows(numbers[chosen]), "rows": chosen.astype(np.int32)}
        at = (np.cumsum(mine) - 1).reshape(shape)

        def array(name: str, sharding: Any) -> jax.Array:
            values = read[name]

            def part(index: Any) -> np.ndarray:
                places = index[2:]
                if name in self._orders:
                    places = (self._orders[name][index[2]], *index[3:])
                return values[at[index[:2]]][(slice(None), slice(None), *places)]

            return jax.make_array_from_callback((*shape, *values.shape[1:]), sharding, part)

        return {name: array(name, sharding) for name, sharding in self._shardings.items()}


def row_numbers(
    batch: int | BatchRamp, taken: Callable[[int], int] = lambda step: step
) -> Callable[[int], np.ndarray]:
    """step -> the global numbers of its rows: the first of the batch that it has `taken`, which is
    itself where none was skipped. While a batch grows the later one is larger; its last rows are
    passed over too."""
    return lambda step: rows_of_step(batch, taken(step))[: batch_of(batch, step)]
