"""What fails on one process of several: all hear of it, and nobody waits for that process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from service import play

from jaxtrain.checkpoint import CheckpointError, SavePolicy, handler, manager, storage
from jaxtrain.checkpoint.committed import CommittedSteps
from jaxtrain.checkpoint.handler import ChunkHandler
from jaxtrain.checkpoint.manager import CheckpointManager
from jaxtrain.checkpoint.retention import Retention
from jaxtrain.checkpoint.storage import DamagedCheckpoint, FailedSave, FailedStorage
from jaxtrain.checkpoint.tiers import Checkpoints
from jaxtrain.run.saves.saving import Saving
from jaxtrain.state_format.manifest import take_parts, write_part
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
    assert play(monkeypatch, 2, lambda _: saves.agreed_latest()) == [8] * 2

    def save(step: int) -> Any:
        tree, named = {"step": jax.numpy.asarray(step)}, {}
        return lambda _: CheckpointManager(tmp_path, SavePolicy()).save(step, tree, named)

    for error in play(monkeypatch, 2, save(7)):
        assert isinstance(error, CheckpointError) and "step 8 is committed" in str(error)


def test_a_save_that_exists_is_known_by_the_first_process_s_word() -> None:
    saving = Saving.__new__(Saving)
    saving.manager = SimpleNamespace(  # type: ignore[assignment]
        agreed_latest=lambda: 4, wait=lambda: None, take_troubles=list, latest=fails
    )
    saving._save = fails  # type: ignore[method-assign]
    assert not saving.save(4, {}, durable=True) and not saving.save_last(4, {})


@pytest.mark.parametrize("process", [0, 1])
def test_only_the_first_process_misses_a_step_that_was_written(
    process: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: process)
    saves = CheckpointManager(tmp_path, SavePolicy())
    saves._orbax = SimpleNamespace(wait_until_finished=lambda: None, close=lambda: None)
    saves._in_flight = 3
    if process:
        saves.wait()
    else:
        with pytest.raises(FailedSave, match="the writer ended, and it is not there"):
            saves.wait()


def saving_of(take: Callable[[], Any]) -> Any:
    return SimpleNamespace(
        step=3, source=None, apart=None, parts=SimpleNamespace(take=take), records={}, metadata={}
    )


def test_a_part_that_cannot_be_written_is_told_in_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor can its error be, on a disk that is full: then the part is missed."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    write_part(tmp_path, 1, [])
    asyncio.run(ChunkHandler()._write(tmp_path, saving_of(fails)))
    assert take_parts(tmp_path, 2) == ([], ["process 0: KeyError: 'of any type'"])

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    write_part(tmp_path, 1, [])
    monkeypatch.setattr(handler, "write_part", full)
    asyncio.run(ChunkHandler()._write(tmp_path, saving_of(fails)))
    (problem,) = take_parts(tmp_path, 2)[1]
    assert problem.startswith("process 0: its part cannot be read: [Errno 2]")
    (tmp_path / "0.part.json").write_text('[{"leaf":')
    write_part(tmp_path, 1, [])
    (problem,) = take_parts(tmp_path, 2)[1]
    assert problem.startswith("process 0: its part cannot be read: Expecting value")


def test_a_manifest_that_cannot_be_written_is_told_in_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(handler, "write_manifest", fails)
    for process in range(2):
        write_part(tmp_path, process, [])
    writer = ChunkHandler()
    writer._saving = saving_of(fails)
    writer.finalize(tmp_path)
    assert (tmp_path / handler.FAILED).read_text() == "process 0: KeyError: 'of any type'"


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


def test_storage_that_fails_is_no_refusal_and_damage_is_one(tmp_path: Path) -> None:
    place: Any = {"step": 4, "directory": tmp_path, "remedy": "mend it"}
    kinds = {kind: refuses(kind("it", **place)) for kind in (CheckpointError, FailedStorage)}
    assert kinds == {CheckpointError: True, FailedStorage: False}
    assert not refuses(FailedSave("it", **place)) and refuses(DamagedCheckpoint(["it"], **place))
