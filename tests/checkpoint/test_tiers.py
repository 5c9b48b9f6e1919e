"""Two tiers: the newest step that is whole across them is restored, whatever one of them lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import process_group
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint import DamagedCheckpoint, LocalTier, Minutes, SavePolicy
from jaxtrain.checkpoint.tiers import Checkpoints
from jaxtrain.inspection.verify import verify
from jaxtrain.state_format import hashing


def state(step: int, devices: int = 8, moved: int = 0) -> dict[str, jax.Array]:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("a",))
    rows = NamedSharding(mesh, P("a"))
    w = jax.device_put(jnp.arange(64.0).reshape(16, 4) + step + moved, rows)
    return {"w": w, "step": jax.device_put(jnp.int32(step), NamedSharding(mesh, P()))}


def equal(found: dict[str, jax.Array], step: int, moved: int = 0) -> bool:
    expected = state(step, moved=moved)
    return all((np.asarray(found[k]) == np.asarray(v)).all() for k, v in expected.items())


def opened(folder: Path, every: int = 10, local_every: int = 1) -> Checkpoints:
    local = LocalTier(every=local_every, directory=str(folder / "memory"))
    return Checkpoints(folder / "run" / "checkpoints", SavePolicy(every=every, local=local))


def saved(folder: Path, steps: range, every: int = 10) -> None:
    with opened(folder, every) as tiers:
        for step in steps:
            if tier := tiers.should_save(step):
                tiers.save(step, state(step), {"step": step}, durable=tier == "durable")


def parts(folder: Path, step: int) -> list[Path]:
    return sorted((folder / "memory").glob(f"*/*/{step}/*.pack"))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(bytes(data))


def restored(folder: Path) -> tuple[dict[str, jax.Array], int]:
    with opened(folder) as tiers:
        while True:
            step = tiers.newest_whole()
            assert step is not None
            try:
                return tiers.restore(step, state(0, devices=4))[0], step
            except DamagedCheckpoint:
                continue


def test_the_newest_of_both_tiers_is_restored(tmp_path: Path) -> None:
    saved(tmp_path, range(1, 13))
    found, step = restored(tmp_path)
    assert step == 12 and equal(found, 12)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name != ".run"] == [
        "10"
    ]
    assert len({p.parent.name for p in parts(tmp_path, 12)}) == 1
    kept = sorted(int(p.name) for p in (tmp_path / "memory").glob("*/0/*"))
    assert kept == [10, 11, 12], "two finished, and the one that was being written"


def test_a_local_step_is_read_by_the_digests_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written without xxhash, read with it; the other way it is refused, and not passed over."""
    monkeypatch.setattr(hashing, "XXH3", None)
    saved(tmp_path, range(1, 4))
    monkeypatch.undo()
    found, step = restored(tmp_path)
    assert step == 3 and equal(found, 3)
    saved(tmp_path, range(4, 6))
    monkeypatch.setattr(hashing, "XXH3", None)
    with pytest.raises(hashing.LacksPackage, match="pip install xxhash"):
        restored(tmp_path)


def test_a_run_directory_that_is_there_again_keeps_its_local_tier(tmp_path: Path) -> None:
    with opened(tmp_path) as tiers:
        tiers.save(1, state(1), {"step": 1}, durable=False)
        tiers.wait()
        shutil.rmtree(tmp_path / "run")
        tiers.name_again()
        tiers.save(2, state(2), {"step": 2}, durable=False)
    found, step = restored(tmp_path)
    assert step == 2 and equal(found, 2)
    assert len(list((tmp_path / "memory").iterdir())) == 1


def test_a_history_that_was_left_is_not_what_a_later_save_is_read_by(tmp_path: Path) -> None:
    saved(tmp_path, range(1, 13))
    with opened(tmp_path) as tiers:
        assert tiers.newest_whole() == 12 and tiers.from_local(12)
        tiers.go_back_to(10)
        assert not tiers.from_local(12) and tiers.from_local(10)
        for step in (11, 12):
            tiers.save(step, state(step, moved=1), {"step": step, "again": True})
        tiers.wait()
        assert tiers.manifest(12).metadata["again"]
        assert equal(tiers.restore(12, state(0))[0], 12, moved=1)


def test_a_local_tier_that_is_gone_leaves_the_durable(tmp_path: Path) -> None:
    saved(tmp_path, range(1, 13))
    shutil.rmtree(tmp_path / "memory")
    found, step = restored(tmp_path)
    assert step == 10 and equal(found, 10)


def test_a_chunk_is_read_from_the_tier_where_it_is_good(tmp_path: Path) -> None:
    """Step 10 is in both; each tier is damaged elsewhere."""
    saved(tmp_path, range(1, 11))
    (pack,) = (tmp_path / "run" / "checkpoints" / "10" / "state").glob("*.pack")
    data = bytearray(pack.read_bytes())
    data[0] ^= 1
    pack.write_bytes(bytes(data))
    (part,) = parts(tmp_path, 10)
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(bytes(data))
    found, step = restored(tmp_path)
    assert step == 10 and equal(found, 10)


def test_the_durable_newest_is_corrupt_and_the_local_is_restored(tmp_path: Path) -> None:
    saved(tmp_path, range(1, 11))
    (tmp_path / "run" / "checkpoints" / "10" / "state" / "manifest.json").write_text("")
    found, step = restored(tmp_path)
    assert step == 10 and equal(found, 10)


@pytest.mark.parametrize("how", ["flipped", "record", "cut"])
def test_a_damaged_part_is_not_restored(tmp_path: Path, how: str) -> None:
    saved(tmp_path, range(1, 13))
    (part,) = parts(tmp_path, 12)
    if how == "flipped":
        flip(part)
    elif how == "cut":
        part.write_bytes(part.read_bytes()[:-1])
    else:
        flip(part.with_suffix(".json"))
    found, step = restored(tmp_path)
    assert step == 11 and equal(found, 11)


def test_a_durable_copy_that_is_damaged_does_no_harm_to_later_saves(tmp_path: Path) -> None:
    """Restored from the local tier: the durable copy is verified, told, and nothing is shared with
    it."""
    saved(tmp_path, range(1, 11))
    (pack,) = (tmp_path / "run" / "checkpoints" / "10" / "state").glob("*.pack")
    flip(pack)
    with opened(tmp_path, every=1) as tiers:
        assert tiers.newest_whole() == 10
        good, _ = tiers.restore(10, state(0))
        assert equal(good, 10)
        assert tiers.begin_after(10) == {10: tmp_path / "run" / "checkpoints" / "10.damaged"}
        assert 10 in tiers.damaged
        tiers.save(10, good, {})
        tiers.save(11, state(11), {})
    assert not any(found.damages for found in verify(tmp_path / "run"))


def test_saves_that_fail_leave_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, range(1, 4))
    with opened(tmp_path) as tiers, monkeypatch.context() as patch:
        assert tiers.newest_whole() == 3

        def full(*args: Any, **options: Any) -> Any:
            raise OSError(28, "No space left on device")

        patch.setattr("jaxtrain.checkpoint.local_tier.write_chunks", full)
        for step in range(4, 9):
            tiers.save(step, state(step), {}, durable=False)
        tiers.wait()
        assert len(tiers.take_troubles()) == 5 and not tiers.take_troubles()
    found, step = restored(tmp_path)
    assert step == 3 and equal(found, 3)


def test_a_copy_of_a_run_has_a_local_tier_of_its_own(tmp_path: Path) -> None:
    saved(tmp_path, range(1, 13))
    shutil.copytree(tmp_path / "run", tmp_path / "copied")
    local = LocalTier(every=1, directory=str(tmp_path / "memory"))
    checkpoints = tmp_path / "copied" / "checkpoints"
    with Checkpoints(checkpoints, SavePolicy(every=10, local=local)) as copy:
        assert copy.newest_whole() == 10
        copy.begin_after(10)
        copy.save(11, state(11, moved=66), {}, durable=False)
    found, step = restored(tmp_path)
    assert step == 12 and equal(found, 12)


def test_another_run_does_not_find_what_a_deleted_one_left(tmp_path: Path) -> None:
    saved(tmp_path, range(1, 13))
    shutil.rmtree(tmp_path / "run")
    with opened(tmp_path) as tiers:
        assert tiers.newest_whole() is None
        tiers.save(1, state(1), {}, durable=False)
    assert restored(tmp_path)[1] == 1


def test_a_durable_tier_that_is_gone_leaves_the_local_one(tmp_path: Path) -> None:
    saved(tmp_path, range(1, 13))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    found, step = restored(tmp_path)
    assert step == 12 and equal(found, 12)


def test_a_history_that_is_left_is_left_in_both(tmp_path: Path) -> None:
    saved(tmp_path, range(1, 13))
    flip(parts(tmp_path, 12)[0])
    with opened(tmp_path) as tiers:
        assert tiers.newest_whole() == 12
        with pytest.raises(DamagedCheckpoint):
            tiers.restore(12, state(0))
        assert tiers.newest_whole() == 11
        tiers.begin_after(11)
        tiers.save(12, state(12, moved=87), {}, durable=False)
    found, step = restored(tmp_path)
    assert step == 12 and equal(found, 12, moved=87)


@pytest.mark.parametrize("every", [0, 1.5, True])
def test_a_local_tier_counts_from_one(every: Any) -> None:
    with pytest.raises(ValueError, match="every="):
        LocalTier(every=every)
    assert LocalTier(every=Minutes(1)).every == Minutes(1)


def test_a_local_tier_without_room_is_refused_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "memory").write_text("a file")
    with opened(tmp_path) as tiers, pytest.raises(ValueError, match=r"another LocalTier\(dir"):
        tiers.check_space(state(0))


WORKER = """
import json, sys
from pathlib import Path
processes, index, port, folder, do = sys.argv[1:]
processes, index = int(processes), int(index)
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4 // processes)
if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=index)
import jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtrain.checkpoint import LocalTier, SavePolicy
from jaxtrain.checkpoint.tiers import Checkpoints
rows = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), P("a"))
local = LocalTier(every=1, directory=f"{folder}/host{{process}}")
make = jax.jit(lambda step: jnp.arange(64.0).reshape(16, 4) + step, out_shardings=rows)
with Checkpoints(Path(folder) / "run" / "checkpoints", SavePolicy(every=100, local=local)) as tiers:
    if do == "save":
        for step in (1, 2, 3):
            tiers.save(step, {"w": make(step)}, {"step": step}, durable=step == 1)
        tiers.wait()
        found = {"step": 3, "troubles": tiers.take_troubles()}
    elif do == "fail":
        from jaxtrain.checkpoint import CheckpointError, handler

        write = handler.write_chunks

        def full(place, name, *args, **options):
            if name == "2.1.pack":
                raise OSError(28, "No space left on device")
            return write(place, name, *args, **options)

        handler.write_chunks = full
        told = []
        for step in (1, 2, 3):
            try:
                tiers.save(step, {"w": make(step)}, {"step": step})
                tiers.wait()
            except CheckpointError as error:
                told.append(str(error))
        found = {"told": told, "steps": tiers.durable.steps()}
    else:
        step = tiers.newest_whole()
        template = jax.ShapeDtypeStruct((16, 4), "float32", sharding=rows)
        state, metadata = tiers.restore(step, {"w": template})
        ours = [np.asarray(s.data) for s in state["w"].addressable_shards]
        good = [np.asarray(s.data) for s in make(step).addressable_shards]
        same = all((a == b).all() for a, b in zip(ours, good, strict=True))
        found = {"step": step, "same": same, "metadata": metadata}
Path(f"{folder}/{do}{index}.json").write_text(json.dumps(found))
"""


def run(folder: Path, processes: int, do: str) -> list[Any]:
    (folder / "worker.py").write_text(WORKER)
    for old in folder.glob(f"{do}*.json"):
        old.unlink()
    process_group.run(
        folder,
        processes,
        lambda index, port: ["worker.py", processes, index, port, folder, do],
        seconds=120,
    )
    return [json.loads((folder / f"{do}{i}.json").read_text()) for i in range(processes)]


@pytest.mark.slow
def test_a_write_that_fails_on_one_process_is_told_by_all_with_its_cause(tmp_path: Path) -> None:
    """Nobody waits for the one that failed, and the next save is whole."""
    found = run(tmp_path, 2, "fail")
    for each in found:
        (told,) = each["told"]
        assert "step 2" in told and "process 1: [Errno 28] No space left" in told
        assert each["steps"] == [1, 3]
    assert {p.name for p in (tmp_path / "run" / "checkpoints").iterdir()} >= {"1", "3"}
    assert not list((tmp_path / "run" / "checkpoints").glob("2*")), "what failed keeps its room"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (2, 2),
        pytest.param(2, 1, marks=pytest.mark.slow),
        *(pytest.param(*p, marks=pytest.mark.exhaustive) for p in [(4, 4), (4, 2)]),
    ],
)
def test_a_machine_is_lost_with_all_it_held(tmp_path: Path, before: int, after: int) -> None:
    """Its part is with its neighbour; the others' are their own. More than one and the durable
    tier is what is left."""
    run(tmp_path, before, "save")
    lost = before - 1
    shutil.rmtree(tmp_path / f"host{lost}")
    found = run(tmp_path, after, "load")
    # Machines that do not come back take their parts with them; neighbours have copies of some.
    here = set(range(after)) - {lost}
    copies = {(p - before // 2) % before for p in here}
    step = 3 if here | copies == set(range(before)) else 1
    assert found == [{"step": step, "same": True, "metadata": {"step": step}}] * after
    for p in range(before):
        shutil.rmtree(tmp_path / f"host{p}", ignore_errors=True)
    found = run(tmp_path, after, "load")
    assert found == [{"step": 1, "same": True, "metadata": {"step": 1}}] * after
