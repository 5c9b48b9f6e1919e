"""A save is committed or it does not exist, and no failure to save is silent."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from object_store import copy_tree, put_below

from jaxtrain.checkpoint import CheckpointError, DamagedCheckpoint, SavePolicy
from jaxtrain.files.store import remove

ROOT = Path(__file__).parents[2]


def add(state, amount: int):
    return jax.tree.map(lambda x: x + amount, state)


def test_only_the_newest_are_kept_and_the_policy_says_when(make_anywhere, small):
    manager = make_anywhere(every=3, keep=2)
    assert manager.latest() is None
    for step in range(13):
        if manager.should_save(step):
            manager.save(step, small, {})
    manager.wait()
    assert manager.steps() == [9, 12]
    assert manager.latest() == 12


@pytest.mark.parametrize(
    "name", ["7.orbax-checkpoint-tmp", "7.discarded", "7.damaged", "007", "seven"]
)
def test_what_is_not_committed_does_not_exist(make_anywhere, small, name):
    manager = make_anywhere()
    manager.save(1, small, {})
    manager.wait()
    copy_tree(manager.directory / "1", manager.directory / name)
    assert manager.latest() == manager.newest_whole() == 1
    with pytest.raises(CheckpointError, match=r"no such step.*step 1 is committed.*one of \[1\]"):
        manager.restore(7, small)


def test_leftovers_of_a_killed_save_are_removed_by_the_next(make, small):
    manager = make()
    leftover = manager.directory / "7.orbax-checkpoint-tmp"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("")
    manager.save(8, small, {})
    manager.wait()
    assert manager.steps() == [8]
    assert not leftover.exists()


@pytest.mark.parametrize("reopen", [False, True])
def test_a_step_that_is_not_newer_is_refused_until_the_newer_are_discarded(
    make_anywhere, small, reopen
):
    manager = make_anywhere(keep=9)
    for step in (1, 2, 3):
        manager.save(step, add(small, step), {"mark": step})
    for step in (1, 3):
        remedy = rf"step 3 is committed.*discard_after\({step - 1}\)"
        with pytest.raises(CheckpointError, match=remedy):
            manager.save(step, small, {})
    if reopen:
        manager.close()
        manager = make_anywhere(keep=9)
    put_below(manager.directory / "5.discarded" / "half")
    assert manager.discard_after(1) == [2, 3]
    assert sorted(entry.name for entry in manager.directory.iterdir()) == ["1"]
    manager.save(2, add(small, 20), {"mark": 20})
    found, metadata = manager.restore(2, small)
    assert metadata == {"mark": 20}
    assert (found["w"] == small["w"] + 20).all()


def test_a_step_of_another_make_is_not_silently_a_lost_save(make, small):
    manager = make()
    (manager.directory / "50").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"step 10 .* newer than all.*step 50"):
        manager.save(10, small, {})
    with pytest.raises(
        DamagedCheckpoint, match=r"manifest\.json is missing.*no step there is whole"
    ):
        manager.newest_whole()
    assert manager.set_damaged_aside()
    manager.save(10, small, {})
    manager.wait()
    assert manager.newest_whole() == 10


def test_a_step_of_an_older_version_says_so(make, small):
    manager = make()
    (manager.directory / "50" / "metadata").mkdir(parents=True)
    (manager.directory / "50" / "metadata" / "metadata").write_text("{}")
    with pytest.raises(DamagedCheckpoint, match="format 1, of an older version; this one reads 2"):
        manager.restore(50, small)


def test_orbax_is_not_asked_which_steps_it_sees(make_anywhere, small):
    """It may have seen a step that has been removed since, and see it on some processes only."""
    manager = make_anywhere()
    manager.save(8, small, {})
    manager.wait()
    remove(manager.directory / "8")
    manager.save(6, small, {})
    manager.wait()
    assert manager.steps() == [6]


@contextmanager
def files_limited_to(size: int):
    """Every write past `size` bytes fails, as on a full disk; works for root too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("surfaces_in", ["wait", "save", "restore", "close", "discard_after"])
def test_a_failed_write_surfaces_in_the_next_call_and_loses_nothing(make, surfaces_in):
    manager = make(keep=1)  # the one good step must outlive the failure
    state = {"w": jax.random.normal(jax.random.key(0), (256, 256))}
    manager.save(1, state, {})
    manager.wait()
    call = {
        "wait": manager.wait,
        "close": manager.close,
        "save": lambda: manager.save(3, state, {}),
        "restore": lambda: manager.restore(1, state),
        "discard_after": lambda: manager.discard_after(1),
    }[surfaces_in]
    with pytest.raises(CheckpointError) as error, files_limited_to(50_000):
        manager.save(2, add(state, 1), {})
        call()
    assert (error.value.step, error.value.last_good) == (2, 1)
    assert error.value.directory == manager.directory
    for part in ("step 2 in", str(manager.directory), "too large", "step 1 is committed"):
        assert part in str(error.value)
    assert error.value.__cause__ is not None
    assert (manager.restore(1, state)[0]["w"] == state["w"]).all()
    manager.save(2, add(state, 1), {})  # starts afresh, and drops the old by the policy
    manager.wait()
    assert manager.steps() == [2]


def test_a_save_that_ended_well_but_is_not_there_is_an_error(make_anywhere, small):
    manager = make_anywhere()
    manager.save(1, small, {})
    while manager.latest() != 1:
        time.sleep(0.01)
    remove(manager.directory / "1")
    with pytest.raises(CheckpointError, match="and it is not there; no checkpoint is committed"):
        manager.wait()


def test_a_directory_that_cannot_be_made_is_reported_with_its_cause(make, small, tmp_path):
    (tmp_path / "file").write_text("")
    manager = make(directory=tmp_path / "file" / "checkpoints")
    assert manager.latest() is None
    with pytest.raises(CheckpointError, match=r"NotADirectoryError.*no checkpoint is committed"):
        manager.save(1, small, {})


@pytest.mark.parametrize(
    ("state", "metadata", "says"),
    [
        ({"a": jnp.ones(2), "n": 3, "m": np.ones(2)}, {}, "m is ndarray, n is int"),
        ({"a": {"b": jnp.ones(2)}, "a.b": jnp.ones(2)}, {}, r"share the path a\.b"),
        ({"a": None, "b": ()}, {}, "no array"),
        ({"a": jnp.ones(2)}, {"when": Path()}, "metadata of step 1 is not JSON.*PosixPath"),
    ],
    ids=["not arrays", "same path", "empty", "metadata"],
)
def test_a_state_that_cannot_be_kept_is_refused_before_writing(
    make_anywhere, state, metadata, says
):
    manager = make_anywhere()
    with pytest.raises(ValueError, match=says) as error:
        manager.save(1, state, metadata)
    assert not isinstance(error.value, CheckpointError)
    assert not manager.directory.exists()


@pytest.mark.parametrize("fields", [{"every": 0, "keep": -1}, {"every": 2.5, "keep": True}])
def test_a_policy_counts_from_one(fields):
    with pytest.raises(ValueError, match=r"every=.* keep="):
        SavePolicy(**fields)


def test_space_is_asked_for_what_will_be_kept_at_once(make, small, monkeypatch):
    manager = make(keep=2)
    asked = []
    monkeypatch.setattr(
        "jaxtrain.checkpoint.manager.check_writable", lambda _, size: asked.append(size)
    )
    manager.check_space(small)
    manager.save(1, small, {})
    manager.wait()
    manager.check_space(small)
    size = 8 * 16 * 4
    assert asked == [3 * size, 2 * size]


def test_looking_for_a_checkpoint_does_not_import_orbax(tmp_path):
    code = f"""
import sys
from pathlib import Path
from jaxtrain.checkpoint import CheckpointManager, SavePolicy
manager = CheckpointManager(Path({str(tmp_path)!r}), SavePolicy())
assert manager.latest() is None and not manager.should_save(1)
manager.check_space({{}})
manager.close()
assert not any(name.split(".")[0] == "orbax" for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


KILLED = """
import sys
from pathlib import Path
import jax.numpy as jnp
from jaxtrain.checkpoint import CheckpointManager, SavePolicy
manager = CheckpointManager(Path(sys.argv[1]), SavePolicy(every=1, keep=5))
for step in range(1, 10_000):
    manager.save(step, {"w": jnp.full((1024, 1024), step, "float32")}, {"step": step})
"""


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 20))]
)
@pytest.mark.sampled(3)
def test_a_killed_save_leaves_a_whole_step(make, seed):
    """Killed at any moment of a save, or between two: the newest step is whole."""
    manager = make(keep=5)
    delay_s = random.Random(seed).uniform(0, 0.1)
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(manager.directory)], cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while (manager.latest() or 0) < 3 and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(delay_s)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    latest = manager.latest()
    assert latest is not None and latest >= 3 and manager.newest_whole() == latest
    found, metadata = manager.restore(latest, {"w": jnp.zeros((1024, 1024))})
    assert metadata == {"step": latest}
    assert (found["w"] == latest).all()
    manager.save(latest + 1, found, {})
    manager.wait()
    assert manager.latest() == latest + 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_save_that_is_interrupted_can_be_made_again(make_anywhere, small, monkeypatch, when):
    import orbax.checkpoint as ocp

    start = ocp.CheckpointManager.save

    def interrupted(self, *args, **options):
        if when == "after":
            start(self, *args, **options)
        raise KeyboardInterrupt

    manager = make_anywhere()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ocp.CheckpointManager, "save", interrupted)
        manager.save(1, small, {})
    manager.wait()
    assert manager.steps() == ([1] if when == "after" else [])
    step = 1 if when == "before" else 2
    manager.save(step, small, {})
    manager.wait()
    assert manager.latest() == step
