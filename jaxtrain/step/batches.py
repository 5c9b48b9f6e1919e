"""Global arrays on a mesh from rows of a dataset. Each process reads only its own rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxtrain.data import Dataset
from jaxtrain.data.loader import RowSource

DOCUMENTS = "segments"
"""Field with the number of each token's document."""


def fields_of(dataset: Dataset, data: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Fields of a batch: name -> (shape of one row, dtype), from one row that is read.

    Without isolated documents segment ids and positions are dropped: attention does not need them,
    and is cheaper without.
    """
    row = dataset.rows(np.arange(1))
    if not getattr(data, "isolate_documents", True):
        row = {k: v for k, v in row.items() if k not in ("segments", "positions")}
    fields = {name: (v.shape[1:], v.dtype) for name, v in row.items()}
    return fields | {"rows": ((), np.dtype(np.int32))}


def token_fields(data: Any) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Returns the fields that `fields_of` gives for packed text, from the settings in `data` alone:
    no dataset is opened."""
    names: dict[str, Any] = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
    if data.isolate_documents:
        names |= {"segments": np.int32, "positions": np.int32}
    if getattr(data, "of_pairs", False):
        names["reference"] = np.float32
    fields: dict[str, tuple[tuple[int, ...], Any]] = {
        name: ((data.seq,), dtype) for name, dtype in names.items()
    }
    fields["rows"] = ((), np.int32)
    return fields


class PlacedRows:
    """A dataset whose rows arrive as global arrays [microbatches, rows, ...] on the mesh.

    Microbatch m is a run of consecutive rows, the same on every mesh. `rows` holds each row's
    number within its batch: with it dropout masks do not depend on the mesh. orders: permutations
    of a row's positions (`Assembly.row_orders`), for fields of which a device's part of a row is
    not contiguous.
    """

    def __init__(
        self,
        dataset: RowSource,
        shardings: Mapping[str, Any],
        microbatches: int,
        orders: Mapping[str, np.ndarray] = {},
    ) -> None:
        self._dataset, self._shardings, self._micro = dataset, dict(shardings), microbatches
        self._orders = orders

    def rows(self, numbers: np.ndarray) -> dict[str, jax.Array]:
        """Returns the batch of these global row numbers; reads only this process's rows."""
        shape = (self._micro, len(numbers) // self._micro)
        local = np.zeros(shape, bool)
        indices = self._shardings["rows"].addressable_devices_indices_map(shape)
        for index in indices.values():
            local[index] = True
        chosen = np.flatnonzero(local)
        read = {**self._dataset.rows(numbers[chosen]), "rows": chosen.astype(np.int32)}
        positions = (np.cumsum(local) - 1).reshape(shape)

        def array(name: str, sharding: Any) -> jax.Array:
            values = read[name]

            def part(index: Any) -> np.ndarray:
                places = index[2:]
                if name in self._orders:
                    places = (self._orders[name][index[2]], *index[3:])
                return values[positions[index[:2]]][(slice(None), slice(None), *places)]

            return jax.make_array_from_callback((*shape, *values.shape[1:]), sharding, part)

        return {name: array(name, sharding) for name, sharding in self._shardings.items()}
