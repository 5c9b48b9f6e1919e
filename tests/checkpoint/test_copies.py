"""Copies of a part of a step: whose they are, and that they are of the step that is restored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.checkpoint import DamagedCheckpoint, LocalTier, SavePolicy, local_tier
from jaxtrain.checkpoint.local_tier import LocalStep, LocalSteps
from jaxtrain.checkpoint.tiers import Checkpoints
from jaxtrain.state_format.chunks import Box, Chunk, digest
from jaxtrain.state_format.manifest import Manifest

ROWS = 4


def state(moved: int) -> dict[str, jax.Array]:
    """Of a history that has `moved` so far: no chunk is that of another."""
    return {f"w{row}": jnp.arange(8.0) + row + 100 * moved for row in range(ROWS)}


def opened(folder: Path) -> Checkpoints:
    local = LocalTier(every=1, directory=str(folder / "memory"))
    return Checkpoints(folder / "run" / "checkpoints", SavePolicy(every=1, local=local))


def saved(folder: Path, moved: int) -> Path:
    """A durable step 1, and a local one."""
    with opened(folder) as tiers:
        tiers.save(1, state(moved), {"step": 1})
    return folder / "run" / "checkpoints" / "1"


def damaged(folder: Path) -> None:
    """One chunk of the local tier's part."""
    (pack,) = (folder / "memory").glob("*/*/1/*.pack")
    data = bytearray(pack.read_bytes())
    data[1] ^= 1
    pack.write_bytes(bytes(data))


def restored(folder: Path) -> dict[str, Any]:
    with opened(folder) as tiers:
        assert tiers.newest_whole() == 1 and tiers.from_local(1)
        return tiers.restore(1, state(0))[0]


def test_a_durable_copy_of_another_history_does_not_stand_in_for_a_damaged_chunk(
    tmp_path: Path,
) -> None:
    """Its bytes are whole and of that leaf and step; with the others they are no state that was."""
    step, other = saved(tmp_path / "ours", 0), saved(tmp_path / "theirs", 1)
    damaged(tmp_path / "ours")
    leaves = restored(tmp_path / "ours")
    assert all((leaves[name] == leaf).all() for name, leaf in state(0).items())
    shutil.rmtree(step)
    shutil.copytree(other, step)
    with pytest.raises(DamagedCheckpoint, match="the durable tier has no such chunk"):
        restored(tmp_path / "ours")


class Neighbour:
    """The other process's tier, as sockets give it: bytes, of whatever it has there."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, part: object, offset: int, size: int, process: int) -> bytes:
        assert process == 1
        return self.data[offset : offset + size]

    def close(self) -> None: ...


ELEMENTS = np.arange(6, dtype=np.float32)
PARTS = {
    "as it was written": (ELEMENTS.tobytes(), True),
    "of another history": ((ELEMENTS + 1).tobytes(), False),
    "cut short": (ELEMENTS.tobytes()[:-4], False),
    "a bit of it": ((ELEMENTS * np.float32(1 + 2**-23)).tobytes(), False),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_neighbours_bytes_are_those_of_the_step_that_is_restored(
    name: str, tmp_path: Path
) -> None:
    """Else what stands in for them is asked, and without it they are refused."""
    data, good = PARTS[name]
    box = Box((0,), ELEMENTS.shape)
    chunk = Chunk("w", box, digest("w", box, ELEMENTS), "3/1.ab.pack", 0, ELEMENTS.nbytes)
    steps = LocalSteps(LocalTier(directory=str(tmp_path)), "run")
    steps.peers = Neighbour(data)  # type: ignore[assignment]
    step = LocalStep(Manifest(3, Path(), {}, {}, {"w": [chunk]}, {}), {chunk.pack: [1]})
    stand_in = np.full(6, 7.0, np.float32)
    read = steps.read(step, lambda chunk, dtype: stand_in)(chunk, ELEMENTS.dtype)
    assert (read == (ELEMENTS if good else stand_in)).all()
    assert len(steps.problems) == (not good)
    if not good:
        with pytest.raises(ValueError, match=r"3/1\.ab\.pack (has another digest|is cut short)"):
            steps.read(step)(chunk, ELEMENTS.dtype)
    steps.close()


@pytest.mark.parametrize("processes", range(1, 10))
def test_a_copy_goes_half_the_processes_on(
    processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is on another machine, however many processes up to half of all a machine has; and
    every process has one other's."""
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(local_tier, "share_failure", lambda act: act())
    monkeypatch.setattr(local_tier, "all_gather_text", lambda text: [text] * processes)
    peers = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(local_tier, "Peers", lambda root, directory: peers)
    goes_to = []
    for process in range(processes):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        steps = LocalSteps(LocalTier(directory=str(tmp_path)), "run")
        goes_to.append(steps.neighbour)
        steps.close()
    assert goes_to == [(p + processes // 2) % processes for p in range(processes)]
    assert sorted(goes_to) == list(range(processes))
    for size in range(1, processes // 2 + 1):
        if processes % size == 0:
            assert all(p // size != to // size for p, to in enumerate(goes_to))


def test_what_is_copied_goes_to_the_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put: list[tuple[int, int]] = []
    monkeypatch.setattr(local_tier, "share_failure", lambda act: act())
    with opened(tmp_path) as tiers:
        steps = tiers._open()
        steps.neighbour = 5
        steps.peers = SimpleNamespace(  # type: ignore[assignment]
            put=lambda part, process: put.append((part.step, process)), close=lambda: None
        )
        tiers.save(1, state(0), {"step": 1}, durable=False)
        tiers.wait()
    assert put == [(1, 5)]
    (record,) = (tmp_path / "memory").glob("*/*/1/*.json")
    assert json.loads(record.read_text().partition("\n")[2])["metadata"] == {"step": 1}
