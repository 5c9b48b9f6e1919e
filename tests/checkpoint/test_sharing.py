"""Chunks that did not change are not written again, and what a kept step needs is kept."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint import CheckpointManager
from jaxtrain.checkpoint.chunks import Box, Part, cut
from jaxtrain.checkpoint.pack import write_chunks

ROWS = 64


def sharded(x: jax.Array) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:8]), ("a",))
    return jax.device_put(x, NamedSharding(mesh, P("a")))


def state(moved: float, frozen: int = 9) -> dict:
    base = jnp.arange(ROWS * 16.0).reshape(ROWS, 16)
    still = {f"still{i}": sharded(base + i) for i in range(frozen)}
    return {**still, "moved": sharded(base + moved)}


def written(directory: Path, step: int) -> int:
    """Bytes of the files of a step that no older step has."""
    files = [p.stat() for p in (directory / str(step)).rglob("*") if p.is_file()]
    return sum(f.st_size for f in files if f.st_nlink == 1)


def pack_bytes(manager: CheckpointManager) -> int:
    """Bytes on the disk of all packs, each counted once."""
    packs = [p.stat() for p in manager.directory.rglob("*.pack")]
    return sum({p.st_ino: p.st_size for p in packs}.values())


def check(manager: CheckpointManager, step: int, expected: dict) -> None:
    found, _ = manager.restore(step, expected)
    assert all((found[k] == v).all() for k, v in expected.items())


def test_only_what_changed_is_written(make) -> None:
    manager = make(keep=9)
    size = ROWS * 16 * 4
    for step in (1, 2, 3):
        manager.save(step, state(step), {})
    manager.wait()
    assert pack_bytes(manager) == 10 * size + 2 * size
    for step in (1, 2, 3):
        check(manager, step, state(step))


def test_deleting_a_step_keeps_what_newer_ones_share(make) -> None:
    manager = make(keep=1)
    for step in (1, 2, 3):
        manager.save(step, state(step), {})
    manager.wait()
    assert manager.steps() == [3]
    check(manager, 3, state(3))


def test_a_new_start_shares_with_what_it_finds(make) -> None:
    first = make()
    first.save(1, state(1), {})
    first.close()
    manager = make(keep=9)
    check(manager, 1, state(1))
    manager.save(2, state(2), {})
    manager.wait()
    assert len(list((manager.directory / "2" / "state").glob("*.pack"))) == 2
    check(manager, 2, state(2))


def test_with_what_a_start_has_not_read_it_shares_nothing(make) -> None:
    """Its bytes may have changed since they were written."""
    first = make()
    first.save(1, state(1), {})
    first.close()
    manager = make(keep=9)
    manager.save(2, state(2), {})
    manager.wait()
    assert [p.name for p in (manager.directory / "2").rglob("*.pack")] == ["2.0.pack"]


def test_a_pack_that_is_mostly_stale_is_left_to_go(make) -> None:
    """What is kept on the disk stays within twice what the steps have, however long one shares."""
    manager = make(keep=1)
    base = [jnp.full((ROWS, 16), float(i)) for i in range(10)]
    for step in range(1, 30):
        base[step % 10] += 1  # another leaf every time
        manager.save(step, {f"x{i}": sharded(x) for i, x in enumerate(base)}, {})
    manager.wait()
    size = ROWS * 16 * 4
    assert 10 * size <= pack_bytes(manager) <= 2 * 10 * size
    check(manager, 29, {f"x{i}": sharded(x) for i, x in enumerate(base)})


@pytest.mark.parametrize("why", ["no links", "cut", "gone", "manifest"])
def test_what_cannot_be_shared_is_written(make, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    manager = make(keep=9)
    manager.save(1, state(1), {})
    manager.wait()
    (pack,) = (manager.directory / "1").rglob("*.pack")
    if why == "no links":

        def refused(*_: object) -> None:
            raise PermissionError("no hard links here")

        monkeypatch.setattr(os, "link", refused)
    elif why == "cut":
        pack.write_bytes(pack.read_bytes()[:-1])
    elif why == "gone":
        pack.unlink()
    else:
        (manager.directory / "1" / "state" / "manifest.json").write_text("")
    manager.save(2, state(1), {})
    manager.wait()
    assert [p.name for p in (manager.directory / "2").rglob("*.pack")] == ["2.0.pack"]
    check(manager, 2, state(1))


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (1, 4, 6), (2, 3, 5, 2)])
@pytest.mark.parametrize("largest", [1, 16, 40, 4096])
def test_pieces_of_a_part_cover_it_once(shape: tuple[int, ...], largest: int) -> None:
    data = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    start = tuple(range(10, 10 + len(shape)))
    seen = np.zeros(shape, int)
    for piece in cut(Part("x", Box(start, shape), data), largest):
        assert piece.data.flags.c_contiguous
        assert piece.data.nbytes <= max(largest, 4)
        where = piece.box.within(Box(start, shape))
        assert (data[where] == piece.data).all()
        seen[where] += 1
    assert (seen == 1).all()


def test_a_pack_holds_its_chunks_and_nothing_else(tmp_path: Path) -> None:
    parts = [
        Part(f"x{i}", Box((0,), (n,)), np.arange(n, dtype=dtype))
        for i, (n, dtype) in enumerate([(3, np.float32), (1, np.int8), (8, np.float16)])
    ]
    chunks = write_chunks(tmp_path, "1.0.pack", parts)
    assert [(c.offset, c.size) for c in chunks] == [(0, 12), (12, 1), (13, 16)]
    whole = b"".join(part.data.tobytes() for part in parts)
    assert (tmp_path / "1.0.pack").read_bytes() == whole
