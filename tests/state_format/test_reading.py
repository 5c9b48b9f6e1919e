"""Leaves are read together, up to a number of bytes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.checkpoint import CheckpointManager, SavePolicy
from jaxtrain.state_format import reader
from jaxtrain.state_format.chunks import Chunk
from jaxtrain.state_format.manifest import Manifest

LEAVES = {f"leaf{i}": jnp.arange(4.0) + i for i in range(4)}
BYTES = 16
"""Of a leaf."""


@pytest.fixture
def saved(tmp_path: Path) -> Manifest:
    with CheckpointManager(tmp_path / "saves", SavePolicy(every=1, keep=1)) as manager:
        manager.save(1, LEAVES, {})
        manager.wait()
        return manager.manifest(1)


def read(saved: Manifest, read_chunk: reader.ReadChunk) -> None:
    specs = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in LEAVES.items()
    }
    assert {*specs} == {*saved.leaves}
    arrays = reader.read_arrays(saved, specs, read_chunk)
    assert all((arrays[name] == leaf).all() for name, leaf in LEAVES.items())


def test_small_leaves_are_read_together(saved: Manifest) -> None:
    """A store's answers are waited for together: none comes before all four are asked for."""
    from_disk, asked = reader.read_from(saved.directory), threading.Barrier(len(LEAVES))

    def waits(chunk: Chunk, dtype: np.dtype) -> np.ndarray:
        asked.wait(timeout=60)
        return from_disk(chunk, dtype)

    read(saved, waits)
    assert reader.verify_chunks(saved, waits) == []


def test_leaves_of_the_limit_together_are_read_together(
    saved: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is read only once another one is, too."""
    from_disk, asked = reader.read_from(saved.directory), threading.Barrier(2)

    def waits(chunk: Chunk, dtype: np.dtype) -> np.ndarray:
        asked.wait(timeout=60)
        return from_disk(chunk, dtype)

    monkeypatch.setattr(reader, "AHEAD", 2 * BYTES)
    read(saved, waits)


@pytest.mark.parametrize("limit", [1, BYTES, 2 * BYTES])
def test_no_more_is_read_ahead_than_the_host_is_to_hold(
    saved: Manifest, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leaf of more bytes than that is read alone."""
    from_disk, holds, most = reader.read_from(saved.directory), [0], [0]
    make = jax.make_array_from_single_device_arrays

    def begins(chunk: Chunk, dtype: np.dtype) -> np.ndarray:
        holds[0] += chunk.size
        most[0] = max(most[0], holds[0])
        return from_disk(chunk, dtype)

    def ends(*args: object) -> jax.Array:
        holds[0] -= BYTES
        return make(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(reader, "AHEAD", limit)
    monkeypatch.setattr(reader, "READERS", 1)
    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", ends)
    read(saved, begins)
    assert holds[0] == 0 and most[0] <= max(limit, BYTES)


def test_all_damages_are_told(saved: Manifest) -> None:
    from_disk = reader.read_from(saved.directory)

    def damaged(chunk: Chunk, dtype: np.dtype) -> np.ndarray:
        if chunk.leaf in ("leaf1", "leaf3"):
            raise ValueError("cut")
        return from_disk(chunk, dtype)

    with pytest.raises(reader.Damaged) as told:
        read(saved, damaged)
    assert [line.split()[0] for line in told.value.damages] == ["leaf1", "leaf3"]


def test_a_store_that_does_not_answer_is_not_asked_for_what_is_left(
    saved: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread reads, and the first leaf fails."""
    from_disk, ended, asked = reader.read_from(saved.directory), threading.Event(), list[str]()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            ended.set()
            super().shutdown()

    def fails(chunk: Chunk, dtype: np.dtype) -> np.ndarray:
        asked.append(chunk.leaf)
        if chunk.leaf == "leaf0":
            raise OSError("no answer")
        assert ended.wait(timeout=60)
        return from_disk(chunk, dtype)

    monkeypatch.setattr(reader, "READERS", 1)
    monkeypatch.setattr(reader, "ThreadPoolExecutor", Pool)
    with pytest.raises(OSError, match="no answer"):
        read(saved, fails)
    assert {*asked} <= {"leaf0", "leaf1"}  # the second may have begun
