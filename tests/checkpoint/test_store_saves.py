"""Saves in an object store: committed by one file, from whatever write or removal a kill leaves."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import pytest
from object_store import Files, ObjectStore, files_below, object_store, put_below, put_object

from jaxtrain.checkpoint import CheckpointError, CheckpointManager, SavePolicy
from jaxtrain.checkpoint.storage import committed_steps, remove_unfinished
from jaxtrain.checkpoint.tiers import Checkpoints
from jaxtrain.files.store import COMMITTED, AnyPath, any_path
from jaxtrain.state_format.pack import SMALL

ADDRESS = "s3://bucket/run/checkpoints"
STEP = "bucket/run/checkpoints/{}/"


@pytest.fixture
def store() -> Iterator[type[ObjectStore]]:
    with object_store() as store:
        yield store


def state(step: int) -> dict:
    """Of three leaves one changes, and one is large enough to be shared."""
    return {"moved": jnp.full(4, step), "still": jnp.zeros(SMALL // 4), "step": jnp.int32(step)}


def opened(keep: int = 2) -> CheckpointManager:
    return CheckpointManager(ADDRESS, SavePolicy(every=1, keep=keep))


def saved(steps: range, keep: int = 2) -> None:
    with opened(keep) as manager:
        for step in steps:
            manager.save(step, state(step), {"step": step})


def check(manager: CheckpointManager, step: int) -> None:
    found, metadata = manager.restore(step, state(0))
    assert metadata == {"step": step}
    assert all((found[name] == leaf).all() for name, leaf in state(step).items())


def test_orbax_writes_the_file_that_commits_a_step_last(store: type[ObjectStore]) -> None:
    """If it takes another name, no step would be committed."""
    saved(range(1, 2))
    written = [name for name, data in store.changes if data is not None]
    of_step = [name for name in written if name.startswith(STEP.format(1))]
    assert of_step[-1] == STEP.format(1) + COMMITTED
    assert {*of_step[:-1]} >= {STEP.format(1) + "state/manifest.json"}


def histories(store: type[ObjectStore], steps: range, keep: int) -> list[Files]:
    """The files after each write and removal of these saves."""
    saved(steps, keep)
    files: Files = {}
    moments = [files]
    for name, data in store.changes:
        files = {k: v for k, v in files.items() if k != name}
        moments.append(files := files if data is None else {**files, name: data})
    assert files == store.files
    return moments


def test_a_kill_after_any_request_leaves_a_whole_step_and_is_cleaned_up(
    store: type[ObjectStore],
) -> None:
    """Of four saves of which two are kept: from each moment on, a start has what was committed,
    makes the next save, and leaves nothing of the one that was lost."""
    newest = 0
    for files in histories(store, range(1, 5), keep=2):
        store.files.clear()
        store.files.update(files)
        with opened() as manager:
            steps = manager.steps()
            assert steps == [s for s in range(5) if STEP.format(s) + COMMITTED in files]
            assert (manager.newest_whole() or 0) >= newest, "what was committed stays"
            newest = max([newest, *steps])
            for step in steps:
                check(manager, step)
            manager.save(newest + 1, state(newest + 1), {"step": newest + 1})
            manager.wait()
            check(manager, newest + 1)
            names = {path.split("/")[3] for path in store.files if "checkpoints" in path}
            assert names == set(map(str, manager.steps()))
    assert newest == 4


def test_what_does_not_change_is_copied_by_the_store(store: type[ObjectStore]) -> None:
    """And written twice in all, so that of two copies one is always in order."""
    saved(range(1, 7), keep=9)
    packs = [name for name in store.files if name.endswith(".still.pack")]
    written = {name.rpartition("/")[2]: name.split("/")[3] for name in packs}
    assert [name for name in packs if name not in store.copied] == [
        STEP.format(step) + f"state/{step}.0.still.pack" for step in (2, 3)
    ]
    shared = [STEP.format(s) + f"state/{s - 2}.0.still.pack" for s in (4, 5)]
    assert store.copied == [*shared, STEP.format(6) + "state/2.0.still.pack"]
    assert {*written} == {"2.0.still.pack", "3.0.still.pack"}


def test_a_store_that_cannot_copy_is_sent_the_bytes(store: type[ObjectStore]) -> None:
    def refuse(kind: str, name: str) -> None:
        if kind == "copy":
            raise PermissionError(name)

    store.request = refuse
    saved(range(1, 5))
    with opened() as manager:
        check(manager, 4)


class Unreachable(Exception):
    """As a store's package defines its own."""


def fails(kind: str, name: str) -> None:
    raise Unreachable("no answer")


@pytest.mark.parametrize("error", [Unreachable, PermissionError, OSError])
@pytest.mark.parametrize("kinds", [("ls", "info"), ("ls",), ("info",)])
def test_a_store_that_does_not_answer_has_neither_lost_nor_uncommitted_steps(
    store: type[ObjectStore], error: type[Exception], kinds: tuple[str, ...]
) -> None:
    def refuses(kind: str, name: str) -> None:
        if kind in kinds:
            raise error("no answer")

    saved(range(1, 3))
    files = dict(store.files)
    store.request = refuses
    place = any_path("place", ADDRESS)
    with pytest.raises(OSError, match="no answer"):
        committed_steps(place)
    with opened() as manager, pytest.raises((OSError, CheckpointError), match="no answer"):
        manager.newest_whole()
    remove_unfinished(place)
    assert store.files == files


def test_a_step_that_another_tool_copied_without_orbaxs_files_stays(
    store: type[ObjectStore],
) -> None:
    """Older Orbax wrote none on a disk. It is not committed, and not removed."""
    saved(range(3, 4))
    for name in [name for name in store.files if name.endswith(COMMITTED)]:
        del store.files[name]
    files = dict(store.files)
    saved(range(4, 5))
    assert files.items() <= store.files.items()
    with opened() as manager:
        assert manager.steps() == [4]
        put_object(STEP.format(3) + COMMITTED, b"")
        check(manager, 3)


def test_steps_that_cannot_be_listed_after_a_save_end_no_run(store: type[ObjectStore]) -> None:
    """The save was made; its removal of older ones is tried again after the next."""
    with opened() as manager:
        manager.save(1, state(1), {"step": 1})
        manager.wait()
        manager.save(2, state(2), {"step": 2})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jaxtrain.checkpoint.retention.committed_steps", refuse_list)
            with pytest.raises(CheckpointError, match="could not be read: OSError: 503"):
                manager.wait()
        assert manager.steps() == [1, 2]
        manager.save(3, state(3), {"step": 3})
        manager.wait()
        assert manager.steps() == [2, 3]


def refuse_list(directory: AnyPath) -> list[int]:
    raise OSError("503 slow down")


def test_what_is_no_step_stays(store: type[ObjectStore]) -> None:
    """Of what has a step's number and is not committed nothing stays."""
    for name in ("notes/readme.txt", "4.damaged/state/manifest.json", "99/state/half"):
        put_below(any_path("place", f"{ADDRESS}/{name}"))
    saved(range(1, 2))
    names = {name.split("/")[3] for name in store.files}
    assert names == {"1", "notes", "4.damaged"}


@pytest.mark.parametrize("kind", ["write", "ls", "info"])
def test_a_save_that_fails_says_why_and_the_next_is_made(
    store: type[ObjectStore], kind: str
) -> None:
    with opened() as manager:
        manager.save(1, state(1), {"step": 1})
        manager.wait()
        store.request = lambda called, name: fails(called, name) if called == kind else None
        with pytest.raises(CheckpointError, match=r"step 2 in s3://bucket/.*no answer"):
            manager.save(2, state(2), {"step": 2})
            manager.wait()
        store.request = lambda called, name: None
        manager.save(2, state(2), {"step": 2})
        manager.wait()
        assert manager.steps() == [1, 2]
        check(manager, 2)


@pytest.mark.parametrize("pack", ["kept", "lost"])
def test_a_step_whose_pack_is_lost_while_it_is_saved_is_not_committed(
    store: type[ObjectStore], pack: str
) -> None:
    def loses(kind: str, name: str) -> None:
        if kind == "read" and name.endswith(".part.json") and pack == "lost":
            for lost in [name for name in store.files if name.endswith("1.0.pack")]:
                del store.files[lost]

    store.request = loses
    with opened() as manager:
        manager.save(1, state(1), {"step": 1})
        if pack == "lost":
            with pytest.raises(CheckpointError, match=r"FileNotFoundError.*1\.0\.pack"):
                manager.wait()
        manager.wait()
        assert manager.steps() == ([1] if pack == "kept" else [])


def test_removing_a_step_leaves_those_whose_names_begin_like_it(
    store: type[ObjectStore],
) -> None:
    saved(range(9, 12), keep=9)
    put_below(any_path("place", f"{ADDRESS}/1/state/half"))
    with opened(keep=9) as manager:
        assert manager.steps() == [9, 10, 11]
        assert manager.discard_after(9) == [10, 11]
        check(manager, 9)
        assert STEP.format(1) + "state/half" in store.files
    remove_unfinished(any_path("place", ADDRESS))
    assert STEP.format(1) + "state/half" not in store.files


def test_the_room_of_a_store_is_not_asked_for_but_its_bucket_is(store: type[ObjectStore]) -> None:
    manager = opened()
    manager.check_space(state(1))
    assert not store.files and len(store.changes) == 2, "one file, which is removed"
    store.request = lambda kind, name: fails(kind, name) if kind == "write" else None
    with pytest.raises(ValueError, match=r"cannot be written: OSError.*Unreachable"):
        manager.check_space(state(1))


def test_a_copy_of_a_run_in_a_store_has_another_local_directory(store: type[ObjectStore]) -> None:
    with Checkpoints(ADDRESS, SavePolicy()) as saves:
        assert saves._run() == ""
        saves._name("mine")
        assert saves._run() == "mine"
    for path in files_below(any_path("run", "s3://bucket/run")):
        put_object(f"bucket/copy/{path.name}", path.read_bytes())
    with Checkpoints("s3://bucket/copy/checkpoints", SavePolicy()) as saves:
        assert saves._run() == ""


def test_addresses_are_those_of_a_bucket(store: type[ObjectStore], tmp_path: AnyPath) -> None:
    for address in ("s3://bucket/run", "s3:/bucket/run", any_path("place", "s3://bucket/run")):
        assert str(any_path("place", address)) == "s3://bucket/run"
    assert any_path("place", tmp_path) == tmp_path
