"""Saves that fail, and checkpoints that are damaged: told, and the run goes on."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import process_group
import pytest
from tiny import Asking

import jaxtrain
from jaxtrain.checkpoint import CheckpointError, CheckpointManager, DamagedCheckpoint
from jaxtrain.experiment import config_of
from jaxtrain.fault_tolerance.faults import _make_foreign
from jaxtrain.inspection.verify import verify
from jaxtrain.run.saving import checkpoints_of
from jaxtrain.session.session import _apart
from jaxtrain.state_format.manifest import read_manifest, write_manifest

MESH = {"fsdp": 2}


def run(
    folder: Path, experiment: jaxtrain.Experiment, *, steps: int, **options: Any
) -> tuple[jaxtrain.Result, str]:
    """A start of the run, and what it told."""
    stream = io.StringIO()
    result = jaxtrain.train(
        experiment,
        jaxtrain.mesh_from_axes(**MESH),
        run_dir=folder / "run",
        cache_dir=folder / "cache",
        steps=steps,
        stream=stream,
        **options,
    )
    return result, stream.getvalue()


def saving(own: jaxtrain.Experiment, **policy: Any) -> jaxtrain.Experiment:
    return replace(own, steps=6, checkpoints=jaxtrain.SavePolicy(**({"every": 1} | policy)))


def same_state(a: jaxtrain.Result, b: jaxtrain.Result) -> bool:
    assert a.session is not None and b.session is not None
    pairs = zip(jax.tree.leaves(a.session.state), jax.tree.leaves(b.session.state), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def flip(run_dir: Path, step: int) -> None:
    """A byte in the middle of what only that step has."""
    pack = run_dir / "checkpoints" / str(step) / "state" / f"{step}.0.pack"
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(bytes(data))


def steps_of(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "run" / "checkpoints").iterdir())


def test_a_damaged_step_is_told_and_the_one_before_it_goes_on(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """To the bit as if it had never been saved; the damaged one is kept aside."""
    experiment = saving(own)
    whole, _ = run(tmp_path / "whole", experiment, steps=6)
    run(tmp_path, experiment, steps=4)
    flip(tmp_path / "run", 4)
    result, told = run(tmp_path, experiment, steps=6)
    assert "DAMAGED checkpoint step 4" in told and "going on from step 3" in told
    assert "4.damaged" in told and "4.damaged" in steps_of(tmp_path)
    assert [row["step"] for row in result.history] == [4, 5, 6]
    assert same_state(result, whole)
    assert all(not found.damages for found in verify(tmp_path / "run"))


def test_the_step_before_a_damaged_one_is_of_this_corpus_or_refused(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """That step 4 is damaged is found when its bytes are read, after the corpus was compared."""
    run(tmp_path, saving(own, every=2), steps=4)
    manifest = read_manifest(tmp_path / "run" / "checkpoints" / "2")
    chunks = [chunk for of_leaf in manifest.chunks.values() for chunk in of_leaf]
    metadata = {**manifest.metadata, "data": "0123456789abcdef"}
    write_manifest(manifest.directory, 2, manifest.leaves, metadata, chunks)
    flip(tmp_path / "run", 4)
    with pytest.raises(ValueError, match=r"step 2 .* was trained on another corpus"):
        run(tmp_path, saving(own, every=2), steps=6)
    assert steps_of(tmp_path) == ["2", "4"]


def test_where_every_step_is_damaged_nothing_begins_again(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    run(tmp_path, saving(own), steps=2)
    before = steps_of(tmp_path)
    for step in (1, 2):
        flip(tmp_path / "run", step)
    with pytest.raises(DamagedCheckpoint, match=r"no step there is whole and of this.*--run-dir"):
        run(tmp_path, saving(own), steps=3)
    assert steps_of(tmp_path) == before


def test_a_save_that_fails_is_told_after_the_next_step_and_made_up_for(
    own: jaxtrain.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxtrain.checkpoint import handler

    write = handler.write_chunks

    def full(place: Path, name: str, *args: Any, **options: Any) -> Any:
        if name == "2.0.pack":
            raise OSError(28, "No space left on device", name)
        return write(place, name, *args, **options)

    monkeypatch.setattr(handler, "write_chunks", full)
    result, told = run(tmp_path, saving(own), steps=4)
    lines = told.splitlines()
    (lost,) = [i for i, line in enumerate(lines) if "NOT SAVED" in line]
    assert "step 2" in lines[lost] and "No space left" in lines[lost]
    assert "step 1 is committed" in lines[lost]
    assert result.saved == 4 and [row["step"] for row in result.history] == [1, 2, 3, 4]
    assert steps_of(tmp_path) == ["1", "3", "4"]


def test_a_last_save_that_fails_is_an_error(
    own: jaxtrain.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxtrain.checkpoint import handler

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(handler, "write_chunks", full)
    says = r"step 3 .*could not be saved.*No space left.*no checkpoint is committed"
    with pytest.raises(CheckpointError, match=says):
        run(tmp_path, saving(own, every=100), steps=3)


def test_a_save_for_which_a_device_has_no_memory_is_told(
    own: jaxtrain.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever tier it is for; the run goes on, and the next save is there."""
    from jaxtrain.checkpoint import manager, tiers

    copied = manager.owned_parts
    asked: list[int] = []

    def full(*args: Any) -> Any:
        asked.append(1)
        if len(asked) in (1, 4):  # of step 1 to the local tier, of step 2 to the durable one
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes")
        return copied(*args)

    monkeypatch.setattr(manager, "owned_parts", full)
    monkeypatch.setattr(tiers, "owned_parts", full)
    local = jaxtrain.checkpoint.LocalTier(every=1, directory=str(tmp_path / "memory"))
    result, told = run(tmp_path, saving(own, local=local), steps=3)
    lines = [line for line in told.splitlines() if "RESOURCE_EXHAUSTED" in line]
    assert ["NOTE local tier" in line for line in lines] == [True, False]
    assert "NOT SAVED checkpoint step 2" in lines[1] and "step 1 is committed there" in lines[1]
    assert result.saved == 3 and {"1", "3"} == {p for p in steps_of(tmp_path) if p.isdecimal()}


def test_saves_that_are_copied_on_the_devices_are_those_that_are_not(
    own: jaxtrain.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both tiers, where a step runs on, which donates what was copied."""
    from jaxtrain.session.session import Session
    from jaxtrain.state_format.parts import OwnedParts

    def trained(name: str, spare: int) -> list[str]:
        monkeypatch.setattr(Session, "spare_bytes", lambda session: spare)
        local = jaxtrain.checkpoint.LocalTier(every=1, directory=str(tmp_path / name / "memory"))
        run(tmp_path / name, saving(own, local=local, every=2), steps=5)
        manifests = [read_manifest(tmp_path / name / "run" / "checkpoints" / "4")]
        return [chunk.digest for m in manifests for of in m.chunks.values() for chunk in of]

    expected = trained("waited", 0)
    taken, take = [], OwnedParts.take

    def noted(owned: OwnedParts) -> Any:
        taken.append({type(data) is not np.ndarray for *_, data in owned.pending})
        return take(owned)

    monkeypatch.setattr(OwnedParts, "take", noted)
    assert trained("beside", 2**30) == expected
    assert len(taken) == 8 and all(kinds == {True} for kinds in taken)  # 5 local, 3 durable


def test_a_copy_that_fails_on_a_device_costs_no_save(
    own: jaxtrain.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both tiers: the state goes to the host instead, which is told once, and no copy is tried
    on the devices again."""
    from jaxtrain.session.session import Session
    from jaxtrain.state_format import parts

    tried: list[int] = []

    def refuse(arrays: Any) -> Any:
        tried.append(1)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes")

    monkeypatch.setattr(parts, "_copied", refuse)
    monkeypatch.setattr(Session, "spare_bytes", lambda session: 2**30)
    for name, local in ("durable", None), ("both", str(tmp_path / "memory")):
        tried.clear()
        tier = jaxtrain.checkpoint.LocalTier(every=2, directory=local) if local else None
        result, told = run(tmp_path / name, saving(own, every=2, local=tier), steps=4)
        lines = [line for line in told.splitlines() if "RESOURCE_EXHAUSTED" in line]
        assert len(lines) == 1 and "NOTE" in lines[0], told
        assert "step 2 was copied to the host first" in lines[0]
        assert len(tried) == 1 and result.saved == 4 and "NOT SAVED" not in told
        verdicts = verify(tmp_path / name / "run")
        assert [(each.step, each.damages) for each in verdicts] == [(2, []), (4, [])]


def test_room_for_a_copy_is_what_no_program_of_the_run_takes(
    own: jaxtrain.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations and comparisons of copies run before a copy has left: the largest program
    counts."""
    from jaxtrain.mesh.spare_memory import working_bytes
    from jaxtrain.session import session

    asked, rooms = set[Any](), []
    free = 2**20

    def spare(devices: Any, program: Any = None) -> int:
        asked.add(program)
        return free - (working_bytes(program) if program is not None else 0)

    class Noted(session.Session):
        def spare_bytes(self) -> int:
            rooms.append(super().spare_bytes())
            return rooms[-1]

    monkeypatch.setattr(session, "spare_bytes", spare)
    monkeypatch.setattr(session, "Session", Noted)
    experiment = replace(
        saving(own, every=2),
        evaluation=jaxtrain.Evaluation(every=3, batches=1, final_batches=1),
        execution=jaxtrain.Execution(health=jaxtrain.Health(replicas=3)),
    )
    result, _ = run(tmp_path, experiment, steps=4)
    programs = asked - {None}
    assert len(programs) == 3  # a step's, an evaluation's, and that of the digests
    most = max(map(working_bytes, programs))
    assert rooms == [0, free - most], "of the evaluation nothing is known before the first"
    assert "eval_loss" in result.evaluation


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True)
    if done.returncode:
        pytest.skip("this user may not mount a file system")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place))
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def bound(tmp_path: Path) -> Iterator[Path]:
    """A run's directory of checkpoints that can be made read-only, for root too."""
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    mount("--bind", str(place), str(place))
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.005)


def test_on_a_full_disk_the_run_goes_on_and_the_last_good_step_stays(
    own: jaxtrain.Experiment, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk fills after step 2, and has room again before the last. A line tells it, and no
    library prints the traces of its threads around that."""
    block = small_disk / "fills"

    def watch() -> bool:
        steps = small_disk / "run" / "checkpoints"
        done = len(asked)
        asked.append(done)
        if done == 2:
            wait_for(steps / "2")
            with block.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(b"\0" * 4096):
                    pass
        if done == 4:
            assert "2" in os.listdir(steps)
            verdicts.extend(verify(small_disk / "run"))
            block.unlink()
        return False

    asked: list[int] = []
    verdicts: list[Any] = []
    result, told = run(small_disk, saving(own), steps=6, callbacks=[Asking(watch)])
    assert [row["step"] for row in result.history] == [1, 2, 3, 4, 5, 6]
    assert "NOT SAVED" in told and "No space left" in told
    assert verdicts and not any(found.damages for found in verdicts)
    assert result.saved == 6 and "6" in steps_of(small_disk)
    assert not [record for record in caplog.records if record.exc_info]


def holds_its_process(thread: threading.Thread) -> bool:
    """Whether it must end before its process can, and does something: one of a pool that waits for
    work is told to end."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None or thread.daemon or not thread.is_alive():
        return False
    return Path(frame.f_code.co_filename).parts[-3:] != ("concurrent", "futures", "thread.py")


@pytest.mark.parametrize("when", ["before a save", "as it begins"])
def test_in_a_directory_that_turned_read_only_the_run_goes_on(
    when: str,
    own: jaxtrain.Experiment,
    tmp_path: Path,
    bound: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each save is over before the next step, so that step 4's is while nothing can be written. No
    thread waits for a directory that never came: the process could not end."""
    if when == "as it begins":
        monkeypatch.setattr("jaxtrain.checkpoint.manager.make_and_remove", lambda directory: None)
    monkeypatch.setattr(CheckpointManager, "poll", CheckpointManager.wait)
    asked: list[int] = []
    before = set(threading.enumerate())

    def watch() -> bool:
        asked.append(1)
        if how := {4: "ro", 6: "rw"}.get(len(asked)):
            options = f"remount,bind,{how}"
            subprocess.run(["mount", "-o", options, str(bound)], check=True)
        return False

    result, told = run(
        tmp_path, saving(own, every=2), steps=6, callbacks=[Asking(watch, "before_step")]
    )
    assert [row["step"] for row in result.history] == [1, 2, 3, 4, 5, 6]
    assert result.saved == 6 and steps_of(tmp_path) == ["2", "6"]
    assert told.count("NOT SAVED") == 1 and "Read-only" in told
    for thread in set(threading.enumerate()) - before:
        until = time.monotonic() + 30
        while holds_its_process(thread) and time.monotonic() < until:
            thread.join(0.1)
        assert not holds_its_process(thread), thread.name


TWO_SAVE = """
import subprocess, sys
from pathlib import Path

index, port, directory = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
import jax

jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
from jaxtrain.checkpoint import CheckpointManager, SavePolicy
from jaxtrain.cluster.agreement import all_gather_text

mesh = jax.make_mesh((2,), ("a",), (jax.sharding.AxisType.Auto,))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
state = {"w": jax.make_array_from_callback((8, 4), split, lambda at: jax.numpy.ones((4, 4)))}
manager = CheckpointManager(directory, SavePolicy(every=1))
for step, how in enumerate(("rw", "ro", "rw"), 1):
    if index == 0:
        options = f"remount,bind,{how}"
        subprocess.run(["mount", "-o", options, str(directory)], check=True)
    all_gather_text("mounted")
    try:
        manager.save(step, state, {"step": step})
        manager.wait()
        print("saved", step, flush=True)
    except ValueError as error:
        print("NOT SAVED", error, flush=True)
manager.close()
"""


def test_two_processes_tell_of_a_read_only_directory_and_save_when_it_is_not(
    bound: Path, tmp_path: Path
) -> None:
    """One of them makes the directory of a step, and both would wait for it."""
    (tmp_path / "two_save.py").write_text(TWO_SAVE)
    told = process_group.run(
        tmp_path, 2, lambda index, port: ("two_save.py", index, port, bound), seconds=120
    )
    for text in told:
        first, second, third = [line for line in text.splitlines() if "SAVED" in line.upper()]
        assert (first, third) == ("saved 1", "saved 3"), text
        assert "could not be saved: OSError: [Errno 30] Read-only" in second, (
            "the same on both: told once"
        )
        assert "step 1 is committed there" in second
    assert [step for step in steps_of(tmp_path) if step.isdecimal()] == ["1", "3"]


def test_the_best_save_is_kept(own: jaxtrain.Experiment, tmp_path: Path) -> None:
    """By the evaluation of the step itself, also after a new start."""
    keep = jaxtrain.checkpoint.Keep(
        latest=1, best=jaxtrain.checkpoint.Best("eval_loss", greatest=True)
    )
    experiment = replace(saving(own, keep=keep), evaluation=jaxtrain.Evaluation(every=1))
    run(tmp_path, experiment, steps=3)
    run(tmp_path, experiment, steps=6)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = {row["step"]: row for row in map(json.loads, lines)}
    worst = max(rows, key=lambda step: rows[step]["eval_loss"])
    assert steps_of(tmp_path) == sorted({"6", str(worst)})


def test_a_save_is_rated_by_an_evaluation_of_its_own_step(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """One without has no values, not those of the evaluation before."""
    keep = jaxtrain.checkpoint.Keep(latest=4, best=jaxtrain.checkpoint.Best("eval_loss"))
    evaluated = replace(saving(own, keep=keep), evaluation=jaxtrain.Evaluation(every=2, batches=1))
    run(tmp_path, evaluated, steps=4)
    steps = {step: tmp_path / "run" / "checkpoints" / str(step) for step in (1, 2, 3, 4)}
    rated = {k: bool(read_manifest(step).metadata["metrics"]) for k, step in steps.items()}
    assert rated == {1: False, 2: True, 3: False, 4: False}, "4 is over all batches"


def test_what_only_the_local_tier_has_is_saved_durably_at_the_next_start(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """Its durable save was killed before it was committed; a reboot would lose the end."""
    local = jaxtrain.checkpoint.LocalTier(every=1, directory=str(tmp_path / "memory"))
    experiment = saving(own, every=100, local=local)
    run(tmp_path, experiment, steps=4)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    _, told = run(tmp_path, experiment, steps=4)
    assert "step 4 comes from the local tier" in told and "the 4 steps asked for" in told
    assert "4" in steps_of(tmp_path)
    assert not any(found.damages for found in verify(tmp_path / "run"))


def test_a_local_tier_that_fails_costs_nothing_else(
    own: jaxtrain.Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxtrain.checkpoint import local_tier

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local_tier, "write_chunks", full)
    local = jaxtrain.checkpoint.LocalTier(every=1, directory=str(tmp_path / "memory"))
    result, told = run(tmp_path, saving(own, every=2, local=local), steps=4)
    assert result.saved == 4 and {"2", "4"} <= set(steps_of(tmp_path))
    assert told.count("No space left") == 4, "once a save"
    assert "NOT SAVED" not in told
    assert not list((tmp_path / "memory").rglob("*.pack"))


def test_the_machines_together_fail_as_often_as_there_are_devices(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    spec = jaxtrain.mesh_from_axes(data=2, fsdp=4)
    for hours, wanted in ((None, None), (800.0, 100 * 3600.0)):
        facts = replace(spec.facts, mtbf_hours=hours)
        with checkpoints_of(tmp_path, saving(own), replace(spec, facts=facts)) as saves:
            assert saves.durable.clock.mtbf_s == wanted


def test_a_step_of_another_experiment_is_passed_over(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """Put among a run's own, by hand or by a tool that copies; its metadata says whose it is."""
    ours = saving(own, every=2)
    theirs = replace(ours, optimizer=replace(ours.optimizer, learning_rate=0.25))
    whole, _ = run(tmp_path / "whole", ours, steps=6)
    run(tmp_path / "ours", ours, steps=4)
    run(tmp_path / "theirs", theirs, steps=6)
    saves, foreign = (tmp_path / who / "run" / "checkpoints" for who in ("ours", "theirs"))
    shutil.copytree(foreign / "6", saves / "6")
    # What does not change the numbers may be another's.
    given = replace(ours, logging=replace(ours.logging, every=2))
    result, told = run(tmp_path / "ours", given, steps=6)
    why = "the step is of another experiment: experiment.optimizer.learning_rate was 0.25, now 0.5"
    assert f"checkpoint step 6 in {saves}: damaged: {why}" in told
    assert "resuming at step 4" in told and same_state(result, whole)
    _make_foreign(saves / "6")  # as a drill does
    result, told = run(tmp_path / "ours", ours, steps=6)
    assert "the step is of another experiment: experiment.seed was 1, now 0" in told
    assert "resuming at step 4" in told and same_state(result, whole)
    for step in saves.glob("?"):
        shutil.rmtree(step)
    shutil.copytree(foreign / "6", saves / "6")
    with pytest.raises(DamagedCheckpoint, match="the step is of another experiment"):
        run(tmp_path / "ours", ours, steps=6)


def test_a_corpus_is_told_from_another_where_they_differ() -> None:
    assert _apart("0123456789abcdef", "ab23456789abcdef") == ("0123456789ab", "ab23456789ab")
    assert _apart("bigrams of 16 in 8", "bigrams of 16 in 32") == (".. in 8", ".. in 32")
    assert _apart("bigrams of 16", "bigrams of 16 in 8") == ("..f 16", "..f 16 in 8")


def test_a_step_says_which_experiment_and_data_it_is_of(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """A copy of a step's directory needs nothing else of the run's."""
    experiment = saving(own)
    result, _ = run(tmp_path, experiment, steps=2)
    step = tmp_path / "run" / "checkpoints" / "2"
    metadata = read_manifest(shutil.copytree(step, tmp_path / "copy")).metadata
    assert result.session is not None
    expected = json.loads(json.dumps(config_of(experiment)))
    assert metadata == {
        "step": 2, "data": result.session.dataset.digest, "metrics": {}, "experiment": expected,
        "skipped": [], "shift": 0, "spikes": None, "held_out": None, "held_out_sets": {},
    }  # fmt: skip


def test_a_step_is_compared_with_the_experiment_at_hand(
    own: jaxtrain.Experiment, tmp_path: Path
) -> None:
    """Whose own classes fill what the step is too old to say."""
    experiment = replace(saving(own, every=2), data=Dated())
    stored = json.loads(json.dumps(config_of(experiment)))
    del stored["data"]["newer"]
    mesh = jaxtrain.mesh_from_axes(data=1)
    for newer, foreign in ((3, False), (4, True)):
        now = replace(experiment, data=Dated(newer=newer))
        saves = checkpoints_of(tmp_path / "run", now, mesh)
        assert saves is not None
        assert bool(saves.durable.foreign({"experiment": stored})) is foreign
        saves.close()


@dataclass(frozen=True)
class Dated:
    """Data of one's own that got a field."""

    seq: int = 8
    newer: int = 3

    def open(self, split: str, *, seed: int, cache_dir: Path) -> None: ...
