"""Any damaged byte is found and named, and never restored; the newest good step is used."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from object_store import copy_tree, files_below, object_store

from jaxtrain.checkpoint import CheckpointManager, DamagedCheckpoint, SavePolicy
from jaxtrain.files.store import COMMITTED, AnyPath, any_path, is_local, move
from jaxtrain.inspection.verify import verify
from jaxtrain.state_format.chunks import Box, digest
from jaxtrain.state_format.manifest import Manifest, read_manifest, refuse_gaps

LEAVES = ("params.w", "params.small", "params.half", "step", "key")


def test_a_chunks_digest_is_of_its_leaf_place_and_dtype_too() -> None:
    """The same bytes elsewhere are another chunk: read in each other's places they are damage."""
    box, data = Box((0, 8), (2, 4)), np.zeros((2, 4), np.float32)
    chunks = [
        ("params.w", box, data),
        ("params.v", box, data),
        ("params.w", Box((2, 8), (2, 4)), data),
        ("params.w", Box((0, 8), (4, 2)), data),
        ("params.w", box, data.astype(np.int32)),
        ("params.w", box, np.full_like(data, 1e-45)),
    ]
    assert len({digest(*chunk) for chunk in chunks}) == len(chunks)
    assert digest(*chunks[0]) == digest("params.w", box, np.asfortranarray(data))


def placed() -> dict:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    rows, both, whole = (NamedSharding(mesh, spec) for spec in (P("a"), P("a", "b"), P()))
    keys = jax.random.split(jax.random.key(7), 3)
    return {
        "params": {
            "w": jax.device_put(jax.random.normal(keys[0], (64, 32)), both),
            "small": jax.device_put(jnp.arange(5.0), whole),
            "half": jax.device_put(jax.random.normal(keys[1], (8, 24), "bfloat16"), rows),
        },
        "step": jax.device_put(jnp.int32(1), whole),
        "key": jax.device_put(keys[2], whole),
    }


def onto(state: dict, *spec: str | None) -> dict:
    """Templates on another mesh, matrices split by `spec`."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("b", "a"))

    def template(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        where = P(*spec) if leaf.ndim == 2 else P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, where))

    return jax.tree.map(template, state)


def as_numpy(state: dict) -> list[np.ndarray]:
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(state)]
    leaves = zip(jax.tree.leaves(state), is_key, strict=True)
    return [np.asarray(jax.random.key_data(leaf) if key else leaf) for leaf, key in leaves]


def equal(a: dict, b: dict) -> bool:
    pairs = zip(as_numpy(a), as_numpy(b), strict=True)
    return all(x.tobytes() == y.tobytes() for x, y in pairs)


Saved = tuple[AnyPath, dict, dict]


@pytest.fixture(scope="module", params=["disk", "store"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Saved]:
    """A run with two steps, on the disk and in an object store; of the second only `params.w` and
    `step` differ."""
    if request.param == "disk":
        yield written(tmp_path_factory.mktemp("run"))
        return
    with object_store():
        yield written(any_path("run", "s3://bucket/run"))


@pytest.fixture
def copy(saved: Saved, tmp_path: Path) -> AnyPath:
    """A copy of that run, beside it."""
    run = saved[0]
    if isinstance(run, Path):
        return copy_tree(run, tmp_path / "run")
    return copy_tree(run, run.parent / tmp_path.name)


def written(run: AnyPath) -> Saved:
    first = placed()
    params = first["params"]
    second = {**first, "params": {**params, "w": params["w"] + 1}, "step": first["step"] + 1}
    with CheckpointManager(run / "checkpoints", SavePolicy(every=1)) as manager:
        manager.save(1, first, {"step": 1})
        manager.save(2, second, {"step": 2})
    return run, first, second


def damage(path: AnyPath, how: str, draw: random.Random) -> range:
    """Damages the file; which of its bytes changed."""
    data = bytearray(path.read_bytes())
    path.unlink()
    at = draw.randrange(len(data)) if data else 0
    if how == "deleted" or not data:
        return range(len(data))
    changed = range(at, at + 1 if how == "flipped" else len(data))
    if how == "flipped":
        data[at] ^= 1 << draw.randrange(8)
    else:
        del data[at:]
    path.write_bytes(bytes(data))
    return changed


def needed(manifest: Manifest, path: AnyPath, how: str, changed: range) -> bool:
    """Whether step 2 has something in those bytes; that a pack is cut or gone is always told."""
    if path.name == "manifest.json":
        return True
    chunks = [c for held in manifest.chunks.values() for c in held if c.pack == path.name]
    ends = [(c.offset, c.offset + c.size) for c in chunks]
    return bool(chunks) and (how != "flipped" or any(a <= changed[0] < b for a, b in ends))


def is_commit(path: AnyPath, how: str) -> bool:
    """True if a step of a store is no longer committed without that file."""
    return (
        not is_local(path)
        and how == "deleted"
        and path.parent.name == "2"
        and path.name == COMMITTED
    )


def restored(run: AnyPath, template: dict) -> tuple[dict | None, int | None]:
    """As a start of a run restores, and the step it was."""
    with CheckpointManager(run / "checkpoints", SavePolicy()) as manager:
        while (step := manager.newest_whole()) is not None:
            try:
                return manager.restore(step, template)[0], step
            except DamagedCheckpoint:
                assert step in manager.damaged
    return None, None


@pytest.mark.parametrize("seed", range(120))
def test_no_damage_is_restored(saved: Saved, copy: AnyPath, seed: int) -> None:
    """Of any one file of the newest step: found and named, or harmless, and in no case does a
    restore give other bits than those that were saved."""
    run, first, second = saved
    draw = random.Random(seed)
    files = files_below(copy / "checkpoints" / "2")
    path = draw.choice(files)
    how = draw.choice(["flipped", "flipped", "truncated", "deleted"])
    changed = damage(path, how, draw)
    verdict = {found.step: found.damages for found in verify(copy)}
    assert not verdict[1]
    state, step = restored(copy, onto(first, *draw.choice([("a", "b"), (None, "b"), ()])))
    assert state is not None and step is not None
    assert equal(state, {1: first, 2: second}[step])
    if is_commit(path, how):
        assert step == 1 and 2 not in verdict
    elif needed(read_manifest(run / "checkpoints" / "2"), path, how, changed):
        assert step == 1
        named = " ".join(verdict[2])
        assert path.name in named or any(leaf in named for leaf in LEAVES)
    else:  # harmless, and told so
        assert step == 2 and not verdict[2]


@pytest.mark.parametrize("how", ["flipped", "truncated", "deleted"])
@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "commit_success.txt", "manifest.json"])
def test_a_damaged_step_is_in_nobodys_way(saved: Saved, copy: AnyPath, name: str, how: str) -> None:
    """Saves go on, and keep what is good, whatever has become of the files of the last."""
    first, folder = saved[1], copy / "checkpoints" / "2"
    path = next(p for p in files_below(folder) if p.name == name)
    damage(path, how, random.Random(0))
    with CheckpointManager(copy / "checkpoints", SavePolicy(every=1, keep=2)) as manager:
        step = manager.newest_whole()
        manager.set_damaged_aside()
        lost = name == "manifest.json" or is_commit(path, how)
        assert manager.steps() == ([1] if lost else [1, 2])
        manager.save(3, {**first, "step": first["step"] + 2}, {"step": 3})
        manager.wait()
        assert manager.steps() == [step, 3]
    assert [found.damages for found in verify(copy)] == [[], []]


def test_where_every_step_is_damaged_nothing_is_restored(saved: Saved, copy: AnyPath) -> None:
    first = saved[1]
    for step in ("1", "2"):
        chunk = read_manifest(copy / "checkpoints" / step).chunks["params.half"][0]
        pack = copy / "checkpoints" / step / "state" / chunk.pack
        data = bytearray(pack.read_bytes())
        data[chunk.offset] ^= 2
        pack.write_bytes(bytes(data))
    assert [bool(found.damages) for found in verify(copy)] == [True, True]
    with pytest.raises(DamagedCheckpoint, match=r"params\.half.*no step there is whole"):
        restored(copy, onto(first, "a"))
    for step in ("1", "2"):
        move(copy / "checkpoints" / step, copy / "checkpoints" / f"{step}.damaged")
    with pytest.raises(DamagedCheckpoint, match=r"set aside: 1\.damaged, 2\.damaged"):
        restored(copy, onto(first, "a"))


def test_a_manifest_with_gaps_or_repeats_is_refused(saved: Saved) -> None:
    manifest = read_manifest(saved[0] / "checkpoints" / "2")
    chunks = manifest.chunks["params.w"]
    for wrong in (chunks[:-1], [*chunks[:-1], chunks[0]], [*chunks, chunks[0]]):
        with pytest.raises(ValueError, match=r"params\.w"):
            refuse_gaps(manifest.leaves, {**manifest.chunks, "params.w": wrong})


def test_a_flip_names_its_leaf_and_place(saved: Saved, copy: AnyPath) -> None:
    with CheckpointManager(copy / "checkpoints", SavePolicy()) as manager:
        chunk = manager.manifest(2).chunks["params.w"][3]
    pack = copy / "checkpoints" / "2" / "state" / chunk.pack
    data = bytearray(pack.read_bytes())
    data[chunk.offset + chunk.size - 1] ^= 128
    pack.unlink()
    pack.write_bytes(bytes(data))
    (damaged,) = [found for found in verify(copy) if found.damages]
    (a, n), (b, m) = zip(*chunk.box, strict=True)
    assert damaged.damages[0].startswith(f"params.w [{a}:{a + n}, {b}:{b + m}]: bytes ")
    with CheckpointManager(copy / "checkpoints", SavePolicy()) as manager:
        with pytest.raises(DamagedCheckpoint, match=r"params\.w .*step 1 is committed there"):
            manager.restore(2, onto(saved[1], "a"))
        assert manager.newest_whole() == 1
        gone = manager.set_damaged_aside()
        assert gone == {2: copy / "checkpoints" / "2.damaged"}
        assert manager.steps() == [1]
