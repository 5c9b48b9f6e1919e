"""Chunks that do not change are not written at every save: two copies of them are on the disk where
several steps are kept, and nothing is there that no step needs."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint import Best, CheckpointManager, Keep, SavePolicy
from jaxtrain.checkpoint.retention import Retention
from jaxtrain.inspection.verify import verify
from jaxtrain.state_format.chunks import Box, Part, cut
from jaxtrain.state_format.leaves import stored_bytes
from jaxtrain.state_format.pack import SMALL, write_chunks

SIZE = 2 * SMALL
"""Bytes of a leaf: two chunks that are just large enough to be linked."""


def sharded(value: float) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",))
    return jax.device_put(jnp.full((2, SMALL // 4), value), NamedSharding(mesh, P("a")))


def state(moved: float, frozen: int = 9) -> dict:
    """Leaves that stand still, one that does not, and a small one that stands still too."""
    still = {f"still{i}": sharded(i) for i in range(frozen)}
    return {**still, "moved": sharded(100 + moved), "skipped": jnp.int32(0)}


def packs(manager: CheckpointManager, step: int) -> dict[int, int]:
    """Size of each file that holds chunks of a step, by inode."""
    found = [p.stat() for p in (manager.directory / str(step)).rglob("*.pack")]
    return {at.st_ino: at.st_size for at in found}


def on_disk(manager: CheckpointManager) -> int:
    """Bytes of all packs, those that several steps hold once."""
    found = [p.stat() for p in manager.directory.rglob("*.pack")]
    return sum({at.st_ino: at.st_size for at in found}.values())


def new_bytes(manager: CheckpointManager, step: int) -> int:
    """Bytes of files of a step that no other has."""
    files = [p.stat() for p in (manager.directory / str(step)).rglob("*.pack")]
    return sum(at.st_size for at in files if at.st_nlink == 1)


def check(manager: CheckpointManager, step: int, expected: dict) -> None:
    found, _ = manager.restore(step, expected)
    assert all((found[k] == v).all() for k, v in expected.items())


def saved(manager: CheckpointManager, step: int, given: dict, **metrics: float) -> None:
    manager.save(step, given, {"metrics": metrics})
    manager.wait()


def test_what_stands_still_is_written_until_there_are_two_copies_apart(make) -> None:
    manager = make(keep=9)
    for step in range(1, 9):
        saved(manager, step, state(step))
    whole, moved = 10 * SIZE + 4, SIZE + 4
    # What changes is known from the second save on; then there are two copies, taken in turn.
    assert [new_bytes(manager, step) for step in range(1, 9)] == [whole, *[moved] * 7]
    assert [len(packs(manager, step)) for step in range(1, 9)] == [1, *[2] * 7]
    for a, b in zip(range(2, 7), range(4, 9), strict=True):
        assert len(packs(manager, a).keys() & packs(manager, b).keys()) == 1, "in turn"
    assert on_disk(manager) == 3 * whole + 5 * moved
    for step in range(1, 9):
        check(manager, step, state(step))


class Policy:
    """A way to keep, what the saves are rated, and what of the state moves at a save."""

    def __init__(
        self,
        keep: Keep,
        rating: Callable[[int], float] = lambda step: 0.0,
        moves: Callable[[int, int], bool] = lambda step, leaf: leaf == 0,
    ) -> None:
        self.keep, self.rating, self.moves = keep, rating, moves


POLICIES = {
    "1": Policy(Keep(1)),
    "2": Policy(Keep(2)),
    "3": Policy(Keep(3)),
    "1, every 4": Policy(Keep(1, every=4)),
    "2, every 3": Policy(Keep(2, every=3)),
    "1, best": Policy(Keep(1, best=Best("loss")), rating=lambda step: -step % 5),
    "2, best 2": Policy(Keep(2, best=Best("loss", n=2)), rating=lambda step: abs(step - 6)),
    # What 6 would share with 5 is what 2 has, which is kept beside it.
    "1, best 2": Policy(
        Keep(1, best=Best("loss", n=2)),
        rating=lambda step: {1: 9.0, 2: 0.0, 3: 5.0, 4: 4.0, 6: 3.0}.get(step, 9.0),
    ),
    "1, the newest is the best": Policy(Keep(1, best=Best("loss")), rating=lambda step: -step),
    "1, in turn": Policy(Keep(1), moves=lambda step, leaf: leaf == step % 4),
    "3, in turn": Policy(Keep(3), moves=lambda step, leaf: leaf == step % 4),
    "1, all at once": Policy(Keep(1), moves=lambda step, leaf: step % 3 == 0),
    "2, nothing": Policy(Keep(2), moves=lambda step, leaf: False),
    "3, everything": Policy(Keep(3), moves=lambda step, leaf: True),
}
LEAVES = 4


def leaves_of(policy: Policy, step: int) -> dict[str, Any]:
    found = {}
    for leaf in range(LEAVES):
        moved = sum(policy.moves(s, leaf) for s in range(1, step + 1))
        found[f"x{leaf}"] = sharded(100 * leaf + moved)
    return {**found, "skipped": jnp.int32(0)}


@pytest.mark.parametrize("name", POLICIES)
def test_no_damage_to_one_file_is_in_all_that_are_kept_and_nothing_is_kept_for_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every save, also of a new start, which has read one step; and while it is made there is
    no more on the disk than was asked for."""
    policy, bytes_of = POLICIES[name], stored_bytes(leaves_of(POLICIES[name], 1))
    assert bytes_of == LEAVES * SIZE + 4
    most: list[int] = []
    drop = Retention.drop_old

    def measured(retention: Retention, step: int) -> None:
        most.append(on_disk(manager))  # when the newest is committed, and nothing gone yet
        drop(retention, step)

    monkeypatch.setattr(Retention, "drop_old", measured)
    for start, last in ((0, 5), (5, 13)):
        with CheckpointManager(tmp_path, SavePolicy(keep=policy.keep)) as manager:
            there = on_disk(manager)
            asked = manager._retention.bytes_needed(bytes_of)
            if start:
                check(manager, start, leaves_of(policy, start))
            kept_by_every: set[int] = set()
            for step in range(start + 1, last + 1):
                given = leaves_of(policy, step)
                saved(manager, step, given, loss=policy.rating(step))
                steps = manager.steps()
                held = {s: packs(manager, s) for s in steps}
                for inode in set().union(*held.values()):
                    rely = [s for s in steps if inode in held[s]]
                    assert len(steps) == 1 or len(rely) < len(steps), (name, step)
                for s in steps:
                    assert sum(held[s].values()) == bytes_of, "what no chunk of the step is in"
                if policy.keep == Keep(1):
                    assert on_disk(manager) == bytes_of
                    assert most[-1] <= 2 * bytes_of
                if policy.keep.every:
                    kept_by_every |= {s for s in steps if s % policy.keep.every == 0}
                assert most[-1] - there <= asked + len(kept_by_every) * bytes_of, (name, step)
            for s in manager.steps():
                check(manager, s, leaves_of(policy, s))


def test_a_flip_in_what_never_changes_leaves_a_step_to_go_on_from(make, tmp_path: Path) -> None:
    """Of any file, in any of the steps that are kept."""
    manager = make(keep=3)
    for step in range(1, 8):
        saved(manager, step, state(step))
    files = sorted(manager.directory.rglob("*.pack"))
    tried = {path.stat().st_ino: path for path in files}.values()
    assert len(tried) == 5, "three of what moves, two of what does not"
    for path in tried:
        data = path.read_bytes()
        with path.open("r+b") as file:  # in place: all that link to it are damaged
            file.seek(len(data) // 2)
            file.write(bytes([data[len(data) // 2] ^ 1]))
        (run := tmp_path / "run").mkdir(exist_ok=True)
        shutil.copytree(manager.directory, run / "checkpoints", dirs_exist_ok=True)
        damaged = [found.step for found in verify(run) if found.damages]
        assert 1 <= len(damaged) <= 2, damaged
        with path.open("r+b") as file:
            file.write(data)
        shutil.rmtree(run)


def test_what_is_small_is_never_held_by_a_link(make) -> None:
    """A counter of four bytes does not keep the file it is in."""
    manager = make(keep=1)
    for step in range(1, 6):
        tiny = {f"tiny{i}": jnp.full(SMALL // 4 - 1, float(i)) for i in range(3)}
        saved(manager, step, {"moved": sharded(step), "skipped": jnp.int32(0), **tiny})
        (path,) = (manager.directory / str(step)).rglob("*.pack")
        assert path.name == f"{step}.0.pack" and path.stat().st_nlink == 1
        assert on_disk(manager) == SIZE + 4 + 3 * (SMALL - 4)


def test_with_what_a_start_has_not_read_it_shares_nothing(make) -> None:
    """Its bytes may have changed since they were written."""
    first = make()
    for step in (1, 2, 3):
        saved(first, step, state(step))
    first.close()
    manager = make(keep=9)
    for step in (4, 5):
        saved(manager, step, state(step))
        assert new_bytes(manager, step) == 10 * SIZE + 4
    manager.close()
    manager = make(keep=9)
    check(manager, 5, state(5))
    for step in (6, 7):
        saved(manager, step, state(step))
    assert new_bytes(manager, 6) == 10 * SIZE + 4, "one copy more than the one it has read"
    assert new_bytes(manager, 7) == SIZE + 4, "with 5, which it has read"
    check(manager, 7, state(7))


@pytest.mark.parametrize("why", ["no links", "cut", "gone", "manifest"])
def test_what_cannot_be_shared_is_written(make, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    manager = make(keep=1)
    for step in (1, 2):
        saved(manager, step, state(step))
    (pack,) = (manager.directory / "2").rglob("*.still.pack")
    if why == "no links":

        def refused(*_: object) -> None:
            raise PermissionError("no hard links here")

        monkeypatch.setattr(os, "link", refused)
    elif why == "cut":
        pack.write_bytes(pack.read_bytes()[:-1])
    elif why == "gone":
        pack.unlink()
    else:
        (manager.directory / "2" / "state" / "manifest.json").write_text("")
    saved(manager, 3, state(3))
    names = {p.name for p in (manager.directory / "3").rglob("*.pack")}
    assert names == {"3.0.pack"} | ({"3.0.still.pack"} if why != "manifest" else set())
    check(manager, 3, state(3))


def test_room_is_asked_for_what_is_kept_and_what_is_there_counts_once(make) -> None:
    """Packs that a step of another name holds too give nothing back when theirs goes."""
    needed = make(keep=3)._retention.bytes_needed
    whole = 10 * SIZE + 4
    assert needed(whole) == 4 * whole, "three, and the one being written"
    manager = make(keep=3)
    for step in range(1, 8):
        saved(manager, step, state(step))
    there = on_disk(manager)
    assert there == 2 * 9 * SIZE + 3 * (SIZE + 4)
    assert needed(whole) == 4 * whole - there
    (manager.directory / "6").rename(manager.directory / "6.damaged")
    (manager.directory / "5").rename(manager.directory / "5.damaged")
    assert needed(whole) == 4 * whole - (SIZE + 4), "what 7 shares with 5 stays with 5.damaged"
    best = Retention(Keep(2, every=7, best=Best("loss", n=2)), manager.directory)
    assert best.bytes_needed(whole) == 5 * whole, "7 stays"
    assert needed(4) == 4, "a step is written before another goes"
    assert math.isclose(needed(0), 0)


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
