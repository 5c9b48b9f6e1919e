"""What fails on one process of several: all hear of it, and nobody waits for that process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import process_group
import pytest
from service import play

from jaxtrain.checkpoint import CheckpointError, SavePolicy, handler, manager, storage
from jaxtrain.checkpoint.committed import CommittedSteps
from jaxtrain.checkpoint.handler import ChunkHandler
from jaxtrain.checkpoint.manager import CheckpointManager
from jaxtrain.checkpoint.retention import Retention
from jaxtrain.checkpoint.storage import (
    DamagedCheckpoint,
    FailedSave,
    FailedStorage,
    describe,
    failure_of,
)
from jaxtrain.checkpoint.tiers import Checkpoints
from jaxtrain.cluster.agreement import FailedTogether
from jaxtrain.run.saving import Saving
from jaxtrain.state_format.manifest import FAILED, ITEM, take_parts, write_part
from jaxtrain.state_format.manifest import NAME as MANIFEST
from jaxtrain.violations import refuses


def fails(*given: Any, **named: Any) -> Any:
    raise KeyError("of any type")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(manager, "make_and_remove"), (Retention, "sharing"), (manager, "owned_parts")],
)
def test_whatever_may_fail_on_one_process_alone_is_tried_before_any_waits(
    owner: Any, name: str, make: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[str] = []

    def share(act: Callable[[], Any]) -> Any:
        try:
            return act()
        except KeyError as error:
            shared.append(str(error))
            raise

    monkeypatch.setattr(manager, "share_failure", share)
    saves = make()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        with pytest.raises(FailedSave, match="KeyError: 'of any type'; no checkpoint is committed"):
            saves.save(1, small, {})
    assert shared == ["'of any type'"] and saves._orbax is None
    saves.save(1, small, {})
    saves.wait()
    assert saves.steps() == [1]


def test_where_one_has_lost_its_writer_all_make_another(
    make: Any, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax's is made by all processes together."""
    asked: list[list[bool]] = []
    saves = make()
    saves.save(1, small, {})
    saves.wait()
    made, another = saves._orbax, [False]

    def union(lost: list[bool]) -> list[bool]:
        if not lost:  # of a save that has failed
            return []
        asked.append(lost)
        return [*lost, *another]

    monkeypatch.setattr(manager, "all_gather_union", union)
    for step, lost in ((2, False), (3, True)):
        another = [lost]
        saves.save(step, small, {})
        saves.wait()
        assert (saves._orbax is made) is not lost
    assert asked == [[False], [False]] and saves.steps() == [1, 2, 3]


def test_the_first_process_says_which_steps_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system of several machines may show one of them an old listing."""
    monkeypatch.setattr(CommittedSteps, "steps", lambda self: [[4, 8], [4]][jax.process_index()])
    saves = Checkpoints(tmp_path, SavePolicy())
    assert play(monkeypatch, 2, lambda _: saves.durable.agreed_steps()) == [[4, 8]] * 2
    for step in (4, 8):
        assert play(monkeypatch, 2, lambda _, s=step: saves.is_saved(s)) == [step == 8] * 2
    monkeypatch.setattr(saves.durable, "verify_step", lambda step: verified.append(step))
    monkeypatch.setattr(saves, "from_local", lambda step: True)
    monkeypatch.setattr(saves.durable, "set_damaged_aside", dict)
    verified: list[int] = []
    assert play(monkeypatch, 2, lambda _: saves.begin_after(8)) == [{}] * 2
    assert verified == [8, 8], "both, or the one that reads would wait for the other"

    def save(step: int) -> Any:
        tree, named = {"step": jax.numpy.asarray(step)}, {}
        return lambda _: CheckpointManager(tmp_path, SavePolicy()).save(step, tree, named)

    for error in play(monkeypatch, 2, save(7)):
        assert isinstance(error, CheckpointError) and "step 8 is committed" in str(error)


def test_a_save_that_exists_is_known_by_the_first_process_s_word() -> None:
    saving = Saving.__new__(Saving)
    saving.manager = SimpleNamespace(  # type: ignore[assignment]
        is_saved=lambda step: step == 4, wait=lambda: None, take_troubles=list, latest=fails,
        from_local=lambda step: True, begin_after=lambda step: {}, damaged={},
    )  # fmt: skip
    saving.session = SimpleNamespace(start=4)  # type: ignore[assignment]
    saving.tell = lambda text: None
    saving._save = fails  # type: ignore[method-assign]
    saving.begin()
    assert not saving.save(4, {}, durable=True) and not saving.save_last(4, {})
    with pytest.raises(KeyError):
        saving.save(5, {}, durable=True)


def test_all_hear_of_a_step_that_the_first_process_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may see an old listing, and do not judge; nor does one that looks alone."""
    missed = "the writer ended, and it is not there"

    def act(process: int) -> None:
        saves = CheckpointManager(tmp_path, SavePolicy())
        done, fine = lambda: None, lambda: False
        saves._orbax = SimpleNamespace(
            wait_until_finished=done, close=done, is_saving_in_progress=fine
        )
        saves._in_flight = 3
        if process:
            saves.poll()
        saves.wait()

    (tmp_path / "3" / ITEM).mkdir(parents=True)
    (tmp_path / "3" / ITEM / MANIFEST).touch()
    monkeypatch.setattr(CommittedSteps, "steps", lambda self: [])
    first, second = play(monkeypatch, 2, act)
    assert isinstance(first, FailedSave) and isinstance(second, FailedSave)
    assert missed in str(first) and f"step 3 in {tmp_path}: on another process: {missed}" in str(
        second
    )


def test_a_step_that_lacks_its_manifest_has_failed(tmp_path: Path) -> None:
    """On a disk where not even the reason could be written."""
    (tmp_path / "3" / ITEM).mkdir(parents=True)
    assert "nor the reason" in str(failure_of(tmp_path, 3))
    (tmp_path / "3" / ITEM / MANIFEST).touch()
    assert failure_of(tmp_path, 3) is None
    (tmp_path / "3" / ITEM / FAILED).write_text("full")
    assert failure_of(tmp_path, 3) == "full" and failure_of(tmp_path, 4) is None


def saving_of(take: Callable[[], Any]) -> Any:
    return SimpleNamespace(
        step=3, source=None, apart=None, parts=SimpleNamespace(take=take), records={}, metadata={},
        key="jaxtrain/share/3",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["take", "write_part"])
def test_a_part_that_cannot_be_written_fails_on_all(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the others' writers do not wait in Orbax; and a full disk keeps nobody from hearing it."""

    def write(place: Path, process: int, chunks: list[Any]) -> None:
        write_part(place, process, fails() if process and name == "write_part" else chunks)

    monkeypatch.setattr(handler, "write_part", write)

    def act(process: int) -> None:
        take = fails if process and name == "take" else list
        asyncio.run(ChunkHandler()._write(tmp_path, saving_of(take)))

    for error in play(monkeypatch, 2, act):
        assert isinstance(error, FailedTogether)
        assert str(error) == "process 1: KeyError: 'of any type'"


def test_parts_that_are_cut_or_gone_are_an_error(tmp_path: Path) -> None:
    write_part(tmp_path, 0, [])
    with pytest.raises(FileNotFoundError):
        take_parts(tmp_path, 2)
    for process in range(2):
        write_part(tmp_path, process, [])
    assert take_parts(tmp_path, 2) == [] and not list(tmp_path.iterdir())
    (tmp_path / "0.part.json").write_text('[{"leaf":')
    with pytest.raises(ValueError, match="Expecting value"):
        take_parts(tmp_path, 1)


@pytest.mark.parametrize("name", ["take_parts", "write_manifest"])
@pytest.mark.parametrize("room", [True, False])
def test_a_manifest_that_cannot_be_written_is_told_in_the_step(
    name: str, room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there is room for the reason; what the others' commit waits for is never an error."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(handler, name, fails)
    for process in range(2):
        write_part(tmp_path, process, [])
    for file in (MANIFEST, "3.0.pack"):
        (tmp_path / file).write_text("half")

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    if not room:
        monkeypatch.setattr(handler, "put", full)
    writer = ChunkHandler()
    writer._saving = saving_of(fails)
    writer.finalize(tmp_path)
    assert not (tmp_path / MANIFEST).exists() and not list(tmp_path.glob("*.pack"))
    if room:
        assert (tmp_path / FAILED).read_text() == "process 0: KeyError: 'of any type'"


def test_an_ill_listing_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before a save, nor in one."""

    def ill(self: CommittedSteps) -> list[int]:
        raise OSError(5, "Input/output error")

    told: list[str] = []
    saving = Saving.__new__(Saving)
    saving.manager, saving.tell = Checkpoints(tmp_path, SavePolicy()), told.append
    with monkeypatch.context() as patch:
        patch.setattr(CommittedSteps, "steps", ill)
        assert not saving.save(4, {}, durable=True)
        with pytest.raises(FailedSave, match="Input/output error"):
            saving.manager.save(4, {"w": jax.numpy.zeros(8)}, {})
    assert len(told) == 1 and told[0].startswith("NOT SAVED checkpoint step 4")


def test_damage_that_one_process_sees_is_damage_and_an_ill_disk_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "4").mkdir()

    def steps(self: CommittedSteps) -> list[int]:
        if jax.process_index():
            raise OSError(5, "Input/output error")
        return [4]

    committed = CommittedSteps(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(CommittedSteps, "steps", steps)
        for error in play(monkeypatch, 2, lambda _: committed.newest_whole()):
            assert isinstance(error, FailedTogether) and str(error).startswith(
                "process 1: [Errno 5]"
            )
    found = play(monkeypatch, 2, lambda _: CommittedSteps(tmp_path).newest_whole())
    assert [type(error) for error in found] == [DamagedCheckpoint] * 2

    def verify(_: int) -> list[int]:
        committed = CommittedSteps(tmp_path)
        committed.verify_step(4)
        return list(committed.damaged)

    assert play(monkeypatch, 2, verify) == [[4], [4]]
    assert not committed.damaged


def test_an_error_of_a_directory_that_cannot_be_listed_is_still_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ill(directory: Path) -> list[int]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(storage, "committed_steps", ill)
    monkeypatch.setattr(manager, "make_and_remove", ill)
    saves = CheckpointManager(tmp_path, SavePolicy())
    with pytest.raises(FailedSave) as error, monkeypatch.context() as patch:
        patch.setattr(CommittedSteps, "steps", lambda self: [])
        saves.save(1, {"w": jax.numpy.zeros(8)}, {})
    assert "what is committed there cannot be seen (Input/output error); make room" in str(
        error.value
    )
    assert error.value.last_good is None


def test_what_is_removed_as_far_as_possible_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ill(directory: Path, pattern: str) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "glob", ill)
    storage.remove_unfinished(tmp_path)


def test_storage_that_fails_is_no_refusal_and_damage_is_one(tmp_path: Path) -> None:
    place: Any = {"step": 4, "directory": tmp_path, "remedy": "mend it"}
    kinds = {kind: refuses(kind("it", **place)) for kind in (CheckpointError, FailedStorage)}
    assert kinds == {CheckpointError: True, FailedStorage: False}
    saves = CheckpointManager(tmp_path, SavePolicy())
    with (
        pytest.raises(FailedStorage, match="not moved: OSError: full"),
        saves._translated("not moved", 4),
    ):
        raise OSError("full")
    assert describe(FailedTogether("process 1: full")) == "process 1: full"
    assert not refuses(FailedSave("it", **place)) and refuses(DamagedCheckpoint(["it"], **place))


TWO = """
import sys

index, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
import jax

jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
from pathlib import Path
from jaxtrain.checkpoint import CheckpointManager, SavePolicy, handler, manager

mesh = jax.make_mesh((2,), ("a",), (jax.sharding.AxisType.Auto,))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
state = {"w": jax.make_array_from_callback((8, 4), split, lambda at: jax.numpy.ones((4, 4)))}
saves = CheckpointManager(Path(directory), SavePolicy(every=1, keep=99))


def full(*given, **named):
    raise OSError(28, "No space left on device")


FAILS = {
    2: [(manager, "owned_parts", 1)],
    4: [(handler, "write_part", 1)],
    6: [(handler, "write_manifest", 0)],
    8: [(handler, "write_manifest", 0), (handler, "put", 0)],
    10: [(manager, "failure_of", 1)],
}
for step in range(1, 12):
    failing = [(owner, name) for owner, name, process in FAILS.get(step, ()) if process == index]
    kept = [getattr(owner, name) for owner, name in failing]
    for owner, name in failing:
        setattr(owner, name, full)
    try:
        saves.save(step, state, {"step": step})
        saves.wait()
    except ValueError as error:
        print(f"NOT SAVED {step}: {error}", flush=True)
    for (owner, name), value in zip(failing, kept):
        setattr(owner, name, value)
saves.close()
print("steps", saves.steps(), flush=True)
"""


@pytest.mark.slow
def test_nobody_waits_for_a_process_that_fails_in_a_save(tmp_path: Path) -> None:
    """Two processes, through Orbax. Only what is committed on all is looked at by one alone."""
    (tmp_path / "two.py").write_text(TWO)
    told = process_group.run(
        tmp_path, 2, lambda index, port: ("two.py", index, port, tmp_path / "c"), seconds=60
    )
    for text in told:
        lines = [line for line in text.splitlines() if line.startswith(("NOT", "steps"))]
        assert [line.split(":")[0] for line in lines[:-1]] == [
            f"NOT SAVED {step}" for step in (2, 4, 6, 8, 10)
        ]
        assert lines[-1] == "steps [1, 3, 5, 7, 9, 10, 11]"
