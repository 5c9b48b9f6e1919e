"""Rows of a dataset as global arrays: the same batch on every mesh, each row read where used."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtrain.data import BatchRamp, BigramChain
from jaxtrain.data.batch_size import row_numbers
from jaxtrain.step.batches import PlacedRows, fields_of

SEQ, ROWS = 4, 8


class Counting:
    """Row i is filled with i; remembers which rows were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        self.read += [int(i) for i in indices]
        tokens = np.repeat(np.asarray(indices, np.int32)[:, None], SEQ, axis=1)
        return {"tokens": tokens + 100 * np.arange(SEQ, dtype=np.int32)}


def shardings(axes: dict[str, int], rows: tuple[str, ...], seq: str | None) -> dict:
    count = int(np.prod(list(axes.values())))
    mesh = Mesh(
        np.array(jax.devices()[:count]).reshape(tuple(axes.values())),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
    )
    return {
        "tokens": NamedSharding(mesh, PartitionSpec(None, rows, seq)),
        "rows": NamedSharding(mesh, PartitionSpec(None, rows)),
    }


LAYOUTS = {
    "one device": ({"data": 1}, ("data",), None),
    "rows over 4": ({"data": 4}, ("data",), None),
    "rows over 2 x 2": ({"data": 2, "fsdp": 2}, ("data", "fsdp"), None),
    "rows whole over tensor": ({"data": 2, "tensor": 4}, ("data",), None),
    "sequence over context": ({"data": 2, "context": 2}, ("data",), "context"),
}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_is_the_same_on_every_mesh(layout: str, microbatches: int) -> None:
    data = Counting()
    numbers = np.arange(40, 40 + ROWS)
    batch = PlacedRows(data, shardings(*LAYOUTS[layout]), microbatches).rows(numbers)
    whole = numbers[:, None] + 100 * np.arange(SEQ)
    assert np.array_equal(batch["tokens"], whole.reshape(microbatches, -1, SEQ))
    assert np.array_equal(batch["rows"], np.arange(ROWS).reshape(microbatches, -1))
    assert sorted(data.read) == list(numbers), "a row was read twice or not at all"


class Remote:
    """A sharding of which this process holds only the devices that `mine` names."""

    def __init__(self, sharding: NamedSharding, mine: set[int]) -> None:
        self._sharding, self._mine = sharding, mine

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict:
        found = self._sharding.devices_indices_map(shape)
        return {d: index for d, index in found.items() if d.id in self._mine}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_process_reads_only_the_rows_its_devices_hold(
    microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, parts = Counting(), {}

    def make(shape: tuple[int, ...], sharding: Remote, part: Callable) -> None:
        for index in sharding.addressable_devices_indices_map(shape).values():
            parts[shape, str(index)] = (index, part(index))

    monkeypatch.setattr(jax, "make_array_from_callback", make)
    where = shardings({"data": 4}, ("data",), None)
    remote = {name: Remote(sharding, mine={1, 2}) for name, sharding in where.items()}
    PlacedRows(data, remote, microbatches).rows(np.arange(ROWS))
    whole = np.arange(ROWS).reshape(microbatches, 4, -1)
    assert sorted(data.read) == sorted(whole[:, 1:3].reshape(-1))
    tokens = (np.arange(ROWS)[:, None] + 100 * np.arange(SEQ)).reshape(microbatches, -1, SEQ)
    for (shape, _), (index, part) in parts.items():
        expected = tokens if len(shape) == 3 else np.arange(ROWS).reshape(microbatches, -1)
        assert np.array_equal(part, expected[index])
    assert len(parts) == 4, "two arrays on two devices each"


def test_ramped_batches_number_their_rows_without_a_gap() -> None:
    rows = row_numbers(BatchRamp(start=2, end=6, increment=2, steps=3))
    sizes = [2, 2, 2, 4, 4, 4, 6, 6, 6, 6]
    assert [len(rows(step)) for step in range(10)] == sizes
    assert np.array_equal(np.concatenate([rows(s) for s in range(10)]), np.arange(sum(sizes)))


@pytest.mark.parametrize("isolate", [True, False])
def test_segments_are_in_a_batch_only_where_documents_are_isolated(isolate: bool) -> None:
    isolated = BigramChain(vocab=8, seq=SEQ, isolate_documents=True)
    dataset = isolated.open("train", seed=0, cache_dir=None)

    class Data:
        isolate_documents = isolate

    fields = fields_of(dataset, Data())
    always = {"tokens", "targets", "weights", "rows"}
    assert set(fields) == always | ({"segments", "positions"} if isolate else set())
    assert fields["tokens"] == ((SEQ,), np.int32)
    assert fields["rows"] == ((), np.int32)
